"""`baton up` over a Redis: its nodes are found by the run directory alone."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.e2e.cluster import BATON, started_cluster
from tests.registry.redis_server import started_redis


def test_a_node_is_given_a_role_and_drained_by_its_name_in_the_run_directory(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "redis").mkdir()
    with started_redis(tmp_path / "redis") as redis:
        flags = ("--registry", redis.url, "--registry-namespace", "mine", "--prefill", "0", "--decode", "2")
        with started_cluster(tiny_model, tmp_path, *flags) as cluster:
            for words in (("role", "decode-1", "mixed"), ("drain", "decode-1")):
                command = [BATON, *words, "--run-dir", str(cluster.run_dir)]
                done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
                assert done.returncode == 0, done.stderr
                assert done.stdout.splitlines()[-1].startswith(f"baton {words[0]}: decode-1 ")
