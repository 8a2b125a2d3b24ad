"""The nets that the contract suite runs on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.transport.net import MemoryNet, Net, ZmqNet


@pytest.fixture(params=["memory", "zmq"])
def net(request: pytest.FixtureRequest) -> Iterator[Net]:
    """A fresh net of each kind; its nodes are stopped afterwards."""
    made: Net = MemoryNet() if request.param == "memory" else ZmqNet()
    with made:
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
