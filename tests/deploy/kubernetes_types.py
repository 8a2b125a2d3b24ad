"""What Kubernetes takes: objects held against the classes of its own Python client: no unknown or missing field, right types.

The classes are generated from the API's OpenAPI description (v1.37). They are read as text: a package of 75 MB with its
dependencies would be imported else. The two kinds of others are spelled here, as far as the chart goes. Not here: what an
object means (pods.py).
"""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any, Final

TOOLS: Final = Path(sys.prefix) / "helm"  # in .venv, filled by `make test-setup`
MODELS: Final = TOOLS / "kubernetes" / "client" / "models"
CLASSES: Final = {
    ("v1", "Service"): "V1Service",
    ("v1", "ServiceAccount"): "V1ServiceAccount",
    ("apps/v1", "Deployment"): "V1Deployment",
    ("apps/v1", "StatefulSet"): "V1StatefulSet",
    ("autoscaling/v2", "HorizontalPodAutoscaler"): "V2HorizontalPodAutoscaler",
    ("networking.k8s.io/v1", "Ingress"): "V1Ingress",
    ("networking.k8s.io/v1", "NetworkPolicy"): "V1NetworkPolicy",
    ("policy/v1", "PodDisruptionBudget"): "V1PodDisruptionBudget",
    ("cert-manager.io/v1", "Certificate"): "Certificate",
    ("monitoring.coreos.com/v1", "PodMonitor"): "PodMonitor",
}
# What the generated classes take any text for.
CHOICES: Final = {
    "imagePullPolicy": {"Always", "IfNotPresent", "Never"},
    "medium": {"", "Memory", "HugePages"},
    "operator": {"In", "NotIn", "Exists", "DoesNotExist", "Equal"},
    "pathType": {"Prefix", "Exact", "ImplementationSpecific"},
    "podManagementPolicy": {"OrderedReady", "Parallel"},
    "protocol": {"TCP", "UDP"},
    "scheme": {"HTTP", "HTTPS", "http", "https"},
    "fsGroupChangePolicy": {"OnRootMismatch", "Always"},
    "whenUnsatisfiable": {"DoNotSchedule", "ScheduleAnyway"},
}
_SECRET_KEY: Final = {"name!": "str", "key!": "str"}
# https://cert-manager.io/docs/reference/api-docs, https://prometheus-operator.dev/docs/api-reference/api; !: must be there
_OF_OTHERS: Final[dict[str, dict[str, Any]]] = {
    "Certificate": {
        "apiVersion!": "str",
        "kind!": "str",
        "metadata!": "V1ObjectMeta",
        "spec!": {
            "secretName!": "str",
            "duration": "str",
            "renewBefore": "str",
            "privateKey": {"algorithm": "str", "size": "int", "rotationPolicy": "str"},
            "usages": "List[str]",
            "dnsNames": "List[str]",
            "ipAddresses": "List[str]",
            "issuerRef!": {"name!": "str", "kind": "str", "group": "str"},
        },
    },
    "PodMonitor": {
        "apiVersion!": "str",
        "kind!": "str",
        "metadata!": "V1ObjectMeta",
        "spec!": {
            "selector!": "V1LabelSelector",
            "podMetricsEndpoints!": [
                {
                    "port": "str",
                    "path": "str",
                    "interval": "str",
                    "scheme": "str",
                    "authorization": {"credentials": _SECRET_KEY},
                    "relabelings": [{"targetLabel": "str", "replacement": "str", "sourceLabels": "List[str]"}],
                    "tlsConfig": {"serverName": "str", "ca": {"secret": _SECRET_KEY}},
                }
            ],
        },
    },
}
_PLAIN: Final = {
    "str": str,
    "StrictStr": str,
    "int": int,
    "StrictInt": int,
    "StrictBool": bool,
    "bool": bool,
    "datetime": str,
}


def problems_of(manifest: dict[str, Any]) -> list[str]:
    """What Kubernetes would refuse of an object, each with its place."""
    kind = (manifest.get("apiVersion", ""), manifest.get("kind", ""))
    if kind not in CLASSES:
        return [f"{kind}: no such kind"]
    return _problems(manifest, CLASSES[kind], kind[1])


def _problems(value: Any, type_: Any, where: str) -> list[str]:
    if isinstance(type_, dict):
        return _problems_of_fields(value, type_, where)
    if isinstance(type_, list):
        return _problems_of_items(value, type_[0], where)
    if parts := re.fullmatch(r"(List|Dict|Optional)\[(.*)\]", type_):
        inner = parts[2].removeprefix("StrictStr, ").removeprefix("str, ")
        if parts[1] == "Optional":
            return _problems(value, inner, where)
        if parts[1] == "List":
            return _problems_of_items(value, inner, where)
        if not isinstance(value, dict):
            return [f"{where}: {value!r} is no object"]
        if where.endswith((".limits", ".requests")):
            inner = "StrictInt | StrictStr"  # a quantity may be a number
        return [problem for key, item in value.items() for problem in _problems(item, inner, f"{where}.{key}")]
    if " | " in type_:
        tried = [_problems(value, each, where) for each in type_.split(" | ")]
        return min(tried, key=len)
    if type_ in ("Any", "object"):
        return []
    if type_ in _PLAIN:
        right = type(value) is _PLAIN[type_]  # a bool is no int here
        return [] if right else [f"{where}: {value!r} is not of the type {type_}"]
    return _problems_of_fields(value, _OF_OTHERS.get(type_) or fields_of(type_), where)


def _problems_of_items(value: Any, type_: Any, where: str) -> list[str]:
    if not isinstance(value, list):
        return [f"{where}: {value!r} is no list"]
    return [problem for i, item in enumerate(value) for problem in _problems(item, type_, f"{where}[{i}]")]


def _problems_of_fields(value: Any, fields: dict[str, Any], where: str) -> list[str]:
    if not isinstance(value, dict):
        return [f"{where}: {value!r} is no object"]
    found = [
        f"{where}.{name[:-1]} is missing" for name in fields if name.endswith("!") and value.get(name[:-1]) is None
    ]
    for key, item in value.items():
        type_ = fields.get(key) or fields.get(key + "!")
        if type_ is None:
            found.append(f"{where}.{key}: no such field")
        elif item is None:
            found.append(f"{where}.{key} has no value")
        elif key in CHOICES and type_ in ("StrictStr", "Optional[StrictStr]") and item not in CHOICES[key]:
            found.append(f"{where}.{key}: {item!r} is none of {sorted(CHOICES[key])}")
        else:
            found += _problems(item, type_, f"{where}.{key}")
    return found


@cache
def fields_of(name: str) -> dict[str, str]:
    """A class's fields as JSON spells them, with their types; with a ! behind it, one that must be there."""
    tree = ast.parse((MODELS / f"{_modules()[name]}.py").read_text(encoding="utf-8"))
    body = next(each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == name).body
    fields = {}
    for line in body:
        if not (isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)):
            continue
        type_ = ast.unparse(line.annotation)
        if type_.startswith("ClassVar"):
            continue
        told = {each.arg: each.value for each in line.value.keywords} if isinstance(line.value, ast.Call) else {}
        alias = told.get("serialization_alias")
        spelled = str(ast.literal_eval(alias)) if alias is not None else line.target.id
        fields[spelled + ("" if type_.startswith("Optional[") else "!")] = type_
    return fields


@cache
def _modules() -> dict[str, str]:
    """Where each class is."""
    text = (MODELS / "__init__.py").read_text(encoding="utf-8")
    return {name: module for module, name in re.findall(r"models\.(\w+) import (\w+)", text)}
