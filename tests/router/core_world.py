"""The router's core with nodes that are nothing but names: a test says what they send, and sees what the core asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from proto import baton_pb2 as pb
from router.core import RouterCore
from router.entrance import RouterCoreConfig
from router.events import (
    Aborted,
    Action,
    Count,
    Degraded,
    Dial,
    Emitted,
    Event,
    Failed,
    Finished,
    FromNode,
    GenerationRequest,
    HangUp,
    NodeListed,
    NodeRef,
    Noted,
    Observe,
    PromptScored,
    Sampling,
    SessionUp,
    Stopped,
    Submitted,
    Timed,
    ToNode,
)
from router.placement import Placement

GOES_ON = pb.FINISH_UNSPECIFIED
ROLES = {"p": pb.ROLE_PREFILL, "d": pb.ROLE_DECODE, "l": pb.ROLE_DECODE, "m": pb.ROLE_MIXED}


def node_entry(
    name: str,
    role: pb.Role.ValueType,
    *,
    incarnation: int = 1,
    max_num_seqs: int = 4,
    weights: str = "w",
    max_model_len: int = 256,
    num_blocks: int = 16,
    address: str = "",
    local_prefill: bool = False,
) -> pb.NodeEntry:
    """A registry entry."""
    return pb.NodeEntry(
        node=pb.PeerId(name=name, incarnation=incarnation),
        role=role,
        grpc_address=address or f"host:{name}",
        fingerprint=pb.Fingerprint(block_size=16, weights=weights),
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        local_prefill=local_prefill,
    )


def ref(name: str, incarnation: int = 1) -> NodeRef:
    """A node process."""
    return NodeRef(name, incarnation)


def named(request_id: str, choice: int) -> str:
    """What a choice is called in a world's results."""
    return f"{request_id}/{choice}" if choice else request_id


