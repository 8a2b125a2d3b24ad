"""What runs other people's clients can fail, says why in one sentence, and leaves nothing behind."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from bench.fleet import wait_until
from tests.clients.__main__ import read
from tests.clients.asks import ASKS, CALLS, STRUCTURED
from tests.clients.benchmarks import problems_of_streams
from tests.clients.environments import (
    CannotInstallError,
    Needs,
    NoIndexError,
    alone,
    downloaded_mb,
    environment,
    is_installed,
    why,
)
from tests.clients.libraries import Library, problems_of
from tests.clients.programs import FailedError, Programs, run
from tests.clients.served import Served

_CALL: Final = {"city": "Oslo", "days": [1, 2]}
_TEXT: Final = '{"is_baton": true, "colour": "red"}'
_ASKS: Final = (ASKS[5], STRUCTURED[0], CALLS[2])  # a completion streamed, a schema, a call
_LIBRARY: Final = Library("openai", "1.0", _ASKS, {"a fact": True}, ("an object",), {"chat": ("logprobs",)})


def _served(folder: Path, text: str = _TEXT, name: str = "weather") -> Served:
    """A server that gives every request the same answer of its kind."""
    usage = {"prompt_tokens": 3, "completion_tokens": 4}
    call = {"id": "call_1", "function": {"name": name, "arguments": json.dumps(_CALL)}}

    def answered(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        if "prompt" in body:
            return httpx.Response(200, json={"choices": [{"text": "so", "finish_reason": "stop"}], "usage": usage})
        message = {"content": None, "tool_calls": [call] if name else []} if "tools" in body else {"content": text}
        return httpx.Response(200, json={"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage})

    return Served("http://nowhere", "m", folder, httpx.Client(transport=httpx.MockTransport(answered)))


def _told() -> dict[str, Any]:
    """What a good library's script says of that server."""
    counts = {"finish_reasons": ["stop"], "prompt_tokens": 3, "completion_tokens": 4}
    completion, structured, called = (ask.name for ask in _ASKS)
    answers = {
        completion: counts | {"texts": ["so"], "logprobs": [], "calls": [], "num_pieces": 4, "was_at_work": True},
        structured: counts | {"texts": [_TEXT], "logprobs": None, "calls": []},
        called: counts | {"texts": [""], "logprobs": None, "calls": [["call_1", "weather", _CALL]]},
    }
    read_by_itself = {"an object": {"is_baton": False, "colour": "green"}}
    return {"version": "1.0", "answers": answers, "facts": {"a fact": True}, "parsed": read_by_itself}


def _problems(told: dict[str, Any], folder: Path, served: Served | None = None) -> list[str]:
    (folder / "said.json").write_text(json.dumps(told))
    python = folder / "python"
    python.write_text(f'#!/bin/sh\ncp "{folder / "said.json"}" "$5"\n')
    python.chmod(0o755)
    scratch = folder / "scratch"
    scratch.mkdir()
    return problems_of(_LIBRARY, Programs(folder, folder / "log", scratch), served or _served(folder))


def test_a_library_that_says_what_plain_http_got_has_no_problem(tmp_path: Path) -> None:
    """Else the next test would prove nothing."""
    assert _problems(_told(), tmp_path) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("version",), "1.1"),
        (("facts", "a fact"), False),
        (("facts",), {}),
        (("facts", "another fact"), True),
        (("parsed", "an object"), {"is_baton": 1, "colour": "green"}),
        (("parsed", "another object"), {}),
        (("answers", _ASKS[0].name, "texts"), ["So"]),
        (("answers", _ASKS[0].name, "texts"), None),
        (("answers", _ASKS[0].name, "prompt_tokens"), None),
        (("answers", _ASKS[0].name, "finish_reasons"), ["length"]),
        (("answers", _ASKS[0].name, "logprobs"), [-0.5]),
        (("answers", _ASKS[0].name, "calls"), [["call_2", "weather", _CALL]]),
        (("answers", _ASKS[0].name, "num_pieces"), 3),
        (("answers", _ASKS[0].name, "was_at_work"), False),
        (("answers", _ASKS[1].name, "texts"), ['{"is_baton": true}']),
        (("answers", _ASKS[1].name, "logprobs"), [-0.5]),
        (("answers", _ASKS[2].name, "calls"), [["call_1", "weather", {"city": "Oslo", "days": [1]}]]),
        (("answers", _ASKS[2].name, "calls"), []),
    ],
)
def test_whatever_a_library_gets_wrong_is_found(path: tuple[str, ...], value: object, tmp_path: Path) -> None:
    """Each thing that is compared, changed alone."""
    told = _told()
    inner = told
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    assert _problems(told, tmp_path)


