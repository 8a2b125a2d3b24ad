"""Nodes that are nothing but their words, and tell the truth: what the core may hear of a cluster that breaks in every way.

A completion's tokens follow from request, choice and index, so there is one right answer. Nodes hand attempts over to each other
behind the router's back, under the fence floors that Cancels raise. Both directions of a session are ordered queues of which any
part has arrived. A node that is lost is dead, or lives on for a while: unheard, and not hearing, it still hands over.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from proto import baton_pb2 as pb
from proto.attempt_key import BranchKey
from router.events import FromNode, NodeListed, NodeRef, SessionLost
from tests.router.core_world import ROLES, CoreWorld, node_entry, ref

VOCAB, STOP = 80, 7
BEFORE_COMMIT = (
    pb.NO_BLOCKS,
    pb.BUSY,
    pb.DRAINING,
    pb.LEASE_EXPIRED,
    pb.TRANSFER_FAILED,
    pb.CHECKSUM,
    pb.INTERNAL,
)
BEHIND_IT = (pb.PREEMPTED, pb.DRAINING, pb.INTERNAL)


def completion(key: BranchKey, max_tokens: int) -> list[int]:
    """The one right answer."""
    tokens: list[int] = []
    while len(tokens) < max_tokens and STOP not in tokens:
        tokens.append(zlib.crc32(f"{key.request_id}/{key.choice}/{len(tokens)}".encode()) % VOCAB)
    return tokens


@dataclass(slots=True)
class Job:
    """A node's part of an attempt: it prefills, or it holds the branch."""

    key: BranchKey
    attempt: int
    tokens: list[int]  # of the whole completion
    first: int  # index of the attempt's first token on this node
    told: int  # index behind the last token that was told
    target: NodeRef | None  # whom it is to be handed to
    holds: bool  # and decodes
    is_asking: bool = False  # for a move


@dataclass(slots=True, eq=False)
class TruthfulNode:
    """One node process."""

    ref: NodeRef
    is_heard: bool = True
    jobs: dict[BranchKey, Job] = field(default_factory=dict)
    floors: dict[BranchKey, int] = field(default_factory=dict)
    inbox: deque[pb.RouterMessage] = field(default_factory=deque)
    outbox: deque[pb.NodeMessage] = field(default_factory=deque)
    next_attempts: dict[BranchKey, int] = field(default_factory=dict)  # of moves

    def accepts(self, key: BranchKey, attempt: int) -> bool:
        """The fence."""
        return attempt >= self.floors.get(key, 0)

    def tell(self, job: Job, until: int) -> bool:
        """Tokens up to an index; True if they end the completion."""
        is_end = until == len(job.tokens)
        finish = pb.FINISH_UNSPECIFIED
        if is_end:
            finish = pb.FINISH_STOP if job.tokens[-1] == STOP else pb.FINISH_LENGTH
        tokens = pb.BranchTokens(
            key=pb.AttemptKey(request_id=job.key.request_id, choice=job.key.choice, attempt=job.attempt),
            first_index=job.told,
            token_ids=job.tokens[job.told : until],
            finish=finish,
        )
        self.outbox.append(pb.NodeMessage(tokens=pb.TokenBatch(branches=[tokens], from_receiver=job.holds)))
        job.told = until
        return is_end

    def fail(self, job: Job, code: pb.ErrorCode.ValueType, *, speaker: str = "", unanswered: bool = False) -> None:
        """A PD Error, and the job's end here."""
        del self.jobs[job.key]
        error = pb.PDError(
            code=code,
            message=f"PD Error {pb.ErrorCode.Name(code)}",
            retryable=True,
            key=pb.AttemptKey(request_id=job.key.request_id, choice=job.key.choice, attempt=job.attempt),
            node_id=speaker or self.ref.name,
            completion_token_ids=job.tokens[: job.told],
            commit_unanswered=unanswered,
        )
        self.outbox.append(pb.NodeMessage(error=error))

    def ask(self, job: Job) -> None:
        """Where to move a branch; a move that was under way has come to nothing."""
        job.target, job.is_asking = None, True
        key = pb.AttemptKey(request_id=job.key.request_id, choice=job.key.choice, attempt=job.attempt)
        self.outbox.append(pb.NodeMessage(wants_move=pb.WantsMove(key=key)))

    def hear(self, message: pb.RouterMessage, max_tokens: dict[str, int]) -> None:
        """A message of the router."""
        match message.WhichOneof("kind"):
            case "dispatch":
                self._begin(message.dispatch, max_tokens)
            case "cancel":
                key = BranchKey(message.cancel.key.request_id, message.cancel.key.choice)
                self.floors[key] = max(self.floors.get(key, 0), message.cancel.key.attempt + 1)
                if key in self.jobs and not self.accepts(key, self.jobs[key].attempt):
                    del self.jobs[key]
            case "move":
                move = message.move
                job = self.jobs.get(BranchKey(move.key.request_id, move.key.choice))
                if job is not None and job.attempt == move.key.attempt:
                    job.is_asking = False
                    peer = move.target.node
                    job.target = NodeRef(peer.name, peer.incarnation) if move.HasField("target") else None
                    self.floors[job.key] = job.attempt
                    self.next_attempts[job.key] = move.next_attempt

    def _begin(self, dispatch: pb.Dispatch, max_tokens: dict[str, int]) -> None:
        target = NodeRef(dispatch.target.node.name, dispatch.target.node.incarnation)
        for branch in dispatch.branches:
            key = BranchKey(dispatch.request_id, branch.choice)
            if not self.accepts(key, dispatch.attempt):
                continue  # a later attempt was handed to it already: a Cancel of this one is on its way
            tokens = completion(key, max_tokens[dispatch.request_id])
            first = len(branch.generated_token_ids)
            assert list(branch.generated_token_ids) == tokens[:first], "other tokens than the right ones"
            assert first < len(tokens), "dispatched with nothing left to do"
            self.floors[key] = dispatch.attempt
            is_local = target == self.ref
            self.jobs[key] = Job(key, dispatch.attempt, tokens, first, first, None if is_local else target, is_local)


