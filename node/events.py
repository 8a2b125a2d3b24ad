"""The vocabulary of a node: what its core hears, and what it asks of the shell.

Events carry received protobuf messages as they came; the shell has already refused what does not parse or is not meant for
this incarnation. Actions are performed in order. Transport events (connector/transport.py) and StepDone reach the core unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from connector.transport import LeaseRef, ReceiverEvent, SenderEvent
from engine.plan import Plan, StepResult
from engine.sequence import Progresses
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey


class RouterId(NamedTuple):
    """A router process that holds a session with this node."""

    name: str
    incarnation: int


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class FromRouter:
    """A message of a router's session, in order, once."""

    router: RouterId
    message: pb.RouterMessage


@dataclass(frozen=True, slots=True)
class RouterLost:
    """The session with this router is lost for good: all its work here ends."""

    router: RouterId


@dataclass(frozen=True, slots=True)
class ReserveAsked:
    """A sender wants blocks here; `call_id` is answered once with AnswerReserve."""

    call_id: int
    request: pb.ReserveRequest


@dataclass(frozen=True, slots=True)
class RenewAsked:
    """A sender keeps its lease alive; answered with AnswerRenew."""

    call_id: int
    request: pb.RenewRequest


@dataclass(frozen=True, slots=True)
class ReleaseAsked:
    """A sender gives an attempt's lease back. The shell has acknowledged it already."""

    request: pb.ReleaseRequest


@dataclass(frozen=True, slots=True)
class ReserveAnswered:
    """What became of SendReserve; None: no answer (unreachable, timed out), so the peer may or may not hold a lease."""

    key: AttemptKey
    reply: pb.ReserveReply | None


@dataclass(frozen=True, slots=True)
class RenewAnswered:
    """What became of SendRenew; None: no answer."""

    key: AttemptKey
    reply: pb.RenewReply | None


@dataclass(frozen=True, slots=True)
class StepDone:
    """The runner finished a plan; results come in the order of the plans."""

    result: StepResult


@dataclass(frozen=True, slots=True)
class BlocksStaged:
    """The answer to a SaveBlocks: `num_staged` of them are copied, the others are not stored; none is read any more."""

    save_id: int
    num_staged: int


@dataclass(frozen=True, slots=True)
class PoolLooked:
    """The answer to a LookInPool: so many leading blocks are in the KV pool; 0, too, if it cannot say."""

    look_id: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class BlocksFetched:
    """The answer to a FetchBlocks: so many leading blocks are in KV memory, verified; nothing writes into any of them any more.

    What the blocks behind them hold is undefined.
    """

    fetch_id: int
    num_blocks: int
    seconds: float  # that the reading took


@dataclass(frozen=True, slots=True)
class PoolSaid:
    """What the KV pool has said of blocks, by key, in the course of other calls: for routers (cache_feed.py), no core hears it."""

    pool: bytes  # its identity
    stored: tuple[bytes, ...] = ()  # it was just given these, or had them already
    found: tuple[bytes, ...] = ()
    lacking: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """Take no new work, hand over what is here, and be done by `deadline` (loop time); one Drained follows. Asked again, the
    earlier deadline counts."""

    deadline: float


Event = (
    FromRouter
    | RouterLost
    | ReserveAsked
    | RenewAsked
    | ReleaseAsked
    | ReserveAnswered
    | RenewAnswered
    | StepDone
    | BlocksStaged
    | PoolLooked
    | BlocksFetched
    | PoolSaid
    | DrainAsked
    | SenderEvent
    | ReceiverEvent
)

# ---------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class ToRouter:
    """Send on the router's session; dropped if that session is lost."""

    router: RouterId
    message: pb.NodeMessage


@dataclass(frozen=True, slots=True)
class RunStep:
    """Queue a plan for the runner thread."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class SendReserve:
    """Ask `address` for blocks; ReserveAnswered follows, at the latest after `timeout_s`."""

    key: AttemptKey
    address: str
    request: pb.ReserveRequest
    timeout_s: float


@dataclass(frozen=True, slots=True)
class SendRenew:
    """RenewAnswered follows, at the latest after `timeout_s`."""

    key: AttemptKey
    address: str
    request: pb.RenewRequest
    timeout_s: float


@dataclass(frozen=True, slots=True)
class SendRelease:
    """Best effort, repeated by the shell a few times within the release's ms_left; nothing follows."""

    address: str
    request: pb.ReleaseRequest


@dataclass(frozen=True, slots=True)
class AnswerReserve:
    """The answer to a ReserveAsked; the shell adds the endpoints to a lease."""

    call_id: int
    reply: pb.ReserveReply


@dataclass(frozen=True, slots=True)
class AnswerRenew:
    """The answer to a RenewAsked."""

    call_id: int
    reply: pb.RenewReply