def test_what_a_server_bound_to_no_schema_says_is_found_though_a_library_hands_it_on_as_it_is(tmp_path: Path) -> None:
    """A text, a call of somebody unknown, and no call."""
    _, structured, called = (ask.name for ask in _ASKS)
    for number, (text, name) in enumerate((("so", "weather"), (_TEXT, "colours"), (_TEXT, ""))):
        told = _told()
        told["answers"][structured]["texts"] = [text]
        told["answers"][called]["calls"] = [["call_1", name, _CALL]] if name else []
        folder = tmp_path / str(number)
        folder.mkdir()
        assert len(_problems(told, folder, _served(folder, text, name))) == 1


def test_tokens_that_were_kept_back_are_no_stream_but_one_reader_that_was_held_up_is_forgiven() -> None:
    """By all streams together."""
    kept = [(name, 0.5, 0.55) for name in "abc"]
    assert problems_of_streams(kept)
    assert not problems_of_streams([*kept[:1], ("d", 0.05, 0.9)])
    assert problems_of_streams([("d", 0.05, 0.9), ("e", 0.2, 0.2)])
    assert problems_of_streams([])


def test_what_a_program_started_ends_with_it_when_it_takes_too_long_and_at_an_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child that holds the output open neither outlives the run nor holds it up."""
    monkeypatch.setattr("tests.clients.programs.SAID_EVERY_S", 0.05)

    def interrupt(line: str) -> None:
        if line:  # it has started what it starts
            raise KeyboardInterrupt

    def command(pipe: str) -> list[str | Path]:
        return ["sh", "-c", 'mkfifo "$0"; sleep 250 <>"$0" & echo $!; wait', tmp_path / pipe]

    def is_over(pipe: str) -> bool:
        """A named pipe that nobody has open for reading cannot be opened for writing."""
        try:
            os.close(os.open(tmp_path / pipe, os.O_WRONLY | os.O_NONBLOCK))
        except OSError as error:
            return error.errno == errno.ENXIO
        return False

    for bound_s in (1, 8, 64):  # the first that is enough for it to say something
        pipe, log = f"first-{bound_s}", tmp_path / f"log-{bound_s}"
        with pytest.raises(FailedError, match=rf"^it took longer than {bound_s} s$") as failed:
            run(command(pipe), log, bound_s, folder=tmp_path, environment=dict(os.environ))
        if failed.value.lines:
            break
    assert list(failed.value.lines) == log.read_text().split() != []
    with pytest.raises(KeyboardInterrupt):
        run(command("second"), log, 60, folder=tmp_path, environment=dict(os.environ), waiting=interrupt)
    assert len(log.read_text().split()) == 2
    wait_until("the kernel has ended them", lambda: is_over(pipe) and is_over("second"))


def test_a_program_that_fails_is_one_sentence_and_its_last_lines(tmp_path: Path) -> None:
    """Of its own lines alone; a bar that is written over and over is its last state."""
    (tmp_path / "log").write_text("of another\n")
    command = ["sh", "-c", r"for n in $(seq 20); do echo $n; done; printf '1%%\r99%%\nBang\n\n'; exit 3"]
    with pytest.raises(FailedError, match=r"^it ended with 3: Bang$") as failed:
        run(command, tmp_path / "log", 60, folder=tmp_path, environment=dict(os.environ))
    assert failed.value.lines[0] == "1"
    assert failed.value.last_lines() == [*map(str, range(8, 21)), "99%", "Bang"]


def test_half_an_environment_is_taken_away_and_a_kept_one_used_again_for_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where pip fails, no folder is left, nor anything of pip's own; its words are in the log."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    folder = tmp_path / "client"

    def waiting(_line: str) -> None:
        """Nothing takes as long."""

    none, one = Needs(()), Needs(("nobody-has-this==1",))
    with environment(folder, none, True, waiting) as made:
        (made.programs / "mine").touch()
        assert made.disk_mb() > 0
    with environment(folder, none, True, waiting) as made:
        assert (made.programs / "mine").exists()
        assert is_installed(folder, none)
        assert not is_installed(folder, one)
    with (
        pytest.raises(CannotInstallError, match=r"^Could not find a version that satisfies .* nobody-has-this==1"),
        environment(folder, one, True, waiting),
    ):
        raise AssertionError("it was installed")
    assert "nobody-has-this" in (tmp_path / "client.log").read_text()
    assert [each.name for each in tmp_path.iterdir()] == ["client.log"]


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (
            "NewConnectionError('<pip._vendor.urllib3.connection.HTTPSConnection object at 0x7f1>: Failed to establish a new "
            "connection: [Errno -3] Temporary failure in name resolution')': /simple/openai/",
            "Failed to establish a new connection: [Errno -3] Temporary failure in name resolution",
        ),
        (
            "NameResolutionError(\"HTTPSConnection(host='pypi.org', port=443): Failed to resolve 'pypi.org' ([Errno -3] "
            "Temporary failure in name resolution)\")': /simple/openai/",
            "HTTPSConnection(host='pypi.org', port=443): Failed to resolve 'pypi.org' ([Errno -3] "
            "Temporary failure in name resolution",
        ),
    ],
)
def test_no_network_is_told_from_a_package_that_is_not_there(broken: str, reason: str) -> None:
    """In pip's words of two versions, which both end as if there were no such package."""
    ends = ["ERROR: Could not find a version that satisfies the requirement openai==9 (from versions: none)"]
    ends += ["ERROR: No matching distribution found for openai==9"]
    tries = [
        f"WARNING: Retrying (Retry(total={left}, connect=None)) after connection broken by '{broken}"
        for left in (4, 3, 2, 1, 0)
    ]
    lost = why(FailedError("it ended with 1", tries + ends))
    assert isinstance(lost, NoIndexError)
    assert str(lost) == f"no package index can be reached: {reason}"
    assert not isinstance(why(FailedError("it ended with 1", tries[:2] + ends)), NoIndexError)
    assert str(why(FailedError("it ended with 9"))) == "it ended with 9"
    broken_off = ["ERROR: Exception:", "Traceback (most recent call last):", "ReadTimeoutError: Read timed out."]
    assert str(why(FailedError("it ended with 2", broken_off))) == broken_off[-1]


