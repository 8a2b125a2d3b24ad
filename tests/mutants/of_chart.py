"""Bugs of the Helm chart: what would be seen in a cluster only."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_CHART: Final = ("tests/deploy/test_helm_chart.py",)  # need Helm's library
_VARIABLES: Final = ("tests/deploy/test_helm_variables.py",)
_VALUES: Final = ("tests/deploy/test_helm_values.py",)
_TEMPLATES: Final = "deploy/helm/baton/templates"

MUTANTS: Final = (
    Mutant(
        "chart-closes-kv-port",
        "No node may open the port where another takes KV.",
        f"{_TEMPLATES}/network.yaml",
        '    - ports: {{ include "baton.kvPorts" . }}\n      to:',
        "    - ports: [{protocol: TCP, port: 8003}]\n      to:",
        _CHART,
    ),
    Mutant(
        "chart-closes-nixls-ports",
        "Nodes that use NIXL may reach each other at zmq's port only.",
        f"{_TEMPLATES}/network.yaml",
        '{{- if include "baton.hasNixl" . -}}',
        "{{- if false -}}",
        _CHART,
    ),
    Mutant(
        "chart-opens-redis",
        "Everybody may write into the registry.",
        f"{_TEMPLATES}/network.yaml",
        "    - ports: [{protocol: TCP, port: 6379}]\n      from:\n",
        "    - ports: [{protocol: TCP, port: 6379}]\n      somebody:\n",
        _CHART,
    ),
    Mutant(
        "chart-forgets-registrys-port",
        "The pods may not reach a Redis that listens at another port than usual.",
        f"{_TEMPLATES}/network.yaml",
        '(urlParse .Values.redis.url).host | trimPrefix ":" | default "6379"',
        '(urlParse .Values.redis.url).hostname | trimPrefix ":" | default "6379"',
        _CHART,
    ),
    Mutant(
        "chart-kills-drains",
        "A router is killed while its last answers are under way, since it slept first.",
        f"{_TEMPLATES}/router.yaml",
        "{{ add (ceil $part.preStopSeconds) (ceil $part.drainTimeoutSeconds) 5 }}",
        "{{ add (ceil $part.drainTimeoutSeconds) 5 }}",
        _CHART,
    ),
    Mutant(
        "chart-loses-false",
        "A role's knob that is off does not win over the same one, on, of all.",
        f"{_TEMPLATES}/_pod.tpl",
        "{{- range $name, $value := .part.config }}{{ $_ := set $config $name $value }}{{ end }}",
        "{{- $config = merge (deepCopy .part.config) $config }}",
        _VARIABLES,
    ),
    Mutant(
        "chart-writes-floating-numbers",
        "A large number arrives as 1.048576e+06, which no process takes.",
        f"{_TEMPLATES}/_helpers.tpl",
        "{{- int64 . -}}",
        "{{- . -}}",
        _VARIABLES,
    ),
    Mutant(
        "chart-hears-of-services",
        "A Service called baton says to every pod that BATON_PORT is tcp://….",
        f"{_TEMPLATES}/_pod.tpl",
        "enableServiceLinks: false",
        "enableServiceLinks: true",
        _CHART,
    ),
    Mutant(
        "chart-asks-for-plain-pages",
        "Probes speak HTTP with processes that speak HTTPS.",
        f"{_TEMPLATES}/_pod.tpl",
        'ternary "HTTPS" "HTTP"',
        'ternary "HTTP" "HTTP"',
        _CHART,
    ),
    Mutant(
        "chart-orders-too-few-names",
        "The certificate names one pod of a role, and not the others.",
        f"{_TEMPLATES}/access.yaml",
        '"*.{{ $fullname }}-{{ $role }}.{{ $zone }}"',
        '"{{ $fullname }}-{{ $role }}-0.{{ $fullname }}-{{ $role }}.{{ $zone }}"',
        _CHART,
    ),
    Mutant(
        "chart-guards-all-roles-at-once",
        "A budget counts the pods of every role as one.",
        f"{_TEMPLATES}/disruption.yaml",
        "      app.kubernetes.io/component: {{ $role }}\n{{- end }}\n{{- end }}",
        "{{- end }}\n{{- end }}",
        _CHART,
    ),
    Mutant(
        "chart-reads-a-misspelt-value",
        "A value is read by a name that it has not, so nothing is said.",
        f"{_TEMPLATES}/router.yaml",
        "{{- with $part.ingress.className }}",
        "{{- with $part.ingress.class }}",
        _VALUES,
    ),
    Mutant(
        "chart-takes-two-models",
        "A model may lie in two volumes at once, and Kubernetes takes no such pod.",
        "deploy/helm/baton/values.schema.json",
        '"maxProperties": 1',
        '"maxProperties": 2',
        _VALUES,
    ),
)
