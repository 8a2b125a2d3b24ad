"""The chart's values.schema.json, from its own shape and the knobs of routers and nodes: `make docs` writes it anew.

So `helm install --set decode.config.blok_size=32` is refused before anything is started: a variable with a misspelt name would mean
nothing to anybody. Not here: the defaults (values.yaml), and what no schema says (templates/_helpers.tpl, baton.check).
"""

from __future__ import annotations

import dataclasses
import json
import types
from pathlib import Path
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from node.config import NodeConfig
from router.config import RouterConfig

CHART: Final = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "baton"
SCHEMA_FILE: Final = CHART / "values.schema.json"
# What the chart sets itself, or must not be set there.
OF_THE_CHART: Final = frozenset(
    "model host advertise port http_port grpc_port kv_port registry registry_host registry_port registry_namespace router node_id "
    "tls_dir api_keys ready_file launcher parent_pid drain_timeout_s served_model_name".split()
)

Schema = dict[str, Any]
TEXT: Final[Schema] = {"type": "string"}
FLAG: Final[Schema] = {"type": "boolean"}
TEXTS: Final[Schema] = {"type": "object", "additionalProperties": {"type": "string"}}
OBJECT: Final[Schema] = {"type": "object"}
OBJECTS: Final[Schema] = {"type": "array", "items": {"type": "object"}}
COUNT: Final[Schema] = {"type": "integer", "minimum": 0, "maximum": 10_000}
SECONDS: Final[Schema] = {"type": "integer", "minimum": 0, "maximum": 86_400}
PORT: Final[Schema] = {"type": "integer", "minimum": 1, "maximum": 65_535}
LARGEST: Final = (
    1 << 53
) - 1  # Helm's numbers are floating ones: of larger whole ones it hands on others than were written
DURATION: Final[Schema] = {"type": "string", "pattern": "^([0-9]+(h|m|s|ms))+$"}
QUANTITY: Final[Schema] = {"type": ["string", "integer"], "pattern": "^([0-9.]+([KMGTP]i?|k)?)?$"}


def exactly(**properties: Schema) -> Schema:
    """An object with these keys and no others."""
    return {"type": "object", "additionalProperties": False, "properties": properties}


def knobs(*configs: type) -> Schema:
    """A `config` for processes of these kinds: their knobs by name, in their bounds."""
    found: dict[str, Schema] = {}
    for config in configs:
        hints = get_type_hints(config)
        for field in dataclasses.fields(config):
            if field.name not in OF_THE_CHART and field.name != "config":
                found.setdefault(field.name, _knob(hints[field.name], field.metadata))
    return exactly(**{name: found[name] for name in sorted(found)})


def _knob(hint: Any, told: Any) -> Schema:
    """What a value of the knob must be; what it means --help says. null is: not said, the knob's default."""
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    kind = members[0]
    choices = get_args(kind) if get_origin(kind) is Literal else tuple(told["choices"] or ())
    if kind is bool or set(choices) == {"on", "off"}:  # YAML's own word for off is false
        return {"enum": ["on", "off", True, False, None]}
    if choices:
        return {"enum": [*choices, None]}
    name = {int: "integer", float: "number"}.get(kind, "string")
    high = min(told["high"] or LARGEST, LARGEST) if kind is int else told["high"]
    bounds = {"minimum": told["low"], "maximum": high}
    return {"type": [name, "null"]} | {key: bound for key, bound in bounds.items() if bound is not None}


def make_schema() -> Schema:
    """The whole file."""
    secret = exactly(name=TEXT, key=TEXT)
    budget = exactly(enabled=FLAG, maxUnavailable={"type": ["integer", "string"], "pattern": "^[0-9]+%$", "minimum": 0})
    resources = exactly(
        requests={"type": "object", "additionalProperties": {"type": ["string", "number"]}},
        limits={"type": "object", "additionalProperties": {"type": ["string", "number"]}},
        claims=OBJECTS,
    )
    pods = {
        "resources": resources,
        "podDisruptionBudget": budget,
        "drainTimeoutSeconds": SECONDS,
        "startupSeconds": SECONDS | {"minimum": 2},
        "podAnnotations": TEXTS,
        "nodeSelector": TEXTS,
        "tolerations": OBJECTS,
        "affinity": OBJECT,
        "topologySpreadConstraints": OBJECTS,
        "priorityClassName": TEXT,
        "extraEnv": {"type": "array", "items": {"type": "object", "required": ["name"]}},
        "extraVolumes": OBJECTS,
        "extraVolumeMounts": OBJECTS,
    }
    of_node: Schema = {"$ref": "#/definitions/node"}
    node = exactly(replicas=COUNT, config=knobs(NodeConfig), shmSize=QUANTITY, runtimeClassName=TEXT, **pods)
    schema = exactly(
        nameOverride=TEXT,
        fullnameOverride=TEXT,
        image=exactly(
            repository=TEXT | {"minLength": 1},
            tag=TEXT,
            pullPolicy={"enum": ["IfNotPresent", "Always", "Never"]},
            pullSecrets=OBJECTS,
        ),
        model=exactly(
            volume=OBJECT | {"maxProperties": 1},
            path=TEXT,
            random={"enum": ["", "llama-tiny", "qwen2-tiny", "qwen3-tiny", "mistral-tiny"]},
            servedName=TEXT | {"minLength": 1},
        ),
        config=knobs(NodeConfig, RouterConfig),
        router=exactly(
            replicas=COUNT | {"minimum": 1},
            config=knobs(RouterConfig),
            listen=TEXT,
            preStopSeconds=SECONDS,
            autoscaling=exactly(
                enabled=FLAG,
                minReplicas=COUNT | {"minimum": 1},
                maxReplicas=COUNT | {"minimum": 1},
                targetCPUUtilizationPercentage={"type": "integer", "minimum": 1, "maximum": 100},
            ),
            service=exactly(type={"enum": ["ClusterIP", "NodePort", "LoadBalancer"]}, port=PORT, annotations=TEXTS),
            ingress=exactly(enabled=FLAG, className=TEXT, annotations=TEXTS, host=TEXT, tlsSecret=TEXT),
            **pods,
        ),
        prefill=of_node,
        decode=of_node,
        mixed=of_node,
        redis=exactly(
            url=TEXT | {"pattern": "^(|rediss?://.+)$"},
            urlSecret=exactly(name=TEXT, key=TEXT, port=PORT),
            image=TEXT,
            passwordSecret=secret,
            resources=resources,
        ),
        apiKeys=exactly(existingSecret=TEXT, key=TEXT),
        tls=exactly(
            existingSecret=TEXT,
            certManager=exactly(
                enabled=FLAG,
                issuerRef=exactly(name=TEXT, kind=TEXT, group=TEXT),
                duration=DURATION,
                renewBefore=DURATION,
            ),
            clusterDomain=TEXT,
        ),
        networkPolicy=exactly(enabled=FLAG, clients=OBJECTS, scrapers=OBJECTS, egress=FLAG, extraEgress=OBJECTS),
        podMonitor=exactly(enabled=FLAG, interval=DURATION, labels=TEXTS, keySecret=secret),
        serviceAccount=exactly(create=FLAG, name=TEXT, annotations=TEXTS),
        podSecurityContext=OBJECT,
        securityContext=OBJECT,
    )
    schema["properties"]["global"] = OBJECT  # of a chart that this one is a part of
    schema["definitions"] = {"node": node}
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values of the chart"} | schema


def main() -> None:
    """Write the file."""
    SCHEMA_FILE.write_text(json.dumps(make_schema(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
