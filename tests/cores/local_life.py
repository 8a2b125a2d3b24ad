"""What a node computes for itself, mixed or decode, under random calls, in a pool far too small for what runs.

Checked after each against the right answers, which follow from prompt and seed alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Literal

from engine.fake_runner import expected_logprobs, expected_tokens
from engine.plan import BROKEN_ROW, StepResult
from node import events as ev
from node.sampling import to_logprobs_message, to_sampling_params
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey, BranchKey, attempt_key
from tests.cores.mixed import MIXED, Mixed, target_of
from tests.cores.nodes import MAX_MODEL_LEN, VOCAB_SIZE

ROUTERS = (ev.RouterId("router-a", 1), ev.RouterId("router-b", 2))
NUM_REQUESTS = 5
EVENTS = {"dispatch": 6, "cancel": 1, "step": 40, "break_row": 0.2, "lose_router": 0.1, "wait": 3}


@dataclass
class Running:
    """A branch that was dispatched, its right answer, and how much of it was said."""

    router: ev.RouterId
    num_prompt: int
    num_top: int | None
    wants_prompt: bool
    prompt: Sequence[int]
    expected: list[int]  # of the whole completion
    num_said: int
    reason: int
    deadline: float
    has_spoken: bool = False


@dataclass
class Life:
    """One node from its first Dispatch to its last."""

    seed: int
    role: Literal["mixed", "decode"]
    happened: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.now = 0.0
        num_slots = self.random.randint(2, 8)
        self.node = Mixed(
            num_blocks=self.random.randint(16, 24),
            num_slots=num_slots,
            max_batched_tokens=self.random.randint(num_slots, 24),
            policy=self.random.choice(("ratio", "fixed", "none", "none", "full")),
            max_attempts=self.random.choice((0, 2, 64)),
            max_fences=self.random.choice((8, 4096)),
            role=self.role,
        )
        self.running: dict[AttemptKey, Running] = {}
        self.outcomes: dict[AttemptKey, str] = {}  # of those that are over, until Ended says the same
        self.newest: dict[BranchKey, int] = {}
        self.num_broken = 0

    def live(self, num_events: int) -> None:
        """Everything in random order; then all goes to its end by itself, or by its routers' loss."""
        for _ in range(num_events):
            event = self.random.choices(list(EVENTS), list(EVENTS.values()))[0]
            self.happened[event] += getattr(self, event)()
        if self.random.random() < 0.3:
            for router in ROUTERS:
                self.lose_router(router)
        while self.step():
            pass
        assert not self.running, "nothing more will happen, and these have no end"
        while (at := self.node.core.next_deadline()) is not None:
            self.now = at
            self.take(self.node.keep_plans(self.node.core.tick(at)))
        self.node.assert_empty()
        assert self.node.core.snapshot()["fences"] == 0
        self.happened["preempted"] += self.node.scheduler.num_preempted

    # ------------------------------------------------------------ events: each says whether it could happen

    def dispatch(self) -> bool:
        request_id = f"r{self.random.randrange(NUM_REQUESTS)}"
        choices = self.random.sample(range(5), self.random.choice((1, 1, 1, 2, 4)))
        newest = max(self.newest.get(BranchKey(request_id, choice), -1) for choice in choices)
        number = max(0, newest + self.random.choice((0, 1, 1, 1)))
        prompt = [7] * self.random.choice((0, 8, 16)) + [
            self.random.randrange(VOCAB_SIZE) for _ in range(self.random.randint(1, 9))
        ]
        max_tokens = self.random.choice((1, 4, 40, MAX_MODEL_LEN - len(prompt)))
        max_tokens = min(max_tokens, MAX_MODEL_LEN - len(prompt))
        sampling = pb.Sampling(
            temperature=self.random.choice((0, 1)),
            max_tokens=max_tokens,
            stop_token_ids=self.random.sample(range(VOCAB_SIZE), self.random.choice((0, 0, 1, 4))),
            presence_penalty=self.random.choice((0, 0.5)),
            min_tokens=self.random.randint(0, max_tokens),
            prompt_logprobs=self.random.random() < 0.3,
        )
        if self.random.random() < 0.5:
            sampling.num_logprobs = self.random.randint(0, 3)
        branches = [pb.Branch(choice=choice, seed=self.random.getrandbits(32)) for choice in choices]
        dispatch = pb.Dispatch(
            request_id=request_id,
            attempt=number,
            branches=branches,
            prompt_token_ids=prompt,
            sampling=sampling,
            target=target_of(MIXED),
            ms_left=self.random.choice((700, 60_000, 60_000, 60_000)),
        )
        if len(branches) == 1 and self.random.random() < 0.4:  # some tokens are of earlier attempts
            whole, _ = right_answer(dispatch, branches[0])
            branches[0].generated_token_ids.extend(whole[: self.random.randrange(len(whole))])
            dispatch.branches[0].CopyFrom(branches[0])
        router = self.random.choice(ROUTERS)
        self.judge(dispatch, router, self.node.send(dispatch, self.now, router))
        return True

    def judge(self, dispatch: pb.Dispatch, router: ev.RouterId, actions: list[ev.Action]) -> None:
        """A branch is refused, or stale, or it replaces the older attempt and runs."""
        keys = [AttemptKey(dispatch.request_id, each.choice, dispatch.attempt) for each in dispatch.branches]
        fresh = [key for key in keys if key.attempt > self.newest.get(key.branch, -1)]
        is_stale = any(isinstance(action, ev.Count) and action.name == "stale_refused" for action in actions)
        assert is_stale == (len(fresh) < len(keys))
        self.happened["stale in part"] += 0 < len(fresh) < len(keys)
        busy = [a.message.error for a in actions if isinstance(a, ev.ToRouter) and a.message.error.code == pb.BUSY]
        num_local = sum(action == ev.Count("local_prefills") for action in actions)
        assert num_local == (0 if busy else len(fresh))
        if busy:
            assert [attempt_key(error.key) for error in busy] == fresh
            assert all(error.completion_token_ids == dispatch.branches[0].generated_token_ids for error in busy)
            self.happened["busy"] += 1
            for key in fresh:
                self.outcomes[key] = "BUSY"
        for key in () if busy else fresh:
            older = key._replace(attempt=self.newest.get(key.branch, 0))
            if self.running.pop(older, None) is not None:
                self.outcomes[older] = "cancelled"
                self.happened["replaced"] += 1
            self.newest[key.branch] = key.attempt
            branch = next(each for each in dispatch.branches if each.choice == key.choice)
            expected, reason = right_answer(dispatch, branch)
            self.running[key] = Running(
                router=router,
                num_prompt=len(dispatch.prompt_token_ids),
                num_top=dispatch.sampling.num_logprobs if dispatch.sampling.HasField("num_logprobs") else None,
                wants_prompt=dispatch.sampling.prompt_logprobs,
                prompt=dispatch.prompt_token_ids,
                expected=expected,
                num_said=len(branch.generated_token_ids),
                reason=reason,
                deadline=self.now + dispatch.ms_left / 1000,
            )
        self.take([action for action in actions if not (isinstance(action, ev.ToRouter) and busy)])

    def cancel(self) -> bool:
        if not self.newest:
            return False
        branch = self.random.choice(list(self.newest))
        key = AttemptKey(*branch, max(0, self.newest[branch] + self.random.choice((-1, 0, 0, 1))))
        self.newest[branch] = max(self.newest[branch], key.attempt)
        for each in [each for each in self.running if each.branch == branch and each.attempt <= key.attempt]:
            del self.running[each]
            self.outcomes[each] = "cancelled"
            self.happened["cancelled while it ran"] += 1
        self.take(self.node.send(pb.Cancel(key=key.to_proto(), ms_left=60_000), self.now))
        return True

    def step(self) -> bool:
        if not self.node.plans:
            return False
        self.take(self.node.step(self.now))
        return True

    def break_row(self) -> bool:
        """A row of the step gives no numbers: whoever it belonged to fails, if it is still here, and nobody else does."""
        if not self.node.plans:
            return False
        result = self.node.runner.run(self.node.plans.popleft())
        answers = list(result)
        sampled = [index for index, answer in enumerate(answers) if answer.token_id >= 0]
        if sampled:
            index = self.random.choice(sampled)
            answers[index] = answers[index]._replace(token_id=BROKEN_ROW, logprobs=None)
            result = StepResult.of(result.step_id, answers)
            self.num_broken += 1
        self.take(self.node.feed(ev.StepDone(result), self.now))
        return bool(sampled)

    def lose_router(self, router: ev.RouterId | None = None) -> bool:
        lost = router or self.random.choice(ROUTERS)
        for key in [key for key, running in self.running.items() if running.router == lost]:
            del self.running[key]
            self.outcomes[key] = "router lost"
        self.take(self.node.feed(ev.RouterLost(lost), self.now))
        return True

    def wait(self) -> bool:
        """Floors stand for ten seconds at least: never so long."""
        self.now += self.random.choice((0.0, 0.01, 0.02, 0.05, 0.4))
        self.take(self.node.keep_plans(self.node.core.tick(self.now)))
        assert all(running.deadline > self.now for running in self.running.values())
        return True

    # ------------------------------------------------------------ what comes of it

    def take(self, actions: Sequence[ev.Action]) -> None:
        ended: list[tuple[AttemptKey, str]] = []
        for action in actions:
            match action:
                case ev.ToRouter(router, message) if message.HasField("error"):
                    self.hear_error(router, message.error)
                case ev.ToRouter(router, message):
                    assert message.tokens.from_receiver
                    for tokens in message.tokens.branches:
                        self.hear_tokens(router, tokens)
                case ev.Ended(key, outcome):
                    ended.append((key, outcome))
                case ev.Count(name):
                    assert name in ("stale_refused", "local_prefills")
                case _:
                    raise AssertionError(action)
        assert sorted(ended) == sorted(self.outcomes.items()), "an end was not said, or twice"
        self.outcomes.clear()
        held = self.node.core.snapshot()
        assert held["local_branches"] == len(self.running)
        # Nobody computes for an attempt that has ended.
        assert self.node.scheduler.num_running + self.node.scheduler.num_waiting == len(self.running)

    def hear_tokens(self, router: ev.RouterId, tokens: pb.BranchTokens) -> None:
        key = attempt_key(tokens.key)
        running = self.running[key]
        assert running.router == router and tokens.first_index == running.num_said
        end = running.num_said + len(tokens.token_ids)
        assert list(tokens.token_ids) == running.expected[running.num_said : end]
        if running.num_top is not None:
            positions = range(running.num_prompt + running.num_said, running.num_prompt + end)
            pairs = zip(tokens.token_ids, positions, strict=True)
            right = [expected_logprobs(token, at, running.num_top, VOCAB_SIZE) for token, at in pairs]
            assert list(tokens.logprobs) == [to_logprobs_message(each) for each in right]
        num_scored = running.num_prompt - 1 if running.wants_prompt and not running.has_spoken else 0
        assert len(tokens.prompt_logprobs) == num_scored
        running.num_said, running.has_spoken = end, True
        if tokens.finish != pb.FINISH_UNSPECIFIED:
            assert (end, tokens.finish) == (len(running.expected), running.reason)
            del self.running[key]
            self.outcomes[key] = "finished"
            self.happened["finished"] += 1

    def hear_error(self, router: ev.RouterId, error: pb.PDError) -> None:
        key = attempt_key(error.key)
        running = self.running.pop(key)
        assert running.router == router and not error.commit_unanswered
        assert list(error.completion_token_ids) == running.expected[: running.num_said]
        if error.code == pb.DEADLINE:
            assert running.deadline <= self.now
        elif error.code == pb.PREEMPTED:
            assert self.role == "decode" and error.retryable, "a mixed node resumes it"
        else:
            assert error.code == pb.INTERNAL and self.num_broken
            self.num_broken -= 1
        self.outcomes[key] = pb.ErrorCode.Name(error.code)
        self.happened[pb.ErrorCode.Name(error.code)] += 1


def right_answer(dispatch: pb.Dispatch, branch: pb.Branch) -> tuple[list[int], int]:
    """The whole completion, and why it ends."""
    sampling = to_sampling_params(dispatch.sampling, branch.seed)
    max_tokens = dispatch.sampling.max_tokens
    tokens = expected_tokens(dispatch.prompt_token_ids, (), sampling, max_tokens, VOCAB_SIZE)
    for index, token in enumerate(tokens):
        if token in sampling.stop_token_ids:
            return tokens[: index + 1], pb.FINISH_STOP
    return tokens, pb.FINISH_LENGTH
