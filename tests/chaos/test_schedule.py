"""The schedule of faults: reproducible, complete, and never so hard that nobody could answer."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tests.chaos.schedule import (
    REGISTRY,
    ChangeRole,
    Cut,
    Kill,
    Replace,
    Stop,
    Terminate,
    Unplug,
    can_serve,
    draw_schedule,
)

NAMES = ("router", "router-1", "prefill-0", "prefill-1", "decode-0", "decode-1", "mixed-0", REGISTRY)
NODES = NAMES[2:-1]


@given(seed=st.integers(0, 2**32), gap_s=st.floats(0.1, 5), has_network=st.booleans())
def test_whenever_somebody_is_touched_others_can_serve_and_all_is_undone_by_the_end(
    seed: int, gap_s: float, has_network: bool
) -> None:
    plan = list(draw_schedule(seed, NAMES, 100, gap_s, has_network))
    assert plan == list(draw_schedule(seed, NAMES, 100, gap_s, has_network))
    assert all(a.at_s <= b.at_s for a, b in pairwise(plan))
    assert all(each.over_at_s <= 100 for each in plan)
    assert has_network or not any(isinstance(each.fault, Cut | Unplug) for each in plan)
    for now in plan:
        standing = [each.fault for each in plan if each.at_s <= now.at_s < each.over_at_s]
        touched = [party for fault in standing for party in fault.parties]
        assert len(touched) == len(set(touched)), "two faults at once on one process"
        assert can_serve(set(NAMES) - set(touched))
        assert REGISTRY not in touched or not any(isinstance(fault, Replace | ChangeRole) for fault in standing)
        assert set(touched) <= set(NAMES)


def test_a_long_schedule_does_everything_to_everybody_who_can_bear_it() -> None:
    plan = [each.fault for each in draw_schedule(1, NAMES, 4000, 1.0, has_network=True)]
    # A router is neither replaced nor asked to go: that ends its clients' connections.
    for kind, names in ((Kill, NAMES), (Stop, NAMES), (Unplug, NAMES), (Replace, NODES), (Terminate, NODES)):
        assert {fault.parties for fault in plan if isinstance(fault, kind)} == {(name,) for name in names}
    changes = {(fault.name, fault.role) for fault in plan if isinstance(fault, ChangeRole)}
    assert changes == {("mixed-0", "prefill"), ("mixed-0", "decode")}
    cuts = {frozenset(fault.parties) for fault in plan if isinstance(fault, Cut)}
    assert cuts == {frozenset((node, other)) for node in NODES for other in NAMES if node != other}
    assert any(fault.for_s < 1 for fault in plan) and any(fault.for_s > 4 for fault in plan)
