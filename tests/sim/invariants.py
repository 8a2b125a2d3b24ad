"""What must hold (design, section 9), looked at after everything that a process does, and once more when all is over.

A process changes nothing but itself, so after its event only it is looked at. The streams are checked where they arrive
(clients.py), writes where they land (links.py, nodes.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from decode_node.moving import MoveState
from engine.block_pool import BlockCounts, BlockState
from mixed_node.core import MAX_HELD
from prefill_node.fetching import MAX_FETCHES, MAX_LOOKS, POOL_SHARE
from proto import baton_pb2 as pb
from router.core import RouterCore
from runtime.session import SessionTiming, State
from runtime.session_end import SessionEnd
from tests.sim.kernel import Process
from tests.sim.nodes import SimNode
from tests.sim.routers import SimRouter

_TIMING = SessionTiming()
_LATE_S = 1e-3  # a timer may be found due by that much: its alarm rings in the same instant
_MAX_NEXT_S = 700.0  # nothing is set for later than the longest request and its fence
_COUNTED: Final = (BlockState.FREE, BlockState.CACHED, BlockState.USED, BlockState.LEASED, BlockState.QUARANTINED)
MAX_HOSTS: Final = 11  # of a scenario: three routers, and eight nodes
_WORK: Final = ("attempts", "branches", "blocks_of_leases", "local_branches")  # of a core: whatever ends by itself
_SLOTLESS: Final = (MoveState.HELD, MoveState.YIELDED, MoveState.SURRENDERED)
MAX_UNANSWERED: Final = 512  # a call ends by its time limit, and so many clients there are not
MAX_EVENTS_WAITING: Final = 1000


def check_process(process: Process) -> None:
    """After each event of the process."""
    if isinstance(process, SimNode):
        check_node(process)
    elif isinstance(process, SimRouter):
        check_router(process)


def check_node(node: SimNode) -> None:
    """Conservation by owner, leases, timers, bounds. Without an input the core has not changed, and is not looked at again."""
    if node.is_changed:
        node.is_changed = False
        state = node.core.snapshot()
        states, references = check_pool(node, state)
        check_owners(node, state, references)
        check_leases(node, state, states)
        check_what_is_touched(node, states)
        check_bounds(node, state)
        if node.has_drained:
            check_drained(node)
        node.is_busy = any(state.get(name) for name in _WORK)
    check_timer(node, node.core_deadline(), node.is_busy)
    check_sessions(node.label, node.listener.take_touched())


def check_pool(node: SimNode, state: Mapping[str, object]) -> tuple[tuple[BlockState, ...], tuple[int, ...]]:
    """The five counts are those of the blocks, and add up; room that was promised is there (S13)."""
    snapshot, counts = node.pool.snapshot(), node.pool.counts()
    states, references = snapshot["states"], snapshot["num_references"]
    assert isinstance(states, tuple) and isinstance(references, tuple)
    found = BlockCounts(*map(states.count, _COUNTED))
    assert found == counts and len(states) == node.pool.num_blocks, f"{node.label}: {counts}, but there are {found}"
    num_promised = node.pool.num_promised
    assert 0 <= num_promised <= counts.free + counts.cached, f"{node.label}: promises without room, {counts}"
    leased, fetched = (state.get(f"blocks_of_{name}", 0) for name in ("leases", "fetches"))
    assert isinstance(leased, int) and isinstance(fetched, int)
    assert counts.leased + counts.quarantined == leased + fetched, (
        f"{node.label}: {counts}, but leases have {leased} blocks and fetches {fetched}"
    )
    used, held = [state is BlockState.USED for state in states], [number > 0 for number in references]
    if used != held:
        block_id = next(each for each in range(len(states)) if used[each] != held[each])
        raise AssertionError(f"{node.label}: {references[block_id]} hold block {block_id}, {states[block_id].value}")
    return states, references


def check_owners(node: SimNode, state: Mapping[str, object], references: tuple[int, ...]) -> None:
    """Every reference of a block is somebody's, and nobody's is missing."""
    scheduler = state["scheduler"]
    assert isinstance(scheduler, dict)
    phases = scheduler["phases"]
    assert isinstance(phases, dict)
    held = Counter(block_id for name in phases for block_id in node.scheduler.block_ids(name))
    for block_id, number in held.items():
        assert number <= references[block_id], f"{node.label}: block {block_id} has more holders than references"
    # What no sequence has is held for leases, the leading blocks that the node had already; what fetches continue; what is saved;
    # what a link still reads of a sequence that was queued again; what a launched step copies to where links read.
    for_fetches, for_saves = state.get("references_of_fetches", 0), scheduler["references_of_saves"]
    for_links = scheduler["references_left_lent"] + scheduler["references_of_shown"]
    assert isinstance(for_fetches, int)
    num_surplus = sum(references) - held.total() - for_fetches - for_saves - for_links
    num_lent = sum(node.num_held.values())
    if _num_closing(node, state) == 0:
        assert num_surplus == num_lent, (
            f"{node.label}: {num_surplus} references are no sequence's, {num_lent} a lease's"
        )
    else:
        assert num_surplus >= num_lent, (
            f"{node.label}: {num_surplus} references are no sequence's, {num_lent} a lease's"
        )


def _num_closing(node: SimNode, state: Mapping[str, object]) -> int:
    """Leases whose writes are quiet, which the core is about to hear of."""
    states = state.get("leases_by_state", {})
    assert isinstance(states, dict)
    num_live: int = sum(number for name, number in states.items() if name != "RELEASED")
    return num_live - len(node.leases)


def check_leases(node: SimNode, state: Mapping[str, object], states: tuple[BlockState, ...]) -> None:
    """A block that may be written into is one lease's and nobody else's; a live lease has its slot."""
    writable = [block_id for block_ids in node.leases.values() for block_id in block_ids if block_id >= 0]
    assert len(set(writable)) == len(writable), f"{node.label}: two leases may write into one block, {sorted(writable)}"
    for block_id in writable:
        is_lent = states[block_id] in (BlockState.LEASED, BlockState.QUARANTINED)
        assert is_lent, f"{node.label}: block {block_id} may be written into and is {states[block_id].value}"
    num_leases = state.get("leases", 0)
    assert isinstance(num_leases, int) and num_leases <= node.num_slots, f"{node.label}: {num_leases} leases"


def check_what_is_touched(node: SimNode, states: tuple[BlockState, ...]) -> None:
    """What a link will read stays; what a launched step reads or writes stays its sequence's (Q08)."""
    for (link_id, _), sources in node.reading.items():
        for block_id in sources:
            is_kept = states[block_id] is BlockState.USED
            assert is_kept, f"{node.label}: {link_id} will read block {block_id}, which is {states[block_id].value}"
    for launched in node.runner.unread:
        for name, block_ids in launched.blocks:
            assert node.scheduler.knows(name), f"{node.label}: {name} is forgotten while a step with it is unread"
            missing = set(block_ids) - set(node.scheduler.block_ids(name))
            assert not missing, f"{node.label}: {name} lost blocks {missing} while a step with it is unread"


