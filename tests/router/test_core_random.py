"""Under any order of events every request ends exactly once, its tokens come once each, and no counter is left behind.

First with nodes that say anything at all, then with such that tell the truth in a cluster that breaks (truthful_nodes.py).
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proto import baton_pb2 as pb
from proto.attempt_key import BranchKey
from router.events import (
    Event,
    Failed,
    Finished,
    FromNode,
    LoadReported,
    NodeListed,
    NodeMissed,
    NodeUnlisted,
    SessionBroken,
    SessionLost,
    SessionUp,
)
from tests.router.core_world import ROLES, CoreWorld, named, node_entry, ref
from tests.router.truthful_nodes import STOP, TruthfulCluster, completion

NODES = ("p1", "p2", "d1", "d2", "m1")
CODES = [code for code in pb.ErrorCode.values() if code != pb.ERROR_UNSPECIFIED]
TIMEOUT_S = 30.0
MAX_TOKENS = 6
VOCAB = 3  # few tokens: wrong reports often look right


class RandomCluster:
    """Nodes that mostly tell the truth about what they were sent, and now and then anything at all."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.world = CoreWorld.with_nodes(*NODES, max_inflight_prefills=2, max_queue=4, preempt_retry_count=2)
        self.submitted: dict[str, int] = {}  # request id -> its number of choices
        self._moves: list[pb.Move] = []

    def step(self) -> None:
        """One event."""
        kinds = [
            self._submit,
            self._speak,
            self._err,
            self._abort,
            self._pass_time,
            self._lie,
            self._move_node,
            self._stop,
            self._ask_to_move,
            self._arrive,
        ]
        self._random.choices(kinds, weights=[4, 12, 3, 1, 2, 2, 2, 1, 4, 3])[0]()

    def _submit(self) -> None:
        request_id = f"r{len(self.submitted)}"
        num_choices = self.submitted[request_id] = self._random.choice([1, 1, 1, 2, 3])
        wants_prompt = self._random.random() < 0.2
        self.world.submit(
            request_id,
            max_tokens=self._random.randint(1, MAX_TOKENS),
            timeout_s=TIMEOUT_S,
            num_choices=num_choices,
            num_logprobs=0 if wants_prompt else None,
            wants_prompt_logprobs=wants_prompt,
        )

    def _stop(self) -> None:
        """The text of some choice, which may have ended, holds a stop string."""
        if (attempt := self._attempt()) is not None and not self.world.has_ended(attempt[1].request_id, 0):
            dispatch = attempt[1]
            choice = dispatch.branches[0].choice
            self.world.stop(dispatch.request_id, len(self._log_of(dispatch)), choice)

    def _log_of(self, dispatch: pb.Dispatch) -> list[int]:
        return self.world.tokens.get(named(dispatch.request_id, dispatch.branches[0].choice), [])

    def _attempt(self) -> tuple[str, pb.Dispatch] | None:
        """One of the attempts so far, mostly a recent one, with its prefill node."""
        found = [(node.name, message.dispatch) for node, message in self.world.sent if message.HasField("dispatch")]
        return self._random.choice(found[-8:]) if found else None

    def _speak(self) -> None:
        if (attempt := self._attempt()) is None:
            return
        prefill, dispatch = attempt
        speaker = self._random.choice([prefill, dispatch.target.node.name])
        log = self._log_of(dispatch)
        first = self._random.randint(0, len(log))
        fresh = [self._random.randrange(VOCAB) for _ in range(self._random.randint(0, 2))]
        token_ids = (log[first:] + fresh)[: MAX_TOKENS - first]
        finish = self._random.choice([pb.FINISH_UNSPECIFIED] * 4 + [pb.FINISH_STOP, pb.FINISH_LENGTH])
        scores: dict[str, Any] = {}
        if dispatch.sampling.HasField("num_logprobs"):
            scores["logprobs"] = [pb.TokenLogprobs(logprob=-1)] * (len(token_ids) + self._random.choice([0] * 9 + [1]))
        if dispatch.sampling.prompt_logprobs and speaker == prefill and self._random.random() < 0.7:
            scores["prompt_logprobs"] = [pb.TokenLogprobs(logprob=-1)] * self._random.choice([2] * 9 + [1])
        choice = dispatch.branches[0].choice
        request_id, attempt_number = dispatch.request_id, dispatch.attempt
        scores["from_receiver"] = speaker.startswith("d") or (speaker.startswith("m") and self._random.random() < 0.8)
        self.world.tokens_from(speaker, request_id, first, token_ids, finish, attempt_number, choice=choice, **scores)

    def _err(self) -> None:
        if (attempt := self._attempt()) is None:
            return
        prefill, dispatch = attempt
        self.world.error_from(
            self._random.choice([prefill, prefill, dispatch.target.node.name]),
            dispatch.request_id,
            self._random.choice(CODES),
            dispatch.attempt,
            retryable=self._random.random() < 0.8,
            commit_unanswered=self._random.random() < 0.2,
            retry_after_ms=self._random.choice([0, 0, 100, 1000]),
            completion_token_ids=self._log_of(dispatch) + [1] * self._random.randint(0, 1),
            choice=dispatch.branches[0].choice,
        )

    def _ask_to_move(self) -> None:
        if (attempt := self._attempt()) is None:
            return
        _, dispatch = attempt
        number = dispatch.attempt + self._random.choice([0, 0, 0, 1])
        choice = dispatch.branches[0].choice
        move = self.world.ask_to_move(dispatch.target.node.name, dispatch.request_id, number, choice=choice)
        if move is not None and move.HasField("target"):
            self._moves.append(move)

    def _arrive(self) -> None:
        """The target of some move speaks for its branch."""
        if not self._moves:
            return
        move = self._random.choice(self._moves[-4:])
        name, choice, number = move.key.request_id, move.key.choice, move.next_attempt
        target = move.target.node.name
        if self._random.random() < 0.2:
            self.world.error_from(target, name, self._random.choice(CODES), number, choice=choice)
            return
        log = self.world.tokens.get(named(name, choice), [])
        finish = self._random.choice([pb.FINISH_UNSPECIFIED] * 3 + [pb.FINISH_STOP])
        scores = {"logprobs": [pb.TokenLogprobs(logprob=-1)] * len(log)}
        self.world.tokens_from(target, name, 0, log, finish, number, choice=choice, from_receiver=True, **scores)

    def _abort(self) -> None:
        living = [
            name for name, n in self.submitted.items() if not all(self.world.has_ended(name, i) for i in range(n))
        ]
        if living:
            self.world.abort(self._random.choice(living))

    def _pass_time(self) -> None:
        self.world.pass_time(self._random.choice([0.0, 0.01, 0.1, 1.0, 5.0]))

    def _lie(self) -> None:
        """A message with nothing right about it."""
        key = pb.AttemptKey(request_id=f"r{self._random.randrange(40)}", choice=self._random.randrange(2), attempt=1)
        tokens = pb.BranchTokens(
            key=key, first_index=self._random.randrange(9), token_ids=[0] * self._random.randrange(9)
        )
        batch = pb.TokenBatch(branches=[tokens, tokens], from_receiver=self._random.random() < 0.5)
        wants_move = pb.NodeMessage(wants_move=pb.WantsMove(key=key))
        message = self._random.choice([pb.NodeMessage(), pb.NodeMessage(tokens=batch), wants_move])
        self.world.feed(FromNode(ref(self._random.choice(NODES), self._random.choice([1, 2])), message))

    def _move_node(self) -> None:
        name = self._random.choice(NODES)
        node = ref(name, self._random.choice([1, 1, 1, 2]))
        entry = node_entry(name, ROLES[name[0]], incarnation=node.incarnation)
        entry.draining = self._random.random() < 0.2
        events: list[Event] = [
            NodeListed(entry),
            NodeMissed(node),
            NodeUnlisted(node),
            SessionUp(node),
            SessionUp(node),
            SessionBroken(node),
            SessionLost(node),
            LoadReported(node, pb.LoadReport(blocks_used=self._random.randrange(16))),
        ]
        self.world.feed(self._random.choice(events))


