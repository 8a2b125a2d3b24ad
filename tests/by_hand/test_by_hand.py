"""docs/by_hand.md, word for word but for paths and addresses: a cluster on four hosts, of which one is cut off, one restarted."""

from __future__ import annotations

import json
import re
import shutil
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from bench.fleet import START_BOUND_S, wait_until
from bench.namespaces import network, why_not
from tests.by_hand.hosts import ROOT, Host

PAGE: Final = (ROOT / "docs" / "by_hand.md").read_text(encoding="utf-8")
BLOCKS: Final = re.findall(r"^```\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
MAKE, USER, KNOBS, ROUTER, PREFILL, DECODE, LOOK, RESTART, UNTIL = BLOCKS
(DRAIN,) = re.findall(r"`(baton drain decode-a[^`]+)`", PAGE)
ADDRESSES: Final = dict(re.findall(r"`([a-z]+-[ab])` \((10\.0\.0\.\d)\)", PAGE))
PORTS: Final = {
    role: set(map(int, re.findall(rf"^\| (\d+) \| a {role}", PAGE, re.MULTILINE))) for role in ("router", "node")
}
NUM_TOKENS: Final = 1500
# Behind the page's own: what makes a test of it.
OURS: Final = "BATON_THREADS=1\nBATON_DTYPE=fp32\nBATON_MAX_MODEL_LEN=2048\nBATON_NUM_BLOCKS=400\n"

pytestmark = pytest.mark.skipif(
    any(shutil.which(each) is None for each in ("curl", "openssl", "bash")), reason="needs curl, openssl and bash"
)


@dataclass(frozen=True, slots=True)
class Town:
    """The hosts, and a client beside them."""

    hosts: dict[str, Host]
    client: httpx.Client
    unplug: Callable[[str], None]
    plug: Callable[[str], None]

    @property
    def router(self) -> Host:
        return self.hosts["router-a"]

    def state(self, name: str) -> dict[str, Any]:
        """Of the node on a host."""
        found: dict[str, Any] = self.client.get(f"https://{self.hosts[name].address}:8002/state").json()
        return found

    def names(self) -> set[str]:
        """The nodes with which the router has a session."""
        nodes = self.client.get("/state").json()["nodes"]
        return {node["name"] for node in nodes if node["session"] == "up"}

    def look(self, command: str) -> str:
        """Run it as an operator on the router's host does."""
        return self.router.run(f"{LOOK.splitlines()[0]}\n{command}")


@pytest.fixture(scope="module")
def town(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    """As the page says; the test itself is who copies from host to host."""
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("by_hand")
    model = shutil.copytree(tiny_model, folder / "my-model")
    with network(tuple(ADDRESSES)) as net:
        replaced = {ADDRESSES[name]: net.address(name) for name in ADDRESSES} | {"/srv/models/my-model": str(model)}
        hosts = {name: Host(name, folder, net, replaced) for name in ADDRESSES}
        router = hosts["router-a"]
        router.run(MAKE)
        for name, host in hosts.items():
            shutil.copytree(router.folder / "certs" / name, host.folder / "etc" / "tls")
            (host.folder / "etc" / "baton.env").write_text(host.here(KNOBS) + OURS)
        shutil.copy(router.folder / "keys", router.folder / "etc" / "keys")
        key = (router.folder / "keys").read_text().split()[0]
        trusted = ssl.create_default_context(cafile=str(router.folder / "certs" / "ca.crt"))
        client = httpx.Client(
            base_url=f"https://{router.address}:8000",
            verify=trusted,
            headers={"Authorization": f"Bearer {key}"},
            timeout=60,
            trust_env=False,
        )
        try:
            copy = ROUTER.splitlines()[0]
            for name, host in hosts.items():
                block = {"router": ROUTER, "prefill": f"{copy}\n{PREFILL}", "decode": f"{copy}\n{DECODE}"}
                host.run(block[name.partition("-")[0]])
            made = Town(hosts, client, net.unplug, net.plug)
            wait_until("the router listens", lambda: is_up(made), START_BOUND_S)
            nodes = {"prefill-a-prefill-0", "decode-a-decode-0", "decode-b-decode-0"}
            wait_until("every node is up", lambda: made.names() == nodes, START_BOUND_S)
            yield made
        except BaseException:
            for host in hosts.values():
                for unit in host.processes:
                    print(f"{host.name} {unit}:\n{host.log(unit)[-2000:]}")  # noqa: T201 (shown with the failure)
            raise
        finally:
            client.close()
            for host in hosts.values():
                host.end()


def is_up(town: Town) -> bool:
    try:
        return town.client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def body(seed: int) -> dict[str, Any]:
    return {
        "model": "my-model",
        "prompt": [(7 * seed + index) % 250 for index in range(90)],
        "max_tokens": NUM_TOKENS,
        "seed": seed,
        "temperature": 1.0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def streamed(town: Town, seed: int, fault: Callable[[str], None]) -> list[int]:
    """A stream's tokens; `fault` is done to the host that decodes it, once it runs there."""
    token_ids: list[int] = []
    was_hurt = False
    with town.client.stream("POST", "/v1/completions", json=body(seed) | {"stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                token_ids += json.loads(line.removeprefix("data: "))["choices"][0]["completion_token_ids"]
            if not was_hurt and len(token_ids) > 20:
                (runs,) = (name for name in ("decode-a", "decode-b") if town.state(name)["running"])
                fault(runs)
                assert len(token_ids) < NUM_TOKENS
                was_hurt = True
    assert was_hurt
    return token_ids


def whole(town: Town, seed: int) -> list[int]:
    """The same of a request that nothing happens to."""
    choice = town.client.post("/v1/completions", json=body(seed)).json()["choices"][0]
    token_ids: list[int] = choice["completion_token_ids"]
    return token_ids


@pytest.mark.covers("X02", "X03")
def test_what_the_page_says_to_look_at_is_well_and_kv_crosses_between_hosts(town: Town) -> None:
    told = town.router.run(LOOK)
    assert "baton doctor: nothing is wrong" in told
    assert json.loads(told.splitlines()[-1])["usage"]["completion_tokens"] > 0
    sent = town.state("prefill-a")["transport"]["bytes_sent_over"]
    assert sent["zmq"] > 0 and not sent.get("shm"), "hosts do not share memory"
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://{town.router.address}:8000/health", trust_env=False)
    assert town.client.get("/v1/models", headers={"Authorization": "Bearer nobody"}).status_code == 401


@pytest.mark.covers("X04")
def test_each_node_listens_on_the_pages_ports_and_tells_the_address_that_its_host_has(town: Town) -> None:
    nodes = {node["name"]: node for node in town.client.get("/state").json()["nodes"]}
    for name, host in town.hosts.items():
        (unit,) = host.processes
        role = name.partition("-")[0]
        assert host.listening_ports(unit) == PORTS["router" if role == "router" else "node"]
        if role != "router":
            told = f"advertised node={name}-{role}-0 host={host.address} towards={town.router.address}:8001"
            assert told in host.log(unit)
            assert nodes[f"{name}-{role}-0"]["http"] == f"{host.address}:8002"


@pytest.mark.covers("C04", "R09")
def test_a_host_that_is_cut_off_costs_no_stream_a_token_and_comes_back(town: Town) -> None:
    cut: list[str] = []

    def cut_off(name: str) -> None:
        town.unplug(name)
        cut.append(name)

    token_ids = streamed(town, 1, cut_off)
    assert f"{cut[0]}-decode-0" not in town.names()
    town.plug(cut[0])
    wait_until("the host is back", lambda: f"{cut[0]}-decode-0" in town.names(), START_BOUND_S)
    assert len(token_ids) == NUM_TOKENS and whole(town, 1) == token_ids


@pytest.mark.covers("C07", "D08")
def test_a_new_version_goes_in_under_a_stream_and_a_node_is_drained_for_good(town: Town) -> None:
    """Last: a node has gone."""
    restarted: list[str] = []

    def restart(name: str) -> None:
        town.hosts[name].run(RESTART)
        restarted.append(name)

    token_ids = streamed(town, 2, restart)
    assert "drain_over was_cut_short=False" in town.hosts[restarted[0]].log("baton-decode@0")
    town.look(UNTIL.replace("decode-a", restarted[0]))
    assert whole(town, 2) == token_ids
    assert town.look(DRAIN).endswith("baton drain: decode-a-decode-0 has drained\n")
    assert town.hosts["decode-a"].processes["baton-decode@0"].wait(10) == 0
