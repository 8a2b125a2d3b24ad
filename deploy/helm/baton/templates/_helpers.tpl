# Names, labels, and what the manifests share.
{{- define "baton.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* What a selector may hold: it can never be changed. */}}
{{- define "baton.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{/* Of objects; pods have the selector's alone, since another version's would start them anew, Redis, too. */}}
{{- define "baton.labels" -}}
{{ include "baton.selector" . }}
app.kubernetes.io/version: {{ include "baton.version" . | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name (.Chart.Version | replace "+" "_") | quote }}
{{- end -}}

{{- define "baton.tag" -}}
{{- default .Chart.AppVersion .Values.image.tag -}}
{{- end -}}

{{/* A tag as a label may be: with a digest, cut, or with an underline at its end it is none. */}}
{{- define "baton.version" -}}
{{- $spelled := regexReplaceAll "[^A-Za-z0-9._-]" (include "baton.tag" .) "_" | trunc 63 -}}
{{- regexReplaceAll "^[^A-Za-z0-9]+|[^A-Za-z0-9]+$" $spelled "" -}}
{{- end -}}

{{- define "baton.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "baton.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "baton.nodeRoles" -}}
{{- $roles := list -}}
{{- range $role := list "prefill" "decode" "mixed" -}}
{{- if gt (int (index $.Values $role).replicas) 0 }}{{ $roles = append $roles $role }}{{ end -}}
{{- end -}}
{{- toJson $roles -}}
{{- end -}}

{{/* The Secret with ca.crt, tls.crt and tls.key; empty: no TLS. */}}
{{- define "baton.tlsSecret" -}}
{{- if .Values.tls.certManager.enabled -}}
{{- default (printf "%s-tls" (include "baton.fullname" .)) .Values.tls.existingSecret -}}
{{- else -}}
{{- .Values.tls.existingSecret -}}
{{- end -}}
{{- end -}}

{{- define "baton.hasOwnRedis" -}}
{{- if not (or .Values.redis.url .Values.redis.urlSecret.name) }}yes{{ end -}}
{{- end -}}

{{/* One cluster's name in a Redis that may hold several: 64 characters at most. */}}
{{- define "baton.registryNamespace" -}}
{{- $name := printf "%s.%s" .Release.Namespace (include "baton.fullname" .) -}}
{{- if gt (len $name) 64 }}{{ sha256sum $name }}{{ else }}{{ $name }}{{ end -}}
{{- end -}}

{{/* Whether some node may take KV by NIXL, whose library listens on ports that it draws. */}}
{{- define "baton.hasNixl" -}}
{{- range $role := fromJsonArray (include "baton.nodeRoles" .) -}}
{{- $part := index $.Values $role -}}
{{- if has (default $.Values.config.transport $part.config.transport) (list "nixl" "auto") }}yes{{ end -}}
{{- end -}}
{{- end -}}

{{/* What is not said by a value must be said by somebody. */}}
{{- define "baton.check" -}}
{{- $fullname := include "baton.fullname" . -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $fullname) -}}
{{- fail (printf "%s: Services take names of small letters, digits and dashes, a letter first; say one in fullnameOverride" $fullname) -}}
{{- end -}}
{{- if not (regexMatch "^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$" (trunc 63 .Values.nameOverride | trimSuffix "-")) -}}
{{- fail (printf "nameOverride: %s is no label: letters and digits, and between them dashes, dots and underlines" .Values.nameOverride) -}}
{{- end -}}
{{- if and (not .Values.model.volume) (not .Values.model.random) -}}
{{- fail "model: say in model.volume where it is (a volume of Kubernetes), or try the chart with --set model.random=llama-tiny" -}}
{{- end -}}
{{- if and .Values.model.volume .Values.model.random -}}
{{- fail "model: volume and random exclude each other" -}}
{{- end -}}
{{- if not (fromJsonArray (include "baton.nodeRoles" .)) -}}
{{- fail "replicas: without a prefill, decode or mixed node nobody computes" -}}
{{- end -}}
{{- if and (not .Values.decode.replicas) (not .Values.mixed.replicas) -}}
{{- fail "replicas: without a decode or mixed node nobody generates" -}}
{{- end -}}
{{- range $role := fromJsonArray (include "baton.nodeRoles" .) -}}
{{- $transport := default $.Values.config.transport (index $.Values $role).config.transport -}}
{{- if and (eq (default "" $transport) "nixl") (include "baton.tlsSecret" $) -}}
{{- fail (printf "%s.config.transport: nixl encrypts nothing, so it does not go with tls" $role) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.redis.url .Values.redis.urlSecret.name -}}
{{- fail "redis: url and urlSecret exclude each other" -}}
{{- end -}}
{{- if and .Values.tls.certManager.enabled (not .Values.tls.certManager.issuerRef.name) -}}
{{- fail "tls.certManager: issuerRef.name says which issuer signs" -}}
{{- end -}}
{{- if and .Values.router.autoscaling.enabled (not (hasKey (default dict .Values.router.resources.requests) "cpu")) -}}
{{- fail "router.autoscaling: goes by the requested CPU, so router.resources.requests.cpu must say how much" -}}
{{- end -}}
{{- if and .Values.router.ingress.enabled (not .Values.router.ingress.host) -}}
{{- fail "router.ingress: host says for which name" -}}
{{- end -}}
{{- end -}}

{{/* A knob's value as a variable spells it: YAML's off is a bool, and its numbers are floating ones, whole up to 2^53. */}}
{{- define "baton.knob" -}}
{{- if kindIs "bool" . -}}
{{- ternary "on" "off" . -}}
{{- else if and (kindIs "float64" .) (eq (toString .) (toString (floor .))) (lt . 9007199254740992.0) -}}
{{- int64 . -}}
{{- else -}}
{{- . -}}
{{- end -}}
{{- end -}}
