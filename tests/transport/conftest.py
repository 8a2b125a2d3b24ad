"""The nets that the contract suite runs on."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.transport.net import MemoryNet, Net, ShmNet, ZmqNet


@pytest.fixture(params=["memory", "zmq", "shm", "zmq without checksums", "shm without checksums"])
def net(request: pytest.FixtureRequest) -> Iterator[Net]:
    """A fresh net of each kind; its nodes are stopped afterwards."""
    kinds: dict[str, Callable[[], Net]] = {
        "memory": MemoryNet,
        "zmq": ZmqNet,
        "shm": ShmNet,
        "zmq without checksums": lambda: ZmqNet(checksums=False),
        "shm without checksums": lambda: ShmNet(checksums=False),
    }
    with kinds[request.param]() as made:
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
def unchecked_shm_net() -> Iterator[ShmNet]:
    """A net over shared memory that computes no checksums."""
    with ShmNet(checksums=False) as made:
        yield made


@pytest.fixture
def shm_net() -> Iterator[ShmNet]:
    """A net over shared memory."""
    with ShmNet() as made:
        yield made
