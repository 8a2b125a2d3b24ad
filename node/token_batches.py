"""What one step gave, collected into one message per router. Each is filled where it stays: giving protobuf a part copies it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from engine.plan import TokenLogprobs
from node.events import RouterId, ToRouter
from node.sampling import to_logprobs_message
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey

FINISH: Final = {"stop": pb.FINISH_STOP, "length": pb.FINISH_LENGTH}


class TokenBatches:
    """Filled while a step's results are read, then handed out."""

    def __init__(self, *, from_receiver: bool) -> None:
        """`from_receiver`: this node is the one that the KV was handed to."""
        self._from_receiver = from_receiver
        self._messages: dict[RouterId, pb.NodeMessage] = {}

    def add(
        self,
        router: RouterId,
        key: AttemptKey,
        first_index: int,
        token_ids: Iterable[int],
        finish: str | None = None,
        logprobs: TokenLogprobs | None = None,
    ) -> pb.BranchTokens:
        """Note a branch's tokens from `first_index` on; whoever has more to say of them adds it to what is returned."""
        message = self._messages.get(router)
        if message is None:
            message = self._messages[router] = pb.NodeMessage()
            message.tokens.from_receiver = self._from_receiver
        tokens = message.tokens.branches.add()
        of_key = tokens.key  # each look at a part makes an object of it
        of_key.request_id, of_key.choice, of_key.attempt = key
        tokens.first_index = first_index
        tokens.token_ids.extend(token_ids)
        if finish is not None:
            tokens.finish = FINISH[finish]
        if logprobs is not None:
            tokens.logprobs.append(to_logprobs_message(logprobs))
        return tokens

    def time(self, router: RouterId, timing: pb.Timing) -> None:
        """Tell, with a token that was added, how long it took."""
        self._messages[router].tokens.timings.append(timing)

    def to_actions(self) -> list[ToRouter]:
        """One message per router that gets any."""
        return [ToRouter(router, message) for router, message in self._messages.items()]
