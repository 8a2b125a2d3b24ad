"""An HTTP answer's way from the core to its handler: choices whose text grows, each with one end, and at most one failure.

One answer may be several requests (a list of prompts) of several choices each; it numbers them prompt by prompt. The core's
shell puts tokens, which become text at once, so that a stop string ends its branch however slowly the client reads; the handler
takes. Both run on the loop. What arrived while the handler was busy is taken together: a slow client gets fewer and larger
pieces instead of a longer queue, and what waits is bounded by the requests' max_tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from proto import baton_pb2 as pb
from router.choice_text import ChoiceText
from router.events import RESCHEDULED, Failed, GenerationRequest
from router.thought_text import Thinking
from router.tool_calls import ToolUse
from runtime.tracing import NOBODY, TraceContext


@dataclass(frozen=True, slots=True)
class ClientGone:
    """Nobody reads the answer any more."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """What only the log and the metrics want to know of a request."""

    at: float  # an instant of the monotonic clock, in seconds: a loop's own may count milliseconds
    client_request_id: str | None  # the client's own name for it
    within: TraceContext = NOBODY  # the client's own span, if it named one
    client: str | None = None  # whose key it showed


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt as text, where the client wants it back."""

    text: str
    offsets: Sequence[int]  # of each prompt token in it; empty unless logprobs are asked for


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt of an answer, ready to be submitted."""

    request: GenerationRequest
    texts: Sequence[ChoiceText]  # one per choice
    echo: Echo | None = None
    drops_tokens: bool = False  # max_tokens 0: the request generates one, which nobody gets to see
    tools: ToolUse | None = None  # what of its text is a tool call; None: nothing
    thinking: Thinking | None = None  # whether its text may have a thought, or begins in one; None: all of it is said
    known_end: str | None = None  # the finish reason of a resubmission that is complete as it came: no node hears of it


@dataclass(slots=True)
class Piece:
    """What is new of a choice."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)  # one per token; see TextPart
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)  # one per token where they were asked for
    prompt_logprobs: Sequence[pb.TokenLogprobs] = ()  # where asked for, all of them, in the first piece
    finish_reason: str | None = None  # nothing follows
    handed_up_ids: Sequence[int] | None = None  # of a choice that ends RESCHEDULED: all its tokens, given ones included
    num_cached: int = 0  # tokens of the prompt whose KV a node had already, as far as was told until now


class Choice:
    """One choice, from its first token to its end."""

    def __init__(self, asked: Asked, text: ChoiceText, notify: Callable[[], None]) -> None:
        self._text = text
        self._notify = notify
        self._drops_tokens = asked.drops_tokens
        prompt_length = len(asked.request.prompt_token_ids)
        self._awaits_prompt = asked.request.sampling.wants_prompt_logprobs and prompt_length > 1
        self._texts: list[str] = []
        self._piece = Piece()
        self.finish_reason: str | None = None
        self._handed_up_ids: Sequence[int] | None = None
        self.num_tokens = 0
        self.num_cached: int | None = None  # tokens of the prompt; None: no node has told
        self.first_token_at: float | None = None
        self._last_token_at = 0.0

    def put(self, token_ids: Sequence[int], logprobs: Sequence[pb.TokenLogprobs], now: float) -> int | None:
        """More tokens; the number of the branch's tokens with which a stop string ends it, if one does."""
        if self._drops_tokens or self.finish_reason is not None:
            return None
        if self.first_token_at is None:
            self.first_token_at = now
        self._last_token_at = now
        part = self._text.push(token_ids)
        num_taken = len(part.offsets)
        self.num_tokens += num_taken
        self._texts.append(part.text)
        self._piece.token_ids += token_ids[:num_taken]
        self._piece.offsets += part.offsets
        self._piece.logprobs += logprobs[:num_taken]
        if part.is_stopped:
            self.finish_reason = "stop"
        self._tell()
        return self._text.num_tokens if part.is_stopped else None

    def put_prompt_logprobs(self, logprobs: Sequence[pb.TokenLogprobs]) -> None:
        """Until they are there nothing is given out: they stand in front."""
        self._piece.prompt_logprobs = logprobs
        self._awaits_prompt = False
        self._tell()

    def finish(self, reason: str, token_ids: Sequence[int]) -> None:
        """The end, with the whole completion; of several only the first counts.

        Of a choice that goes on elsewhere nothing is shown that is held back: who goes on with its tokens shows it. Where nobody is
        to see a token, there is nothing to go on with.
        """
        if self.finish_reason is not None:
            return
        if reason == RESCHEDULED and not self._drops_tokens:
            self.finish_reason, self._handed_up_ids = reason, token_ids
            self._tell()
            return
        part = self._text.finish()
        self._texts.append(part.text)
        self.finish_reason = "length" if self._drops_tokens else "stop" if part.is_stopped else reason
        self._tell()

    def take(self) -> Piece:
        """What is new."""
        piece, self._piece = self._piece, Piece()
        piece.text = "".join(self._texts)
        piece.finish_reason, piece.handed_up_ids = self.finish_reason, self._handed_up_ids
        piece.num_cached = self.num_cached or 0
        self._texts = []
        return piece

    def put_back(self, piece: Piece) -> None:
        """What was just taken is to be taken again."""
        self._piece, self._texts = piece, [piece.text]

    @property
    def is_over(self) -> bool:
        """It has its end, and nothing that stands in front of it is missing."""
        return self.finish_reason is not None and not self._awaits_prompt

    @property
    def seconds_per_token(self) -> float | None:
        """Between tokens, on average; None before there are two."""
        if self.first_token_at is None or self.num_tokens < 2:
            return None
        return (self._last_token_at - self.first_token_at) / (self.num_tokens - 1)

    def _tell(self) -> None:
        if not self._awaits_prompt:
            self._notify()


