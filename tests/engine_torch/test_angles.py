"""A position's cos and sin are the same numbers whenever and with however many others they were computed."""

from __future__ import annotations

import torch

from engine.rope import Angles


def test_a_position_keeps_its_angles_while_the_table_grows() -> None:
    frequencies = 0.7 ** torch.arange(12)
    angles = Angles(frequencies, 1.25)
    early = [part.clone() for part in angles.up_to(5)]
    late = angles.up_to(len(early[0]) + 1)
    assert all(len(part) > len(early[0]) for part in late)
    assert all(torch.equal(part[: len(before)], before) for part, before in zip(late, early, strict=True))
    for position in (0, 3, 700, len(late[0]) - 1):
        turn = position * frequencies
        assert torch.equal(late[0][position], turn.cos() * 1.25)
        assert torch.equal(late[1][position], turn.sin() * 1.25)


def test_a_table_that_reaches_far_enough_is_not_made_anew() -> None:
    angles = Angles(torch.ones(2), 1.0)
    first = angles.up_to(100)
    again = angles.up_to(len(first[0]))
    assert again[0] is first[0]
    assert again[1] is first[1]
