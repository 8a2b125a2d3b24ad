"""What one step gave, collected into one message per router. Each is filled where it stays: giving protobuf a part copies it, to
look at a part makes an object of it, and to write what is there already costs as much as anything else.

The logprobs of a prompt, up to 3 MiB of them, go with its first token in a message of their own: a step may end many prompts, and
the length of a message is bounded (SessionTiming.max_message_bytes).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from engine.plan import TokenLogprobs
from node.events import RouterId, ToRouter
from node.sampling import to_logprobs_message
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey

if TYPE_CHECKING:
    from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

FINISH: Final = {"stop": pb.FINISH_STOP, "length": pb.FINISH_LENGTH}


class TokenBatches:
    """Filled while a step's results are read, then handed out."""

    def __init__(self, *, from_receiver: bool) -> None:
        """`from_receiver`: this node is the one that the KV was handed to."""
        self._from_receiver = from_receiver
        self._messages: dict[RouterId, pb.NodeMessage] = {}
        self._apart: list[ToRouter] = []
        self._newest: pb.NodeMessage | None = None  # to which a token was added
        self._parts: dict[RouterId, RepeatedCompositeFieldContainer[pb.BranchTokens]] = {}  # of those messages

    def add(
        self,
        router: RouterId,
        key: AttemptKey,
        first_index: int,
        token_ids: Iterable[int],
        finish: str | None = None,
        logprobs: TokenLogprobs | None = None,
        prompt_logprobs: Sequence[pb.TokenLogprobs] = (),
    ) -> pb.BranchTokens:
        """Note a branch's tokens from `first_index` on; whoever has more to say of them adds it to what is returned."""
        message = self._newest = self._message_apart(router) if prompt_logprobs else self._message(router)
        tokens = message.tokens.branches.add()
        of_key = tokens.key
        of_key.request_id, of_key.choice, of_key.attempt = key
        tokens.first_index = first_index
        tokens.token_ids.extend(token_ids)
        if finish is not None:
            tokens.finish = FINISH[finish]
        if logprobs is not None:
            tokens.logprobs.append(to_logprobs_message(logprobs))
        if prompt_logprobs:
            tokens.prompt_logprobs.extend(prompt_logprobs)
        return tokens

    def add_one(self, router: RouterId, key: AttemptKey, index: int, token_id: int) -> None:
        """Note one more token of a branch, and nothing else: nearly all that is ever said."""
        branches = self._parts.get(router)
        if branches is None:
            branches = self._parts[router] = self._message(router).tokens.branches
        tokens = branches.add()
        of_key = tokens.key
        of_key.request_id, choice, attempt = key
        if choice:
            of_key.choice = choice
        if attempt:
            of_key.attempt = attempt
        tokens.first_index = index
        tokens.token_ids.append(token_id)

    def time(self, timing: pb.Timing) -> None:
        """Tell, with the token that was added last, how long it took."""
        assert self._newest is not None, "the time of no token"
        self._newest.tokens.timings.append(timing)

    def to_actions(self) -> list[ToRouter]:
        """One message per router that gets any, and those with a prompt's logprobs."""
        return self._apart + [ToRouter(router, message) for router, message in self._messages.items()]

    def _message(self, router: RouterId) -> pb.NodeMessage:
        message = self._messages.get(router)
        if message is None:
            message = self._messages[router] = self._new_message()
        return message

    def _message_apart(self, router: RouterId) -> pb.NodeMessage:
        message = self._new_message()
        self._apart.append(ToRouter(router, message))
        return message

    def _new_message(self) -> pb.NodeMessage:
        message = pb.NodeMessage()
        message.tokens.from_receiver = self._from_receiver
        return message
