"""What /metrics says of each node: gauges written straight as text. Pure.

prometheus_client takes some 13 µs for a sample, on the loop that all streams share: 50 ms for a thousand nodes. Not here: what
is one sample however many nodes there are (metrics.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from prometheus_client.metrics_core import GaugeMetricFamily, Metric

# name -> (help, value by the node's snapshot and the state of its circuit)
_GAUGES: Final[Mapping[str, tuple[str, Callable[[Mapping[str, Any], str], float]]]] = {
    "up": ("1 while the node's session is up", lambda node, _: node["session"] == "up"),
    "prefilling": ("choices of requests in prefill there", lambda node, _: node["prefilling"]),
    "branches": ("sequences placed there", lambda node, _: node["branches"]),
    "circuit_open": (
        "1 while the node is left alone, or tried with one attempt",
        lambda _, circuit: circuit != "closed",
    ),
}
_ESCAPES: Final = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def node_families(state: Mapping[str, Any]) -> list[Metric]:
    """The gauges, for who wants more of them than the text."""
    families: list[Metric] = []
    for name, (text, value_of) in _GAUGES.items():
        family = GaugeMetricFamily(f"baton_router_node_{name}", text, labels=["node", "role"])
        for node_name, node, circuit in _nodes(state):
            family.add_metric([node_name, node["role"]], float(value_of(node, circuit)))
        families.append(family)
    return families


def node_text(state: Mapping[str, Any]) -> str:
    """The same in Prometheus' text format (version 0.0.4)."""
    labelled = [
        (f'{{node="{name.translate(_ESCAPES)}",role="{node["role"]}"}}', node, circuit)
        for name, node, circuit in _nodes(state)
    ]
    lines: list[str] = []
    for name, (text, value_of) in _GAUGES.items():
        metric = f"baton_router_node_{name}"
        lines += [f"# HELP {metric} {text}", f"# TYPE {metric} gauge"]
        lines += [f"{metric}{labels} {float(value_of(node, circuit))}" for labels, node, circuit in labelled]
    return "\n".join([*lines, ""])


def _nodes(state: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any], str]]:
    """Name, snapshot and circuit of each; two processes of one name share a circuit."""
    named = [(key.rpartition("@")[0], node) for key, node in state["nodes"].items()]
    return [(name, node, state["circuits"][name]) for name, node in named]
