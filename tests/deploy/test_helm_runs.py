"""What the chart's pods would run, run here: their commands, variables, ports, probes and secrets as Helm rendered them.

With TLS, keys and a password. Each pod is a process with an address of loopback of its own, and a mount namespace in which
the cluster's names are known. What it opens to others is held against the network policies. Not here: Kubernetes, so neither
containers nor Services; images: tests/compose.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import psutil
import pytest

from engine.make_model import make_model
from engine.model_sizes import SIZES
from runtime.certificates import make_authority, sign_host
from tests.deploy.chart_cases import SWITCHES, TINY, TLS, together
from tests.deploy.installs import ROOT, run_helm
from tests.deploy.pods import GRPC_PORT, HTTP_PORT, KV_PORT, NODE_ROLES, REDIS_PORT, ROUTER_PORT, Install, Peer, Pods
from tests.registry.redis_server import need_redis

PATIENCE_S: Final = 200.0  # of a machine that others use
KEY: Final = "sk-a-key-of-the-test-0123456789"
PASSWORD: Final = "A1b2C3d4"
VALUES: Final = together(
    TINY,
    TLS,
    SWITCHES["keys"],
    SWITCHES["password"],
    {
        "config": {"num_blocks": 512, "dtype": "fp32"},
        "router": {"replicas": 1, "listen": "baton-router"},  # not everywhere: others test on this machine, too
        "prefill": {"replicas": 1},
        "decode": {"replicas": 1},
    },
)


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod as a process."""

    pods: Pods
    address: str
    process: subprocess.Popen[bytes]


class Cluster:
    """One pod of each role of an install."""

    def __init__(self, install: Install, folder: Path) -> None:
        self.install = install
        self._folder = folder
        net = f"127.{random.randrange(16, 250)}.{random.randrange(250)}"
        self.addresses = {each.role: f"{net}.{i + 2}" for i, each in enumerate(install.pods())}
        self.paths = {"/model": folder / "model", "/etc/baton/tls": folder / "tls", "/etc/baton/keys": folder / "keys"}
        self._write_secrets()
        names = [(self.addresses[role], name) for role in self.addresses for name in self._names_of(role)]
        (folder / "hosts").write_text("".join(f"{address} {name}\n" for address, name in names))
        self.running: dict[str, Pod] = {}

    def start(self, role: str) -> None:
        """Start the pod's process."""
        pods, address = self.install.pods_of(role), self.addresses[role]
        command = [part.replace("$(REDIS_PASSWORD)", PASSWORD) for part in pods.container["args"]]
        if role == "redis":
            command = [*pods.container["command"], *command, "--bind", address, "--dir", str(self._folder)]
            process = self._begin(role, command)
        else:
            process = self.execute(role, *command)
        self.running[role] = Pod(pods, address, process)

    def execute(self, role: str, *words: str) -> subprocess.Popen[bytes]:
        """Run `baton …` in a pod, with the variables that it has, as `kubectl exec` does."""
        return self._begin(role, [sys.executable, "-m", "deploy.cli", *words])

    def _begin(self, role: str, command: list[str]) -> subprocess.Popen[bytes]:
        pods = self.install.pods_of(role)
        variables = {each["name"]: self._value_of(each, pods) for each in pods.container.get("env", ())}
        for name, value in variables.items():
            for other, known in variables.items():
                value = value.replace(f"$({other})", known)
            for path, real in self.paths.items():
                value = value.replace(path, str(real)) if value.startswith(path) else value
            variables[name] = value
        hosts = str(self._folder / "hosts")
        own = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', hosts]
        with (self._folder / f"{role}.log").open("ab") as log:
            return subprocess.Popen(
                [*own, *command], cwd=ROOT, env={"PATH": os.environ["PATH"]} | variables, stdout=log, stderr=log
            )

    def await_probe(self, role: str, probe: str) -> None:
        """Wait until a pod's probe would succeed."""
        asked = self.install.pods_of(role).probes[probe]
        port = self.install.pods_of(role).ports[asked["port"]]
        url = f"{asked['scheme'].lower()}://{self.addresses[role]}:{port}{asked['path']}"
        until = time.monotonic() + PATIENCE_S
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # as the kubelet asks
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(url, verify=context, timeout=5).status_code == 200:
                    return
            assert time.monotonic() < until and self.running[role].process.poll() is None, self.log(role)
            time.sleep(0.05)

    def await_pair(self) -> None:
        """Wait until the router knows both roles: it is ready before, while decode nodes would compute every prompt."""
        until = time.monotonic() + PATIENCE_S
        while self.ask_router("GET", "/ready").json()["degraded"]:
            assert time.monotonic() < until, self.log("router")
            time.sleep(0.05)

    def ask_router(self, method: str, path: str, **named: Any) -> httpx.Response:
        """A request by the Service's name in the certificate."""
        context = ssl.create_default_context(cafile=str(self.paths["/etc/baton/tls"] / "ca.crt"))
        port = self.install.pods_of("router").ports["http"]
        with httpx.Client(verify=context, timeout=PATIENCE_S) as client:
            url = f"https://{self.addresses['router']}:{port}{path}"
            return client.request(method, url, extensions={"sni_hostname": "baton-router"}, **named)

    def log(self, role: str) -> str:
        """The end of a pod's."""
        return (self._folder / f"{role}.log").read_text()[-3000:]

    def connections(self) -> set[tuple[str, str, int]]:
        """(who dialled, whom, port) of all that stand now."""
        places = {address: role for role, address in self.addresses.items()}
        found = set()
        for role, pod in self.running.items():
            for each in psutil.Process(pod.process.pid).net_connections("tcp"):
                if each.status != psutil.CONN_ESTABLISHED:
                    continue
                own, other = (
                    end.ip.removeprefix("::ffff:") for end in (each.laddr, each.raddr)
                )  # gRPC's are both kinds
                was_dialled = own == self.addresses[role] and each.laddr.port in pod.pods.ports.values()
                if other in places and not was_dialled:
                    found.add((role, places[other], each.raddr.port))
        return found

    def close(self) -> None:
        """End all of it."""
        for pod in self.running.values():
            if pod.process.poll() is None:
                pod.process.kill()
            pod.process.wait(PATIENCE_S)

    def _names_of(self, role: str) -> list[str]:
        service = f"baton-{role}"
        return [service, f"{service}-0.{service}.inference.svc.cluster.local"] if role in NODE_ROLES else [service]

    def _value_of(self, variable: dict[str, Any], pods: Pods) -> str:
        if "value" in variable:
            return str(variable["value"])
        match variable["valueFrom"]:
            case {"fieldRef": {"fieldPath": "metadata.name"}}:
                return f"baton-{pods.role}-0"
            case {"fieldRef": {"fieldPath": "status.podIP"}}:
                return self.addresses[pods.role]
            case {"secretKeyRef": {"name": "redis-password", "key": "password"}}:
                return PASSWORD
            case {"resourceFieldRef": {"resource": "requests.cpu"}}:
                return "1"
        raise AssertionError(variable)

    def _write_secrets(self) -> None:
        """What cert-manager is asked for, and the file of keys."""
        (order,) = self.install.of("Certificate")
        authority = make_authority(1)
        pair = sign_host(authority, [*order["spec"]["dnsNames"], *order["spec"]["ipAddresses"]], 1)
        files = {"ca.crt": authority.certificate, "tls.crt": pair.certificate, "tls.key": pair.key}
        self.paths["/etc/baton/tls"].mkdir()
        for name, content in files.items():
            (self.paths["/etc/baton/tls"] / name).write_bytes(content)
        self.paths["/etc/baton/keys"].mkdir()
        (self.paths["/etc/baton/keys"] / "keys").write_text(KEY + "\n")
        make_model(SIZES["llama-tiny"], "fp32", 0, self.paths["/model"] / "llama-tiny")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """All pods, ready. It needs a mount namespace, so root."""
    need_redis()
    if (
        shutil.which("unshare") is None
        or subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode
    ):
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no mount namespaces here: they are root's")
    outcome = run_helm({"": VALUES}).outcomes[""]
    assert outcome.error == ""
    made = Cluster(outcome.install, tmp_path_factory.mktemp("cluster"))
    try:
        for role in ("redis", "router", "prefill", "decode"):
            made.start(role)
        for role in ("prefill", "decode", "router"):
            made.await_probe(role, "startupProbe")
        for role in ("prefill", "decode", "router"):
            made.await_probe(role, "readinessProbe")
            made.await_probe(role, "livenessProbe")
        made.await_pair()
        yield made
    finally:
        made.close()


