"""Load on servers that do what few do, or what none should: an answer is counted as what it is, and none ends the run."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from bench.completions import one_line
from bench.report import report_of
from bench.serve import ServerProblem, find_asking
from bench.serve_config import BenchConfig
from tests.bench.scripted_server import chunk, event, scripted_server, stream_head, usage, whole
from tests.bench.test_load import OK_STREAM, records_of, writing

FINISH = b'data: {"choices":[{"index":0,"text":"","finish_reason":"%s"}]}\n\n'


@pytest.mark.parametrize(
    ("data", "kind", "error"),
    [
        (stream_head() + b"data: " + b"[" * 200_000 + b"\n\n", "malformed", "RecursionError"),
        (b"HTTP/1.1 500 X\r\n\r\n" + b"[" * 200_000, "500", "[["),
        (stream_head() + b'data: {"usage":{"completion_tokens":Infinity}}\n\n', "malformed", "OverflowError"),
        (stream_head() + chunk() + usage(4, -5), "malformed", "below 0"),
        (whole(503, {"error": {"message": "a\ud800\x1b[31m\nb", "code": "\udfffX"}}), "503 X", "a [31m b"),
        (stream_head() + b"data: [DONE]\n\n", "stream_error", "no event"),
        (stream_head() + chunk() + FINISH % b"pd_reschedule" + usage(4, 2), "unfinished pd_reschedule", "early"),
        (stream_head() + FINISH % b"abort" + usage(4, 2), "unfinished abort", "early"),
    ],
)
def test_what_no_server_should_say_is_an_error_of_its_request_and_ends_no_run(
    data: bytes, kind: str, error: str
) -> None:
    records = records_of(writing(data), 2)
    assert [one_line(record.kind) for record in records] == [kind, kind]
    assert error in records[0].error and records[0].error.isprintable()
    assert report_of(records).num_ok == 0


@pytest.mark.parametrize(
    "data",
    [
        stream_head() + event(choices=[{"index": 0, "text": "x"}], error=None) + usage(4, 1),
        stream_head() + chunk() + event(usage={"prompt_tokens": 4, "completion_tokens": 1}) + b"data: [DONE]\n\n",
        stream_head() + event(choices=None) + chunk() + usage(4, 1),
        stream_head() + chunk() + usage(4, 1) + event(choices=[], usage={"completion_tokens": None}),
        stream_head() + chunk() + usage(4, 1).rstrip(),
        (stream_head() + chunk() + usage(4, 1)).replace(b"\n\n", b"\r\n\r\n"),
        b"HTTP/1.1 100 Continue\r\n\r\n" + OK_STREAM,
        b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\nContent-Length: 0\r\n\r\n" + OK_STREAM,
    ],
)
def test_what_servers_may_do_beside_the_usual_is_an_answer_all_the_same(data: bytes) -> None:
    (record,) = records_of(writing(data))
    assert record.is_ok, record
    assert (record.prompt_tokens, record.output_tokens, len(record.chunk_at_s)) == (4, 1, 1)


@pytest.mark.parametrize(
    ("content", "kind", "error"),
    [
        ({"error": {"message": "model is loading", "code": 503}}, "malformed 503", "model is loading"),
        ({"detail": "no"}, "malformed", "detail"),
        ({"choices": [{"text": "x", "finish_reason": "pd_reschedule"}]}, "unfinished pd_reschedule", "early"),
    ],
)
def test_a_whole_answer_without_an_answer_is_no_quick_success(content: dict[str, Any], kind: str, error: str) -> None:
    (record,) = records_of(writing(whole(200, content)), is_stream=False)
    assert record.kind == kind and error in record.error and not record.is_ok


@pytest.mark.parametrize("model", [None, "m"])
def test_a_server_that_sends_elsewhere_is_told_with_where(model: str | None) -> None:
    data = b"HTTP/1.1 307 X\r\nLocation: https://elsewhere/v1\r\nContent-Length: 0\r\n\r\n"

    async def run() -> None:
        async with asyncio.timeout(100), scripted_server(writing(data)) as url:
            with pytest.raises(ServerProblem, match="sends elsewhere, to https://elsewhere/v1; give"):
                await find_asking(BenchConfig(url=url, model=model))

    asyncio.run(run())


def test_a_page_instead_of_an_answer_is_told_in_one_line() -> None:
    async def run() -> str:
        async with asyncio.timeout(100), scripted_server(writing(b"HTTP/1.1 404 X\r\n\r\n<html>\n<p>")) as url:
            with pytest.raises(ServerProblem) as problem:
                await find_asking(BenchConfig(url=url, model="m"))
            return str(problem.value)

    assert asyncio.run(run()).endswith("is answered 404: <html> <p>")


DIES: Final = """
import asyncio, os

num_answered = 0

async def serve(reader, writer):
    global num_answered
    head = (await reader.readuntil(b"\\r\\n\\r\\n")).lower()
    await reader.readexactly(int(head.partition(b"content-length:")[2].split(b"\\r\\n")[0] or 0))
    body = b'{"data": [{"id": "m"}]}'
    if b"/v1/completions" in head.split(b"\\r\\n")[0]:
        num_answered += 1
        body = b'{"choices": [{"text": "a"}], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}'
    told = b"HTTP/1.1 200 OK\\r\\nContent-Type: application/json\\r\\nConnection: close\\r\\nContent-Length: %d\\r\\n\\r\\n"
    writer.write(told % len(body) + body)
    await writer.drain()
    writer.close()
    if num_answered == 40:
        os._exit(0)

async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""


def test_a_server_that_dies_of_a_rate_leaves_the_runs_before(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    with subprocess.Popen([sys.executable, "-c", DIES], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{server.stdout.readline().strip()}"
        flags = ["--rates", "200,201,202,203", "--max-requests", "15", "--stream", "off", "--output", str(path)]
        command = [sys.executable, "-m", "bench.serve", url, *flags, "--prompt-tokens", "4"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2, ended.stderr
    assert "cannot be reached" in ended.stderr and "what follows is of the runs before" in ended.stderr
    assert len(json.loads(path.read_text())["runs"]) >= 2
