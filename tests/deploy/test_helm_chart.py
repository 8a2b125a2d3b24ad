"""The chart, installed in many ways by Helm's own code at a stand-in for the API server: what would run, and be let through.

What the pods' settings do when they are run: test_helm_runs.py. Never run: a cluster.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
import subprocess
from typing import Final

import pytest
import yaml

from deploy.cli import COMMANDS
from node.config import NodeConfig
from router.config import RouterConfig
from runtime.config import parse
from runtime.process import is_everywhere
from tests.conftest import RUN_SEED
from tests.deploy.chart_cases import MIXED_ONLY, SWITCHES, TINY, TLS, WRONG, Values, drawn, together, values_of
from tests.deploy.chart_schema import CHART
from tests.deploy.installs import ROOT, Engine, run_helm
from tests.deploy.kubernetes_types import problems_of
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
    resolved,
    selects,
)
from tests.thorough import examples

NUM_DRAWN: Final = examples(20, 2)
CONFIGS: Final[dict[str, type[NodeConfig] | type[RouterConfig]]] = {"node": NodeConfig, "router": RouterConfig}
# Nobody's knobs, but read by what runs in the pods.
NO_KNOBS: Final = {"POD_NAME", "POD_IP", "REDIS_PASSWORD", "TRITON_CACHE_DIR"}


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest) -> Engine:
    """All cases, in one run of Helm."""
    rng = random.Random(request.config.stash[RUN_SEED])
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
    assert {
        name: outcome.error for name, outcome in engine.outcomes.items() if name not in WRONG and outcome.error
    } == {}


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


def test_every_variable_is_a_knob_said_once_and_every_process_would_start_with_them(engine: Engine) -> None:
    knobs = {f"BATON_{field.name.upper()}" for config in CONFIGS.values() for field in dataclasses.fields(config)}
    for outcome in engine.good():
        for pods in filter(lambda each: each.is_ours, outcome.install.pods()):
            names = [each["name"] for each in pods.container["env"]]
            assert len(names) == len(set(names)), names
            assert {name for name in names if name not in knobs} <= NO_KNOBS
            (command,) = pods.container["args"]
            assert command == pods.role and (command,) in COMMANDS
            kind = CONFIGS["router" if command == "router" else "node"]
            parse(kind, f"baton {command}", "", [], resolved(pods))  # raises ConfigError
    install = engine.outcomes["long names"].install
    assert len(resolved(install.pods_of("decode"))["BATON_REGISTRY_NAMESPACE"]) == 64


def test_what_a_pod_mounts_is_there_and_what_it_is_told_of_is_mounted(engine: Engine) -> None:
    for outcome in engine.good():
        for pods in outcome.install.pods():
            volumes = [each["name"] for each in pods.spec["volumes"]]
            assert len(volumes) == len(set(volumes))
            mounts = {each["mountPath"]: each for each in pods.container["volumeMounts"]}
            containers = [*pods.spec["containers"], *pods.spec.get("initContainers", ())]
            mounted = {each["name"] for container in containers for each in container["volumeMounts"]}
            assert mounted == set(volumes), "what is mounted, and nothing else"
            if not pods.is_ours:
                continue
            told = resolved(pods)
            for name in ("BATON_MODEL", "BATON_TLS_DIR", "BATON_API_KEYS", "TRITON_CACHE_DIR"):
                assert name not in told or any(told[name].startswith(path) for path in mounts), name
            assert not mounts["/tmp"].get("readOnly") and mounts["/model"]["readOnly"]
            assert bool(pods.probes["startupProbe"]["scheme"] == "HTTPS") == ("BATON_TLS_DIR" in told)
            (init,) = pods.spec.get("initContainers") or [None]
            assert (init is None) == (not outcome.values["model"].get("random"))
    decode = engine.outcomes["gpu"].install.pods_of("decode")
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}} in decode.spec["volumes"]
    assert decode.container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert decode.variables["BATON_THREADS"]["valueFrom"]["resourceFieldRef"]["resource"] == "requests.cpu"
    keys = engine.outcomes["keys"].install.pods_of("router")
    (volume,) = [each for each in keys.spec["volumes"] if each["name"] == "keys"]
    assert volume["secret"]["items"] == [{"key": "keys.txt", "path": "keys"}]
    assert resolved(keys)["BATON_API_KEYS"] == "/etc/baton/keys/keys"
    assert ("Secret", "api-keys") in set(references(keys))
    assert resolved(engine.outcomes["claim"].install.pods_of("prefill"))["BATON_MODEL"] == "/model/llama/3b"


def test_probes_ask_for_pages_that_the_process_has_at_the_port_where_they_are(engine: Engine) -> None:
    sources = {"router": ROOT / "router" / "api.py", "node": ROOT / "node" / "http.py"}
    for outcome in engine.good():
        for pods in filter(lambda each: each.is_ours, outcome.install.pods()):
            told = resolved(pods)
            if pods.role == "router":
                own = {"http": told["BATON_PORT"]}
            else:
                own = {name: told[f"BATON_{name.upper()}_PORT"] for name in ("http", "grpc", "kv")}
            assert own == {name: str(port) for name, port in pods.ports.items()}
            pages = sources["router" if pods.role == "router" else "node"].read_text()
            assert {name: each["path"] for name, each in pods.probes.items()} == {
                "startupProbe": "/health",
                "livenessProbe": "/health",
                "readinessProbe": "/ready?accepting=1",
            }
            for each in pods.probes.values():
                assert each["port"] in pods.ports and f'"{each["path"].partition("?")[0]}"' in pages


def test_pods_have_no_rights_and_hear_of_no_services(engine: Engine) -> None:
    for outcome in engine.good():
        for pods in outcome.install.pods():
            assert not pods.spec["automountServiceAccountToken"]
            assert not pods.spec["enableServiceLinks"], "a Service called baton is BATON_PORT=tcp://… in every pod"
            assert pods.spec["securityContext"]["runAsNonRoot"] and pods.spec["securityContext"]["runAsUser"] > 0
            for container in [*pods.spec["containers"], *pods.spec.get("initContainers", ())]:
                assert container["securityContext"] == {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                }
            accounts = [each["metadata"]["name"] for each in outcome.install.of("ServiceAccount")]
            assert pods.spec["serviceAccountName"] in (accounts or ["mine", "42"])
            if pods.is_ours:
                image = outcome.values.get("image", {})
                tag = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
                assert pods.container["image"] == f"{image.get('repository', 'baton')}:{image.get('tag', tag)}"
                assert pods.spec.get("imagePullSecrets", []) == image.get("pullSecrets", [])


def test_the_certificate_names_every_host_that_is_dialled(engine: Engine) -> None:
    orders = [(each.install, order) for each in engine.good() for order in each.install.of("Certificate")]
    assert orders
    for install, order in orders:
        names = order["spec"]["dnsNames"]
        assert set(order["spec"]["usages"]) >= {"server auth", "client auth"}
        for pods in filter(lambda each: each.role in NODE_ROLES, install.pods()):
            host = resolved(pods)["BATON_ADVERTISE"]
            assert "*." + host.partition(".")[2] in names, host
            assert ("Secret", order["spec"]["secretName"]) in set(references(pods))
        assert {each["metadata"]["name"] for each in install.of("Deployment")} | {"localhost"} <= set(names)
        assert order["spec"]["ipAddresses"] == ["127.0.0.1", "::1"]
        assert {rule["host"] for each in install.of("Ingress") for rule in each["spec"]["rules"]} <= set(names)
        for monitor in install.of("PodMonitor"):
            (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
            assert endpoint["scheme"] == "https" and endpoint["tlsConfig"]["serverName"] in names


def test_what_is_said_after_an_install_is_a_curl_line_that_fits(engine: Engine) -> None:
    plain, tls = engine.outcomes["defaults"].notes, engine.outcomes["tls"].notes
    assert "curl http://127.0.0.1:8000/v1/completions" in plain and "Nobody is asked for a key" in plain
    assert "curl -k https://127.0.0.1:8000/v1/completions" in tls and "Nothing is encrypted" not in tls
    assert "Authorization: Bearer" in engine.outcomes["keys"].notes and '"model": "baton"' in plain
    for outcome in engine.good():
        (service,) = [
            each for each in outcome.install.of("Service") if each["metadata"]["labels"][COMPONENT] == "router"
        ]
        assert f"service/{service['metadata']['name']} 8000:" in outcome.notes


def test_a_shell_reads_the_curl_line_whatever_the_model_is_called(engine: Engine) -> None:
    for case in ("defaults", "keys", "tls", "quotes"):
        outcome = engine.outcomes[case]
        (line,) = re.findall(r"^  (curl .*\\\n.*)$", outcome.notes, re.MULTILINE)
        script = f'curl() {{ for last; do :; done; printf %s "$last"; }}\n{line}'
        told = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout
        assert json.loads(told)["model"] == outcome.values["model"].get("servedName", "baton")


def test_the_port_that_is_forwarded_after_an_install_is_open(engine: Engine) -> None:
    """kubectl dials the pod's loopback, also where there is no TLS: at the pod's own address nobody would answer."""
    for outcome in engine.good():
        assert is_everywhere(resolved(outcome.install.pods_of("router"))["BATON_HOST"])


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
            assert pods.labels == selector["matchLabels"], (
                "a label of the version would start all anew at every upgrade"
            )
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
            scraped = [each for each in workloads if selects(monitor["spec"]["selector"], each.labels)]
            assert scraped and all("http" in each.ports for each in scraped)


def test_budgets_are_there_unless_they_are_not_wanted(engine: Engine) -> None:
    roles = {
        budget["metadata"]["labels"][COMPONENT] for budget in engine.outcomes["mixed"].install.of("PodDisruptionBudget")
    }
    assert roles == {"router", *NODE_ROLES}
    assert engine.outcomes["no budgets"].install.of("PodDisruptionBudget") == []


def test_the_network_lets_through_every_channel_of_the_design_and_nothing_else(engine: Engine) -> None:
    stranger = Peer({"app": "cron"})
    for outcome in engine.good():
        install = outcome.install
        if not install.of("NetworkPolicy"):
            assert not outcome.values["networkPolicy"]["enabled"]
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
                    port
                    for port in (ROUTER_PORT, HTTP_PORT, GRPC_PORT, KV_PORT, REDIS_PORT)
                    if install.is_allowed(other, to, port)
                ]
                assert set(reached) <= ({ROUTER_PORT} if target.role == "router" else {HTTP_PORT}), (
                    target.role,
                    reached,
                )
                if has_egress:
                    assert not install.is_allowed(to, other, 22)
        for source in workloads:
            assert install.is_allowed(peer(source, install), OUTSIDE, 53, "UDP") or source.role == "redis"


def test_a_redis_elsewhere_is_reached_at_its_port(engine: Engine) -> None:
    for case, port in {"own redis": 6380, "own redis, port left out": REDIS_PORT, "redis of a secret": 7000}.items():
        install = engine.outcomes[case].install
        for pods in install.pods():
            reached = [
                each for each in (REDIS_PORT, 6380, 7000) if install.is_allowed(peer(pods, install), OUTSIDE, each)
            ]
            assert reached == [port], (case, pods.role)


def channels(source: str, target: str, values: Values) -> set[int]:
    """Section 4 of the design, and what an operator in a router's pod dials; also what else the switches leave open."""
    policy = values.get("networkPolicy", {})
    is_free = not policy.get("egress", True)  # then whoever may scrape, or ask, may be one of ours
    scraped = policy.get("scrapers", True)
    if target == "router":
        is_open = is_free and (scraped or not policy.get("clients"))
        return {ROUTER_PORT} if is_open or source == "router" else set()
    if target == "redis":
        return set() if source == "redis" else {REDIS_PORT}
    has_nixl = "nixl" in str(values)  # whose library draws ports
    is_node = source in NODE_ROLES
    pages = {HTTP_PORT} if (is_free and scraped) or (has_nixl and is_node) or source == "router" else set()
    drawn = {ROUTER_PORT, REDIS_PORT} if has_nixl and is_node else set()
    return pages | drawn | {"router": {GRPC_PORT}, "redis": set()}.get(source, {GRPC_PORT, KV_PORT})
