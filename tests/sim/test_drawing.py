"""The drawings of docs/concepts.md are what the simulation does today, and show what their captions say."""

from __future__ import annotations

import pytest

from tests.sim.drawing import DRAWINGS, PICTURES, draw


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_drawing_is_what_the_simulation_does(name: str) -> None:
    assert (PICTURES / name).read_text(encoding="utf-8") == draw(name), "stale: make docs"


def test_the_drawings_show_a_handoff_a_retry_and_a_move() -> None:
    handoff, killed, drained = (draw(name) for name in DRAWINGS)
    assert "attempt 0" in handoff and "attempt 1" not in handoff and "decode node 1" not in handoff
    assert ">killed<" in killed and ">Dispatch, attempt 1, 4 tokens<" in killed and "is lost" in killed
    assert ">WantsMove<" in drained and ">Move, as attempt 1<" in drained and "Dispatch, attempt 1" not in drained


@pytest.mark.parametrize("name", DRAWINGS)
def test_the_client_hears_each_token_once_and_in_order(name: str) -> None:
    lines = draw(name).split("\n")
    arrows = [index for index, line in enumerate(lines) if 'class="token"' in line and 'x2="97"' in line]
    heard = [lines[index + 1].partition(">")[2].partition("<")[0] for index in arrows]
    assert heard == [f"token {index}" for index in range(DRAWINGS[name].scenario.clients[0].max_tokens)]
