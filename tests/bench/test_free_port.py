"""Ports for servers that are started later: nobody else is given them meanwhile."""

from __future__ import annotations

import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from bench.free_port import free_port
from tests.architecture.source_tree import ROOT

NUM_PORTS = 400
NUM_PROCESSES = 3
DRAW = f"from bench.free_port import free_port; print(*(free_port() for _ in range({NUM_PORTS})), flush=True); input()"


def test_no_port_is_given_twice_to_processes_that_live_at_the_same_time() -> None:
    """Of so many that are drawn at random, as they once were, some seventy would be."""
    drawing = [
        subprocess.Popen(
            [sys.executable, "-c", DRAW], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(NUM_PROCESSES)
    ]
    try:
        drawn = [free_port() for _ in range(NUM_PORTS)]
        for process in drawing:
            assert process.stdout is not None
            drawn += map(int, process.stdout.readline().split())
    finally:
        for process in drawing:
            process.communicate("\n", timeout=60)
    assert len(drawn) == len(set(drawn)) == (NUM_PROCESSES + 1) * NUM_PORTS
    assert all(1024 < port < 32768 for port in drawn)


def test_a_port_that_somebody_has_is_given_to_nobody_and_threads_draw_side_by_side() -> None:
    taken = free_port()
    with socket.create_server(("127.0.0.1", taken)), ThreadPoolExecutor(4) as threads:
        assert taken not in threads.map(lambda _: free_port(), range(2 * NUM_PORTS))