@pytest.mark.covers("R15", "R17")
@given(st.integers(0, 2**32), st.integers(10, 120))
def test_every_request_ends_exactly_once_and_nothing_is_left(seed: int, num_steps: int) -> None:
    cluster = RandomCluster(seed)
    world = cluster.world
    for _ in range(num_steps):
        cluster.step()
    world.pass_time(TIMEOUT_S + 1)
    for request_id, num_choices in cluster.submitted.items():
        assert all(world.has_ended(request_id, choice) for choice in range(num_choices))
    world.assert_nothing_is_left()


@given(st.integers(0, 2**32))
def test_equal_events_give_equal_actions(seed: int) -> None:
    first, second = RandomCluster(seed), RandomCluster(seed)
    for _ in range(60):
        first.step()
        second.step()
    assert first.world.sent == second.world.sent
    assert first.world.ends == second.world.ends
    assert first.world.core.snapshot() == second.world.core.snapshot()


FATES = ("taken answered", "taken unanswered", "lost answered", "lost unanswered")
STORM = ("p1", "p2", "d1", "d2", "d3", "m1")


def storm(seed: int, num_steps: int) -> TruthfulCluster:
    """Everything at once, and then the end of it."""
    draw = random.Random(seed)
    count = draw.choice([0, 1, 3])
    cluster = TruthfulCluster(seed, STORM, preempt_retry_count=count, max_nodes_lost=draw.choice([2, 3, 5]))
    kinds = [cluster.submit, cluster.work, cluster.exchange, cluster.abort, cluster.lose, cluster.drain]
    for _ in range(num_steps):
        draw.choices(kinds, weights=[2, 8, 8, 0.3, 0.4, 0.4])[0]()
        cluster.world.pass_time(draw.choice([0.0, 0.01, 0.1, 1.0]))
    cluster.settle()
    return cluster


