"""What a node tells whoever has started it, once it takes work. Not here: who waits for it (deploy/child_process.py)."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from node.roles import RoleName
from proto import baton_pb2 as pb
from runtime.logs import log_event
from runtime.process import CannotWrite, write_ready_file

_LOG = logging.getLogger(__name__)


def why_not_told(path: Path | None, role: RoleName, entry: pb.NodeEntry, scheme: str) -> str:
    """Write what the registry has of the node, and its process, unless nobody wants it; what keeps it from being written, or "".

    Whoever waited for the node has read it by the time that it takes another role: what is wrong then is a line of the log.
    """
    content = {"node_id": entry.node.name, "role": role, "pid": os.getpid()}
    try:
        write_ready_file(path, content | {"http": scheme + entry.http_address, "grpc": entry.grpc_address})
    except CannotWrite as error:
        log_event(_LOG, logging.WARNING, "ready_file_not_written", node=entry.node.name, reason=error)
        return str(error)
    return ""
