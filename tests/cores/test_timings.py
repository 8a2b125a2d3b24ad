"""What nodes tell of how long an attempt took them: each part once, by the node's own clock, from where to where."""

from __future__ import annotations

from typing import Final

import pytest

from connector.transport import NotifyArrived, RevokeDone
from node import events as ev
from proto import baton_pb2 as pb
from tests.cores.pair import Node, Pair
from tests.cores.test_local_prefill import decode_node, dispatch

TICK_S: Final = 0.125  # of the world, with every event; exact in binary


class TimedPair(Pair):
    """Time passes with every event, and the sender's clock is far from the receiver's."""

    def __init__(self) -> None:
        super().__init__()
        self.clocks = {id(self.prefill): 1000.0, id(self.decode): 1.0}
        self.taken: list[tuple[Node, ev.Event, float]] = []

    def _feed(self, node: Node, event: ev.Event) -> None:
        for name in self.clocks:
            self.clocks[name] += TICK_S
        now = self.clocks[id(node)]
        self.taken.append((node, event, now))
        for action in node.core.receive(event, now):
            self._perform(node, action)

    def at(self, node: Node, kind: type[object], which: int = 0) -> float:
        """When the node took its first event of a kind, or another one."""
        return [at for each, event, at in self.taken if each is node and isinstance(event, kind)][which]


def timings(messages: list[pb.NodeMessage]) -> list[pb.Timing]:
    return [timing for message in messages for timing in message.tokens.timings]


@pytest.mark.covers("O02")
def test_a_handoffs_parts_are_told_once_each_by_who_spent_them() -> None:
    pair = TimedPair()
    pair.complete(dispatch("a", [1] * 9, 6))
    (computed,) = timings(pair.prefill.sent)
    assert computed.queue_us == 0, "nobody was before it: planned in the turn of its Dispatch"
    took_s = pair.at(pair.prefill, ev.StepDone, -1) - pair.at(pair.prefill, ev.FromRouter)
    assert computed.prefill_us == took_s * 1e6 > 0
    began_at, chunks = pair.at(pair.prefill, ev.FromRouter), list(computed.chunk_end_us)
    steps = [at for node, event, at in pair.taken if node is pair.prefill and isinstance(event, ev.StepDone)]
    assert chunks == [(at - began_at) * 1e6 for at in steps[:-1]] and chunks, "each chunk but the last, as it was read"
    (received,) = timings(pair.decode.sent)
    admit_s = pair.at(pair.decode, RevokeDone) - pair.at(pair.decode, NotifyArrived)
    assert received.admit_us == admit_s * 1e6 > 0
    assert received.first_step_us == (pair.at(pair.decode, ev.StepDone) - pair.at(pair.decode, RevokeDone)) * 1e6 > 0
    assert received.reserve_wait_us == received.queue_us == received.prefill_us == 0, (
        "the lease was there before the token"
    )
    assert computed.key == received.key and computed.key.request_id == "a"


@pytest.mark.covers("O02")
def test_a_lease_that_comes_behind_the_token_is_told_as_waited_for() -> None:
    pair = TimedPair()
    late: list[ev.SendReserve] = []
    performed = pair._perform

    def perform(node: Node, action: ev.Action) -> None:
        if isinstance(action, ev.SendReserve) and not late:
            late.append(action)
        else:
            performed(node, action)

    pair._perform = perform  # type: ignore[method-assign]
    pair.complete(dispatch("a", [1] * 9, 6))  # as far as it goes without a lease
    assert not pair.decode.sent
    pair.clocks[id(pair.prefill)] += 2.0
    performed(pair.prefill, late[0])
    pair.complete(dispatch("b", [2] * 9, 1))  # lets everything that is under way end
    received = next(each for each in timings(pair.decode.sent) if each.key.request_id == "a")
    assert received.reserve_wait_us >= 2_000_000


@pytest.mark.covers("O02")
def test_a_node_that_does_all_tells_what_it_waited_computed_and_stepped() -> None:
    node = decode_node()
    node.send(dispatch("a", [1] * 40, 3), 1.0)  # three steps of sixteen tokens
    node.send(dispatch("b", [2] * 4, 3), 2.0)
    now, told = 2.0, dict[str, list[pb.Timing]]()
    while node.plans:
        now += 1.0
        for action in node.step(now):
            if isinstance(action, ev.ToRouter):
                assert action.message.tokens.from_receiver
                for timing in action.message.tokens.timings:
                    told.setdefault(timing.key.request_id, []).append(timing)
    first, second = told["a"]
    assert (first.queue_us, first.prefill_us, first.first_step_us) == (0, 4_000_000, 0)
    assert (second.queue_us, second.prefill_us, second.first_step_us) == (0, 0, 1_000_000)
    first, second = told["b"]
    assert first.queue_us > 0 and first.queue_us + first.prefill_us == (now - 2.0 - 2.0) * 1e6
    assert second.first_step_us == 1_000_000
    node.assert_empty()


@pytest.mark.covers("O02", "P02")
def test_who_computes_a_prompt_tells_how_much_of_it_was_there_and_a_receiver_does_not() -> None:
    pair = TimedPair()
    for name, num_cached in (("a", 0), ("b", 8)):  # two of its blocks; the last token is always computed
        pair.complete(dispatch(name, [1] * 9, 6))
        computed = next(each for each in timings(pair.prefill.sent) if each.key.request_id == name)
        assert computed.HasField("cached_tokens") and computed.cached_tokens == num_cached
    assert not any(each.HasField("cached_tokens") for each in timings(pair.decode.sent))
    node = decode_node()
    told: list[pb.Timing] = []
    for now, name in enumerate(("a", "b")):
        node.send(dispatch(name, [1] * 40, 3), float(now))
        while node.plans:
            told += timings([each.message for each in node.step(float(now)) if isinstance(each, ev.ToRouter)])
    assert [each.cached_tokens for each in told if each.HasField("cached_tokens")] == [0, 36]