class Answer:
    """One request of an answer, as the shell sees it."""

    def __init__(self, asked: Asked, arrival: Arrival, choices: Sequence[Choice], fail: Callable[[End], None]) -> None:
        self.request = asked.request
        self.known_end = asked.known_end
        self.arrival = arrival
        self.choices = choices
        self.fail = fail
        self.first_token_at: float | None = None
        self.num_attempts = 0  # of its choices together, for which a node was asked to compute the prompt
        self.untold = set(range(len(choices)))  # those whose timelines lack their first or second token
        self.uncounted = set(range(len(choices)))  # those whose end no metric has

    def note_cached(self, num_tokens: int) -> None:
        """A node that computed a prompt has told how much of it was there; later attempts find what earlier ones have left."""
        for choice in self.choices:
            if choice.num_cached is None:
                choice.num_cached = min(num_tokens, len(self.request.prompt_token_ids))

    @property
    def is_canary(self) -> bool:
        """Whether no client asked for it (canary.py)."""
        return self.request.pinned is not None

    @property
    def is_complete(self) -> bool:
        """Every choice is over."""
        return all(choice.is_over for choice in self.choices)

    @property
    def num_tokens(self) -> int:
        """Of all choices."""
        return sum(choice.num_tokens for choice in self.choices)


End = Failed | ClientGone


class Delivery:
    """Everything that one HTTP answer is made of; its handler takes from here.

    While it waits, `write_now` may take and write what is new of a choice in its place, which spares its task a turn; False: the
    handler is to do it.
    """

    def __init__(self, asked: Sequence[Asked], arrival: Arrival) -> None:
        self.answers: list[Answer] = []
        self.failure: End | None = None  # of several the first
        self._choices: list[Choice] = []
        self._news: dict[int, None] = {}  # indices of choices with something new, in order
        self._waiter: asyncio.Future[None] | None = None
        self._bug: Exception | None = None
        self.write_now: Callable[[int, Choice], bool] | None = None
        self.origins: list[tuple[str, int]] = []  # of each choice, its request and its number there
        for each in asked:
            self.origins += [(each.request.request_id, choice) for choice in range(len(each.texts))]
            choices = [Choice(each, text, self._notifier(i)) for i, text in enumerate(each.texts, len(self._choices))]
            self._choices += choices
            self.answers.append(Answer(each, arrival, choices, self._fail))

    async def take(self) -> list[tuple[int, Piece]]:
        """What is new, by index of the choice; waits for it. Empty only behind a failure."""
        while not self._news and self.failure is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            if self._bug is not None:
                raise self._bug
        news, self._news = self._news, {}
        return [(index, self._choices[index].take()) for index in news]

    @property
    def is_complete(self) -> bool:
        """Every choice is over, and all of it has been taken."""
        return not self._news and all(answer.is_complete for answer in self.answers)

    def forget(self) -> None:
        """Let go of everything: nobody takes or puts any more. What is here refers to itself in circles, which would stay until a
        full walk (runtime/collecting.py): a busy router makes one every other minute, 20,000 answers later."""
        self.write_now = None
        self._choices.clear()
        self.answers.clear()

    def _notifier(self, index: int) -> Callable[[], None]:
        def notify() -> None:
            if self.write_now is None or self._news or not self._is_awaited or not self._is_written(index):
                self._news[index] = None
                self._wake()

        return notify

    @property
    def _is_awaited(self) -> bool:
        return self._waiter is not None and not self._waiter.done()

    def _is_written(self, index: int) -> bool:
        """Have it written, if it can be; a bug in that is the handler's, not that of who brought the tokens."""
        assert self.write_now is not None
        try:
            return self.write_now(index, self._choices[index])
        except Exception as bug:
            self._bug = bug
            return False

    def _fail(self, end: End) -> None:
        if self.failure is None:
            self.failure = end
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
