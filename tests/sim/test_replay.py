"""A seed is a run: the same events in the same order, in this process and in any other."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.sim.outcome import run_scenario
from tests.sim.scenario import draw_scenario
from tests.thorough import IS_THOROUGH

# In the short run those in which sets of branches were once told of in the order of their hashes.
SEEDS = tuple(range(60)) if IS_THOROUGH else (12, 13, 22)
PRINT_LOGS = f"""
from tests.sim.outcome import run_scenario
from tests.sim.scenario import draw_scenario
for seed in {SEEDS}:
    print(run_scenario(draw_scenario(seed), is_traced=True).trace)
"""


def log_of(seed: int) -> str:
    return str(run_scenario(draw_scenario(seed), is_traced=True).trace)


@pytest.mark.covers("C02")
def test_a_seed_gives_the_same_log_byte_for_byte_in_every_process() -> None:
    expected = "\n".join(log_of(seed) for seed in SEEDS) + "\n"
    assert expected.count("\n") > 1000 and "FAULT" in expected
    for hash_seed in ("1", "2"):  # sets of strings have another order in each
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", PRINT_LOGS]
        printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        assert printed == expected


@pytest.mark.covers("C02")
def test_keeping_a_log_changes_nothing() -> None:
    with_log = run_scenario(draw_scenario(13), is_traced=True)
    without = run_scenario(draw_scenario(13))
    assert with_log.counters == without.counters and with_log.num_events == without.num_events


@pytest.mark.covers("C02")
def test_another_seed_is_another_run() -> None:
    assert log_of(22) != log_of(25)
