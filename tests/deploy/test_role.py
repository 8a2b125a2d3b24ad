"""`baton role` against a registry and a node of the test's: whom it refuses to change, what it prints, and its exit codes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from itertools import combinations_with_replacement, product

import grpc.aio
import pytest

from deploy.role import find_lack, main
from node.ending import Means
from proto import baton_pb2 as pb
from proto.baton_pb2_grpc import RegistryStub
from tests.deploy.test_heedless import unwritten
from tests.node.grpc_node import INCARNATION, GrpcNode, serve_node
from tests.node.scripted_core import ScriptedCore
from tests.registry.test_listing import entry
from tests.registry.test_registry import RunningRegistry, running_registry


async def _announce() -> None:
    pass


async def changed(node: GrpcNode) -> None:
    """What the node's process does, with a core that drains at once."""
    node.ending.has_drained.set()
    if await node.ending.run(Means(_announce, node.events.append, lambda: 0, lambda: "")) is not None:
        node.ending.take_up(ScriptedCore())
        node.ending.tell_changed()
    await asyncio.Event().wait()


async def told_to_end(node: GrpcNode) -> None:
    """A signal comes before it has drained."""
    while not node.ending.is_draining:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    node.ending.ask("SIGTERM", 0)
    await changed(node)


def other(name: str, role: pb.Role.ValueType, port: int) -> pb.NodeEntry:
    """A node that is listed beside `decode-0`."""
    listed = entry(name, port=port)
    listed.role = role
    return listed


def exit_code(arguments: list[str]) -> int:
    """Of `baton role` with these."""
    try:
        return main(arguments)
    except SystemExit as end:
        assert isinstance(end.code, int)
        return end.code


def run(
    *words: str,
    others: Sequence[pb.NodeEntry] = (other("m", pb.ROLE_MIXED, 7001),),
    until_the_end: Callable[[GrpcNode], Coroutine[None, None, None]] = changed,
    incarnation: int = INCARNATION,
    called: Callable[[list[str]], int] = exit_code,
) -> int:
    """The exit code with these words behind the node's name and before its router, where `decode-0` is listed."""

    async def scene() -> int:
        async with (
            asyncio.timeout(100),
            running_registry() as registry,
            serve_node(pb.ROLE_DECODE) as node,
            grpc.aio.insecure_channel(registry.address) as channel,
        ):
            await _list(channel, node, others, incarnation)
            end = asyncio.create_task(until_the_end(node))
            code = await asyncio.to_thread(called, _arguments(words, registry, node))
            end.cancel()
            return code

    return asyncio.run(scene())


def _arguments(words: Sequence[str], registry: RunningRegistry, node: GrpcNode) -> list[str]:
    if words[0] == "ADDRESS":
        return [node.address, *words[1:]]
    return ["decode-0", *words, "--router", registry.address]


async def _list(channel: grpc.aio.Channel, node: GrpcNode, others: Sequence[pb.NodeEntry], incarnation: int) -> None:
    listed = entry(incarnation=incarnation)
    listed.grpc_address = node.address
    for each in (listed, *others):
        assert not (await RegistryStub(channel).Register(each)).refused


