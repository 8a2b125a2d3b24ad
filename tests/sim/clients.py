"""The clients: what each asked for, the right answer, and what came. Wrong tokens, gaps, repeats and second ends are found here.

The right answer is known beforehand (engine/fake_runner.py expected_tokens). A choice is checked as an OpenAI client would see
it: a stop string cuts it where it stands, and of several ends the first one counts, as in router/answer.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from engine.fake_runner import expected_logprobs, expected_tokens
from engine.plan import SamplingParams
from node.sampling import to_logprobs_message
from proto import baton_pb2 as pb
from router import events as rev
from router.seeds import branch_seed
from tests.sim.ends import Trials
from tests.sim.models import OURS, Model
from tests.sim.scenario import ClientPlan


@dataclass(frozen=True, slots=True)
class Answer:
    """The right one of a model."""

    model: Model
    token_ids: tuple[int, ...]
    finish_reason: str

    def logprobs(self, token_ids: Sequence[int], begin: int, num_top: int) -> tuple[pb.TokenLogprobs, ...]:
        """Of these tokens, the first of which is at position `begin` of prompt and completion together."""
        return tuple(
            to_logprobs_message(expected_logprobs(token_id, position, num_top, self.model.vocab_size))
            for position, token_id in enumerate(token_ids, begin)
        )


@dataclass(slots=True)
class Choice:
    """One choice: what must come, and what has."""

    answers: list[Answer]  # those that what came may be of: whose it is at first, the first tokens settle
    stops_at: int | None  # tokens after which its text has a stop string
    received: list[int] = field(default_factory=list)
    is_prompt_scored: bool = False
    is_stopped: bool = False
    finish_reason: str | None = None
    had_no_heirs: bool = False  # the router had no pair of its model, when it handed it up


@dataclass(slots=True)
class Client:
    """One client and its request."""

    plan: ClientPlan
    choices: list[Choice]
    router: str  # label of the process that took the request
    submitted_at: float
    deadline_at: float  # in the world's time; its router, if awake, has ended it by then
    end: str | None = None  # "finished", "aborted", "router lost", "refused", or an error code
    ended_at: float = 0.0
    error: str = ""
    trials: list[Trials] = field(default_factory=list)  # of each choice
    had_no_pair: bool = False  # its router, when it failed
    on_end: Callable[[Client], None] | None = None

    @property
    def is_over(self) -> bool:
        """Nothing more will come."""
        return self.end is not None

    def take(self, emitted: rev.Emitted) -> int | None:
        """More tokens; how many the choice has with them if they end it with a stop string."""
        choice = self.choices[emitted.choice]
        name = f"{self.plan.name}/{emitted.choice}"
        assert not self.is_over and choice.finish_reason is None, f"{name}: tokens behind the end"
        assert emitted.first_index == len(choice.received), f"{name}: gap or repeat at {emitted.first_index}"
        choice.received += emitted.token_ids
        said = tuple(choice.received)
        right = [each for each in choice.answers if each.token_ids[: len(said)] == said]
        assert right, f"{name}: {choice.received} is wrong, right is {choice.answers}"
        choice.answers = right
        if (num_top := self.plan.num_logprobs) is not None:
            told = (emitted.token_ids, len(self.plan.prompt) + emitted.first_index, num_top)
            choice.answers = [each for each in right if each.logprobs(*told) == emitted.logprobs]
            assert choice.answers, f"{name}: wrong logprobs from {emitted.first_index} on"
        if choice.stops_at is not None and not choice.is_stopped and len(choice.received) >= choice.stops_at:
            choice.is_stopped = True
            return choice.stops_at
        return None

    def take_prompt_logprobs(self, scored: rev.PromptScored) -> None:
        """Once, right, and before the end."""
        choice = self.choices[scored.choice]
        assert not choice.is_prompt_scored and choice.finish_reason is None, f"{self.plan.name}: scored again"
        told = (self.plan.prompt[1:], 1, self.plan.num_logprobs or 0)
        choice.answers = [each for each in choice.answers if each.logprobs(*told) == scored.logprobs]
        assert choice.answers, f"{self.plan.name}/{scored.choice}: wrong logprobs of the prompt"
        choice.is_prompt_scored = True

    def finish(self, finished: rev.Finished, now: float) -> None:
        """A choice's end."""
        choice = self.choices[finished.choice]
        name = f"{self.plan.name}/{finished.choice}"
        assert not self.is_over and choice.finish_reason is None, f"{name}: a second end"
        assert tuple(choice.received[: len(finished.token_ids)]) == finished.token_ids, (
            f"{name}: ends with other tokens"
        )
        choice.finish_reason = "stop" if choice.is_stopped else finished.finish_reason
        if choice.finish_reason == "pd_reschedule":  # what there is was looked at when it came
            assert tuple(choice.received) == finished.token_ids, f"{name}: {finished.token_ids} are not all that came"
            self._close_when_all_have_ended(now)
            return
        tokens, right = tuple(choice.received), [(each.token_ids, each.finish_reason) for each in choice.answers]
        if choice.is_stopped:  # what came behind the stop string is not shown
            tokens, right = tokens[: choice.stops_at], [(ids[: choice.stops_at], "stop") for ids, _ in right]
        assert (tokens, choice.finish_reason) in right, f"{name}: ended with {tokens}, {choice.finish_reason}: {right}"
        if self.plan.wants_prompt_logprobs and len(self.plan.prompt) > 1:
            assert choice.is_prompt_scored, f"{name}: ended without its prompt's logprobs"
        self._close_when_all_have_ended(now)

    def _close_when_all_have_ended(self, now: float) -> None:
        reasons = [each.finish_reason for each in self.choices]
        if None not in reasons:
            self.close("pd_reschedule" if "pd_reschedule" in reasons else "finished", now)

    def fail(self, failed: rev.Failed, now: float) -> None:
        """The request's error."""
        assert not self.is_over, f"{self.plan.name}: a second end, {failed}"
        self.error = failed.message
        self.close(failed.code, now)

    def close(self, end: str, now: float) -> None:
        """Its one end."""
        self.end, self.ended_at = end, now
        if self.on_end is not None:
            self.on_end(self)


