# What pods of all roles share. Each template takes a dict: root, role, and part (the role's values).
{{- define "baton.variables" -}}
{{- $root := .root -}}
{{- $fullname := include "baton.fullname" $root -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- with $root.Values.redis.passwordSecret }}
{{- if and .name (include "baton.hasOwnRedis" $root) }}
- name: REDIS_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ .name }}, key: {{ .key }}}}
{{- end }}
{{- end }}
- name: BATON_REGISTRY
{{- if $root.Values.redis.urlSecret.name }}
  valueFrom: {secretKeyRef: {name: {{ $root.Values.redis.urlSecret.name }}, key: {{ $root.Values.redis.urlSecret.key }}}}
{{- else if $root.Values.redis.url }}
  value: {{ $root.Values.redis.url | quote }}
{{- else }}
  {{- $password := ternary ":$(REDIS_PASSWORD)@" "" (not (empty $root.Values.redis.passwordSecret.name)) }}
  value: {{ printf "redis://%s%s-redis:6379/0" $password $fullname | quote }}
{{- end }}
- name: BATON_REGISTRY_NAMESPACE
  value: {{ include "baton.registryNamespace" $root | quote }}
- name: BATON_MODEL
  value: {{ include "baton.modelDirectory" $root | quote }}
- name: BATON_DRAIN_TIMEOUT_S
  value: {{ include "baton.knob" .part.drainTimeoutSeconds | quote }}
{{- if include "baton.tlsSecret" $root }}
- name: BATON_TLS_DIR
  value: /etc/baton/tls
{{- end }}
{{- /* `merge` takes false and 0 for nothing said. */}}
{{- $config := deepCopy $root.Values.config }}
{{- range $name, $value := .part.config }}{{ $_ := set $config $name $value }}{{ end }}
{{- range $name, $value := $config }}
{{- if not (kindIs "invalid" $value) }}
- name: BATON_{{ upper $name }}
  value: {{ include "baton.knob" $value | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* All that a container is told, each name once: the user's word, the last of several, stands where the chart's would. `own`: of the role. */}}
{{- define "baton.env" -}}
{{- $given := dict -}}
{{- range .part.extraEnv }}{{ $_ := set $given .name . }}{{ end -}}
{{- $told := list -}}
{{- range concat (include "baton.variables" . | fromYamlArray) (.own | fromYamlArray) (default list .part.extraEnv) -}}
{{- $told = append $told (default . (get $given .name)) -}}
{{- end -}}
{{- toYaml (uniq $told) -}}
{{- end -}}

{{- define "baton.modelDirectory" -}}
{{- if .Values.model.random -}}
/model/{{ .Values.model.random }}
{{- else -}}
/model{{ with .Values.model.path }}/{{ trimPrefix "/" . | trimSuffix "/" }}{{ end }}
{{- end -}}
{{- end -}}

{{- define "baton.mounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: model, mountPath: /model, readOnly: true}
{{- if include "baton.tlsSecret" .root }}
- {name: tls, mountPath: /etc/baton/tls, readOnly: true}
{{- end }}
{{- if and (eq .role "router") .root.Values.apiKeys.existingSecret }}
- {name: keys, mountPath: /etc/baton/keys, readOnly: true}
{{- end }}
{{- if .part.shmSize }}
- {name: shm, mountPath: /dev/shm}
{{- end }}
{{- with .part.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "baton.volumes" -}}
- {name: tmp, emptyDir: {}}
- name: model
  {{- toYaml (default (dict "emptyDir" dict) .root.Values.model.volume) | nindent 2 }}
{{- with include "baton.tlsSecret" .root }}
- {name: tls, secret: {secretName: {{ . }}, defaultMode: 0440}}
{{- end }}
{{- if and (eq .role "router") .root.Values.apiKeys.existingSecret }}
- name: keys
  secret:
    secretName: {{ .root.Values.apiKeys.existingSecret }}
    defaultMode: 0440
    items: [{key: {{ .root.Values.apiKeys.key }}, path: keys}]
{{- end }}
{{- if .part.shmSize }}
- {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ .part.shmSize }}}}
{{- end }}
{{- with .part.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Made anew whenever the pod's sandbox is: what a restart left is whole or not there. */}}
{{- define "baton.initContainers" -}}
{{- if .root.Values.model.random }}
initContainers:
  - name: model
    image: {{ printf "%s:%s" .root.Values.image.repository (include "baton.tag" .root) | quote }}
    imagePullPolicy: {{ .root.Values.image.pullPolicy }}
    command: [sh, -ec]
    args:
      - >-
        test -d /model/{{ .root.Values.model.random }} ||
        { rm -rf /model/part; baton model make --like {{ .root.Values.model.random }} --dtype fp32 --seed 0 --out /model/part;
        mv /model/part /model/{{ .root.Values.model.random }}; }
    securityContext: {{- toYaml .root.Values.securityContext | nindent 6 }}
    resources: {requests: {cpu: 100m, memory: 512Mi}, limits: {memory: 2Gi}}
    volumeMounts:
      - {name: tmp, mountPath: /tmp}
      - {name: model, mountPath: /model}
{{- end }}
{{- end -}}

{{/* /health: alive, also while it drains; its first answer may wait for the model. /ready: takes work; with accepting=1 a router's is
also good while what it lets in waits for a node to come back. */}}
{{- define "baton.probes" -}}
{{- $scheme := ternary "HTTPS" "HTTP" (not (empty (include "baton.tlsSecret" .root))) -}}
startupProbe:
  httpGet: {path: /health, port: http, scheme: {{ $scheme }}}
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: {{ div (add (int .part.startupSeconds) 1) 2 }}
livenessProbe:
  httpGet: {path: /health, port: http, scheme: {{ $scheme }}}
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: 6
readinessProbe:
  httpGet: {path: "/ready?accepting=1", port: http, scheme: {{ $scheme }}}
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: 2
{{- end -}}

{{- define "baton.placing" -}}
serviceAccountName: {{ include "baton.serviceAccount" .root | quote }}
automountServiceAccountToken: false
# A Service called baton would put BATON_PORT=tcp://… into every pod.
enableServiceLinks: false
securityContext: {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .part.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .part.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
{{- if .part.topologySpreadConstraints }}
  {{- toYaml .part.topologySpreadConstraints | nindent 2 }}
{{- else }}
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "baton.selector" .root | nindent 8 }}
        app.kubernetes.io/component: {{ .role }}
{{- end }}
{{- end -}}