def ask(cluster: Cluster, key: str) -> httpx.Response:
    """A completion."""
    return cluster.ask_router(
        "POST",
        "/v1/completions",
        headers={"Authorization": f"Bearer {key}"},
        json={"model": "baton", "prompt": "Once upon a time " * 40, "max_tokens": 8, "temperature": 0},
    )


@pytest.mark.covers("X02", "X03")
def test_the_pods_serve_and_open_to_each_other_what_the_policies_let_through(cluster: Cluster) -> None:
    assert ask(cluster, "sk-of-somebody-else-0123456789").status_code == 401
    answer = ask(cluster, KEY)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 8, answer.text
    wanted = {
        ("router", "prefill", GRPC_PORT),
        ("router", "decode", GRPC_PORT),
        ("prefill", "decode", GRPC_PORT),
        ("prefill", "decode", KV_PORT),
        *((role, "redis", REDIS_PORT) for role in ("router", "prefill", "decode")),
    }
    until = time.monotonic() + PATIENCE_S
    opened = cluster.connections()
    while not wanted <= opened:  # who stood still for too long is called anew
        assert time.monotonic() < until, opened
        time.sleep(0.05)
        opened |= cluster.connections()
    for source, target, port in opened:
        labels = [cluster.install.pods_of(role).labels for role in (source, target)]
        assert cluster.install.is_allowed(Peer(labels[0]), Peer(labels[1]), port), (source, target, port)


def test_who_looks_at_the_cluster_from_a_routers_pod_finds_nothing_wrong_and_is_let_through(cluster: Cluster) -> None:
    asked = cluster.execute("router", "doctor", "https://baton-router:8000", "--api-key", KEY)
    assert asked.wait(PATIENCE_S) == 0 and "baton doctor: nothing is wrong" in cluster.log("router"), cluster.log(
        "router"
    )
    router = cluster.install.pods_of("router").labels
    for role, port in {"router": ROUTER_PORT, "prefill": HTTP_PORT, "decode": HTTP_PORT}.items():
        assert cluster.install.is_allowed(Peer(router), Peer(cluster.install.pods_of(role).labels), port)


def test_a_pod_that_is_told_to_end_drains_in_the_time_that_it_has(cluster: Cluster) -> None:
    asked = cluster.execute("router", "drain", "baton-decode-0")
    assert asked.wait(PATIENCE_S) == 0, cluster.log("router")
    assert cluster.running["decode"].process.wait(PATIENCE_S) == 0 and "drain_over" in cluster.log("decode")
    for role in ("prefill", "router"):
        pod = cluster.running[role]
        pod.process.send_signal(signal.SIGTERM)
        assert pod.process.wait(pod.pods.spec["terminationGracePeriodSeconds"]) == 0, cluster.log(role)
