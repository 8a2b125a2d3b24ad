"""How a node says that it cannot go on with an attempt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from node.events import Action, Ended, RouterId, ToRouter
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey

TOO_LATE: Final = "the request's deadline has passed"  # the reason of every DEADLINE that a node says
NOT_RETRYABLE: Final = frozenset({pb.INCOMPATIBLE, pb.CANCELLED, pb.DEADLINE, pb.INVALID})
# How the engine ends a sequence without a token: its KV, or what the model makes of it, is no number; its grammar
# held up a step, lets nothing follow, or was lost; others needed its blocks.
ENDS_WITHOUT_TOKEN: Final[Mapping[str, tuple[pb.ErrorCode.ValueType, str]]] = {
    "broken": (pb.INTERNAL, "the model gives no numbers for this sequence"),
    "stalled": (pb.INVALID, "its grammar takes too long to follow: it can be read in too many ways"),
    "barred": (pb.INTERNAL, "its grammar lets nothing follow, or could not be followed any more"),
    "preempted": (pb.PREEMPTED, "its blocks were needed by older sequences"),
}


def pd_error(
    code: pb.ErrorCode.ValueType,
    reason: str,
    key: AttemptKey | None,
    node_id: str,
    *,
    completion_token_ids: Sequence[int] = (),
    retry_after_ms: int = 0,
    commit_unanswered: bool = False,
) -> pb.PDError:
    """A PD Error whose message is one sentence: `reason`, without the prefix. `key` None: whoever sends it says whose it is."""
    return pb.PDError(
        code=code,
        message=f"PD Error {pb.ErrorCode.Name(code)} at {node_id}: {reason}",
        retryable=code not in NOT_RETRYABLE,
        key=None if key is None else key.to_proto(),
        node_id=node_id,
        completion_token_ids=completion_token_ids,
        retry_after_ms=retry_after_ms,
        commit_unanswered=commit_unanswered,
    )


def refusal(
    code: pb.ErrorCode.ValueType,
    reason: str,
    keys: Iterable[AttemptKey],
    router: RouterId,
    node_id: str,
    generated_token_ids: Sequence[int],
) -> list[Action]:
    """A Dispatch is not taken now: the router may ask again soon, for each of its branches."""
    actions: list[Action] = []
    for key in keys:
        error = pd_error(code, reason, key, node_id, completion_token_ids=generated_token_ids, retry_after_ms=100)
        actions += [ToRouter(router, pb.NodeMessage(error=error)), Ended(key, pb.ErrorCode.Name(code))]
    return actions