@pytest.mark.covers("C11")
def test_a_node_is_changed_and_serves_when_the_command_comes_back(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("prefill", "--timeout-s", "7") == 0
    lines = ["decode-0: 0 attempts and 0 leases left, 7 s", "decode-0 is a prefill node"]
    assert capsys.readouterr().out.splitlines() == [f"baton role: {line}" for line in lines]
    assert run("decode", others=()) == 0, "it is one: nothing happens"
    assert capsys.readouterr().out == "baton role: decode-0 is a decode node\n"
    assert run("ADDRESS", "mixed") == 0
    assert capsys.readouterr().out.endswith(" is a mixed node\n")


@pytest.mark.covers("C11")
def test_a_full_disk_behind_stdout_ends_no_wait_for_a_change() -> None:
    def on_a_full_disk(arguments: list[str]) -> int:
        code, told = unwritten(["deploy.cli", "role", *arguments])
        assert told == ""
        return code

    assert run("prefill", called=on_a_full_disk) == 0


@pytest.mark.covers("C11")
def test_the_last_of_its_kind_is_not_changed_unless_it_is_forced(capsys: pytest.CaptureFixture[str]) -> None:
    for others in ((), (other("p", pb.ROLE_PREFILL, 7001),)):
        assert run("prefill", others=others) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("baton role: decode-0 is the last node that decodes: ")
    assert run("mixed", "--force", others=()) == 0


@pytest.mark.covers("C11")
def test_a_change_that_came_to_something_else_is_exit_code_1_and_what_can_be_mended_is_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("prefill", until_the_end=told_to_end) == 1
    assert capsys.readouterr().err == "baton role: decode-0 was told to end, and has not changed its role\n"
    assert run("prefill", incarnation=5) == 2
    assert capsys.readouterr().err.endswith(": ChangeRole is meant for another process\n"), "and no gRPC code before it"
    for words, sentence in (
        ([], "NODE is missing: the node's name, such as decode-0, or HOST:PORT of its gRPC port"),
        (["decode-0", "--router", "127.0.0.1:1"], "the role is missing: prefill, decode or mixed"),
        (["decode-0", "router", "--router", "127.0.0.1:1"], "must be one of prefill, decode, mixed"),
        (["decode-0", "prefill"], "--router HOST:PORT, --registry URL or --run-dir DIR is missing"),
        (["decode-0", "prefill", "--router", "127.0.0.1:1"], "nobody answers there"),
    ):
        assert exit_code(words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert sentence in line, line


def nodes_beside() -> Iterator[tuple[pb.NodeEntry, ...]]:
    """Up to two nodes of every kind."""
    roles = (pb.ROLE_PREFILL, pb.ROLE_DECODE, pb.ROLE_MIXED)
    kinds = [*product(roles, (False, True), ("abc", "another"), (False, True))]
    for number in range(3):
        for drawn in combinations_with_replacement(kinds, number):
            found = []
            for index, (role, is_draining, weights, local_prefill) in enumerate(drawn):
                each = other(f"n{index}", role, 7000 + 2 * index)
                each.draining, each.fingerprint.weights, each.local_prefill = is_draining, weights, local_prefill
                found.append(each)
            yield tuple(found)


@pytest.mark.covers("C11")
def test_a_node_may_go_exactly_where_nothing_that_it_does_is_left_undone() -> None:
    for role, computes in product((pb.ROLE_PREFILL, pb.ROLE_DECODE, pb.ROLE_MIXED), (False, True)):
        node = other("decode-0", role, 6999)
        node.local_prefill = computes
        does = {"decodes": role != pb.ROLE_PREFILL, "computes prompts": role != pb.ROLE_DECODE or computes}
        for others in nodes_beside():
            able = [each for each in others if not each.draining and each.fingerprint.weights == "abc"]
            decodes = any(each.role in (pb.ROLE_DECODE, pb.ROLE_MIXED) for each in able)
            prefills = any(each.role != pb.ROLE_DECODE or each.local_prefill for each in able)
            lack = "decodes" if not decodes else "computes prompts" if not prefills else None
            assert find_lack(node, (node, *others)) == (lack if lack and does[lack] else None), (node, others)


@pytest.mark.covers("C11")
def test_a_node_becomes_what_nobody_is_without_force() -> None:
    """Found as a cluster whose only decode node had gone: its prefill node was said to be the last that decodes."""
    prefill = other("prefill-0", pb.ROLE_PREFILL, 7001)
    assert find_lack(prefill, (prefill,)) is None
    decoding = [other(f"decode-{index}", pb.ROLE_DECODE, 7003 + 2 * index) for index in range(2)]
    assert find_lack(decoding[0], decoding) is None, "nobody computes prompts, and it is no last one that does"
    assert find_lack(decoding[0], decoding[:1]) == "decodes"
