"""`baton up` whose words nobody reads any more: `baton up | tee log` behind its Ctrl-C, a terminal that was closed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.cluster import Watch, started_cluster


@pytest.fixture
def heard_hangups() -> Iterator[None]:
    """Under nohup SIGHUP is ignored, by our children, too."""
    inherited = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, inherited)


@pytest.mark.usefixtures("heard_hangups")
def test_a_launcher_that_nobody_reads_keeps_its_cluster_and_ends_it_in_good_order(
    tiny_model: Path, tmp_path: Path
) -> None:
    with started_cluster(tiny_model, tmp_path, "--decode", "2", is_executed=True) as cluster:
        assert cluster.launcher.stdout is not None
        cluster.launcher.stdout.close()
        watch = Watch(cluster.pids)
        victim = cluster.nodes_of("decode")[0]
        psutil.Process(victim["pid"]).kill()
        watch.wait_for_end([victim["pid"]])
        body = {"model": tiny_model.name, "prompt": "Once", "max_tokens": 4, "ignore_eos": True}
        with cluster.client() as client:  # behind the line about the victim, more likely than not
            assert client.post("/v1/completions", json=body).status_code == 200
        assert watch.alive() == set(cluster.pids) - {victim["pid"]}
        cluster.launcher.send_signal(signal.SIGHUP)  # its terminal is closed: the kernel says so, and the shell
        assert cluster.end(signal.SIGHUP) == 0
        watch.close()
    assert "router_stopped" in (tmp_path / "run" / "router.log").read_text()
    assert "node_stopped" in (tmp_path / "run" / "prefill-0.log").read_text()
