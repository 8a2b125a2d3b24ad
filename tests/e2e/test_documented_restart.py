"""The shell loop of docs/draining.md, word for word but for addresses and names, restarts a node of a real cluster."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Final

import httpx
import pytest

from bench.cluster import BATON, environment_of_a_cluster
from tests.e2e.role_by_role import started_role_by_role, wait_until

_LOOP: Final = re.compile(r"```\n(for node in [a-z0-9 -]+; do\n.*?done\n)```", re.DOTALL)
_BOUND_S: Final = 120.0
# Who is started in the background outlives the loop, and must not outlive the test.
_BATON: Final = f'#!/bin/sh\necho $$ >> "$PIDS"\nexec {BATON} "$@"\n'


@pytest.mark.skipif(shutil.which("curl") is None, reason="the loop asks the router with curl, and there is none")
@pytest.mark.covers("C07", "D08")
def test_the_loop_of_the_docs_drains_a_node_and_brings_it_back(tiny_model: Path, tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "draining.md").read_text(encoding="utf-8")
    (loop,) = _LOOP.findall(text)
    pids = tmp_path / "pids"
    pids.touch()
    (tmp_path / "baton").write_text(_BATON)
    (tmp_path / "baton").chmod(0o755)
    flags = {"router": (), "prefill-0": (), "decode-0": ()}
    with started_role_by_role(tiny_model, tmp_path, flags) as cluster:
        for old, new in (
            ("prefill-0 prefill-1 decode-0 decode-1", "decode-0"),
            ("127.0.0.1:8001", cluster.registry_of("router")),
            ("http://127.0.0.1:8000", cluster.url),
            ("DIR", str(tiny_model)),
        ):
            assert old in loop
            loop = loop.replace(old, new)
        environment = environment_of_a_cluster()
        environment |= {"PATH": f"{tmp_path}:{environment.get('PATH', os.defpath)}", "PIDS": str(pids)}
        try:
            ended = subprocess.run(["bash", "-c", loop], cwd=tmp_path, env=environment, timeout=_BOUND_S, check=False)
            assert ended.returncode == 0
            assert cluster.exit_code("decode-0") == 0, "the old one has drained"
            assert "was_cut_short=False" in cluster.log_text("decode-0")
            wait_until("both nodes are up", lambda: cluster.metric("node_up") == 2)
            body = {"model": tiny_model.name, "prompt": "hello", "max_tokens": 4}
            assert httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60).status_code == 200
        finally:
            for pid in map(int, pids.read_text().split()):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
