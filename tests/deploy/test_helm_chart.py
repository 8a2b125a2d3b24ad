"""The chart, installed by Helm's own code at a stand-in for the API server, in many ways: what Kubernetes would then run, and let through.

What the pods' settings do when they are run: test_helm_runs.py. Never run: a cluster.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from node.config import NodeConfig
from router.config import RouterConfig
from tests.deploy.chart_cases import CLAIM, MIXED_ONLY, SWITCHES, TINY, TLS, WRONG, Values, drawn, together, values_of
from tests.deploy.chart_schema import CHART, OF_THE_CHART, SCHEMA_FILE, make_schema
from tests.deploy.kubernetes_types import TOOLS, problems_of
from tests.deploy.pods import (
    COMPONENT,
    GRPC_PORT,
    HTTP_PORT,
    KV_PORT,
    NODE_ROLES,
    OUTSIDE,
    REDIS_PORT,
    ROUTER_PORT,
    Install,
    Peer,
    Pods,
    references,
    selects,
)

ROOT: Final = CHART.parents[2]
LIBRARY: Final = TOOLS / "helm_sdkpy" / "_lib" / "linux-amd64" / "libhelm_sdkpy.so"
NUM_DRAWN: Final = 40
# Nobody's knobs, but read by what runs in the pods.
NO_KNOBS: Final = {"POD_NAME", "POD_IP", "REDIS_PASSWORD", "TRITON_CACHE_DIR"}


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What came of an install."""

    values: Values
    install: Install
    notes: str
    error: str


@dataclasses.dataclass(frozen=True, slots=True)
class Engine:
    """What Helm made of all cases, by name."""

    lint: list[dict[str, Any]]
    outcomes: dict[str, Outcome]

    def good(self) -> list[Outcome]:
        """Those that were to succeed."""
        return [outcome for name, outcome in self.outcomes.items() if name not in WRONG]


def run_helm(cases: dict[str, Values]) -> Engine:
    """Fail or skip where Helm's code is not there."""
    if not LIBRARY.exists():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"no {LIBRARY}: make setup fetches it, on x86-64")
    told = []
    for i, (name, values) in enumerate(cases.items()):
        long = name == "long names"
        release = "r" * 53 if long else ("baton", "llm", "prod-baton")[i % 3]
        told.append({"release": release, "namespace": "n" * 63 if long else "inference", "values": values})
    command = [sys.executable, "-m", "tests.deploy.helm_engine", str(LIBRARY)]
    done = subprocess.run(command, cwd=ROOT, input=json.dumps(told), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    outcomes = {
        name: Outcome(values, Install(each["manifests"]), each["notes"], each["error"])
        for (name, values), each in zip(cases.items(), found["installs"], strict=True)
    }
    return Engine(found["lint"], outcomes)


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest) -> Engine:
    """All cases, in one run of Helm."""
    rng = random.Random(random.SystemRandom().getrandbits(32))
    cases = {name: values_of([name]) for name in SWITCHES} | {
        "defaults": TINY,
        "mixed nodes only": together(TINY, MIXED_ONLY),
        "long names": together(TINY, TLS),
    }
    cases |= {", ".join(chosen): values_of(chosen) for chosen in (drawn(rng) for _ in range(NUM_DRAWN))}
    return run_helm(cases | {name: values for name, (values, _) in WRONG.items()})


def peer(pods: Pods, install: Install) -> Peer:
    return Peer(pods.labels, install.manifests[0]["metadata"]["namespace"])


def test_helm_finds_nothing_wrong_and_installs_every_case(engine: Engine) -> None:
    assert [each for each in engine.lint if each["Severity"] > 1] == []
    assert {name: outcome.error for name, outcome in engine.outcomes.items() if name not in WRONG and outcome.error} == {}


def test_kubernetes_would_take_every_object(engine: Engine) -> None:
    seen = set()
    for outcome in engine.good():
        for manifest in outcome.install.manifests:
            assert problems_of(manifest) == [], outcome.values
            seen.add(manifest["kind"])
            name = manifest["metadata"]["name"]
            assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?", name), name  # a pod's label has it, and 11 more
            labels = manifest["metadata"]["labels"]
            assert all(re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", each) for each in labels.values())
    assert len(seen) == 10, seen
    broken = json.loads(json.dumps(engine.outcomes["defaults"].install.of("StatefulSet")[0]))
    broken["spec"]["template"]["spec"]["containers"][0] |= {"imgae": "baton", "imagePullPolicy": "Sometimes", "name": 7}
    del broken["spec"]["selector"]
    assert len(problems_of(broken)) == 4, "the check notices nothing"


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_refused_by_its_name(engine: Engine, name: str) -> None:
    outcome = engine.outcomes[name]
    assert WRONG[name][1] in outcome.error and outcome.install.manifests == []


def test_the_schema_is_what_the_knobs_say() -> None:
    assert json.loads(SCHEMA_FILE.read_text()) == make_schema(), "python -m tests.deploy.chart_schema"
    knobs = {field.name for config in (NodeConfig, RouterConfig) for field in dataclasses.fields(config)}
    assert knobs >= OF_THE_CHART, "the chart keeps knobs to itself that nobody has"
    every = set(make_schema()["properties"]["config"]["properties"])
    assert every == knobs - OF_THE_CHART


def test_every_value_of_the_schema_has_its_default_in_the_file() -> None:
    values: Values = yaml.safe_load((CHART / "values.yaml").read_text())

    def missing(schema: dict[str, Any], found: Any, where: str) -> list[str]:
        if "properties" not in schema or where.endswith(".config") or where == ".config":
            return []
        return [
            each
            for name, inner in schema["properties"].items()
            for each in (
                [f"{where}.{name}"]
                if name not in found and name not in ("global", "requests", "limits", "claims")
                else missing(inner, found.get(name, {}), f"{where}.{name}")
            )
        ]

    assert missing(make_schema(), values, "") == []


def test_every_variable_is_a_knob_of_its_role_with_a_value_in_its_bounds(engine: Engine) -> None:
    for outcome in engine.good():
        for pods in outcome.install.pods():
            if not pods.is_ours:
                continue
            names = [each["name"] for each in pods.container["env"]]
            assert len(names) == len(set(names)), f"{names} of {outcome.values}"
            knobs = {
                f"BATON_{field.name.upper()}"
                for config in (NodeConfig, RouterConfig)  # a role ignores the other's
                for field in dataclasses.fields(config)
            }
            assert {name for name in names if name not in knobs} <= NO_KNOBS


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


def test_a_pod_has_longer_to_end_than_its_drain_takes(engine: Engine) -> None:
    for outcome in engine.good():
        for pods in filter(lambda each: each.is_ours, outcome.install.pods()):
            sleep = pods.container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["", "0"])[1]
            drain = float(pods.variables["BATON_DRAIN_TIMEOUT_S"]["value"])
            assert pods.spec["terminationGracePeriodSeconds"] >= float(sleep) + drain + 5
            if pods.role == "router" and "slow drain" not in str(outcome.values):
                assert float(sleep) > 0 or outcome.values.get("router", {}).get("preStopSeconds") == 0


