"""A terminal that is closed: the kernel says so to the leader of its session, who may keep it to himself, as make does."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

WAITER = """
import asyncio, pathlib, sys
from runtime.process import first_signal

async def main():
    first = first_signal(or_hangup=True)
    print("up", flush=True)
    pathlib.Path(sys.argv[1]).write_text((await asyncio.wait_for(first, 5)).name)

asyncio.run(main())
"""
LEADER = """
import fcntl, signal, subprocess, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGHUP, lambda *_: None)
subprocess.run([sys.executable, "-c", *sys.argv[2:]], process_group={"front": None, "back": 0}[sys.argv[1]])
"""


@pytest.mark.parametrize(("is_in_front", "said"), [(True, "SIGHUP"), (False, None)])
def test_who_is_in_the_foreground_of_a_terminal_that_is_closed_hears_of_it_and_who_is_not_stays(
    tmp_path: Path, is_in_front: bool, said: str | None
) -> None:
    heard = tmp_path / "heard"
    terminal, slave = pty.openpty()
    command = [sys.executable, "-c", LEADER, "front" if is_in_front else "back", WAITER, str(heard)]
    with subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True) as leader:
        os.close(slave)
        assert os.read(terminal, 9).startswith(b"up")
        time.sleep(0.1)  # it looks for itself
        os.close(terminal)
        assert leader.wait(60) == 0
    assert (heard.read_text() if heard.exists() else None) == said
