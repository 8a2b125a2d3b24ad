"""Bugs of the overlap of steps on a device that computes by itself."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_LAUNCH: Final = ("tests/engine_torch/test_launch.py",)
_THREAD: Final = ("tests/node/test_runner_thread.py",)

MUTANTS: Final = (
    Mutant(
        "drawn-token-not-fed",
        "The next decode row feeds the token that the host knows, which is an older one.",
        "engine/runner.py",
        "        on_device[: len(slots)] = self._last_on_device[slots]\n",
        "",
        _LAUNCH,
    ),
    Mutant(
        "host-draw-not-told-to-device",
        "A token that the host drew is not fed to the next row, which reads the device's.",
        "engine/runner.py",
        "            self._last_on_device[upload(torch.tensor(slots, dtype=torch.int64), device)] = fed\n",
        "",
        _LAUNCH,
    ),
    Mutant(
        "chunk-draws-for-all",
        "A step some of whose rows want more than a token is drawn on the device as if they did not.",
        "engine/runner.py",
        "not all(map(self._is_plain, slots, draws))",
        "not any(map(self._is_plain, slots, draws))",
        _LAUNCH,
    ),
    Mutant(
        "read-before-launch",
        "A step is waited for though the next one could be launched behind it.",
        "node/runner_thread.py",
        "if not is_ended and (launched is None or not launched.is_done()):",
        "if not is_ended and launched is None:",
        _THREAD,
    ),
)
