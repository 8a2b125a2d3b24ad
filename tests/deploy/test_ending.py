"""How a process of ours ends when it has nothing left to do: what Python does then, but for what the kernel does in no time."""

from __future__ import annotations

import subprocess
import sys

ENDED = """
import atexit
import sys
from runtime.process import end_process

class Held:
    def __del__(self): print("freed")

held = Held()
atexit.register(print, "called")
print("said")
end_process(lambda: sys.exit(7) if sys.argv[1:] else 7)
"""


def test_a_process_that_ends_says_all_and_calls_who_asked_for_it_and_leaves_its_memory_to_the_kernel() -> None:
    for words in ([], ["exits"]):
        command = [sys.executable, "-c", ENDED, *words]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (ended.returncode, ended.stdout, ended.stderr) == (7, "said\ncalled\n", "")
    full = ["bash", "-c", 'exec "$@" >/dev/full', "-", sys.executable, "-c", ENDED]
    ended = subprocess.run(full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert ended.returncode not in (0, 7) and "No space left on device" in ended.stderr
