"""`baton up` over a Redis: its nodes are found by the run directory alone."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests import forked
from tests.e2e.cluster import BATON, started_cluster
from tests.registry.redis_server import started_redis


def test_a_node_is_given_a_role_and_drained_by_its_name_in_the_run_directory(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "redis").mkdir()
    with started_redis(tmp_path / "redis") as redis:
        flags = ("--registry", redis.url, "--registry-namespace", "mine", "--prefill", "0", "--decode", "2")
        with started_cluster(tiny_model, tmp_path, *flags) as cluster:
            for words in (("role", "decode-1", "mixed"), ("drain", "decode-1")):
                command = [BATON, *words, "--run-dir", str(cluster.run_dir)]
                done = forked.run(command, timeout=60)
                assert done.returncode == 0, done.stderr
                assert done.stdout.splitlines()[-1].startswith(f"baton {words[0]}: decode-1 ")


def test_a_start_that_waits_for_a_redis_that_is_not_there_says_so_before_it_gives_up(
    tiny_model: Path, tmp_path: Path
) -> None:
    flags = ("--model", str(tiny_model), "--registry", "redis://127.0.0.1:9/0", "--port", "0")
    command = [BATON, "up", *flags, "--run-dir", str(tmp_path / "run"), "--start-timeout-s", "60"]
    with forked.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as launcher:
        try:
            assert launcher.stdout is not None
            told = next(line for line in launcher.stdout if "registry_unreachable" in line)
        finally:
            launcher.terminate()
    assert told.startswith("baton up: still waiting; router said last: ") and "redis://127.0.0.1:9/0" in told


def test_a_start_that_gives_up_says_what_was_lacking_and_what_the_router_said(tiny_model: Path, tmp_path: Path) -> None:
    flags = ("--registry", "redis://127.0.0.1:9/0", "--port", "0", "--start-timeout-s", "12")
    command = [BATON, "up", "--model", str(tiny_model), *flags, "--run-dir", str(tmp_path / "run")]
    ended = forked.run(command, timeout=120)
    assert ended.returncode == 1
    first, last = ended.stderr.splitlines()[-2:]
    assert first.startswith("baton up: not ready after 12 s")
    assert "router said last: " in first and "registry_unreachable registry=redis://127.0.0.1:9/0" in first
    assert last == f"baton up: see the logs in {tmp_path / 'run'}"