def check_bounds(node: SimNode, state: Mapping[str, object]) -> None:
    """Every queue of a node is bounded. What was preempted is beside those that took its slot: on a mixed node it waits there, on
    another one it is kept for the node that it may go to."""
    limits, is_mixed = node.limits, node.role == pb.ROLE_MIXED
    moving = state.get("branches_moving", {})
    assert isinstance(moving, dict)
    num_slotless = sum(moving.get(each.name, 0) for each in _SLOTLESS)
    most_local = node.num_slots + limits.max_attempts
    bounds = {
        "attempts": limits.max_attempts,
        "fences": (3 if is_mixed else 1) * limits.max_fences,
        "branches": 2 * node.num_slots if is_mixed else node.num_slots + num_slotless,
        "local_branches": most_local,
        "waiting_reserves": limits.max_waiting_reserves,
        "links": 2 * MAX_HOSTS,
        "reserves_unanswered": MAX_UNANSWERED,
        "waiting_for_kv": limits.max_attempts + (MAX_HELD if is_mixed else 0),
        "kv_looks": MAX_LOOKS,
        "kv_fetches": MAX_FETCHES,
        "blocks_of_fetches": node.pool.num_blocks // POOL_SHARE,
    }
    for name, most in bounds.items():
        number = state.get(name, 0)
        assert isinstance(number, int) and number <= most, f"{node.label}: {number} {name}, {most} at most"
    most_waiting = limits.max_attempts + (most_local + bounds["branches"] if is_mixed or node.prefills_locally else 0)
    num_waiting = node.scheduler.num_waiting
    assert num_waiting <= most_waiting, f"{node.label}: {num_waiting} sequences wait, {most_waiting} at most"
    assert len(node.runner.unread) <= 2, f"{node.label}: {len(node.runner.unread)} steps are unread"
    assert node.num_events_waiting <= MAX_EVENTS_WAITING, f"{node.label}: {node.num_events_waiting} events wait"


def check_drained(node: SimNode) -> None:
    """Who says that it has drained holds nothing for anybody, and nobody reads of it. What it still fetches, nobody waits for."""
    counts, state = node.pool.counts(), node.core.snapshot()
    leased, used = state.get("blocks_of_fetches", 0), state.get("references_of_fetches", 0)
    assert isinstance(used, int) and counts.used <= used, f"{node.label} has drained and holds {counts}"
    assert (counts.leased, counts.quarantined) == (leased, 0), f"{node.label} has drained and holds {counts}"
    assert not any(node.reading.values()), f"{node.label} has drained, and a link will read its blocks"
    assert node.runner.is_idle, f"{node.label} has drained, and computes"


