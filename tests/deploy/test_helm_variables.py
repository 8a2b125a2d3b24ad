"""What the chart tells processes by variables: values as they were written, and the user's own word.

Not here: whether a process would start with them (test_helm_chart.py).
"""

from __future__ import annotations

import pytest

from tests.deploy.chart_cases import TINY, values_of
from tests.deploy.installs import Engine, run_helm
from tests.deploy.pods import resolved


@pytest.fixture(scope="module")
def engine() -> Engine:
    """The cases that are asked about."""
    asked = ("knobs", "a large seed", "own variables", "no CPU")
    return run_helm({name: values_of([name]) for name in asked} | {"defaults": TINY})


def test_values_arrive_as_they_were_written(engine: Engine) -> None:
    install = engine.outcomes["knobs"].install
    decode = {name: each.get("value") for name, each in install.pods_of("decode").variables.items()}
    assert decode["BATON_MAX_NUM_BATCHED_TOKENS"] == "1048576", "a number as YAML has it, not as floating point has it"
    assert decode["BATON_LOCAL_PREFILL"] == "off", "a role's value wins, also where it is false"
    assert decode["BATON_NEW_TOKEN_RATIO_MIN"] == "0.05" and decode["BATON_THREADS"] == "3"
    prefill = {name: each.get("value") for name, each in install.pods_of("prefill").variables.items()}
    assert prefill["BATON_LOCAL_PREFILL"] == "on" and prefill["BATON_BLOCK_SIZE"] == "32"
    router = {name: each.get("value") for name, each in install.pods_of("router").variables.items()}
    assert router["BATON_PREEMPT_RETRY_EXCLUDE_DECODE"] == "off" and router["BATON_REQUEST_TIMEOUT_S"] == "3600"
    assert "BATON_PLACEMENT_SEED" not in router, "null: not said"
    seeded = engine.outcomes["a large seed"].install.pods_of("router").variables
    assert seeded["BATON_PLACEMENT_SEED"]["value"] == "9007199254740991"


def test_what_the_user_says_of_a_variable_wins_over_the_chart_and_stands_in_its_place(engine: Engine) -> None:
    pods = engine.outcomes["own variables"].install.pods_of("decode")
    assert (resolved(pods)["BATON_THREADS"], resolved(pods)["TRITON_CACHE_DIR"]) == ("5", "/tmp/mine")
    assert pods.variables["BATON_THREADS"] == {"name": "BATON_THREADS", "value": "5"}
    assert resolved(engine.outcomes["own variables"].install.pods_of("router"))["BATON_HOST"] == "::"
    names = [
        [each["name"] for each in engine.outcomes[case].install.pods_of("decode").container["env"]]
        for case in ("own variables", "defaults")
    ]
    assert names[0] == names[1]


def test_who_asks_for_no_cpu_computes_with_what_the_limit_or_the_host_has(engine: Engine) -> None:
    """A request of nothing would be --threads 0, with which no node starts."""
    wanted = {
        ("no CPU", "prefill"): "limits.cpu",
        ("no CPU", "decode"): "limits.cpu",
        ("defaults", "decode"): "requests.cpu",
    }
    for (case, role), resource in wanted.items():
        threads = engine.outcomes[case].install.pods_of(role).variables["BATON_THREADS"]
        assert threads["valueFrom"]["resourceFieldRef"]["resource"] == resource
