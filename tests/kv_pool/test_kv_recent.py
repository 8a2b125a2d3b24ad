"""What the KV pool had a moment ago, against a naive model."""

from __future__ import annotations

from random import Random

import pytest

from node.kv_recent import RecentKeys

MOST = 4
LIFE_S = 10.0


@pytest.mark.covers("W06")
@pytest.mark.parametrize("seed", range(20))
def test_it_knows_the_last_few_for_a_while(seed: int) -> None:
    random, keys = Random(seed), RecentKeys(MOST, LIFE_S)
    noted: list[tuple[bytes, float]] = []  # each key once, the last noted at the end
    now = 0.0
    for _ in range(200):
        now += random.choice((0.0, 0.5, 4.0))
        drawn = [bytes([random.randrange(8)]) for _ in range(random.randint(0, 3))]
        keys.note(drawn, now)
        for key in drawn:
            noted = [each for each in noted if each[0] != key] + [(key, now)]
        noted = noted[-MOST:]
        dropped = [bytes([random.randrange(8)]) for _ in range(random.randint(0, 1))]
        keys.drop(dropped)
        noted = [each for each in noted if each[0] not in dropped]
        known = {key for key, at in noted if now - at < LIFE_S}
        assert {key for key in map(bytes, zip(range(8))) if keys.has(key, now)} == known
        assert len(keys) == len(noted)
