"""What must hold (design, section 9), looked at after everything that a process does, and once more when all is over.

A process changes nothing but itself, so after its event only it is looked at. The streams are checked where they arrive
(clients.py), writes where they land (links.py, nodes.py).
"""

from __future__ import annotations

from collections import Counter

from decode_node.core import DecodeCore
from engine.block_pool import BlockState
from router.core import RouterCore
from runtime.session import SessionTiming, State
from tests.sim.kernel import Process
from tests.sim.nodes import SimNode
from tests.sim.routers import SimRouter

_TIMING = SessionTiming()
_LATE_S = 1e-3  # a timer may be found due by that much: its alarm rings in the same instant
_MAX_NEXT_S = 700.0  # nothing is set for later than the longest request and its fence


def check_process(process: Process) -> None:
    """After each event of the process."""
    if isinstance(process, SimNode):
        check_node(process)
    elif isinstance(process, SimRouter):
        check_router(process)


def check_node(node: SimNode) -> None:
    """Conservation by owner, leases, timers, bounds."""
    counts = node.pool.counts()
    total = counts.free + counts.cached + counts.used + counts.leased + counts.quarantined
    assert total == node.pool.num_blocks, f"{node.label}: {counts} do not add up to {node.pool.num_blocks}"
    assert 0 <= node.pool.num_promised <= counts.free + counts.cached, f"{node.label}: promises without room, {counts}"
    state = node.core.snapshot()
    leased = state.get("blocks_of_leases", 0)
    assert counts.leased + counts.quarantined == leased, f"{node.label}: {counts}, but leases have {leased} blocks"
    for name, most in (("attempts", node.limits.max_attempts), ("fences", node.limits.max_fences)):
        number = state.get(name, 0)
        assert isinstance(number, int) and number <= most, f"{node.label}: {number} {name}, {most} at most"
    check_owners(node)
    busy = counts.leased + counts.quarantined > 0 or bool(state.get("attempts")) or bool(state.get("branches"))
    check_timer(node, node.core.next_deadline(), busy)
    check_sessions(node.label, node.listener.ends())


def check_owners(node: SimNode) -> None:
    """Every reference of a block is somebody's, and nobody's is missing."""
    phases = node.scheduler.snapshot()["phases"]
    assert isinstance(phases, dict)
    held = Counter(block_id for name in phases for block_id in node.scheduler.block_ids(name))
    snapshot = node.pool.snapshot()
    states, references = snapshot["states"], snapshot["num_references"]
    assert isinstance(states, tuple) and isinstance(references, tuple)
    num_surplus = 0
    for block_id, (state, num_references) in enumerate(zip(states, references, strict=True)):
        if state is BlockState.USED:
            assert num_references >= held[block_id], f"{node.label}: block {block_id} has more holders than references"
            num_surplus += num_references - held[block_id]
        else:
            assert not held[block_id], f"{node.label}: block {block_id} of a sequence is {state.value}"
            assert not num_references, f"{node.label}: block {block_id} is {state.value} and has references"
    # What no sequence has is held for leases: the leading blocks that the node had already.
    num_lent = sum(block_ids.count(-1) for block_ids in node.leases.values())
    if not isinstance(node.core, DecodeCore):
        assert num_surplus == 0, f"{node.label}: {num_surplus} references are nobody's"
    elif not node.leases:
        leases = node.core.snapshot()["leases_by_state"]
        assert isinstance(leases, dict)
        if not set(leases) - {"RELEASED"}:
            assert num_surplus == 0, f"{node.label}: {num_surplus} references are nobody's"
    else:
        assert num_surplus <= num_lent + _num_closing(node), f"{node.label}: {num_surplus} references, {num_lent} lent"


def _num_closing(node: SimNode) -> int:
    """References that leases may still hold whose writes are quiet: the core hears of it with its next event."""
    leases = node.core.snapshot()["leases_by_state"]
    assert isinstance(leases, dict)
    num_live = sum(number for state, number in leases.items() if state != "RELEASED")
    return max(0, num_live - len(node.leases)) * node.pool.num_blocks


