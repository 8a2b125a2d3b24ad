"""How a node says that it cannot go on with an attempt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey

NOT_RETRYABLE: Final = frozenset({pb.INCOMPATIBLE, pb.CANCELLED, pb.DEADLINE})


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
