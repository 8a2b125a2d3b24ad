"""What `baton doctor` says of this machine's limits: those that a node or a router will have, not the doctor's own."""

from __future__ import annotations

import resource

import pytest

from deploy.own_machine import OK, WARNING, WRONG, look_at_this_machine


@pytest.mark.covers("O06")
@pytest.mark.parametrize(
    ("soft", "hard", "level"),
    [
        (1024, 1 << 20, OK),  # as most systems have it: nodes and routers raise theirs
        (64, resource.RLIM_INFINITY, OK),
        (1024, 1024, WARNING),
        (64, 255, WRONG),
    ],
)
def test_open_files_are_judged_by_the_limit_that_nodes_and_routers_raise_theirs_to(
    soft: int, hard: int, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    (found,) = [each for each in look_at_this_machine(None) if each.what == "open files"]
    assert found.level == level
    assert (str(hard) in found.sentence) == (hard != resource.RLIM_INFINITY)