class CoreWorld:
    """Drives one core; checks after every event that no choice ends twice and no token is emitted twice or skipped.

    Choices other than 0 are named `request/choice` in what came of them.
    """

    def __init__(self, placement: Placement | None = None, **config: Any) -> None:
        self.core = RouterCore(RouterCoreConfig(**config), placement or Placement())
        self.now = 0.0
        self.sent: list[tuple[NodeRef, pb.RouterMessage]] = []
        self.ends: dict[str, Finished | Failed] = {}
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[pb.TokenLogprobs]] = {}
        self.prompt_logprobs: dict[str, tuple[pb.TokenLogprobs, ...]] = {}
        self.aborted: set[str] = set()
        self.dialed: list[str] = []
        self.hung_up: list[NodeRef] = []
        self.degraded: list[bool] = []  # each change
        self.counts: list[tuple[str, str]] = []
        self.observed: list[tuple[str, float]] = []
        self.noted: list[Noted] = []

    @classmethod
    def with_nodes(cls, *names: str, **config: Any) -> CoreWorld:
        """Names that begin with p are prefill nodes, with d decode nodes, with l such that may compute prompts, with m mixed ones;
        all up."""
        world = cls(**config)
        world.join_all(*names)
        return world

    # ---------------------------------------------------------------- what happens

    def feed(self, event: Event) -> list[Action]:
        """Tick, then receive, as a shell does; and the turns that are due then."""
        actions = [*self._take(self.core.tick(self.now)), *self._take(self.core.receive(event, self.now))]
        return actions + self._finish()

    def _finish(self) -> list[Action]:
        """Turns that are due at once: one leaves to the next what it has no room for."""
        actions: list[Action] = []
        for _ in range(1000):
            if (due := self.core.next_deadline()) is None or due > self.now:
                return actions
            actions += self._take(self.core.tick(self.now))
        raise AssertionError("a timer that is due must not stay due")

    def join_all(self, *names: str, incarnation: int = 1) -> None:
        """Nodes as in `with_nodes`."""
        for name in names:
            self.join(node_entry(name, ROLES[name[0]], incarnation=incarnation, local_prefill=name[0] == "l"))

    def join(self, entry: pb.NodeEntry) -> None:
        """List the node and open its session."""
        self.feed(NodeListed(entry))
        self.feed(SessionUp(ref(entry.node.name, entry.node.incarnation)))

    def submit(
        self,
        request_id: str,
        *,
        prompt: Sequence[int] = (1, 2, 3),
        timeout_s: float = 600.0,
        num_choices: int = 1,
        generated: Sequence[int] = (),
        **sampling: Any,
    ) -> None:
        """A client's request; max_tokens is 8 unless `sampling` says otherwise."""
        fields: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, "stop_token_ids": (99,)} | sampling
        request = GenerationRequest(
            request_id=request_id,
            prompt_token_ids=tuple(prompt),
            seed=5,
            sampling=Sampling(**fields),
            deadline=self.now + timeout_s,
            num_choices=num_choices,
            generated_token_ids=tuple(generated),
        )
        if generated:
            self.tokens[request_id] = list(generated)
        self.feed(Submitted(request))

    def stop(self, request_id: str, num_tokens: int, choice: int = 0) -> None:
        """A stop string is found in its text."""
        self.feed(Stopped(request_id, choice, num_tokens))

    def abort(self, request_id: str) -> None:
        """Its client leaves."""
        self.aborted.add(request_id)
        self.feed(Aborted(request_id))

    def pass_time(self, seconds: float) -> None:
        """Let the clock run; the core wakes only for its own timers."""
        end = self.now + seconds
        while (due := self.core.next_deadline()) is not None and due <= end:
            self.now = max(self.now, due)
            self._take(self.core.tick(self.now))
            self._finish()
        self.now = end

    def tokens_from(
        self,
        name: str,
        request_id: str,
        first_index: int,
        token_ids: Sequence[int],
        finish: pb.FinishReason.ValueType = GOES_ON,
        attempt: int = 0,
        *,
        choice: int = 0,
        from_receiver: bool | None = None,
        **scores: Any,
    ) -> None:
        """A batch of a node; decode nodes (named d…, l…) speak as receivers unless told otherwise."""
        key = pb.AttemptKey(request_id=request_id, choice=choice, attempt=attempt)
        tokens = pb.BranchTokens(key=key, first_index=first_index, token_ids=token_ids, finish=finish, **scores)
        is_receiver = name[0] in "dl" if from_receiver is None else from_receiver
        batch = pb.TokenBatch(branches=[tokens], from_receiver=is_receiver)
        self.feed(FromNode(ref(name), pb.NodeMessage(tokens=batch)))

    def error_from(
        self, name: str, request_id: str, code: pb.ErrorCode.ValueType, attempt: int = 0, **fields: Any
    ) -> None:
        """A PD Error of a node."""
        error = pb.PDError(
            code=code,
            message=f"PD Error {pb.ErrorCode.Name(code)}",
            retryable=fields.pop("retryable", True),
            key=pb.AttemptKey(request_id=request_id, choice=fields.pop("choice", 0), attempt=attempt),
            node_id=fields.pop("node_id", name),
            **fields,
        )
        self.feed(FromNode(ref(name), pb.NodeMessage(error=error)))

    def ask_to_move(
        self,
        name: str,
        request_id: str,
        attempt: int = 0,
        *,
        choice: int = 0,
        reason: pb.MoveReason.ValueType = pb.MOVE_DRAINING,
    ) -> pb.Move | None:
        """A node wants to hand a branch over; what it is told, if anything."""
        key = pb.AttemptKey(request_id=request_id, choice=choice, attempt=attempt)
        num_sent = len(self.sent)
        wants_move = pb.WantsMove(key=key, reason=reason)
        self.feed(FromNode(ref(name), pb.NodeMessage(wants_move=wants_move)))
        moves = [
            message.move for node, message in self.sent[num_sent:] if message.HasField("move") and node == ref(name)
        ]
        assert len(moves) <= 1
        return moves[0] if moves else None

    # ---------------------------------------------------------------- what came of it

    def dispatches(self, request_id: str) -> list[tuple[str, pb.Dispatch]]:
        """Every attempt, with the prefill node that it was sent to."""
        found = [(node.name, message.dispatch) for node, message in self.sent if message.HasField("dispatch")]
        return [(name, dispatch) for name, dispatch in found if dispatch.request_id == request_id]

    def cancels(self, request_id: str) -> list[tuple[str, int]]:
        """Node and attempt of every Cancel."""
        found = [(node.name, message.cancel.key) for node, message in self.sent if message.HasField("cancel")]
        return [(name, key.attempt) for name, key in found if key.request_id == request_id]

    def node(self, name: str) -> dict[str, Any]:
        """The core's view of a node."""
        nodes: Any = self.core.snapshot()["nodes"]
        return next(node for key, node in nodes.items() if key.startswith(f"{name}@"))

    def load(self, name: str) -> tuple[int, int]:
        """(requests in prefill, branches) there."""
        node = self.node(name)
        return node["prefilling"], node["branches"]

    def failure(self, request_id: str) -> Failed:
        """The error that ended the request."""
        end = self.ends[request_id]
        assert isinstance(end, Failed)
        return end

    def has_ended(self, request_id: str, choice: int = 0) -> bool:
        """Finished, failed with its request, or aborted."""
        is_failed = isinstance(self.ends.get(request_id), Failed)
        return is_failed or named(request_id, choice) in self.ends or request_id in self.aborted

    def assert_nothing_is_left(self) -> None:
        """All load counters are 0, nothing waits, no timer runs."""
        snapshot: Any = self.core.snapshot()
        assert (snapshot["queued"], snapshot["timers"], snapshot["requests"]) == (0, 0, {})
        for node in snapshot["nodes"].values():
            assert (node["prefilling"], node["attempts"], node["prefill_tokens"], node["branches"]) == (0, 0, 0, 0)

    def _take(self, actions: list[Action]) -> list[Action]:
        for action in actions:
            match action:
                case ToNode(node, message):
                    self.sent.append((node, message))
                case Emitted(request_id, first_index, token_ids, choice, logprobs):
                    log = self.tokens.setdefault(name := named(request_id, choice), [])
                    assert first_index == len(log), "a gap or a repeat"
                    assert token_ids
                    assert not self.has_ended(request_id, choice)
                    log.extend(token_ids)
                    self.logprobs.setdefault(name, []).extend(logprobs)
                case PromptScored(request_id, choice, logprobs):
                    name = named(request_id, choice)
                    assert name not in self.prompt_logprobs, "scored twice"
                    assert not self.has_ended(request_id, choice)
                    self.prompt_logprobs[name] = logprobs
                case Finished(request_id, _, token_ids, choice):
                    assert not self.has_ended(request_id, choice), "ended twice"
                    self.ends[name := named(request_id, choice)] = action
                    assert list(token_ids) == self.tokens.get(name, [])[: len(token_ids)]
                case Failed(request_id):
                    assert not isinstance(self.ends.get(request_id), Failed), "ended twice"
                    assert request_id not in self.aborted
                    self.ends[request_id] = action
                case Observe(name, seconds):
                    self.observed.append((name, seconds))
                case Dial(entry):
                    self.dialed.append(entry.node.name)
                case HangUp(node):
                    self.hung_up.append(node)
                case Degraded(sentences):
                    self.degraded.append(bool(sentences))
                case Noted():
                    self.noted.append(action)
                case Timed():
                    pass
                case Count(name, label):
                    self.counts.append((name, label))
        return actions