def test_selectors_mean_the_pods_they_are_written_for(engine: Engine) -> None:
    for outcome in engine.good():
        install = outcome.install
        workloads = install.pods()
        for pods in workloads:
            selector = pods.manifest["spec"]["selector"]
            assert [each.role for each in workloads if selects(selector, each.labels)] == [pods.role]
            for spread in pods.spec.get("topologySpreadConstraints", ()):
                assert selects(spread["labelSelector"], pods.labels)
            if pods.manifest["kind"] == "StatefulSet":
                (service,) = [
                    each
                    for each in install.of("Service")
                    if each["metadata"]["name"] == pods.manifest["spec"]["serviceName"]
                ]
                assert selects({"matchLabels": service["spec"]["selector"]}, pods.labels)
        for budget in install.of("PodDisruptionBudget"):
            about = [each.role for each in workloads if selects(budget["spec"]["selector"], each.labels)]
            assert about == [budget["metadata"]["labels"][COMPONENT]]
        for service in install.of("Service"):
            (pods,) = [each for each in workloads if selects({"matchLabels": service["spec"]["selector"]}, each.labels)]
            assert {port["targetPort"] for port in service["spec"]["ports"]} <= pods.ports.keys()
        for scaler in install.of("HorizontalPodAutoscaler"):
            (router,) = install.of("Deployment")
            assert scaler["spec"]["scaleTargetRef"]["name"] == router["metadata"]["name"]
            assert "replicas" not in router["spec"], "an upgrade would undo what the scaler did"
        for monitor in install.of("PodMonitor"):
            about = [each for each in workloads if selects(monitor["spec"]["selector"], each.labels)]
            assert about and all("http" in each.ports for each in about)


def test_budgets_are_there_unless_they_are_not_wanted(engine: Engine) -> None:
    roles = {budget["metadata"]["labels"][COMPONENT] for budget in engine.outcomes["mixed"].install.of("PodDisruptionBudget")}
    assert roles == {"router", *NODE_ROLES}
    assert engine.outcomes["no budgets"].install.of("PodDisruptionBudget") == []


def test_the_network_lets_through_every_channel_of_the_design_and_nothing_else(engine: Engine) -> None:
    stranger = Peer({"app": "cron"})
    for outcome in engine.good():
        install = outcome.install
        if not install.of("NetworkPolicy"):
            assert outcome.values["networkPolicy"] == {"enabled": False}
            continue
        has_egress = outcome.values.get("networkPolicy", {}).get("egress", True)
        scraper = Peer({"app": "prometheus"}, "monitoring")
        workloads = install.pods()
        for target in workloads:
            to = peer(target, install)
            for source in workloads:
                wanted = {
                    port
                    for port in (ROUTER_PORT, HTTP_PORT, GRPC_PORT, KV_PORT, REDIS_PORT)
                    if install.is_allowed(peer(source, install), to, port)
                }
                assert wanted == channels(source.role, target.role, outcome.values), (source.role, target.role)
            scraped = bool(outcome.values.get("networkPolicy", {}).get("scrapers", True))
            assert install.is_allowed(scraper, to, HTTP_PORT) == (scraped and target.role in NODE_ROLES)
            for other in (stranger, OUTSIDE):
                reached = [
                    port for port in (ROUTER_PORT, HTTP_PORT, GRPC_PORT, KV_PORT, REDIS_PORT) if install.is_allowed(other, to, port)
                ]
                assert set(reached) <= ({ROUTER_PORT} if target.role == "router" else {HTTP_PORT}), (target.role, reached)
                if has_egress:
                    assert not install.is_allowed(to, other, 22)
        for source in workloads:
            assert install.is_allowed(peer(source, install), OUTSIDE, 53, "UDP") or source.role == "redis"


def channels(source: str, target: str, values: Values) -> set[int]:
    """Section 4 of the design: the ports of `target` that `source` dials. Clients may be pods of ours, too."""
    nodes = {GRPC_PORT} if target in NODE_ROLES and source in ("router", *NODE_ROLES) else set()
    if target in NODE_ROLES and source in NODE_ROLES:
        nodes = {GRPC_PORT, KV_PORT}
    return nodes | ({REDIS_PORT} if target == "redis" and source != "redis" else set())
