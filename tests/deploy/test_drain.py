"""`baton drain` against a registry and a node of the test's: whom it asks, what it prints, and its exit codes."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc.aio
import pytest

from deploy.drain import main
from node.ending import Means
from proto import baton_pb2 as pb
from proto.baton_pb2_grpc import RegistryStub
from runtime.redis_store import RedisStore
from tests.deploy.test_heedless import unwritten
from tests.node.grpc_node import INCARNATION, GrpcNode, serve_node
from tests.registry.redis_server import started_redis
from tests.registry.test_listing import entry
from tests.registry.test_registry import RunningRegistry, running_registry
from tests.without_root import without_root

LISTED_S = 0.3  # between two repetitions


async def _announce() -> None:
    pass


async def drained(node: GrpcNode) -> None:
    """What the node's process does, with a core that drains at once."""
    node.ending.has_drained.set()
    await node.ending.run(Means(_announce, node.events.append, lambda: 0, lambda: ""))


async def drained_and_writing(node: GrpcNode) -> None:
    """There is a KV pool, which takes its time for what is staged."""
    await drained(node)
    await asyncio.sleep(1)


async def drained_and_stuck(node: GrpcNode) -> None:
    """It never ends."""
    await drained(node)
    await asyncio.Event().wait()


async def hung_up(node: GrpcNode) -> None:
    """The process dies in the middle."""
    while not node.ending.is_draining:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def told_by_up(*registries: str, namespace: str | None = None) -> str:
    """What a cluster.json says of its routers."""
    routers = [{"registry": each} for each in registries]
    return json.dumps({"router": routers[0], "routers": routers, "registry_namespace": namespace})


def exit_code(arguments: list[str]) -> int:
    """Of `baton drain` with these."""
    try:
        return main(arguments)
    except SystemExit as end:
        assert isinstance(end.code, int)
        return end.code


def run(
    arguments: Callable[[RunningRegistry, GrpcNode], list[str]],
    until_the_end: Callable[[GrpcNode], Coroutine[None, None, None]] = drained,
    incarnation: int = INCARNATION,
    called: Callable[[list[str]], int] = exit_code,
) -> int:
    """The exit code with these arguments, where `decode-0` is listed; the node's port is closed at its end."""

    async def scene() -> int:
        async with asyncio.timeout(100), running_registry() as registry:
            async with serve_node(pb.ROLE_DECODE) as node, grpc.aio.insecure_channel(registry.address) as channel:
                listed = entry(incarnation=incarnation)
                listed.grpc_address = node.address
                await RegistryStub(channel).Register(listed)
                command = asyncio.create_task(asyncio.to_thread(called, arguments(registry, node)))
                end = asyncio.create_task(until_the_end(node))
                await asyncio.wait([command, end], return_when=asyncio.FIRST_COMPLETED)
            end.cancel()
            return await command

    return asyncio.run(scene())


@pytest.mark.covers("D08")
def test_a_node_is_found_by_its_name_and_has_gone_when_the_command_comes_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def by_run_dir(registry: RunningRegistry, node: GrpcNode) -> list[str]:
        (tmp_path / "cluster.json").write_text(told_by_up("127.0.0.1:1", registry.address))
        return ["decode-0", "--run-dir", str(tmp_path)]

    assert run(lambda registry, node: ["decode-0", "--router", f"127.0.0.1:1,{registry.address}"]) == 0  # one is down
    assert run(by_run_dir) == 0
    assert (
        capsys.readouterr().out.splitlines()
        == [
            "baton drain: decode-0: 0 attempts and 0 leases left, 25 s",
            "baton drain: decode-0 has drained",
        ]
        * 2
    )