@pytest.mark.covers("R03", "R04", "R05", "R07", "R10", "R11", "R15", "R19", "R20", "R21", "A07")
@given(st.integers(0, 2**32), st.integers(10, 150))
def test_whatever_breaks_every_choice_ends_once_with_the_right_tokens(seed: int, num_steps: int) -> None:
    cluster = storm(seed, num_steps)
    world = cluster.world
    world.assert_nothing_is_left()
    for name, max_tokens in cluster.max_tokens.items():
        for choice in range(cluster.num_choices[name]):
            right = completion(BranchKey(name, choice), max_tokens)
            told = world.tokens.get(named(name, choice), [])
            assert told == right[: len(told)]
            end = world.ends.get(named(name, choice))
            if isinstance(end, Finished):
                reason = "stop" if right[-1] == STOP else "length"
                assert end.finish_reason in (reason, "pd_reschedule")
                assert list(end.token_ids) == (told if end.finish_reason == "pd_reschedule" else right)
            elif isinstance(end, Failed):
                assert end.status == 503 and end.code not in ("DEADLINE", "BUSY", "NO_BLOCKS", "DRAINING"), end


def test_in_these_storms_everything_happens() -> None:
    counts: Counter[str] = Counter()
    for seed in range(60):
        cluster = storm(seed, 120)
        counts += cluster.counts
        counts.update("-".join(name) for name in cluster.world.counts)
        counts.update(
            end.finish_reason if isinstance(end, Finished) else end.code for end in cluster.world.ends.values()
        )
    for what in (
        "lost",
        "drain",
        *(f"moves {fate}" for fate in FATES),
        *(f"handoffs {fate}" for fate in FATES),
        *(f"moves-{what}" for what in ("begun", "done", "off", "no_room")),
        *(f"retries-{code}" for code in ("NODE_LOST", "PREEMPTED", "INTERNAL", "CHECKSUM", "TRANSFER_FAILED")),
        "stale_messages-tokens",
        "stale_messages-error",
        "repeated_batches-",
        "length",
        "stop",
        "pd_reschedule",
        "NODE_LOST",
    ):
        assert counts[what] > 1, f"{what}: {counts}"
