"""The nets that the contract suite runs on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import pytest

from connector import accepting, nixl_sender, sender_thread, shm_sender, two_ends, zmq_options, zmq_sender
from connector.nixl_agent import is_installed
from tests.transport.net import MemoryNet, Net, NixlNet, ShmNet, ZmqNet

KINDS: Final[dict[str, Callable[[], Net]]] = {
    "memory": MemoryNet,
    "zmq": ZmqNet,
    "shm": ShmNet,
    "zmq, encrypted": lambda: ZmqNet(is_encrypted=True),
    "zmq without checksums": lambda: ZmqNet(checksums=False),
    "shm without checksums": lambda: ShmNet(checksums=False),
    "memory, one-sided": lambda: MemoryNet(is_one_sided=True),
    "nixl, one-sided": NixlNet,
    "nixl without checksums, one-sided": lambda: NixlNet(checksums=False),
}


PATIENCE_S: Final = 100.0


@pytest.fixture
def nodes_own_times() -> None:
    """What is tested is when a node gives up."""


@pytest.fixture(autouse=True)
def patience(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless that is tested nobody gives anybody up, however long this process stands still in the middle of a handshake."""
    if "nodes_own_times" in request.fixturenames:
        return
    for module, name in (
        (zmq_options, "OPEN_S"),
        (zmq_sender, "OPEN_S"),
        (shm_sender, "_OPEN_S"),
        (nixl_sender, "_OPEN_S"),
        (sender_thread, "FIND_S"),
        (accepting, "_HELLO_S"),
    ):
        assert hasattr(module, name)
        monkeypatch.setattr(module, name, PATIENCE_S)
    monkeypatch.setattr(zmq_options, "SILENCE_MS", int(PATIENCE_S * 1000))
    monkeypatch.setattr(two_ends, "_STOP_S", PATIENCE_S)


def made(kind: str) -> Net:
    """A net of a kind; skips the test where its transport is not installed."""
    if kind.startswith("nixl") and not is_installed():
        pytest.skip("NIXL is not installed: pip install -c constraints.txt -e '.[nixl]'")
    return KINDS[kind]()


@pytest.fixture(params=KINDS)
def net(request: pytest.FixtureRequest) -> Iterator[Net]:
    """A fresh net of each kind; its nodes are stopped afterwards."""
    with made(request.param) as net:
        yield net


@pytest.fixture(params=[name for name in KINDS if "one-sided" not in name])
def two_sided_net(request: pytest.FixtureRequest) -> Iterator[Net]:
    """The same of those whose receiver takes each write by itself."""
    with made(request.param) as net:
        yield net


@pytest.fixture
def nixl_net() -> Iterator[NixlNet]:
    """A net whose bytes NIXL moves; skips the test where it is not installed."""
    with made("nixl, one-sided") as net:
        assert isinstance(net, NixlNet)
        yield net


@pytest.fixture
def one_sided_net() -> Iterator[MemoryNet]:
    """A net whose senders write into their receivers' memory, and whose steps the test takes."""
    with MemoryNet(is_one_sided=True) as made:
        yield made


@pytest.fixture
def memory_net() -> Iterator[MemoryNet]:
    """A net whose steps the test takes."""
    with MemoryNet() as made:
        yield made


@pytest.fixture
def zmq_net() -> Iterator[ZmqNet]:
    """A net over real sockets."""
    with ZmqNet() as made:
        yield made


@pytest.fixture
def curve_net() -> Iterator[ZmqNet]:
    """A net over real sockets whose links are encrypted."""
    with ZmqNet(is_encrypted=True) as made:
        yield made


@pytest.fixture
def unchecked_shm_net() -> Iterator[ShmNet]:
    """A net over shared memory that computes no checksums."""
    with ShmNet(checksums=False) as made:
        yield made


@pytest.fixture
def shm_net() -> Iterator[ShmNet]:
    """A net over shared memory."""
    with ShmNet() as made:
        yield made