def check_timer(process: Process, deadline: float | None, must_be_set: bool) -> None:
    """Whatever waits has a timer, and none is overdue."""
    now = process.clock()
    assert deadline is not None or not must_be_set, f"{process.label}: work without a timer"
    if deadline is not None and process.kernel.now > process.paused_until:  # else it is just about to look at its timers
        assert deadline > now - _LATE_S, f"{process.label}: a timer is {now - deadline:.3f} s late"
        assert deadline < now + _MAX_NEXT_S, f"{process.label}: a timer is set for {deadline - now:.3f} s from now"


def check_router(router: SimRouter) -> None:
    """Every branch has a timer; the queue is bounded; nothing is counted for a request that has ended."""
    core: RouterCore = router.core
    state = core.snapshot()
    requests, queued = state["requests"], state["queued"]
    assert isinstance(requests, dict) and isinstance(queued, int)
    num_branches = sum(len(branches) for branches in requests.values())
    assert state["timers"] == num_branches, f"{router.label}: {state['timers']} timers of {num_branches} branches"
    waiting = sum(branch["phase"] == "Waiting" for branches in requests.values() for branch in branches)
    assert queued == waiting, f"{router.label}: {queued} queued of {waiting} that wait"
    check_timer(router, core.next_deadline(), bool(requests))
    for request_id in requests:
        client = router.clients[request_id]
        assert not client.is_over or client.end in ("aborted", "router lost"), f"{router.label} still has {request_id}, which has ended"
    nodes = state["nodes"]
    assert isinstance(nodes, dict)
    for name, held in nodes.items():
        assert held["attempts"] <= router.config.max_inflight_prefills, f"{router.label}: {name} has {held}"
        assert held["prefilling"] <= num_branches and held["branches"] <= num_branches, f"{router.label}: {name}: {held}"
    check_sessions(router.label, router.dialer.ends())


def check_sessions(label: str, ends: list[object]) -> None:
    """The window of unacknowledged messages is bounded."""
    for end in ends:
        state = end.snapshot()  # type: ignore[attr-defined]
        number = state["unacknowledged"]
        assert number <= _TIMING.max_unacked_messages, f"{label}: {number} messages are unacknowledged"


def check_idle_router(router: SimRouter) -> None:
    """No request is left: nothing is counted anywhere."""
    state = router.core.snapshot()
    assert state["requests"] == {} and state["queued"] == 0 and state["timers"] == 0, f"{router.label}: {state}"
    nodes = state["nodes"]
    assert isinstance(nodes, dict)
    for name, held in nodes.items():
        left = (held["prefilling"], held["attempts"], held["prefill_tokens"], held["branches"])
        assert left == (0, 0, 0, 0), f"{router.label} still counts on {name}: {held}"


def check_idle_node(node: SimNode) -> None:
    """No request and no router is left: nothing is held, not even a fence."""
    counts = node.pool.counts()
    assert (counts.used, counts.leased, counts.quarantined) == (0, 0, 0), f"{node.label} leaks blocks: {counts}"
    assert node.pool.num_promised == 0, f"{node.label} leaks {node.pool.num_promised} promises"
    num_slots = len(node.scheduler.snapshot()["slots"])  # type: ignore[arg-type]
    assert node.scheduler.num_free_slots == num_slots, f"{node.label} leaks slots"
    assert not node.plans and not node.leases, f"{node.label} is not idle"
    state = node.core.snapshot()
    left = {name: state[name] for name in state.keys() & _MUST_BE_ZERO if state[name]}
    assert not left, f"{node.label} still holds {left}"
    assert node.core.next_deadline() is None, f"{node.label} has a timer for nothing"
    assert not [end for end in node.listener.ends() if end.state is not State.LOST], f"{node.label} has sessions"


_MUST_BE_ZERO = {"attempts", "reserves_unanswered", "leases", "blocks_of_leases", "branches", "fences"}