@dataclass(frozen=True, slots=True)
class OpenLink:
    """Open a link to one of a receiver's endpoints, best first; LinkClosed if none can be had."""

    link_id: str
    endpoints: tuple[pb.Endpoint, ...]


@dataclass(frozen=True, slots=True)
class WriteBlocks:
    """Transport.write."""

    link_id: str
    lease: LeaseRef
    blocks: tuple[tuple[int, int], ...]  # (block index in the lease, source block id)


@dataclass(frozen=True, slots=True)
class DropWrites:
    """Transport.drop."""

    link_id: str
    lease: LeaseRef


@dataclass(frozen=True, slots=True)
class NotifyLink:
    """Transport.notify with a Commit."""

    link_id: str
    message: pb.DataMessage


@dataclass(frozen=True, slots=True)
class CloseLink:
    """Transport.close."""

    link_id: str


@dataclass(frozen=True, slots=True)
class AdmitLease:
    """Transport.admit; performed before the AnswerReserve that follows it."""

    lease_id: int
    secret: bytes
    block_ids: tuple[int, ...]  # -1: held already, not writable


@dataclass(frozen=True, slots=True)
class RevokeLease:
    """Transport.revoke; RevokeDone follows."""

    lease_id: int


@dataclass(frozen=True, slots=True)
class AnswerCommit:
    """Transport.answer."""

    reply_to: object
    message: pb.DataMessage


@dataclass(frozen=True, slots=True)
class SaveBlocks:
    """Store full, final blocks in the KV pool; BlocksStaged follows, soon whatever the pool does, and until then they are read."""

    save_id: int
    blocks: tuple[tuple[bytes, int], ...]  # (key, block id), in the sequence's order


@dataclass(frozen=True, slots=True)
class TakeOutBlocks:
    """Take blocks out of the KV pool, should it have them: one of them has no numbers. Nothing follows."""

    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class LookInPool:
    """Find out how many leading blocks of a prompt the KV pool has; PoolLooked follows within a bounded time."""

    look_id: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class FetchBlocks:
    """Read blocks out of the KV pool; BlocksFetched follows within a bounded time, and until then they are written."""

    fetch_id: int
    blocks: tuple[tuple[bytes, int], ...]  # (key, id of a leased block), in the prompt's order


@dataclass(frozen=True, slots=True)
class Count:
    """Raise a counter; `name` is a field of the node's counters (see node/metrics.py)."""

    name: str
    amount: int = 1


@dataclass(frozen=True, slots=True)
class Ended:
    """An attempt ended here; the shell logs it once."""

    key: AttemptKey
    outcome: str  # "committed", "finished", "cancelled", or a PD Error code's name


@dataclass(frozen=True, slots=True)
class Drained:
    """Nothing is here any more that anybody waits for: the process may end."""


Action = (
    ToRouter
    | RunStep
    | SendReserve
    | SendRenew
    | SendRelease
    | AnswerReserve
    | AnswerRenew
    | OpenLink
    | WriteBlocks
    | DropWrites
    | NotifyLink
    | CloseLink
    | AdmitLease
    | RevokeLease
    | AnswerCommit
    | SaveBlocks
    | TakeOutBlocks
    | LookInPool
    | FetchBlocks
    | Count
    | Ended
    | Drained
)


class NodeCore(Protocol):
    """What the shell drives, whichever the role. Same events and times in, same actions out."""

    def receive(self, event: Event, now: float) -> Sequence[Action]:
        """Take one event; `now` is in seconds of a monotonic clock and never goes back."""

    def tick(self, now: float) -> Sequence[Action]:
        """Fire every timer that is due; the shell calls it before receive, and when next_deadline comes."""

    def next_deadline(self) -> float | None:
        """When tick must be called at the latest, or None."""

    def snapshot(self) -> Mapping[str, object]:
        """JSON-able state for /state, /metrics and the invariants of the tests."""

    def load(self) -> pb.LoadReport:
        """What the next keepalive tells the routers."""


class PartOfCore(Protocol):
    """A core that can share its scheduler with others: what receive and tick do, without completing and planning steps.

    Whoever drives several does that once for all (mixed_node/core.py). A turn ends with `settle`, behind the planning.
    """

    def take(self, event: Event, now: float) -> None:
        """Take one event. Of several parts each gets StepDone as `read`."""

    def read(self, progress: Progresses, now: float) -> None:
        """Take what a step gave; what is of sequences that are not its own it leaves alone."""

    def expire(self, now: float) -> None:
        """Fire every timer that is due."""

    def settle(self, now: float) -> list[Action]:
        """Do what the new plans, or the lack of any, allow; hand out the turn's actions."""

    def next_deadline(self) -> float | None:
        """See NodeCore."""

    def snapshot(self) -> Mapping[str, object]:
        """See NodeCore."""
