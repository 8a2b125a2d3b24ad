"""A cluster in containers: it serves, and what happens to a container happens to no stream."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.compose.containers import (
    Containers,
    build_images,
    docker,
    model_for_containers,
    started_containers,
    wait_until,
)
from tests.e2e.fault_clients import Stream, ask, body, tokens_of

pytestmark = pytest.mark.timeout(1800)  # the first one builds the images
NUM_STREAMS = 6
NUM_TOKENS = 3500


@pytest.fixture(scope="module")
def containers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containers]:
    """The cluster of compose.yaml on a tiny model, in images that are built for it."""
    build_images()
    folder = tmp_path_factory.mktemp("compose")
    with started_containers(model_for_containers(folder), folder) as cluster:
        yield cluster


# Looks up what it needs, and yields; strikes, and yields; waits until it is over.
Fault = Callable[[Containers], Iterator[None]]


def crash(service: str) -> Fault:
    def fault(containers: Containers) -> Iterator[None]:
        before, pid = int(containers.inspect(service, ".RestartCount")), containers.pid(service)
        yield
        os.kill(pid, signal.SIGKILL)  # as the kernel out of memory would: the engine starts it again
        yield
        wait_until(f"{service} is back", lambda: int(containers.inspect(service, ".RestartCount")) == before + 1)

    return fault


def partition(containers: Containers) -> Iterator[None]:
    cut_off = containers.cut_off("decode-0")
    yield
    with cut_off:
        yield
        wait_until("both routers miss it", lambda: all(containers.num_nodes(f"router-{i}") == 3 for i in (0, 1)))


def stop_and_start(containers: Containers) -> Iterator[None]:
    """As a rolling update does: SIGTERM, and time to hand over what runs."""
    command = ["docker", "stop", "-t", "60", containers.container("decode-1")]
    yield
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as stopping:
        yield
        assert stopping.wait(90) == 0
    drained = docker("logs", "--tail=30", containers.container("decode-1"), with_stderr=True)
    assert re.search(r" draining attempts=[1-9]", drained), "it had nothing to hand over"
    assert containers.inspect("decode-1", ".State.ExitCode") == "0", "it was killed, it did not drain"
    docker("start", containers.container("decode-1"))


def restart_redis(containers: Containers) -> Iterator[None]:
    began = containers.inspect("redis", ".State.StartedAt")
    yield
    docker("kill", containers.container("redis"))
    yield
    docker("start", containers.container("redis"))
    assert containers.inspect("redis", ".State.StartedAt") != began


@pytest.mark.covers("C08", "R16")
@pytest.mark.parametrize(
    "fault",
    [crash("decode-0"), crash("prefill-1"), partition, stop_and_start, restart_redis],
    ids=["decode", "prefill", "cut", "drain", "redis"],
)
def test_whatever_happens_to_a_container_every_stream_has_its_tokens(
    containers: Containers, fault: Fault, fresh_seed: int
) -> None:
    rng = random.Random(fresh_seed)
    bodies = [body(rng, rng.randrange(40, 200), NUM_TOKENS) for _ in range(NUM_STREAMS)]
    expected = [tokens_of(ask(containers, fields)) for fields in bodies]
    steps = fault(containers)
    next(steps)
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        streams = [Stream(containers, threads, fields) for fields in bodies]
        for stream in streams:
            stream.take_tokens(50)
        next(steps)
        assert any(stream.is_running for stream in streams), "all of them were over before it began"
        assert list(steps) == []
        for stream in streams:
            stream.take_all()
    assert [stream.token_ids for stream in streams] == expected
    containers.wait_until_ready()
    wait_until("nothing is held", lambda: not held(containers))
    assert tokens_of(ask(containers, bodies[0])) == expected[0]


def held(containers: Containers) -> int:
    """Blocks that somebody has in use, in all nodes."""
    blocks = [containers.state(f"{role}-{i}")["blocks"] for role in ("prefill", "decode") for i in (0, 1)]
    return sum(each["used"] + each["leased"] + each["quarantined"] for each in blocks)


@pytest.mark.covers("R16")
def test_one_port_serves_while_either_router_is_down(containers: Containers, fresh_seed: int) -> None:
    fields = body(random.Random(fresh_seed), 40, 20)
    expected = tokens_of(ask(containers, fields))
    for router in ("router-0", "router-1"):
        containers.compose("stop", "-t", "40", router)
        for _ in range(4):
            assert tokens_of(ask(containers, fields)) == expected
        containers.compose("start", router)
        containers.wait_until_ready()
        time.sleep(3)  # for the front to see it: a check a second


@pytest.mark.covers("O01")
def test_prometheus_scrapes_every_process(containers: Containers) -> None:
    wait_until("all six are up", lambda: [each["value"][1] for each in containers.query("sum(up)")] == ["6"])
    wait_until(
        "what they count is there", lambda: float(containers.query("sum(baton_router_tokens_total)")[0]["value"][1]) > 0
    )


@pytest.mark.parametrize("service", ["router-0", "router-1", "prefill-0", "prefill-1", "decode-0", "decode-1"])
def test_no_process_is_root_and_every_one_is_healthy(containers: Containers, service: str) -> None:
    wait_until("it is healthy", lambda: containers.inspect(service, ".State.Health.Status") == "healthy")
    status = Path(f"/proc/{containers.inspect(service, '.State.Pid')}/status").read_text()
    assert "Uid:\t10001\t10001\t10001\t10001" in status and "CapEff:\t0000000000000000" in status


def test_the_image_says_what_it_can_do_and_a_wrong_flag_is_one_line() -> None:
    assert "prefill" in docker("run", "--rm", "baton-under-test", "--help")
    done = subprocess.run(
        ["docker", "run", "--rm", "baton-under-test", "decode", "--block-size", "0"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "--block-size" in done.stderr
