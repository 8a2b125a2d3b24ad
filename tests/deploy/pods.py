"""What the manifests of an install say of its pods, and who may reach whom, as Kubernetes reads them. Pure.

Not here: whether Kubernetes takes them at all (kubernetes_types.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

Manifest = dict[str, Any]
Labels = Mapping[str, str]

COMPONENT: Final = "app.kubernetes.io/component"
# The ports of the image (ENV of the Dockerfile), and zmq's.
ROUTER_PORT, HTTP_PORT, GRPC_PORT, KV_PORT, REDIS_PORT = 8000, 8002, 8003, 8004, 6379
NODE_ROLES: Final = ("prefill", "decode", "mixed")


@dataclass(frozen=True, slots=True)
class Pods:
    """The pods of a Deployment or a StatefulSet, which are all alike."""

    manifest: Manifest

    @property
    def role(self) -> str:
        """router, prefill, decode, mixed or redis."""
        return str(self.labels[COMPONENT])

    @property
    def spec(self) -> dict[str, Any]:
        """Of one pod."""
        spec: dict[str, Any] = self.manifest["spec"]["template"]["spec"]
        return spec

    @property
    def labels(self) -> Labels:
        """Of one pod."""
        labels: Labels = self.manifest["spec"]["template"]["metadata"]["labels"]
        return labels

    @property
    def container(self) -> dict[str, Any]:
        """The only one that stays."""
        (container,) = self.spec["containers"]
        return dict(container)

    @property
    def variables(self) -> dict[str, dict[str, Any]]:
        """Name -> how it is said."""
        return {each["name"]: each for each in self.container.get("env", ())}

    @property
    def ports(self) -> dict[str, int]:
        """Name -> number."""
        return {each["name"]: each["containerPort"] for each in self.container["ports"]}

    @property
    def probes(self) -> dict[str, dict[str, Any]]:
        """Those over HTTP."""
        return {
            name: probe["httpGet"] for name, probe in self.container.items() if "Probe" in name and "httpGet" in probe
        }

    @property
    def is_ours(self) -> bool:
        """Not a Redis."""
        return self.role != "redis"


@dataclass(frozen=True, slots=True)
class Peer:
    """Who opens a connection, or takes it: a pod, or with no labels something outside of the cluster."""

    labels: Labels | None
    namespace: str = "inference"


OUTSIDE: Final = Peer(None, "")


@dataclass(frozen=True, slots=True)
class Install:
    """What Helm gave the API server."""

    manifests: list[Manifest]

    def of(self, *kinds: str) -> list[Manifest]:
        """Those of some kinds."""
        return [each for each in self.manifests if each["kind"] in kinds]

    def pods(self) -> list[Pods]:
        """Of each workload."""
        return [Pods(each) for each in self.of("Deployment", "StatefulSet")]

    def pods_of(self, role: str) -> Pods:
        """Of one role."""
        (found,) = [each for each in self.pods() if each.role == role]
        return found

    def is_allowed(self, source: Peer, target: Peer, port: int, protocol: str = "TCP") -> bool:
        """Whether the policies let the one open a connection to a port of the other."""
        return self._lets("ingress", target, source, port, protocol) and self._lets(
            "egress", source, target, port, protocol
        )

    def _lets(self, way: str, subject: Peer, other: Peer, port: int, protocol: str) -> bool:
        """`subject` is whom policies are about; whom none is about may do everything."""
        if subject.labels is None:
            return True
        about = [
            each["spec"]
            for each in self.of("NetworkPolicy")
            if each["metadata"]["namespace"] == subject.namespace
            and way.capitalize() in each["spec"]["policyTypes"]
            and selects(each["spec"]["podSelector"], subject.labels)
        ]
        rules = [rule for spec in about for rule in spec.get(way) or ()]
        return not about or any(_lets(rule, way, subject.namespace, other, port, protocol) for rule in rules)


def selects(selector: Mapping[str, Any], labels: Labels) -> bool:
    """Whether a label selector means a pod."""
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    for each in selector.get("matchExpressions", ()):
        assert each["operator"] == "In"
        if labels.get(each["key"]) not in each["values"]:
            return False
    return True


def _lets(rule: Manifest, way: str, namespace: str, other: Peer, port: int, protocol: str) -> bool:
    """A rule without ports is for all of them, one without peers for everybody."""
    ports = rule.get("ports")
    if ports and not any(
        each["protocol"] == protocol and each.get("port", 0) <= port <= each.get("endPort", each.get("port", 65_535))
        for each in ports
    ):
        return False
    peers = rule.get("from" if way == "ingress" else "to")
    return not peers or any(_is(peer, namespace, other) for peer in peers)


def _is(peer: Manifest, namespace: str, other: Peer) -> bool:
    if other.labels is None or "ipBlock" in peer:
        return False
    if "namespaceSelector" in peer:
        assert peer["namespaceSelector"] == {}
    elif other.namespace != namespace:
        return False
    return selects(peer.get("podSelector", {}), other.labels)


def resolved(pods: Pods) -> dict[str, str]:
    """A pod's variables, as its process would have them."""
    told = {}
    for name, each in pods.variables.items():
        source = each.get("valueFrom", {})
        if "secretKeyRef" in source:
            told[name] = "redis://of-a-secret:6379/0"
        else:
            told[name] = each.get("value") or (
                "10.1.2.3" if name == "POD_IP" else "4" if name == "BATON_THREADS" else "pod-0"
            )
    for name, value in told.items():
        told[name] = (
            value.replace("$(POD_IP)", told["POD_IP"]).replace("$(POD_NAME)", "pod-0").replace("$(REDIS_PASSWORD)", "x")
        )
    return told


def references(pods: Pods) -> Iterator[tuple[str, str]]:
    """Each (kind, name) that must be there before a pod starts."""
    for volume in pods.spec["volumes"]:
        if "secret" in volume:
            yield "Secret", volume["secret"]["secretName"]
    for variable in pods.variables.values():
        if secret := variable.get("valueFrom", {}).get("secretKeyRef"):
            yield "Secret", secret["name"]
