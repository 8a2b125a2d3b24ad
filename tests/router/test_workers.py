"""`baton router --workers 2` with fake nodes: real processes, of which one is stopped, and one is killed under streams."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest

from bench.router_sides import Speaker
from bench.stepping import Pace
from proto import baton_pb2 as pb
from proto.baton_pb2_grpc import RegistryStub
from runtime.listing import MAX_TEXT_CHARS
from tests import forked
from tests.plain_http import NO_CERTIFICATES
from tests.router.tiny_model import write_model_text
from tests.stopping import resume, stop

TEXT = "abcdefgh"  # what the fake nodes say, over and over
NUM_TOKENS = 80
NUM_OF_LONG = 120  # of streams that outlast a stall of some seconds
LOG = "router.log"
HUNG_S = 5.0  # for so long a worker may leave unread more than may wait for it


def until(is_so: Callable[[], bool], bound_s: float = 120.0) -> None:
    end = time.monotonic() + bound_s
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


@contextmanager
def started(
    folder: Path,
    *more: str,
    popen: type[subprocess.Popen[Any]] = forked.Popen,
    program: Sequence[str] = ("-m", "router"),
) -> Iterator[tuple[subprocess.Popen[Any], dict[str, Any]]]:
    """A router with two workers, ready to serve with a fake prefill and a fake decode node; its ready file, and the nodes' pid."""
    model, ready_file = write_model_text(folder / "model"), folder / "ready.json"
    flags = ["--model", str(model), "--port", "0", "--workers", "2", "--ready-file", str(ready_file), *more]
    command = [sys.executable, *program, *flags, "--parent-pid", str(os.getpid())]
    with (folder / LOG).open("wb") as log, popen(command, stdin=subprocess.DEVNULL, stderr=log) as router:
        try:
            until(lambda: ready_file.exists() or router.poll() is not None)
            ready = json.loads(ready_file.read_text())
            nodes = [sys.executable, "-m", "bench.fake_node", "--router", ready["registry"]]
            with popen(nodes, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as speaking:
                try:
                    Speaker(speaking).set_pace(Pace(step_ms=40, group=32))
                    until(lambda: by_worker(ready["url"], "node_up") == {0: 2, 1: 2})
                    yield router, ready | {"nodes": speaking.pid}
                finally:
                    speaking.kill()
        finally:
            router.kill()


def by_worker(url: str, name: str) -> dict[int, float]:
    """A metric's sum, by worker."""
    found: dict[int, float] = {}
    for line in httpx.get(f"{url}/metrics", timeout=60, verify=NO_CERTIFICATES).text.splitlines():
        if match := re.fullmatch(rf'baton_router_{name}{{worker="(\d)".*}} (\S+)', line):
            found[int(match[1])] = found.get(int(match[1]), 0) + float(match[2])
    return found


def ends_of(url: str, worker: int) -> dict[str, float]:
    """How the requests of a worker that has none now have ended: how many by outcome."""
    until(lambda: by_worker(url, "live_requests").get(worker) == 0)
    metrics = httpx.get(f"{url}/metrics", timeout=60, verify=NO_CERTIFICATES).text
    found = re.findall(rf'baton_router_requests_total{{worker="{worker}",outcome="(\w+)"}} (\S+)', metrics)
    return {outcome: float(number) for outcome, number in found if float(number)}


async def stream(url: str, num_tokens: int = NUM_TOKENS) -> str:
    """A completion's text, or nothing if its connection broke."""
    body = {"model": "model", "prompt": "x", "max_tokens": num_tokens, "stream": True, "ignore_eos": True}
    try:
        async with httpx.AsyncClient(timeout=120, verify=NO_CERTIFICATES) as client:
            answer = await client.post(f"{url}/v1/completions", json=body)
    except httpx.TransportError:
        return ""
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


async def while_one_dies(url: str, pids: list[int]) -> list[str]:
    """Streams until both workers have some; then worker 0 is killed. Their texts."""
    streams: list[asyncio.Task[str]] = []
    live: dict[int, float] = {}
    while not (live.get(0) and live.get(1)):
        assert len(streams) < 60
        streams += [asyncio.create_task(stream(url, NUM_OF_LONG)) for _ in range(6)]
        await asyncio.sleep(0.2)
        live = await asyncio.to_thread(by_worker, url, "live_requests")
    os.kill(pids[0], signal.SIGKILL)
    return list(await asyncio.gather(*streams))


@pytest.mark.covers("C05")
def test_a_worker_that_cannot_be_started_now_is_started_later_and_the_others_serve(tmp_path: Path) -> None:
    with started(tmp_path, popen=subprocess.Popen) as (router, ready):
        url, pids = ready["url"], ready["workers"]
        soft, hard = resource.prlimit(router.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(router.pid, resource.RLIMIT_NOFILE, (5, hard))  # it has more: none can be opened
        os.kill(pids[0], signal.SIGKILL)
        time.sleep(1.0)  # long enough for some tries
        assert router.poll() is None
        assert asyncio.run(stream(url)) == (TEXT * NUM_TOKENS)[:NUM_TOKENS]
        resource.prlimit(router.pid, resource.RLIMIT_NOFILE, (soft, hard))
        until(lambda: by_worker(url, "node_up") == {0: 2, 1: 2})


@pytest.mark.covers("C05", "R16")
def test_both_serve_and_a_killed_one_is_replaced_while_the_others_streams_go_on(tmp_path: Path) -> None:
    with started(tmp_path, popen=subprocess.Popen) as (router, ready):
        url, pids = ready["url"], ready["workers"]
        texts = asyncio.run(while_one_dies(url, pids))
        whole, long = ((TEXT * number)[:number] for number in (NUM_TOKENS, NUM_OF_LONG))
        assert set(texts) == {long, ""}, "a stream is whole, or its connection broke with its worker"
        (ended,) = ends_of(url, 1).items()
        assert ended[0] == "length" and 1 <= ended[1] <= texts.count(long), "the other's streams all went on"
        until(lambda: by_worker(url, "node_up") == {0: 2, 1: 2})  # its successor knows the nodes, too
        stop(pids[1])
        assert asyncio.run(stream(url)) == whole, "who hangs keeps no connection waiting"
        resume(pids[1])
        router.send_signal(signal.SIGTERM)
        assert router.wait(120) == 0
        assert not Path(f"/proc/{pids[1]}").exists()


def tell_much(registry: str, num_times: int) -> None:
    """Have the parent tell its workers of a node time and again, 5 KiB each time: as long as an entry may be, and changed."""
    long = "\U0001d11e" * MAX_TEXT_CHARS
    fingerprint = pb.Fingerprint(architecture=long, dtype=long, weights=long, kernels=long)
    for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
        setattr(fingerprint, name, 1)
    entry = pb.NodeEntry(node=pb.PeerId(name=long, incarnation=1), role=pb.ROLE_DECODE, fingerprint=fingerprint)
    entry.grpc_address = entry.http_address = "127.0.0.1:1"
    entry.max_num_seqs = entry.max_model_len = 1
    with grpc.insecure_channel(registry) as channel:
        register = RegistryStub(channel).Register
        for number in range(num_times):
            entry.num_blocks = 1 + number % 2
            assert not register(entry).refused


def test_a_client_that_no_worker_can_take_waits_until_one_can(tmp_path: Path) -> None:
    with started(tmp_path) as (_, ready):
        address = ("127.0.0.1", int(ready["url"].rpartition(":")[2]))
        bounds = {pid: resource.prlimit(pid, resource.RLIMIT_NOFILE) for pid in ready["workers"]}
        for pid, (_, hard) in bounds.items():
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (5, hard))  # it has more: none can be opened
        log = tmp_path / LOG
        with socket.create_connection(address) as waiting:
            until(lambda: log.read_text().count("cannot_accept") >= len(bounds))
            for pid, both in bounds.items():
                resource.prlimit(pid, resource.RLIMIT_NOFILE, both)
            waiting.settimeout(60)
            waiting.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert waiting.recv(9) == b"HTTP/1.1 "
        assert log.read_text().count("cannot_accept") <= 2 * len(bounds) + 8, "once a second"


@pytest.mark.covers("C05")
def test_a_worker_that_hangs_is_replaced_before_what_it_does_not_read_is_more_than_there_is(tmp_path: Path) -> None:
    with started(tmp_path) as (router, ready):
        url, pids = ready["url"], ready["workers"]
        stop(pids[1])
        try:
            began = time.monotonic()
            tell_much(ready["registry"], 1800)  # 9 MiB: more than may wait for it
            was_there = Path(f"/proc/{pids[1]}").exists()
            assert was_there or time.monotonic() - began > HUNG_S, "for a moment it may"
            end = time.monotonic() + 120
            while Path(f"/proc/{pids[1]}").exists():
                assert time.monotonic() < end
                tell_much(ready["registry"], 20)
        finally:
            with suppress(ProcessLookupError):
                resume(pids[1])
        until(lambda: by_worker(url, "node_up") == {0: 2, 1: 2})
        assert asyncio.run(stream(url)) == (TEXT * NUM_TOKENS)[:NUM_TOKENS]
        assert router.poll() is None
    lines = (tmp_path / LOG).read_text().splitlines()
    (hangs,) = [line for line in lines if "worker_hangs" in line]
    assert f"worker=1 pid={pids[1]} unread_bytes=" in hangs


def test_a_reload_without_a_file_of_keys_ends_neither_parent_nor_workers(tmp_path: Path) -> None:
    with started(tmp_path) as (router, ready):
        for pid in (router.pid, *ready["workers"]):
            os.kill(pid, signal.SIGHUP)
        assert asyncio.run(stream(ready["url"])) == (TEXT * NUM_TOKENS)[:NUM_TOKENS]
        assert by_worker(ready["url"], "node_up") == {0: 2, 1: 2}
        assert router.poll() is None
        assert {child.pid for child in psutil.Process(router.pid).children()} >= set(ready["workers"])


@pytest.mark.covers("X02", "R16")
def test_whichever_worker_is_asked_clients_are_named_to_one_of_them_alone(tmp_path: Path) -> None:
    key, keys = {"Authorization": "Bearer sk-of-alice-0123456789"}, tmp_path / "keys"
    keys.write_text("sk-of-alice-0123456789 name=alice\n")
    keys.chmod(0o600)
    with started(tmp_path, "--api-keys", str(keys)) as (_, ready):
        url, pids = ready["url"], ready["workers"]

        def page(headers: dict[str, str]) -> str:
            return httpx.get(f"{url}/metrics", timeout=60, headers=headers, verify=NO_CERTIFICATES).text

        def named() -> set[str]:
            """By which workers; who does not answer within a second is left out."""
            return set(re.findall(r'client_requests_total{worker="(.)",client="alice"} 1.0', page(key)))

        for stopped in pids:  # so each of them has a request
            stop(stopped)
            body = {"model": "model", "prompt": "x", "max_tokens": 2}
            url_of_all = f"{url}/v1/completions"
            assert (
                httpx.post(url_of_all, json=body, headers=key, timeout=120, verify=NO_CERTIFICATES).status_code == 200
            )
            resume(stopped)
        for stopped in (*pids, None):  # who asks is answered by the other one, then by both together
            if stopped is not None:
                stop(stopped)
            try:
                assert "alice" not in page({}) and "baton_router_client" not in page({})
                running = {str(index) for index, pid in enumerate(pids) if pid != stopped}
                until(lambda running=running: named() == running)  # type: ignore[misc]
            finally:
                if stopped is not None:
                    resume(stopped)


def test_what_keeps_a_worker_from_starting_is_said_and_ends_all_with_exit_code_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "router", "--model", str(tmp_path / "none"), "--port", "0", "--workers", "2"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240)
    lines = [line for line in ended.stderr.splitlines() if line.startswith("baton router: ")]
    assert ended.returncode == 2 and len(lines) >= 1 and "none" in lines[0]
    assert "Traceback" not in ended.stderr
