"""URLs as people write them for `baton status`, `doctor`, `chat` and `bench`: one reading, and no secret in them is told."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench import plan_measure, serve
from bench.frame import facts
from bench.http_exchange import Server
from deploy import certs, chat, doctor, status
from runtime.server_url import read_url
from tests.architecture.source_tree import DEMO_MODEL
from tests.deploy.test_wrong_urls import answering

Main = Callable[[Sequence[str]], int]
COMMANDS: dict[str, Main] = {"status": status.main, "doctor": doctor.main, "chat": chat.main, "bench": serve.main}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "url",
    [
        "http://a..b:1",
        "http://.",
        f"http://{'a' * 64}.example:1",
        "http://\N{LATIN SMALL LIGATURE FF}.example",
        "http://[::1",
        "http://[v1.a]:1",
        "http://127.0.0.1:65536",
        "http://127.0.0.1:0",
        "http://127.0.0.1:8000/a b",
        "http://127.0.0.1:8000?x=1",
        "http://127.0.0.1:8000#x",
        "http:///x",
    ],
)
def test_what_is_no_url_is_one_sentence_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], command: str, url: str
) -> None:
    with pytest.raises(SystemExit) as end:
        COMMANDS[command](["--url", url])
    assert end.value.code == 2
    assert capsys.readouterr().err == f"baton {command}: --url {url}: must be http(s)://HOST[:PORT][/PREFIX]\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_password_in_a_url_is_refused_and_not_told_again(capsys: pytest.CaptureFixture[str], command: str) -> None:
    """What measures left it out without a word, others showed it instead of the key and printed it."""
    with pytest.raises(SystemExit) as end:
        COMMANDS[command](["--url", "http://me:secret@127.0.0.1:1"])
    assert end.value.code == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and "no user and no password" in line
    assert "secret" not in line


@pytest.mark.parametrize(
    ("url", "means"),
    [
        ("HTTP://LocalHost:8000/v1/", "http://localhost:8000"),
        ("http://h\N{LATIN SMALL LETTER A WITH DIAERESIS}user.example/v1", "http://xn--huser-gra.example"),
        ("https://h/pr\N{LATIN SMALL LETTER E WITH ACUTE}fix/v1", "https://h/pr%C3%A9fix"),
        ("https://h/a%2Fb/", "https://h/a%2Fb"),
        ("http://[fe80::1%25eth0]:8000", "http://[fe80::1%eth0]:8000"),
        ("http://[fe80::1%eth0]:8000/v1", "http://[fe80::1%eth0]:8000"),
    ],
)
def test_a_url_is_read_as_it_goes_over_the_wire(url: str, means: str) -> None:
    assert str(read_url(url)) == means
    server = Server.parse(url)
    assert read_url(server.base_url) == read_url(url)
    line, host = server.post("/v1/completions", b"{}").split(b"\r\n")[:2]
    assert line.isascii() and line.count(b" ") == 2
    assert host.isascii()


@dataclass(frozen=True)
class _Told:
    api_key: str | None = "sk-not-for-others"
    output: Path | None = None


@pytest.mark.covers("X02")
@pytest.mark.parametrize("words", [["--api-key", "sk-not-for-others"], ["--api-key=sk-not-for-others"], []])
def test_no_key_is_in_a_result(words: list[str]) -> None:
    """Results are handed round; a key may stand in the command, too."""
    told = facts("baton bench", _Told(), words)
    assert "sk-not-for-others" not in json.dumps(told)
    assert told["command"].startswith("baton bench")


def test_a_server_that_says_nothing_is_said_to_be_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(SystemExit):
            serve.main(["--url", url, "--timeout-s", "0.2"])
    assert capsys.readouterr().err == f"baton bench: --url {url}: no answer within 0.2 s\n"


def test_a_cluster_with_certificates_and_keys_can_be_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """`baton plan measure` gets as far as the server's own words; without the authority it says which flag names one."""
    assert certs.main([str(tmp_path / "certs")]) == 0
    authority = str(tmp_path / "certs" / "ca.crt")
    pages, names = {"/": "no stream"}, {"/v1/models": '{"data": [{"id": "m"}]}'}
    tls_dir = tmp_path / "certs" / "localhost"
    with answering(pages | names, tls_dir) as url, answering(pages, tls_dir, status_code=401) as locked:
        for asked, words, why in (
            (url, ["--ca", authority, "--api-key", "k"], "failed: stream_error the stream ended without [DONE]"),
            (locked, ["--ca", authority, "--api-key", "k"], "BATON_API_KEY"),
            (url, [], "; --ca FILE names the authority that signed it"),
            (url, ["--ca", str(DEMO_MODEL / "config.json")], "config.json: holds no certificate, as PEM"),
        ):
            capsys.readouterr()
            with pytest.raises(SystemExit) as end:
                plan_measure.main(
                    ["--model", str(DEMO_MODEL), "--output", str(tmp_path / "r.json"), "--url", asked, *words]
                )
            line = capsys.readouterr().err
            assert end.value.code == 2
            assert line.count("\n") == 1 and line.endswith(f"{why}\n"), line
