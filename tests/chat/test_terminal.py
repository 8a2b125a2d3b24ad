"""`baton chat` on a pseudo terminal: lines, commands, Ctrl-C, the end of input."""

from __future__ import annotations

import asyncio
import codecs
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.bench.scripted_server import Answer, event, scripted_server, stream_head, whole
from tests.chat.test_chat import BOUND_S, HELLO, THOUGHTFUL, answering, busy, said


class Terminal:
    """A chat on a pseudo terminal."""

    def __init__(self, *words: str) -> None:
        self._mine, theirs = pty.openpty()
        environment = {"PATH": os.environ["PATH"], "TERM": "dumb", "INPUTRC": "/dev/null"}
        # As a shell with a terminal starts it: who runs the tests in the background has the signal ignored, and would hand that on.
        command = ["env", "--default-signal=INT", sys.executable, "-P", "-m", "deploy.chat", *words]
        self._chat = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
        )
        os.close(theirs)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._read_to = 0
        self.seen = ""

    async def until(self, text: str) -> None:
        """Read until it is shown behind what was waited for before."""
        while (found := self.seen.find(text, self._read_to)) < 0:
            self.seen += self._decoder.decode(await asyncio.to_thread(os.read, self._mine, 4096))
        self._read_to = found + len(text)

    def type(self, text: str) -> None:
        """As a user does."""
        os.write(self._mine, text.encode())

    def interrupt(self) -> None:
        """What the terminal makes of Ctrl-C."""
        self._chat.send_signal(signal.SIGINT)

    async def interrupt_waiting(self) -> None:
        """The same once it waits: of one that comes just before, Python hears only when the waiting is over."""
        while self._state() != "S":  # noqa: ASYNC110 - another process: nothing else tells
            await asyncio.sleep(0.001)
        self.interrupt()

    def _state(self) -> str:
        return Path(f"/proc/{self._chat.pid}/stat").read_text().rpartition(")")[2].split()[0]

    async def end(self) -> int:
        """The exit code, once the terminal is no longer used."""
        with suppress(OSError):  # what Linux says when the other end is closed
            await self.until("never said")
        return await asyncio.to_thread(self._chat.wait, BOUND_S)

    def close(self) -> None:
        """Kill what is left."""
        self._chat.kill()
        self._chat.wait()
        os.close(self._mine)


def on_a_terminal(answer: Answer, use: Callable[[Terminal], Awaitable[None]], *words: str) -> None:
    """Run a chat there against a scripted server."""

    async def run() -> None:
        async with asyncio.timeout(BOUND_S), scripted_server(answer) as url:
            terminal = Terminal(url, *words)
            try:
                await use(terminal)
            finally:
                terminal.close()

    asyncio.run(run())


def test_ctrl_c_stops_the_answer_hangs_up_and_leaves_the_chat(tmp_path: Path) -> None:
    bodies: list[dict[str, Any]] = []
    hung_up = asyncio.Event()

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if not body:
            writer.write(whole(200, {"data": [{"id": "the-model"}]}))
            return
        bodies.append(body)
        if len(bodies) == 1:
            writer.write(stream_head() + said("endless"))
            await writer.drain()
            while not writer.transport.is_closing():
                await asyncio.sleep(0.01)
                writer.write(event(choices=[]))
            hung_up.set()
        else:
            writer.write(HELLO)

    saved = tmp_path / "chat.json"

    async def use(terminal: Terminal) -> None:
        await terminal.until("> ")
        terminal.type("first\n")
        await terminal.until("endless")
        terminal.interrupt()
        await terminal.until("stopped")
        await hung_up.wait()
        await terminal.until("> ")
        terminal.type("one\\\n")
        await terminal.until("... ")
        terminal.type("two\n")
        await terminal.until("2 tokens")
        for command, told in (
            ("/stats", "2 answers, 4 messages kept"),
            (f"/save {saved}", "written: "),
            (f"/save {saved}", "File exists"),
            ("/sav", "did you mean /save?"),
            ("/system Be old.", "system prompt: Be old."),
            ("/help", "/reset"),
            ("again", "2 tokens"),
        ):
            terminal.type(command + "\n")
            await terminal.until(told)
        await terminal.until("> ")
        await terminal.interrupt_waiting()
        await terminal.until("Ctrl-D or /quit ends the chat")
        terminal.type("/quit\n")
        assert await terminal.end() == 0

    on_a_terminal(answer, use)
    messages = [body["messages"] for body in bodies]
    assert messages[1] == [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "endless"},
        {"role": "user", "content": "one\ntwo"},
    ]
    assert messages[2] == [{"role": "system", "content": "Be old."}, {"role": "user", "content": "again"}]
    assert '"content": "one\\ntwo"' in saved.read_text()


