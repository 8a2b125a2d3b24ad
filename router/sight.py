"""What a router shows of itself and of its requests: `/state`, `/v1/requests`, `/v1/requests/{id}/timeline`.

JSON for `baton status`, the dashboard, and whoever asks why a request took so long. No token, text or key of a client is in any of
it. Read from the core and the timelines when somebody asks, so that nothing shown is stale. Not here: HTTP's errors (api.py).
"""

from __future__ import annotations

import os
from itertools import islice
from typing import Any, Final

from google.protobuf.json_format import MessageToDict

from proto import baton_pb2 as pb
from router.node_state import Node
from router.shell import RouterShell
from router.timeline_json import summary, timeline
from runtime.version import versions

MAX_LISTED: Final = 1000
USUALLY_LISTED: Final = 50
_BLOCK_STATES: Final = ("free", "cached", "used", "leased", "quarantined")


class Sight:
    """Pages over one shell, on its loop."""

    def __init__(self, shell: RouterShell) -> None:
        self._shell = shell

    def state(self) -> dict[str, Any]:
        """The router, and its nodes as they told it last."""
        fingerprints: dict[bytes, dict[str, Any]] = {}  # few differ, and each takes a while to be read out
        nodes = [_node(node, circuit, fingerprints) for node, circuit in self._shell.nodes()]
        return self._router() | {"versions": versions(), "nodes": nodes}

    def glance(self) -> dict[str, Any]:
        """The same for who looks each second: of nodes what the dashboard shows."""
        return self._router() | {"nodes": [_glanced(node, circuit) for node, circuit in self._shell.nodes()]}

    def _router(self) -> dict[str, Any]:
        shell = self._shell
        missing = shell.missing()
        return {
            "router": shell.name,
            "pid": os.getpid(),
            "ready": not missing,
            "missing": missing,
            "degraded": shell.degraded(),
            "is_draining": shell.is_draining,
            "queued": shell.num_queued,
            "live_requests": shell.num_live,
        }

    def requests(self, limit: int = USUALLY_LISTED) -> dict[str, Any]:
        """The newest requests, the newest first, those that live among them."""
        now = self._shell.now()
        newest = islice(self._shell.timelines.newest(), min(limit, MAX_LISTED))
        return {"object": "list", "data": [summary(record, now) for record in newest]}

    def timeline(self, name: str) -> dict[str, Any] | None:
        """One request's; None if it is not kept (any more)."""
        record = self._shell.timelines.find(name)
        return None if record is None else timeline(record, self._shell.now())


def _node(node: Node, circuit: str, fingerprints: dict[bytes, dict[str, Any]]) -> dict[str, Any]:
    entry = node.entry
    written = entry.fingerprint.SerializeToString(deterministic=True)
    if written not in fingerprints:
        fingerprints[written] = MessageToDict(entry.fingerprint, preserving_proto_field_name=True)
    return _glanced(node, circuit) | {
        "listed": node.is_listed,
        "grpc": entry.grpc_address,
        "http": entry.http_address,
        "fingerprint": fingerprints[written],
        "sequences": len(node.branches),
        "max_sequences": entry.max_num_seqs,
    }


def _glanced(node: Node, circuit: str) -> dict[str, Any]:
    load, entry = node.load, node.entry
    return {
        "name": node.ref.name,
        "incarnation": f"{node.ref.incarnation:016x}",
        "role": pb.Role.Name(entry.role).removeprefix("ROLE_").lower(),
        "session": node.session.value,
        "left_out": node.is_left_out,
        "draining": node.drains,
        "circuit": circuit,
        "tp": max(1, entry.num_ranks),
        "num_blocks": entry.num_blocks,
        "blocks": {state: getattr(load, f"blocks_{state}") for state in _BLOCK_STATES},  # all 0: it has not spoken yet
        "running": load.running,
        "waiting": load.waiting,
        "prefilling": len(node.prefilling),
    }
