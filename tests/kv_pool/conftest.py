"""The places that the contract suite runs on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kv_pool.places import FilePlace, MemoryPlace, Place, RedisPlace
from tests.registry.redis_server import RedisServer, started_redis


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One for all tests of a file."""
    with started_redis(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture(params=["memory", "file", "redis"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """An empty one of each kind."""
    match request.param:
        case "memory":
            return MemoryPlace()
        case "file":
            return FilePlace(tmp_path / "pool")
        case _:
            server: RedisServer = request.getfixturevalue("redis_server")
            server.client.flushall()
            return RedisPlace(server)
