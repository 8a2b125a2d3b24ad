"""The vocabulary of the router's core: what it hears, and what it asks of the shell.

Requests arrive parsed, validated and tokenized; text never enters the core. Messages of nodes arrive in the order of their
session, each once; there is no order between sessions.
"""

from __future__ import annotations

from dataclasses import dataclass

from proto import baton_pb2 as pb


@dataclass(frozen=True, slots=True)
class NodeRef:
    """A node process: the name alone would take a restarted node for the old one."""

    name: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What a client asked for, in tokens."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    seed: int  # effective: drawn by the API if the client gave none
    temperature: float
    max_tokens: int
    stop_token_ids: tuple[int, ...]  # empty with ignore_eos
    deadline: float  # the instant, on the router's monotonic clock


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Submitted:
    """A client's request; exactly one Finished or Failed answers it, unless the client aborts."""

    request: GenerationRequest


@dataclass(frozen=True, slots=True)
class Aborted:
    """The client went away; nothing more is emitted for this request."""

    request_id: str


@dataclass(frozen=True, slots=True)
class NodeListed:
    """The registry has this entry, new or changed (a new incarnation included)."""

    entry: pb.NodeEntry


@dataclass(frozen=True, slots=True)
class NodeUnlisted:
    """The registry has it no more; ends no session."""

    node: NodeRef


@dataclass(frozen=True, slots=True)
class SessionUp:
    """The session with this node is open: it can take work. Also after a resume."""

    node: NodeRef


@dataclass(frozen=True, slots=True)
class SessionBroken:
    """No stream at the moment; within the grace it may be resumed. No new work goes there meanwhile."""

    node: NodeRef


@dataclass(frozen=True, slots=True)
class SessionLost:
    """Gone for good: every attempt there is NODE_LOST."""

    node: NodeRef


@dataclass(frozen=True, slots=True)
class FromNode:
    """A message of the node's session."""

    node: NodeRef
    message: pb.NodeMessage


@dataclass(frozen=True, slots=True)
class LoadReported:
    """The node's newest load report."""

    node: NodeRef
    load: pb.LoadReport


Event = (
    Submitted | Aborted | NodeListed | NodeUnlisted | SessionUp | SessionBroken | SessionLost | FromNode | LoadReported
)

# ---------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class Dial:
    """Open a session with this node and keep it."""

    entry: pb.NodeEntry


@dataclass(frozen=True, slots=True)
class HangUp:
    """Forget the session with this node."""

    node: NodeRef


@dataclass(frozen=True, slots=True)
class ToNode:
    """Send on the node's session; dropped if that session is lost."""

    node: NodeRef
    message: pb.RouterMessage


@dataclass(frozen=True, slots=True)
class Emitted:
    """New tokens of a request's completion, from index `first_index`, without gap or repeat."""

    request_id: str
    first_index: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The request's only result; everything was emitted before."""

    request_id: str
    finish_reason: str  # "stop", "length"
    token_ids: tuple[int, ...]  # the whole completion


@dataclass(frozen=True, slots=True)
class Failed:
    """The request's only error."""

    request_id: str
    status: int  # of the HTTP answer, if none was begun
    code: str  # a PD Error code's name, or "OVERLOADED", "NO_NODES"
    message: str
    retry_after_s: float | None


@dataclass(frozen=True, slots=True)
class Count:
    """Raise a counter; `name` is one of the router's counters (see router/metrics.py)."""

    name: str
    label: str = ""


Action = Dial | HangUp | ToNode | Emitted | Finished | Failed | Count
