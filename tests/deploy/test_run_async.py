"""Ctrl-C while a coroutine runs, at the one moment at which asyncio forgets it."""

from __future__ import annotations

import subprocess
import sys

INTERRUPTED = """
import asyncio, os, signal
from runtime.process import run_async

take = signal.signal

def take_and_be_hit(number, handler):
    before = take(number, handler)
    if handler is not signal.default_int_handler:
        os.kill(os.getpid(), signal.SIGINT)
    return before

async def main():
    await asyncio.sleep(60)

signal.signal = take_and_be_hit  # asyncio's: it sets its count of signals to nought behind this call
try:
    run_async(main())
except BaseException as error:
    print(type(error).__name__)
"""


def test_ctrl_c_is_keyboard_interrupt_whenever_it_comes() -> None:
    ran = subprocess.run([sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, text=True, timeout=30, check=True)
    assert ran.stdout.strip() == "KeyboardInterrupt"  # asyncio.run raises CancelledError