def test_what_was_downloaded_is_counted_and_what_was_there_is_not() -> None:
    """By pip's lines."""
    lines = ["Collecting openai", "  Downloading openai-3.whl.metadata (30 kB)", "  Downloading openai-3.whl (1.5 MB)"]
    lines += ["  Using cached numpy-2.whl (16.6 MB)", "Processing /wheels/torch.whl", "Downloading x.whl (2.0 GB)"]
    assert downloaded_mb(lines) == pytest.approx(2001.53)


def test_one_at_a_time(tmp_path: Path) -> None:
    """Two would take away each other's environments."""
    with alone(tmp_path), pytest.raises(BlockingIOError), alone(tmp_path):
        raise AssertionError("both were let in")
    with alone(tmp_path):
        shutil.rmtree(tmp_path)


def test_wrong_words_are_one_sentence_and_a_name_said_twice_runs_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, before anything is started."""
    names = [client.name for client in read(["openai,vllm", "openai,"]).clients]
    assert names == ["openai", "vllm"]
    assert len(read([]).clients) == 6
    for words, sentence in (
        (["opanai"], "no such client: opanai; there are openai, langchain, litellm, lm-eval, vllm, guidellm"),
        (["--model", sys.executable], "is no model's folder: it has no tokenizer_config.json"),
    ):
        with pytest.raises(SystemExit, match="2"):
            read(words)
        assert capsys.readouterr().err.rstrip().endswith(sentence)
