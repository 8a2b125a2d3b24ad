"""By which host others dial a node: what it is told, where it listens, or the way to its registry."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proto import baton_pb2 as pb
from runtime.advertise import (
    HostPort,
    NoAddress,
    advertise_problem,
    known_host,
    source_towards,
    split_address,
    with_port,
)
from runtime.listing import entry_problem
from runtime.registry_choice import registry_servers
from tests.architecture.source_tree import DEMO_MODEL

ROUTER = ("router-a", 8001)
HOSTS = st.one_of(
    st.ip_addresses().map(str),
    st.text("abz09.-_:[]%/ ü", max_size=20),
    st.from_regex(r"[a-z0-9_-]{1,64}(\.[a-z0-9-]{1,64}){0,3}", fullmatch=True),
)


@pytest.mark.parametrize("host", ["node-a", "decode-0.decode.baton.svc", "10.0.0.5", "127.0.0.1", "::1", "2001:db8::5"])
def test_a_name_or_an_address_can_be_advertised(host: str) -> None:
    assert advertise_problem(host) is None
    assert split_address(with_port(host, 80)) == (host, 80)


@pytest.mark.parametrize(
    "host",
    [
        "",
        "a:1",
        "10.0.0.5:8003",
        "[::1]",
        "http://a",
        "a b",
        "a..b",
        "10.0.0",
        "0.0.0.0",
        "::",
        "224.0.0.1",
        "fe80::1%lo",
    ],
)
def test_what_nobody_can_dial_is_one_sentence(host: str) -> None:
    told = advertise_problem(host)
    assert told is not None and told.startswith(f"--advertise {host}: must be ") and "\n" not in told


@given(HOSTS)
def test_what_can_be_advertised_is_what_a_registry_takes(host: str) -> None:
    if advertise_problem(host) is None:
        assert registers_at(with_port(host, 8003))


def registers_at(address: str) -> bool:
    fingerprint = pb.Fingerprint(architecture="a", dtype="a", weights="a", kernels="a")
    fingerprint.num_layers = fingerprint.num_kv_heads = fingerprint.head_dim = fingerprint.block_size = 1
    entry = pb.NodeEntry(node=pb.PeerId(name="n", incarnation=1), role=pb.ROLE_DECODE, fingerprint=fingerprint)
    entry.grpc_address = entry.http_address = address
    entry.num_blocks = entry.max_num_seqs = entry.max_model_len = 1
    return entry_problem(entry) is None


def never(target: HostPort, takes_ipv6: bool) -> str:
    raise AssertionError


def test_who_listens_at_one_address_is_known_by_it() -> None:
    for host in ("127.0.0.1", "10.0.0.5", "node-a", "::1"):
        assert known_host("n", host, [ROUTER], never) == host


@pytest.mark.parametrize(("host", "takes_ipv6"), [("0.0.0.0", False), ("::", True), ("0:0::0", True)])
def test_who_listens_everywhere_is_known_by_the_address_towards_the_first_registry_that_is_found(
    host: str, takes_ipv6: bool, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[tuple[HostPort, bool]] = []
    waited: list[float] = []

    def find(target: HostPort, ipv6: bool) -> str:
        asked.append((target, ipv6))
        if len(asked) < 6:
            raise OSError(101, "Network is unreachable")
        return "10.0.0.6"

    assert known_host("n", host, [ROUTER, ("router-b", 8001)], find, waited.append) == "10.0.0.6"
    assert asked == [(ROUTER, takes_ipv6), (("router-b", 8001), takes_ipv6)] * 3
    assert len(waited) == 2
    told = [record.getMessage() for record in caplog.records]
    assert told[-1].endswith("advertised node=n host=10.0.0.6 towards=router-b:8001") or "INFO" not in told[-1]
    assert [line for line in told if "no_way_yet" in line and "router-a:8001: Network is unreachable" in line]


def test_loopback_and_no_registry_to_go_to_end_the_search(tmp_path: Path) -> None:
    for found in ("127.0.0.1", "::1", "127.0.1.1"):
        with pytest.raises(NoAddress, match=r"the way to router-a:8001 is loopback, .* --advertise HOST says"):
            known_host("n", "0.0.0.0", [ROUTER], lambda target, ipv6, found=found: found)  # type: ignore[misc]
    with pytest.raises(NoAddress, match="cannot be told: --advertise HOST says it"):
        known_host("n", "::", registry_servers("unix:///run/redis.sock", ()))


def test_registries_are_where_the_flags_say() -> None:
    assert registry_servers("embedded", ("a:1", "[::1]:2")) == [("a", 1), ("::1", 2)]
    assert registry_servers("redis://:secret@cache/3", ()) == [("cache", 6379)]
    assert registry_servers("rediss://[::1]:7000/3", ()) == [("::1", 7000)]


def test_the_kernel_tells_the_way() -> None:
    assert source_towards(("127.0.0.2", 9), False) in ("127.0.0.1", "127.0.0.2")
    for name in ("no-such-host.invalid", "a..b"):
        with pytest.raises(OSError, match=r".") as error:
            source_towards((name, 9), True)
        assert error.value.strerror


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--host", "0.0.0.0"), "--host 0.0.0.0: the way to 127.0.0.1:9 is loopback"),
        (("--host", "0.0.0.0", "--advertise", "a:1"), "--advertise a:1: must be a host name or an address"),
        (("--host", ""), "--host: must be an address of this machine"),
        (("--host", "300.1.1.1"), "--host 300.1.1.1: must be a host name or an address"),
    ],
)
def test_a_node_that_cannot_be_dialled_does_not_start(flags: tuple[str, ...], sentence: str) -> None:
    command = [sys.executable, "-m", "decode_node", "--model", str(DEMO_MODEL), "--router", "127.0.0.1:9", *flags]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1, ended.stderr
    assert ended.stderr.startswith(f"baton decode: {sentence}")
