"""The router's core with nodes that are nothing but names: a test says what they send, and sees what the core asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from proto import baton_pb2 as pb
from router.core import RouterCore
from router.events import (
    Aborted,
    Action,
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
    SessionUp,
    Submitted,
    ToNode,
)
from router.placement import Placement
from router.requests import RouterCoreConfig

GOES_ON = pb.FINISH_UNSPECIFIED


def node_entry(
    name: str,
    role: pb.Role.ValueType,
    *,
    incarnation: int = 1,
    max_num_seqs: int = 4,
    weights: str = "w",
    max_model_len: int = 256,
    address: str = "",
) -> pb.NodeEntry:
    """A registry entry."""
    return pb.NodeEntry(
        node=pb.PeerId(name=name, incarnation=incarnation),
        role=role,
        grpc_address=address or f"host:{name}",
        fingerprint=pb.Fingerprint(block_size=16, weights=weights),
        num_blocks=16,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
    )


def ref(name: str, incarnation: int = 1) -> NodeRef:
    """A node process."""
    return NodeRef(name, incarnation)


class CoreWorld:
    """Drives one core; checks after every event that no request ends twice and no token is emitted twice or skipped."""

    def __init__(self, placement: Placement | None = None, **config: Any) -> None:
        self.core = RouterCore(RouterCoreConfig(**config), placement or Placement())
        self.now = 0.0
        self.sent: list[tuple[NodeRef, pb.RouterMessage]] = []
        self.ends: dict[str, Finished | Failed] = {}
        self.tokens: dict[str, list[int]] = {}
        self.aborted: set[str] = set()
        self.dialed: list[str] = []
        self.hung_up: list[NodeRef] = []
        self.counts: list[tuple[str, str]] = []

    @classmethod
    def with_nodes(cls, *names: str, **config: Any) -> CoreWorld:
        """Names that begin with p are prefill nodes, with d decode nodes; all up."""
        world = cls(**config)
        for name in names:
            world.join(node_entry(name, pb.ROLE_PREFILL if name.startswith("p") else pb.ROLE_DECODE))
        return world

    # ---------------------------------------------------------------- what happens

    def feed(self, event: Event) -> list[Action]:
        """Tick, then receive, as a shell does."""
        return [*self._take(self.core.tick(self.now)), *self._take(self.core.receive(event, self.now))]

    def join(self, entry: pb.NodeEntry) -> None:
        """List the node and open its session."""
        self.feed(NodeListed(entry))
        self.feed(SessionUp(ref(entry.node.name, entry.node.incarnation)))

    def submit(
        self, request_id: str, *, prompt: Sequence[int] = (1, 2, 3), max_tokens: int = 8, timeout_s: float = 600.0
    ) -> None:
        """A client's request."""
        request = GenerationRequest(
            request_id=request_id,
            prompt_token_ids=tuple(prompt),
            seed=5,
            temperature=0.0,
            max_tokens=max_tokens,
            stop_token_ids=(99,),
            deadline=self.now + timeout_s,
        )
        self.feed(Submitted(request))

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
            later = self.core.next_deadline()
            assert later is None or later > self.now, "a timer that is due must not stay due"
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
    ) -> None:
        """A batch of a node; decode nodes (named d…) speak as receivers unless told otherwise."""
        key = pb.AttemptKey(request_id=request_id, choice=choice, attempt=attempt)
        tokens = pb.BranchTokens(key=key, first_index=first_index, token_ids=token_ids, finish=finish)
        is_receiver = name.startswith("d") if from_receiver is None else from_receiver
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
            key=pb.AttemptKey(request_id=request_id, choice=0, attempt=attempt),
            node_id=fields.pop("node_id", name),
            **fields,
        )
        self.feed(FromNode(ref(name), pb.NodeMessage(error=error)))

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

    def assert_nothing_is_left(self) -> None:
        """All load counters are 0, nothing waits, no timer runs."""
        snapshot: Any = self.core.snapshot()
        assert (snapshot["queued"], snapshot["timers"], snapshot["requests"]) == (0, 0, {})
        for node in snapshot["nodes"].values():
            assert (node["prefilling"], node["prefill_tokens"], node["branches"]) == (0, 0, 0)

    def _take(self, actions: list[Action]) -> list[Action]:
        for action in actions:
            match action:
                case ToNode(node, message):
                    self.sent.append((node, message))
                case Emitted(request_id, first_index, token_ids):
                    log = self.tokens.setdefault(request_id, [])
                    assert first_index == len(log), "a gap or a repeat"
                    assert token_ids
                    assert request_id not in self.ends
                    assert request_id not in self.aborted
                    log.extend(token_ids)
                case Finished(request_id) | Failed(request_id):
                    assert request_id not in self.ends, "ended twice"
                    assert request_id not in self.aborted
                    self.ends[request_id] = action
                    if isinstance(action, Finished):
                        assert list(action.token_ids) == self.tokens.get(request_id, [])
                case Dial(entry):
                    self.dialed.append(entry.node.name)
                case HangUp(node):
                    self.hung_up.append(node)
                case _:
                    self.counts.append((action.name, action.label))
        return actions