def test_on_a_terminal_the_thought_stands_above_the_answer_and_is_not_sent_back() -> None:
    bodies: list[dict[str, Any]] = []

    async def use(terminal: Terminal) -> None:
        await terminal.until("> ")
        terminal.type("hi\n")
        await terminal.until("So So \r\n\r\nYes.Yes.\r\n")
        await terminal.until("2 tokens")
        await terminal.until("> ")
        terminal.type("and?\n")
        await terminal.until("2 tokens")
        terminal.type("/quit\n")
        assert await terminal.end() == 0

    on_a_terminal(answering(THOUGHTFUL, bodies=bodies), use)
    assert bodies[1]["messages"][1] == {"role": "assistant", "content": "Yes.Yes."}


def test_a_history_that_cannot_be_kept_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    async def use(terminal: Terminal) -> None:
        await terminal.until(f"baton chat: --history {tmp_path}: cannot be kept: ")
        assert await terminal.end() == 2
        assert "Traceback" not in terminal.seen

    on_a_terminal(answering(HELLO, bodies=[]), use, "--history", str(tmp_path))


def test_an_error_is_a_line_of_the_chat_and_the_end_of_input_its_end(tmp_path: Path) -> None:
    bodies: list[dict[str, Any]] = []
    history = tmp_path / "lines"
    broken = stream_head() + said("half \x1b[2J") + event(error={"message": "node lost"})

    async def use(terminal: Terminal) -> None:
        await terminal.until("> ")
        terminal.type("first\n")
        await terminal.until("node lost")
        terminal.type("second\n")
        await terminal.until("2 tokens")
        await terminal.until("> ")
        terminal.type("\x04")
        assert await terminal.end() == 0
        assert "\x1b[2J" not in terminal.seen and "half \ufffd[2J" in terminal.seen

    on_a_terminal(answering(broken, HELLO, bodies=bodies), use, "--history", str(history))
    assert [message["content"] for message in bodies[1]["messages"]] == ["first", "half \x1b[2J", "second"]
    assert history.read_text().split() == ["first", "second"] and history.stat().st_mode & 0o777 == 0o600


def test_what_is_typed_while_an_answer_comes_is_kept_the_end_of_input_too() -> None:
    bodies: list[dict[str, Any]] = []
    is_typed = asyncio.Event()

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if not body:
            writer.write(whole(200, {"data": [{"id": "the-model"}]}))
            return
        bodies.append(body)
        writer.write(stream_head() + said("slow"))
        await writer.drain()
        await is_typed.wait()
        writer.write(said(" answer") + event(choices=[]) + b"data: [DONE]\n\n")

    async def use(terminal: Terminal) -> None:
        await terminal.until("> ")
        terminal.type("first\n")
        await terminal.until("slow")
        terminal.type("secondd\x7f\n\x04")
        is_typed.set()
        assert await terminal.end() == 0

    on_a_terminal(answer, use)
    assert [body["messages"][-1]["content"] for body in bodies] == ["first", "second"]


def test_the_waiting_for_a_busy_server_can_be_stopped() -> None:
    async def use(terminal: Terminal) -> None:
        await terminal.until("> ")
        terminal.type("first\n")
        await terminal.until("again in 50 s")
        began_at = time.monotonic()
        await terminal.interrupt_waiting()
        await terminal.until("stopped")
        assert time.monotonic() - began_at < 40
        terminal.type("/quit\n")
        assert await terminal.end() == 0

    on_a_terminal(answering(busy(429, 50), bodies=[]), use)
