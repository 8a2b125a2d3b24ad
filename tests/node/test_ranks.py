"""Nodes of several ranks as real processes: handoffs between sizes, and what becomes of processes, however one of them ends."""

from __future__ import annotations

import asyncio
import os
import random
import select
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import cycle, product
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest

from engine.kv_memory import KvMemory
from engine.model_config import read_model_config
from engine.plan import SamplingParams
from engine.sequence import SequenceSpec
from node.rank_process import RankJob
from node.ranks import RankProcesses
from proto import baton_pb2 as pb
from tests.kernels_choice import KERNELS
from tests.node.test_process import TIMEOUT_S, flags, run, running
from tests.node.test_two_nodes import SIZES, Stream, TestRouter, alone, dispatch_of, entry_of, until_free


@contextmanager
def held(pids: Sequence[int]) -> Iterator[list[int]]:
    """Descriptors that tell a process that ended from a new one with its number."""
    descriptors = [os.pidfd_open(pid) for pid in pids]
    try:
        yield descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def wait_for_end(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        assert select.select([descriptor], [], [], TIMEOUT_S)[0], "it is still there"


@pytest.mark.covers("H14", "D07", "H01")
def test_kv_goes_between_nodes_of_any_number_of_ranks_and_tokens_are_those_of_one_engine(
    model_dir: Path, tmp_path: Path, fresh_seed: int
) -> None:
    """From nodes of two and of one to nodes of two and of one. Then a node is killed, and a rank of another."""
    draw = random.Random(fresh_seed)
    lengths = (1, 16, 31, 49, 96, 130, 200, 17)  # around block (16) and chunk (48) borders
    specs = [
        SequenceSpec(
            sequence_id=f"r{length}",
            token_ids=tuple(draw.randrange(256) for _ in range(length)),
            num_generated=0,
            sampling=SamplingParams(temperature=draw.choice((0.0, 1.0)), seed=draw.getrandbits(64)),
            max_new_tokens=20,
            stop_token_ids=frozenset(),
            block_keys=(),
        )
        for length in lengths
    ]

    async def serve(entries: dict[tuple[str, int], pb.NodeEntry]) -> dict[str, list[int]]:
        router = TestRouter(list(entries.values()))
        ways = cycle([(entries["prefill", one], entries["decode", other]) for one in (1, 2) for other in (1, 2)])
        try:
            async with asyncio.timeout(120):
                await router.ready()
                for spec, (prefill, decode) in zip(specs, ways, strict=False):
                    router.streams[str(spec.sequence_id)] = Stream()
                    message = pb.RouterMessage(dispatch=dispatch_of(spec, decode))
                    router.dialer.send(prefill.node.name, prefill.node.incarnation, message)
                for stream in router.streams.values():
                    await stream.end.wait()
                    assert stream.error is None and stream.from_receiver > 1
                for (_, size), entry in entries.items():
                    state: dict[str, Any] = await until_free(entry)
                    assert state["tp"] == size
                    assert len(state["kv_bytes_sent"]) + len(state["kv_bytes_received"]) == 2, "of both sizes"
        finally:
            await router.dialer.close()
        return {name: stream.token_ids for name, stream in router.streams.items()}

    with ExitStack() as opened:
        processes, entries, ranks = {}, {}, {}
        for role, size in product(("prefill", "decode"), (1, 2)):
            arguments = [*flags(model_dir, *SIZES), "--tp", str(size)]
            context = running(f"{role}_node", arguments, tmp_path / f"{role}-{size}.json")
            processes[role, size], ready = opened.enter_context(context)
            state = httpx.get(f"http://{ready['http']}/state", timeout=TIMEOUT_S).json()
            entries[role, size], ranks[role, size] = entry_of(ready, state), state["rank_pids"]
        assert (
            "baton_node_ranks 2.0"
            in httpx.get(f"http://{entries['decode', 2].http_address}/metrics", timeout=TIMEOUT_S).text
        )
        assert asyncio.run(serve(entries)) == alone(model_dir, specs)
        with held([pid for pids in ranks.values() for pid in pids]) as descriptors:
            assert len(descriptors) == 2
            processes["decode", 2].kill()
            (rank,) = ranks["prefill", 2]
            for number in (
                signal.SIGTERM,
                signal.SIGINT,
            ):  # of who asks all processes of a node, which is the node's business
                os.kill(rank, number)
            assert (
                httpx.get(f"http://{entries['prefill', 2].http_address}/health", timeout=TIMEOUT_S).status_code == 200
            )
            assert "rank_ended" not in (tmp_path / "prefill-2.log").read_text()
            os.kill(rank, signal.SIGKILL)  # nothing runs there that would notice
            for size_one in (processes["prefill", 1], processes["decode", 1]):
                size_one.send_signal(signal.SIGTERM)
                assert size_one.wait(TIMEOUT_S) == 0
            assert processes["decode", 2].wait(TIMEOUT_S) == -signal.SIGKILL
            assert processes["prefill", 2].wait(TIMEOUT_S) == 1
            wait_for_end(descriptors)
        assert f"rank_ended rank=1 pid={rank} how=SIGKILL" in (tmp_path / "prefill-2.log").read_text()


@pytest.mark.covers("H14")
def test_a_number_of_ranks_that_does_not_go_is_refused_by_name(model_dir: Path) -> None:
    for more, named in (
        (("--tp", "3"), "--tp 3: the model's num_key_value_heads 2 cannot be cut into 3 equal parts"),
        (("--tp", "0"), "--tp 0"),
    ):
        result = run("decode_node", flags(model_dir, *more))
        assert result.returncode == 2, result.stderr
        assert result.stderr.startswith("baton decode: ") and named in result.stderr
        assert result.stderr.count("\n") == 1, result.stderr


def job_of(model: Path, memory: KvMemory) -> RankJob:
    return RankJob(
        rank=1,
        size=2,
        model=str(model),
        dtype="fp32",
        kernels=KERNELS,
        device="cpu",
        weight_dtype="auto",
        threads=1,
        block_size=16,
        num_blocks=4,
        kv_descriptor=memory.writers_descriptor,
        meeting_descriptor=-1,
        parent_pid=os.getpid(),
    )


def test_a_rank_that_cannot_load_says_why_and_one_that_dies_meanwhile_how(model_dir: Path, tmp_path: Path) -> None:
    memory = KvMemory(read_model_config(model_dir), 16, 4, "fp32")
    job = job_of(tmp_path / "nothing", memory)
    ranks = RankProcesses(job)
    with held(ranks.pids) as descriptors:
        with pytest.raises(ValueError, match=r"nothing.config\.json"):
            ranks.wait_until_loaded()
        ranks.close()
        wait_for_end(descriptors)
    ranks = RankProcesses(job)
    os.kill(ranks.pids[0], signal.SIGKILL)
    with pytest.raises(ValueError, match=r"^--tp: rank 1 ended while it loaded: SIGKILL$"):
        ranks.wait_until_loaded()
    ranks.close()


@pytest.mark.covers("H14")
@pytest.mark.parametrize("when", ["has answered", "is waited for", "has parted"])
def test_a_rank_that_dies_between_loading_and_the_first_step_is_one_sentence_at_once(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Whoever waits for it would wait for a minute, and end with a traceback."""
    rank = tmp_path / "rank"
    rank.write_text(
        "#!/bin/sh\nread job\necho loaded\n" + ("" if when == "has answered" else "read go\nexec sleep 99\n")
    )
    rank.chmod(0o755)
    monkeypatch.setattr("node.ranks.sys.executable", str(rank))
    ranks, never = RankProcesses(job_of(model_dir, KvMemory(read_model_config(model_dir), 16, 4, "fp32"))), Event()
    (pid,), waited = ranks.pids, []

    def meet() -> bool:
        if when != "has answered":
            os.kill(pid, signal.SIGKILL)
        if when == "has parted":
            raise RuntimeError("Connection closed by peer\nException raised from ...")
        if not never.wait(30):
            waited.append(pid)
        return True

    try:
        if when == "has answered":
            ranks.ends[0][1].result(TIMEOUT_S)
        ranks.wait_until_loaded()
        how = "exit code 0" if when == "has answered" else "SIGKILL"
        with pytest.raises(ValueError, match=f"^--tp: rank 1 ended while it loaded: {how}$"):
            ranks.until_met(meet)
        assert not waited
    finally:
        never.set()
        ranks.close()


@pytest.mark.covers("H14")
def test_a_rank_that_hangs_as_it_loads_is_given_up_in_one_sentence_and_a_slow_one_is_not(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped one was waited for without limit."""
    rank = tmp_path / "rank"
    monkeypatch.setattr("node.ranks.sys.executable", str(rank))
    monkeypatch.setattr("node.ranks.HANGS_S", 3.0)
    computes = (
        "n=0; while [ $n -lt 12 ]; do sleep 0.3; k=0; while [ $k -lt 999 ]; do k=$((k+1)); done; n=$((n+1)); done"
    )
    for work, sentence in (
        (computes, ""),
        ("kill -STOP $$", r"^--tp: rank 1 hangs as it loads: it has computed nothing for 3 s$"),
    ):
        rank.write_text(f"#!/bin/sh\nread job\n{work}\necho loaded\nread go\nexec sleep 99\n")
        rank.chmod(0o755)
        ranks = RankProcesses(job_of(model_dir, KvMemory(read_model_config(model_dir), 16, 4, "fp32")))
        with held(ranks.pids) as descriptors:
            try:
                with pytest.raises(ValueError, match=sentence) if sentence else nullcontext():
                    ranks.wait_until_loaded()
            finally:
                ranks.close()
            wait_for_end(descriptors)


@pytest.mark.covers("H14")
def test_ranks_that_do_not_meet_are_one_sentence(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = tmp_path / "rank"
    rank.write_text("#!/bin/sh\nread job\necho loaded\nread go\nexec sleep 99\n")
    rank.chmod(0o755)
    monkeypatch.setattr("node.ranks.sys.executable", str(rank))
    monkeypatch.setattr("node.ranks.END_TIMEOUT_S", 0.01)
    ranks = RankProcesses(job_of(model_dir, KvMemory(read_model_config(model_dir), 16, 4, "fp32")))

    def meet() -> None:
        raise RuntimeError("Wait timeout\nException raised from ...")

    try:
        ranks.wait_until_loaded()
        with pytest.raises(ValueError, match=r"^--tp: the ranks did not meet: Wait timeout$"):
            ranks.until_met(meet)
    finally:
        ranks.close()