@pytest.mark.covers("D08")
def test_a_node_is_called_at_its_address_with_the_operators_patience(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(lambda registry, node: ["--node", node.address, "--timeout-s", "7"]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first.endswith("0 attempts and 0 leases left, 7 s") and last.endswith(" has drained")


@pytest.mark.covers("D08")
def test_a_full_disk_behind_stdout_ends_no_wait_for_a_node() -> None:
    def on_a_full_disk(arguments: list[str]) -> int:
        code, told = unwritten(["deploy.cli", "drain", *arguments])
        assert told == ""
        return code

    assert run(lambda registry, node: ["decode-0", "--router", registry.address], called=on_a_full_disk) == 0


@pytest.mark.covers("D08")
def test_a_node_that_dies_before_it_has_drained_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(lambda registry, node: ["decode-0", "--router", registry.address], hung_up) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "ended before it had drained" in line or "hung up before it had drained" in line


@pytest.mark.covers("D08")
def test_a_container_of_which_not_even_the_address_is_left_is_not_waited_for_without_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No host answers there any more, so no connection is refused: Linux alone would try for two minutes."""

    async def unanswered(*_: object, **__: object) -> tuple[object, object]:
        await asyncio.get_running_loop().create_future()
        raise AssertionError("nobody answers")

    monkeypatch.setattr("deploy.drain.END_TIMEOUT_S", 0.1)
    monkeypatch.setattr("deploy.drain.asyncio.open_connection", unanswered)
    assert run(lambda registry, node: ["decode-0", "--router", registry.address, "--timeout-s", "0.5"]) == 0
    assert capsys.readouterr().out.endswith("baton drain: decode-0 has drained\n")


@pytest.mark.covers("D08")
def test_a_node_that_still_writes_to_its_kv_pool_is_waited_for_as_long_as_its_drain_may_take(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop of docs/draining.md ended in the middle of a restart, over a node that had drained well."""
    monkeypatch.setattr("deploy.drain.END_TIMEOUT_S", 0.5)
    assert run(lambda registry, node: [node.address, "--timeout-s", "60"], drained_and_writing) == 0
    assert run(lambda registry, node: [node.address, "--timeout-s", "0.5"], drained_and_stuck) == 1
    assert " has drained, but still listens at 127.0.0.1:" in capsys.readouterr().err


@contextmanager
def listing_in(url: str, namespace: str) -> Iterator[Callable[[pb.NodeEntry], None]]:
    """What has a Redis list a node until the end, by repeating it as nodes do: what is read lasts for 1.5 s."""
    over, threads = threading.Event(), list[threading.Thread]()

    def list_node(listed: pb.NodeEntry) -> None:
        is_listed = threading.Event()

        async def register() -> None:
            store = RedisStore(url, namespace, ttl_s=60.0, timeout_s=60.0)
            while not over.is_set():
                assert await store.register(listed) == ""
                is_listed.set()
                over.wait(LISTED_S)
            await store.hang_up()

        threads.append(threading.Thread(target=asyncio.run, args=(register(),)))  # a loop of its own
        threads[-1].start()
        assert is_listed.wait(60)

    try:
        yield list_node
    finally:
        over.set()
        for thread in threads:
            thread.join()


@pytest.mark.covers("D08")
def test_a_run_directory_may_name_a_redis_and_what_it_keeps_secret_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = "redis://:hunter2@{host}:{port}/0"
    with (
        started_redis(tmp_path, "--requirepass", "hunter2", url=url) as redis,
        listing_in(redis.url, "one") as list_node,
    ):
        name = redis.url.replace(":hunter2@", "")
        (tmp_path / "cluster.json").write_text(told_by_up(name, name, namespace="one"))
        words = ["decode-0", "--run-dir", str(tmp_path)]

        def by_both(registry: RunningRegistry, node: GrpcNode) -> list[str]:
            listed = entry(incarnation=INCARNATION)
            listed.grpc_address = node.address
            list_node(listed)
            return [*words, "--registry", redis.url]

        line = fails_with_2(capsys, exit_code(words))
        assert line.startswith(f"--registry {name}: cannot be read: ") and line.endswith("with them, give --registry")
        assert run(by_both) == 0
        assert "decode-0 has drained" in capsys.readouterr().out
        redis.client.config_set("requirepass", "")
        assert (
            fails_with_2(capsys, exit_code(["decode-1", *words[1:]])) == "decode-1: no such node; there are: decode-0"
        )


@pytest.mark.covers("D08")
def test_a_node_that_registers_in_redis_is_found_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with started_redis(tmp_path) as redis, listing_in(redis.url, "baton") as list_node:

        def by_redis(registry: RunningRegistry, node: GrpcNode) -> list[str]:
            listed = entry(incarnation=INCARNATION)
            listed.grpc_address = node.address
            list_node(listed)
            return ["decode-0", "--registry", redis.url]

        assert run(by_redis) == 0
    assert "decode-0 has drained" in capsys.readouterr().out
    line = fails_with_2(capsys, exit_code(["decode-0", "--registry", "redis://127.0.0.1:1/0"]))
    assert line == "--registry redis://127.0.0.1:1/0: nobody answers there"


@pytest.mark.covers("D08")
def test_a_redis_that_is_busy_for_a_moment_is_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with started_redis(tmp_path) as redis:
        redis.freeze()
        busy = threading.Timer(1.0, redis.thaw)  # longer than nodes wait, which ask again
        busy.start()
        line = fails_with_2(capsys, exit_code(["decode-0", "--registry", redis.url]))
        busy.join()
    assert line == "decode-0: no such node; there are: none"


def fails_with_2(capsys: pytest.CaptureFixture[str], code: int) -> str:
    assert code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("baton drain: ")


@pytest.mark.covers("D08")
def test_what_the_operator_can_mend_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown = fails_with_2(capsys, run(lambda registry, node: ["decode-1", "--router", registry.address]))
    assert unknown == "decode-1: no such node; there are: decode-0"
    replaced = fails_with_2(
        capsys, run(lambda registry, node: ["decode-0", "--router", registry.address], incarnation=5)
    )
    assert replaced.startswith("decode-0: ") and "another process" in replaced
    assert fails_with_2(capsys, exit_code(["127.0.0.1:1"])) == "127.0.0.1:1: nobody answers there"
    assert fails_with_2(capsys, exit_code(["d", "--router", "127.0.0.1:1"])).endswith("nobody answers there")
    in_run_dir = ["d", "--run-dir", str(tmp_path)]
    assert "no cluster of `baton up`" in fails_with_2(capsys, exit_code(in_run_dir))
    (tmp_path / "cluster.json").write_text("[" * 100_000)
    assert "no cluster of `baton up`" in fails_with_2(capsys, exit_code(in_run_dir))
    (tmp_path / "cluster.json").write_text(told_by_up("127.0.0.1:1"))
    gone = fails_with_2(capsys, exit_code(in_run_dir))
    assert gone == f"--run-dir {tmp_path}: its router 127.0.0.1:1: nobody answers there"
    (tmp_path / "cluster.json").chmod(0)
    with without_root(tmp_path):
        closed = fails_with_2(capsys, exit_code(["d", "--run-dir", "."]))
    assert closed == "--run-dir .: cluster.json cannot be read: Permission denied"
    assert "--router HOST:PORT, --registry URL or --run-dir DIR is missing" in fails_with_2(
        capsys, exit_code(["decode-0"])
    )
    assert "must be HOST:PORT" in fails_with_2(capsys, exit_code(["decode-0", "--router", "nowhere"]))
    assert "NODE is missing: the node's name" in fails_with_2(capsys, exit_code([]))