def new_client(
    plan: ClientPlan, router: str, now: float, deadline_at: float, models: Sequence[Model] = (OURS,)
) -> Client:
    """A client with the right answers to its request: of each of these models."""
    stops = dict(plan.stops)
    choices = []
    for number in range(plan.num_choices):
        sampling = SamplingParams(
            plan.temperature,
            seed=branch_seed(plan.seed, number),
            presence_penalty=plan.presence_penalty,
            min_tokens=plan.min_tokens,
            stop_token_ids=frozenset(plan.stop_token_ids),
        )
        answers = [_answer_of(model, plan, sampling) for model in models]
        choices.append(Choice(answers, stops.get(number), [*plan.generated]))
    trials = [Trials() for _ in choices]
    return Client(plan, choices, router, now, deadline_at, trials=trials)


def _answer_of(model: Model, plan: ClientPlan, sampling: SamplingParams) -> Answer:
    """What it says behind what others may have said."""
    num_tokens = plan.max_tokens - len(plan.generated)
    fresh = expected_tokens(plan.prompt, plan.generated, sampling, num_tokens, model.vocab_size)
    tokens = (*plan.generated, *fresh)
    ends = [index for index, token_id in enumerate(tokens) if token_id in plan.stop_token_ids]
    return Answer(model, tokens[: ends[0] + 1] if ends else tokens, "stop" if ends else "length")


def resubmission_of(client: Client, number: int, now: float) -> ClientPlan:
    """What a client that knows of pd_reschedule asks for when a choice has ended so: the same, behind what it has."""
    plan, choice = client.plan, client.choices[number]
    return replace(
        plan,
        name=f"{plan.name}.{number}",
        at=now,
        seed=branch_seed(plan.seed, number),
        generated=tuple(choice.received),
        num_choices=1,
        wants_prompt_logprobs=plan.wants_prompt_logprobs and not choice.is_prompt_scored,
        timeout_s=600.0,
        aborts_after_s=None,
        stops=() if choice.stops_at is None else ((0, choice.stops_at),),
    )


def request_of(plan: ClientPlan, deadline: float) -> rev.GenerationRequest:
    """What the router's HTTP side makes of it. `deadline`: of the router's clock."""
    return rev.GenerationRequest(
        request_id=plan.name,
        prompt_token_ids=plan.prompt,
        seed=plan.seed,
        sampling=rev.Sampling(
            plan.temperature,
            plan.max_tokens,
            plan.stop_token_ids,
            presence_penalty=plan.presence_penalty,
            min_tokens=plan.min_tokens,
            num_logprobs=plan.num_logprobs,
            wants_prompt_logprobs=plan.wants_prompt_logprobs,
        ),
        deadline=deadline,
        num_choices=plan.num_choices,
        generated_token_ids=plan.generated,
    )
