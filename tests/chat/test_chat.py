"""`baton chat` as a user runs it: in a pipe, and on a terminal, against a server that does what the test says."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import Any

import pytest

from deploy.chat import main
from tests.bench.scripted_server import Answer, event, scripted_server, stream_head, whole
from tests.e2e.cluster import BATON

BOUND_S = 150.0


def said(text: str) -> bytes:
    """An event with a piece of an answer."""
    return event(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": None}])


END = event(choices=[], usage={"prompt_tokens": 4, "completion_tokens": 2}) + b"data: [DONE]\n\n"
HELLO = stream_head() + said("Hel") + said("lo") + END
THOUGHT = event(choices=[{"index": 0, "delta": {"reasoning_content": "So "}, "finish_reason": None}])
THOUGHTFUL = stream_head() + THOUGHT + THOUGHT + said("Yes.") + said("Yes.") + END


def answering(*answers: bytes, bodies: list[dict[str, Any]]) -> Answer:
    """The model's name, then these, one per request; the last one again and again."""
    left = list(answers)

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if not body:
            writer.write(whole(200, {"data": [{"id": "the-model"}]}))
            return
        bodies.append(body)
        writer.write(left.pop(0) if len(left) > 1 else left[0])
        await writer.drain()

    return answer


async def asked_of(url: str, *words: str, stdin: bytes = b"") -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `baton chat URL …` with this on stdin."""
    pipe = subprocess.PIPE
    chat = await asyncio.create_subprocess_exec(BATON, "chat", url, *words, stdin=pipe, stdout=pipe, stderr=pipe)
    out, err = await chat.communicate(stdin)
    assert chat.returncode is not None
    return chat.returncode, out.decode(), err.decode()


def exit_code(answer: Answer, *words: str) -> int:
    """The same in this process, which takes a tenth of the time."""

    async def run() -> int:
        async with asyncio.timeout(BOUND_S), scripted_server(answer) as url:
            return await asyncio.to_thread(main, [url, *words])

    return asyncio.run(run())


def test_a_question_prints_just_the_answer_from_the_command_line_or_a_pipe() -> None:
    bodies: list[dict[str, Any]] = []

    async def run() -> None:
        async with asyncio.timeout(BOUND_S), scripted_server(answering(HELLO, bodies=bodies)) as url:
            flags = ("--system", "Be brief.", "--seed", "7")
            assert await asked_of(url, "hi", *flags) == (0, "Hello\n", "")
            assert await asked_of(url, stdin=b"hi\n") == (0, "Hello\n", "")
            assert await asked_of(url, stdin=b"caf\xe9") == (0, "Hello\n", ""), "a diff of what is no UTF-8"

    asyncio.run(run())
    first, second, third = bodies
    assert first["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert (first["model"], first["seed"], first["stream"]) == ("the-model", 7, True)
    assert second["messages"] == [{"role": "user", "content": "hi\n"}] and "seed" not in second
    assert third["messages"] == [{"role": "user", "content": "caf\ufffd"}]


def test_an_answer_that_nobody_reads_any_more_is_not_waited_for() -> None:
    """It would be generated to its end for nobody."""

    async def endless(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if not body:
            writer.write(whole(200, {"data": [{"id": "the-model"}]}))
            return
        writer.write(stream_head())
        while True:
            writer.write(said("la"))
            await writer.drain()
            await asyncio.sleep(0.01)

    async def run() -> None:
        async with asyncio.timeout(BOUND_S), scripted_server(endless) as url:
            read, write = os.pipe()
            os.close(read)
            chat = await asyncio.create_subprocess_exec(BATON, "chat", url, "hi", stdout=write)
            os.close(write)
            assert await chat.wait() == 0

    asyncio.run(run())


def busy(status: int, retry_after: int | None) -> bytes:
    """A refusal, which may say when to come back."""
    told = whole(status, {"error": {"message": "too many"}})
    return told if retry_after is None else told.replace(b"\r\n", f"\r\nRetry-After: {retry_after}\r\n".encode(), 1)


def test_a_file_has_the_answer_and_not_what_the_model_thought(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(answering(THOUGHTFUL, bodies=[]), "hi") == 0
    assert capsys.readouterr().out == "Yes.Yes.\n"


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_that_says_when_to_come_back_is_asked_again(
    capsys: pytest.CaptureFixture[str], status: int
) -> None:
    bodies: list[dict[str, Any]] = []
    code = exit_code(answering(busy(status, 0), HELLO, bodies=bodies), "hi")
    out, err = capsys.readouterr()
    assert (code, out, len(bodies)) == (0, "Hello\n", 2)
    assert f"{status}: too many; again in 0.1 s" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (busy(429, None), ": 429: too many"),
        (busy(503, 3600), ": 503: too many"),
        (
            whole(401, {"error": {"message": "no key"}}),
            ": 401: wants a key: --api-key, or better",
        ),
        (whole(404, {"detail": "Not Found"}), ": 404: has no such page"),
        (whole(500, "oops"), ': 500: "oops"'),
        (stream_head() + said("Hel"), "the answer broke off"),
        (stream_head() + said("Hel") + event(error={"message": "node lost"}), ": node lost"),
        (stream_head() + b"data: {\n\n", "sends what is no event of a chat"),
        (stream_head() + b"data: {}\n\n", "sends what is no event of a chat"),
        (stream_head() + b"data: 5\n\n", "sends what is no event of a chat"),
        (stream_head() + b"data: " + b"[" * 100_000 + b"\n\n", "sends what is no event of a chat"),
        (b"SSH-2.0-OpenSSH\r\n", "http://127.0.0.1:"),
        (
            stream_head() + said("x") + event(choices=[{"delta": {}, "finish_reason": "pd_reschedule"}]) + END,
            "cut short: ",
        ),
    ],
)
def test_where_there_is_no_answer_there_is_one_sentence_and_exit_code_1(
    capsys: pytest.CaptureFixture[str], data: bytes, sentence: str
) -> None:
    code = exit_code(answering(data, bodies=[]), "hi", "--model", "m")
    _, err = capsys.readouterr()
    assert code == 1 and err.startswith("baton chat: ") and sentence in err and err.count("\n") == 1, err


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (("http://127.0.0.1:1", "hi"), 1, "`make up` starts a cluster, --url names another server"),
        (("--url", "127.0.0.1:8000"), 2, "--url 127.0.0.1:8000: must be http(s)://HOST[:PORT][/PREFIX]"),
        (("--temperature", "3"), 2, "--temperature 3: must be a number between 0 and 2"),
        (("hi", "--ca", "/nowhere"), 2, "--ca /nowhere: is no file"),
        (("hi", "there"), 2, "there: unexpected argument"),
        ((b"caf\xe9",), 2, "--question: must be text in UTF-8"),
        (("hi", "--system", b"caf\xe9"), 2, "--system: must be text in UTF-8"),
        (("hi", "--api-key", "clé"), 2, "--api-key: keys are printable ASCII"),
        (("hi", "--api-key", "key\r"), 2, "--api-key: keys are printable ASCII"),
        ((), 2, "stdin holds no question"),
    ],
)
def test_what_the_user_can_mend_is_one_line(words: tuple[str | bytes, ...], code: int, sentence: str) -> None:
    ended = subprocess.run(
        [BATON, "chat", *words], input="", capture_output=True, text=True, timeout=BOUND_S, check=False
    )
    assert (ended.returncode, ended.stdout) == (code, "")
    assert sentence in ended.stderr and ended.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["stdin", "stdout"])
def test_a_stream_that_the_shell_has_closed_is_one_line(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, name, None)
    with pytest.raises(SystemExit) as ended:
        main(["http://127.0.0.1:1"])
    assert ended.value.code == 2
    monkeypatch.undo()
    assert capsys.readouterr().err.startswith(f"baton chat: {name} is closed;")