def check_timer(process: Process, deadline: float | None, must_be_set: bool) -> None:
    """Whatever waits has a timer, and none is overdue. One that is set for an instant that has passed fires at once."""
    now, before = process.clock(), process.checked_deadline
    process.checked_deadline = deadline
    assert deadline is not None or not must_be_set, f"{process.label}: work without a timer"
    if deadline is not None and process.kernel.now > process.paused_until:  # else it is about to look at its timers
        is_late = deadline <= now - _LATE_S and deadline == before
        assert not is_late, f"{process.label}: a timer is {now - deadline:.3f} s late"
        assert deadline < now + _MAX_NEXT_S, f"{process.label}: a timer is set for {deadline - now:.3f} s from now"


def check_router(router: SimRouter) -> None:
    """Every branch has a timer; the queue is bounded; nothing is counted for a request that has ended; deadlines are kept."""
    if router.is_changed:
        router.is_changed = False
        check_router_core(router, router.core)
    now = router.kernel.now
    check_timer(router, router.core_deadline(), router.is_busy)
    for client in router.open_clients():
        is_due = now > max(client.deadline_at, router.paused_until) + _LATE_S
        assert not is_due, (
            f"{router.label}: {client.plan.name} goes on {now - client.deadline_at:.3f} s after its deadline"
        )
    check_sessions(router.label, router.dialer.take_touched())


def check_router_core(router: SimRouter, core: RouterCore) -> None:
    """Branches, queue and counts of nodes agree with each other, and with what clients were told."""
    state = core.snapshot()
    requests, queued = state["requests"], state["queued"]
    assert isinstance(requests, dict) and isinstance(queued, int)
    num_branches = sum(len(branches) for branches in requests.values())
    assert state["timers"] == num_branches, f"{router.label}: {state['timers']} timers of {num_branches} branches"
    waiting = sum(branch["phase"] == "Waiting" for branches in requests.values() for branch in branches)
    assert queued == waiting, f"{router.label}: {queued} queued of {waiting} that wait"
    router.is_busy = bool(requests)
    for request_id in requests:
        client = router.clients[request_id]
        assert not client.is_over or client.end in ("aborted", "router lost"), (
            f"{router.label} still has {request_id}, which has ended"
        )
    count_circuits(router, state)
    nodes = state["nodes"]
    assert isinstance(nodes, dict)
    for name, held in nodes.items():
        assert held["attempts"] <= router.config.max_inflight_prefills, f"{router.label}: {name} has {held}"
        assert held["prefilling"] <= num_branches and held["branches"] <= num_branches, (
            f"{router.label}: {name}: {held}"
        )


def count_circuits(router: SimRouter, state: Mapping[str, object]) -> None:
    """What circuit breaking does, for the tests that want to know."""
    circuits = state["circuits"]
    assert isinstance(circuits, dict)
    for name, now in circuits.items():
        if (before := router.circuits.get(name, "closed")) != now:
            router.kernel.count(f"circuit {before} to {now}")
            router.kernel.tell(router.label, "circuit", f"of {name} from {before} to {now}")
    router.circuits = circuits


def check_sessions(label: str, ends: Iterable[SessionEnd]) -> None:
    """What is unacknowledged is bounded."""
    for end in ends:
        state = end.snapshot()
        messages, size = state["unacknowledged"], state["unacknowledged_bytes"]
        assert isinstance(messages, int) and isinstance(size, int)
        assert messages <= _TIMING.max_unacked_messages, f"{label}: {messages} messages are unacknowledged"
        assert size <= _TIMING.max_unacked_bytes, f"{label}: {size} bytes are unacknowledged"


def check_idle_router(router: SimRouter) -> None:
    """No request is left: nothing is counted anywhere."""
    state = router.core.snapshot()
    assert state["requests"] == {} and state["queued"] == 0 and state["timers"] == 0, f"{router.label}: {state}"
    nodes, circuits = state["nodes"], state["circuits"]
    assert isinstance(nodes, dict) and isinstance(circuits, dict)
    assert "probing" not in circuits.values(), f"{router.label} probes with no attempt: {circuits}"
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
    assert node.runner.is_idle and not node.leases and not any(node.reading.values()), f"{node.label} is not idle"
    state = node.core.snapshot()
    left = {name: state[name] for name in state.keys() & _MUST_BE_ZERO if state[name]}
    assert not left, f"{node.label} still holds {left}"
    assert node.core.next_deadline() is None, f"{node.label} has a timer for nothing"
    assert not node.unanswered, f"{node.label} owes {len(node.unanswered)} answers"
    assert not [end for end in node.listener.ends() if end.state is not State.LOST], f"{node.label} has sessions"


_MUST_BE_ZERO = {
    "attempts",
    "reserves_unanswered",
    "leases",
    "blocks_of_leases",
    "branches",
    "local_branches",
    "fences",
    "waiting_reserves",
    "waiting_for_kv",
    "kv_looks",
    "kv_fetches",
    "blocks_of_fetches",
    "references_of_fetches",
}