class TruthfulCluster:
    """The core, its nodes, and what happens to them; `step` until enough, then `settle`."""

    def __init__(self, seed: int, names: tuple[str, ...], **config: Any) -> None:
        self._random = random.Random(seed)
        self.world = CoreWorld(**config)
        self.counts: Counter[str] = Counter()
        self.max_tokens: dict[str, int] = {}
        self.num_choices: dict[str, int] = {}
        self._nodes: dict[str, TruthfulNode] = {}
        self._unheard: list[TruthfulNode] = []  # lost, and alive
        self._num_sent = 0
        for name in names:
            self._start(name)

    # ---------------------------------------------------------------- clients

    def submit(self) -> None:
        """A request."""
        name = f"r{len(self.max_tokens)}"
        self.max_tokens[name] = self._random.choice([1, 2, 9, 20, 40])
        self.num_choices[name] = self._random.choice([1, 1, 1, 2, 3])
        self.world.submit(
            name, max_tokens=self.max_tokens[name], num_choices=self.num_choices[name], stop_token_ids=(STOP,)
        )

    def abort(self) -> None:
        """A client goes away."""
        if open_ones := [name for name in self.max_tokens if not self.is_over(name)]:
            self.world.abort(self._random.choice(open_ones))

    def is_over(self, name: str) -> bool:
        """Whether every choice of a request has ended."""
        return all(self.world.has_ended(name, choice) for choice in range(self.num_choices[name]))

    # ---------------------------------------------------------------- processes

    def _start(self, name: str) -> None:
        old = self._nodes.get(name)
        node = self._nodes[name] = TruthfulNode(ref(name, 1 if old is None else old.ref.incarnation + 1))
        self.world.join(node_entry(name, ROLES[name[0]], incarnation=node.ref.incarnation))

    def lose(self) -> None:
        """A session is lost; part of what was said had arrived."""
        node = self._random.choice(list(self._nodes.values()))
        if not node.is_heard:
            self._start(node.ref.name)  # the next life of one lost before
            return
        for _ in range(self._random.randint(0, len(node.outbox))):
            self._deliver(node)
        node.is_heard = False
        node.outbox.clear()
        node.inbox.clear()
        lives = self._random.random() < 0.5
        self.world.feed(SessionLost(node.ref, has_died=not lives))
        self.counts["lost"] += 1
        if lives:
            self._unheard.append(node)
        else:
            node.jobs.clear()

    def drain(self) -> None:
        """A node says that it is to end, or that it is not."""
        node = self._random.choice(list(self._nodes.values()))
        if node.is_heard:
            entry = node_entry(node.ref.name, ROLES[node.ref.name[0]], incarnation=node.ref.incarnation)
            entry.draining = self._random.random() < 0.5
            self.world.feed(NodeListed(entry))
            self.counts["drain"] += 1

    # ---------------------------------------------------------------- messages

    def exchange(self, share: float = 0.5) -> None:
        """Some of what is on its way arrives."""
        self._post()
        for node in list(self._nodes.values()):
            while node.is_heard and node.inbox and self._random.random() < share:
                node.hear(node.inbox.popleft(), self.max_tokens)
            while node.is_heard and node.outbox and self._random.random() < share:
                self._deliver(node)

    def _deliver(self, node: TruthfulNode) -> None:
        self.world.feed(FromNode(node.ref, node.outbox.popleft()))
        self._post()

    def _post(self) -> None:
        for target, message in self.world.sent[self._num_sent :]:
            node = self._nodes[target.name]
            if node.ref == target and node.is_heard:
                node.inbox.append(message)
        self._num_sent = len(self.world.sent)

    # ---------------------------------------------------------------- work

    def work(self, *, is_smooth: bool = False) -> None:
        """Each node may do something about each of its jobs; nothing goes wrong if `is_smooth`."""
        for node in [*self._nodes.values(), *self._unheard]:
            for job in list(node.jobs.values()):
                if node.jobs.get(job.key) is job and (is_smooth or self._random.random() < 0.6):
                    self._work_on(node, job, is_smooth)

    def _work_on(self, node: TruthfulNode, job: Job, is_smooth: bool) -> None:
        draw = 1.0 if is_smooth else self._random.random()
        if draw < 0.06:
            node.fail(job, self._random.choice(BEHIND_IT if job.holds else BEFORE_COMMIT))
        elif not job.holds and job.told == job.first:
            self._go_on(node, job, 1)
        elif job.target is not None and (not job.holds or draw > 0.4):
            self._hand_over(node, job, is_smooth)
        elif job.holds and draw < 0.3 and not job.is_asking:
            node.ask(job)
        elif job.holds:
            self._go_on(node, job, self._random.randint(1, 3))

    def _go_on(self, node: TruthfulNode, job: Job, num_tokens: int) -> None:
        if node.tell(job, min(job.told + num_tokens, len(job.tokens))):
            del node.jobs[job.key]

    def _hand_over(self, node: TruthfulNode, job: Job, is_smooth: bool) -> None:
        assert job.target is not None
        attempt = node.next_attempts.get(job.key, job.attempt) if job.holds else job.attempt
        what = "moves" if job.holds else "handoffs"
        taker = self._find(job.target)
        is_taken = taker is not None and taker.accepts(job.key, attempt) and (is_smooth or self._random.random() < 0.85)
        is_acked = is_smooth or self._random.random() < 0.85
        if is_taken and taker is not None:
            taker.floors[job.key] = attempt
            taker.jobs[job.key] = taken = Job(job.key, attempt, job.tokens, job.first, job.first, None, True)
            taker.tell(taken, job.told)
        if not is_acked:
            node.fail(job, pb.TRANSFER_FAILED, unanswered=True)
        elif is_taken:
            del node.jobs[job.key]
        elif job.holds and self._random.random() < 0.7:  # it came to nothing: it goes on, and asks again
            node.ask(job)
        else:
            node.fail(job, pb.PREEMPTED if job.holds else pb.TRANSFER_FAILED)
        self.counts[f"{what} {'taken' if is_taken else 'lost'} {'answered' if is_acked else 'unanswered'}"] += 1

    def _find(self, wanted: NodeRef) -> TruthfulNode | None:
        alive = [node for node in self._nodes.values() if node.is_heard]
        return next((node for node in [*alive, *self._unheard] if node.ref == wanted), None)

    # ---------------------------------------------------------------- the end

    def settle(self) -> None:
        """No more faults: every node is there, and all that is left is done."""
        for node in list(self._nodes.values()):
            if node.is_heard:
                self.world.join(node_entry(node.ref.name, ROLES[node.ref.name[0]], incarnation=node.ref.incarnation))
            else:
                self._start(node.ref.name)
        self._unheard.clear()
        for _ in range(300):
            if all(self.is_over(name) for name in self.max_tokens):
                return
            self.exchange(1.0)
            self.work(is_smooth=True)
            self.exchange(1.0)
            self.world.pass_time(0.25)
        raise AssertionError("requests do not end")
