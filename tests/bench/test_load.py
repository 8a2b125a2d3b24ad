"""The load generator against a server that does what a test says: what is measured, from where to where, and what is an error."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, pairwise
from typing import Any

import pytest

from bench.completions import Asked, Asking, Record
from bench.http_exchange import Server
from bench.load import Halt, Sender, run_closed_loop, run_open_loop
from bench.report import report_of, to_json
from bench.serve import ServerProblem, find_asking, measure
from bench.serve_config import BenchConfig
from tests.bench.scripted_server import Answer, chunk, event, scripted_server, stream_head, usage, whole

BODY = json.dumps({"n": 0}).encode()
OK_STREAM = stream_head() + chunk() + usage(4, 1)


def writing(data: bytes) -> Answer:
    """The same bytes to every request."""

    async def answer(_body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()

    return answer


def records_of(answer: Answer, number: int = 1, *, is_stream: bool = True, timeout_s: float = 10.0) -> list[Record]:
    """What becomes of so many requests at once."""

    async def run() -> list[Record]:
        async with asyncio.timeout(100), scripted_server(answer) as url:
            sender = Sender(Server.parse(url), is_stream, timeout_s)
            asked = [Asked(index, BODY, 4, 1) for index in range(number)]
            return await run_open_loop(sender, asked, [0.0] * number)

    return asyncio.run(run())


def test_a_late_answer_delays_no_arrival() -> None:
    """The first answer comes only once the last request is there: a loop that waited for it would never end."""
    number = 20
    arrived: list[int] = []
    arrived_at: list[float] = []
    all_there = asyncio.Event()

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        arrived.append(body["n"])
        arrived_at.append(time.monotonic())
        if len(arrived) == number:
            all_there.set()
        await all_there.wait()
        writer.write(OK_STREAM)

    async def run() -> list[Record]:
        async with asyncio.timeout(100), scripted_server(answer) as url:
            sender = Sender(Server.parse(url), True, 10.0)
            asked = [Asked(index, json.dumps({"n": index}).encode(), 4, 1) for index in range(number)]
            return await run_open_loop(sender, asked, [index * 0.005 for index in range(number)])

    records = asyncio.run(run())
    assert sorted(arrived) == list(range(number))
    assert [record.index for record in records] == list(range(number))
    assert [record.arrival_s for record in records] == pytest.approx([index * 0.005 for index in range(number)])
    assert all(record.is_ok and record.lag_s > -0.002 for record in records)
    assert records[arrived[0]].end_s > arrived_at[-1] - arrived_at[0], "the first one waited for all"


def test_a_server_that_stalls_holds_up_no_arrival_and_a_halt_leaves_nobody_out_of_the_records() -> None:
    """It answers the first half and no more; what is sent behind it comes at its instants, and all of it is in the records."""
    number, gap_s = 30, 0.01

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if body["n"] >= number // 2:
            await asyncio.Event().wait()
        writer.write(OK_STREAM)

    async def run() -> tuple[list[Record], list[Record]]:
        async with asyncio.timeout(100), scripted_server(answer) as url:
            asked = [Asked(index, json.dumps({"n": index}).encode(), 4, 1) for index in range(number)]
            halt = Halt()
            sender = Sender(Server.parse(url), True, 100.0, Counting(number, number // 2, halt))
            opened = await run_open_loop(sender, asked, [index * gap_s for index in range(number)], halt)
            sender = replace(sender, watcher=Counting(3, 0, halt := Halt()))
            return opened, await run_closed_loop(sender, asked[number // 2 :], 3, halt)

    opened, closed = asyncio.run(run())
    assert [record.index for record in opened] == list(range(number))
    assert [record.status for record in opened] == ["200"] * (number // 2) + ["interrupted"] * (number // 2)
    assert [record.arrival_s for record in opened] == pytest.approx([index * gap_s for index in range(number)])
    assert sorted(record.lag_s for record in opened)[number // 2] < 10, "nobody waited for those that time out"
    assert report_of(opened).errors == {"interrupted": number // 2}
    assert [(record.index - number // 2, record.status) for record in closed] == [
        (index, "interrupted") for index in range(3)
    ]


class Counting:
    """Halts a run a moment after so many requests have begun, and so many of those have ended."""

    def __init__(self, num_begun: int, num_ended: int, halt: Halt) -> None:
        self._left = [num_begun, num_ended]
        self._halt = halt

    def begun(self) -> None:
        self._count(0)

    def ended(self, record: Record) -> None:
        assert record.end_s > 0
        self._count(1)

    def _count(self, which: int) -> None:
        self._left[which] -= 1
        if max(self._left) <= 0:
            asyncio.get_running_loop().call_later(0.05, self._halt.ask)


def test_requests_are_made_one_ahead_and_no_earlier() -> None:
    """The text of a long run would fill the memory."""
    made_at: list[float] = []

    def asked() -> Iterator[Asked]:
        for index in range(10):
            made_at.append(time.monotonic())
            yield Asked(index, BODY, 4, 1)

    async def run() -> list[Record]:
        async with asyncio.timeout(100), scripted_server(writing(OK_STREAM)) as url:
            return await run_open_loop(Sender(Server.parse(url), True, 10.0), asked(), [0.02 * n for n in range(10)])

    began_at = time.monotonic()
    assert len(asyncio.run(run())) == 10
    assert all(at >= began_at + 0.02 * (n - 1) for n, at in enumerate(made_at)), "not before the one ahead of it is due"


def test_a_duration_ends_a_closed_loop_that_has_requests_without_end() -> None:
    async def run() -> list[Record]:
        async with asyncio.timeout(100), scripted_server(writing(OK_STREAM)) as url:
            endless = (Asked(index, BODY, 4, 1) for index in count())
            return await run_closed_loop(Sender(Server.parse(url), True, 10.0), endless, 2, duration_s=0.2)

    records = asyncio.run(run())
    assert [record.index for record in records] == list(range(len(records))) and records
    assert all(record.is_ok and record.arrival_s < 0.2 for record in records)


def test_tokens_are_what_the_server_counts_and_never_what_chunks_are_counted() -> None:
    ids = event(choices=[{"index": 0, "text": "x", "completion_token_ids": [5, 6, 7]}])
    theirs = event(choices=[{"index": 0, "text": "x", "token_ids": [8]}])
    (counted,) = records_of(writing(stream_head() + ids + theirs + b"data: [DONE]\n\n"))
    assert (counted.output_tokens, counted.token_ids) == (4, [5, 6, 7, 8]) and counted.tpot_s is not None
    (unknown,) = records_of(writing(stream_head() + chunk() + chunk() + b"data: [DONE]\n\n"))
    assert unknown.is_ok and unknown.output_tokens is None and unknown.tpot_s is None
    assert report_of([counted, unknown]).num_uncounted == 1


def test_the_event_that_opens_a_chats_answer_is_no_token() -> None:
    opening = event(
        choices=[{"index": 0, "delta": {"role": "assistant", "content": "", "refusal": None}, "finish_reason": None}]
    )
    said = event(choices=[{"index": 0, "delta": {"content": "x"}, "finish_reason": None}])
    (record,) = records_of(writing(stream_head() + opening + said + said + usage(4, 2)))
    assert record.is_ok and len(record.chunk_at_s) == 2


def test_a_chat_and_a_key_go_where_they_should() -> None:
    heads: list[dict[str, Any]] = []

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        heads.append(body)
        writer.write(whole(200, {"data": [{"id": "m"}]}) if not body else OK_STREAM)

    async def run() -> list[Record]:
        async with asyncio.timeout(100), scripted_server(answer) as url:
            config = BenchConfig(url=url, api="chat", max_requests=2, warmup=0, seed=1, return_token_ids=True)
            return await measure(config, await find_asking(config))

    assert all(record.is_ok for record in asyncio.run(run()))
    assert [len(body["messages"][0]["content"].split()) for body in heads[-2:]] == [64, 64]
    assert heads[-1]["return_token_ids"] is True and "prompt" not in heads[-1]
    server = Server.parse("https://a/b")
    assert server.post("/p", b"{}", "secret").startswith(b"POST /b/p HTTP/1.1\r\nHost: a:443\r\n")
    assert b"\r\nAuthorization: Bearer secret\r\n" in server.post("/p", b"{}", "secret")
    assert b"Authorization" not in server.post("/p", b"{}")


def test_the_generators_own_lateness_is_told_apart_from_the_servers() -> None:
    class Blocking:
        def begun(self) -> None:
            time.sleep(0.5)  # while the second request is due

        def ended(self, record: Record) -> None: ...

    async def run() -> list[Record]:
        async with asyncio.timeout(100), scripted_server(writing(OK_STREAM)) as url:
            sender = Sender(Server.parse(url), True, 10.0, Blocking())
            return await run_open_loop(sender, [Asked(index, BODY, 4, 1) for index in range(2)], [0.0, 0.05])

    began_at = time.monotonic()
    records = asyncio.run(run())
    assert records[1].lag_s > 0.4
    assert 0.05 + records[1].lag_s + records[1].end_s < time.monotonic() - began_at, "none of its time counts twice"


def test_a_closed_loop_keeps_so_many_requests_under_way_and_no_more() -> None:
    under_way, most = 0, 0
    full = asyncio.Event()

    async def answer(_body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        if under_way == 3:
            full.set()
        await full.wait()
        for _ in range(50):
            await asyncio.sleep(0)  # time for a fourth one, which shares this loop
        under_way -= 1
        writer.write(OK_STREAM)

    async def run() -> list[Record]:
        async with asyncio.timeout(100), scripted_server(answer) as url:
            asked = [Asked(index, BODY, 4, 1) for index in range(12)]
            return await run_closed_loop(Sender(Server.parse(url), True, 10.0), asked, 3)

    records = asyncio.run(run())
    assert most == 3
    assert [record.index for record in records] == list(range(12))
    assert all(record.is_ok for record in records)


def test_times_are_of_the_events_that_carry_a_choice_however_the_bytes_are_cut(fresh_seed: int) -> None:
    rng = random.Random(fresh_seed)
    data = chunk("é") + chunk() + chunk() + usage(4, 5)
    cuts = sorted({0, len(data), *(rng.randrange(len(data)) for _ in range(10))})

    async def answer(_body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(stream_head())
        for begin, end in pairwise(cuts):
            writer.write(data[begin:end])
            await writer.drain()
            await asyncio.sleep(0)

    (record,) = records_of(answer)
    assert record.is_ok, record
    assert record.connect_s is not None and record.ttft_s is not None and record.tpot_s is not None
    assert 0 < record.connect_s <= record.ttft_s <= record.end_s
    assert len(record.chunk_at_s) == 3 and len(record.itl_s) == 2
    assert (record.prompt_tokens, record.output_tokens) == (4, 5)
    assert record.tpot_s == pytest.approx((record.chunk_at_s[2] - record.chunk_at_s[0]) / 4)


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("data", "status", "error"),
    [
        (whole(429, {"error": {"message": "too many"}}), "429", "too many"),
        (whole(429, {"error": {"message": "too many", "code": "OVERLOADED"}}), "429 OVERLOADED", "too many"),
        (whole(503, {"detail": "starting"}), "503", "starting"),
        (b"HTTP/1.1 500 X\r\n\r\noops", "500", "oops"),
        (stream_head() + chunk() + event(error={"message": "node lost"}), "stream_error", "node lost"),
        (stream_head() + chunk(), "stream_error", "[DONE]"),
        (stream_head() + b"data: {\n\n", "malformed", "JSONDecodeError"),
        (stream_head() + b"data: []\n\ndata: [DONE]\n\n", "malformed", ""),
        (stream_head() + event(choices=[], usage={"prompt_tokens": "many"}), "malformed", ""),
        (b"SSH-2.0-OpenSSH\r\n", "malformed", ""),
        (b"", "broken", "closed"),
        (CHUNKED + b"5\r\nda", "broken", "closed"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\ndata: ", "broken", "closed"),
    ],
)
def test_an_answer_that_is_not_complete_is_an_error_by_its_kind_and_ends_no_run(
    data: bytes, status: str, error: str
) -> None:
    records = records_of(writing(data), 2)
    assert [record.kind for record in records] == [status, status]
    assert error in records[0].error
    report = report_of(records)
    assert (report.num_ok, report.errors) == (0, {status: 2})
    assert report.ttft_s is None and report.requests_per_s == 0


def test_a_server_that_does_not_answer_is_a_timeout_and_one_that_is_not_there_a_failed_connect() -> None:
    async def answer(_body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    async def no_server() -> Record:
        async with scripted_server(answer) as url:
            pass
        (record,) = await run_closed_loop(Sender(Server.parse(url), True, 10.0), [Asked(0, BODY, 4, 1)], 1)
        return record

    (silent,) = records_of(answer, timeout_s=0.05)
    assert silent.status == "timeout" and silent.end_s >= 0.05
    assert asyncio.run(no_server()).status == "connect"


def test_a_whole_answer_has_counts_and_an_end_but_no_first_token() -> None:
    answer = whole(200, {"choices": [{"text": "x"}], "usage": {"prompt_tokens": 4, "completion_tokens": 2}})
    (record,) = records_of(writing(answer), is_stream=False)
    assert record.is_ok and (record.prompt_tokens, record.output_tokens) == (4, 2)
    assert record.ttft_s is None and record.tpot_s is None and record.end_s > 0
    assert report_of([record]).num_wrong_length == 1, "one was asked for"


def test_figures_follow_from_the_records() -> None:
    good = [
        Record(0, 4, 3, 0.0, 0.0, "200", "", 0.001, 2.0, [0.5, 1.0, 1.5], 4, 3),
        Record(1, 4, 3, 1.0, 0.5, "200", "", 0.001, 2.5, [1.5, 2.0, 2.5], 4, 3),
    ]
    bad = Record(2, 4, 3, 2.0, 0.0, "503", "busy", 0.001, 0.1)
    report = report_of([*good, bad])
    assert report.duration_s == 4.0  # the second one was begun at 1.5 and took 2.5
    assert (report.num_requests, report.num_ok, report.errors) == (3, 2, {"503": 1})
    assert (report.requests_per_s, report.output_tokens_per_s, report.prompt_tokens_per_s) == (0.5, 1.5, 2.0)
    assert report.ttft_s is not None and (report.ttft_s.count, report.ttft_s.p50) == (2, 1.0)
    assert report.tpot_s is not None and report.tpot_s.max == 0.5
    assert report.itl_s is not None and report.itl_s.count == 4
    assert report.arrival_lag_s is not None and (report.arrival_lag_s.count, report.arrival_lag_s.max) == (3, 0.5)
    result = to_json(report, [*good, bad], {"command": "c"})
    assert json.loads(json.dumps(result))["requests"][1]["chunk_at_s"] == [1.5, 2.0, 2.5]
    assert result["ttft_s"]["p50"] == 1.0 and result["requests"][0]["ttft_s"] == 0.5


def test_a_server_that_takes_no_token_ids_is_asked_in_words_and_the_seed_decides_what() -> None:
    bodies: list[dict[str, Any]] = []

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        bodies.append(body)
        if not body:
            writer.write(whole(200, {"data": [{"id": "the-model"}]}))
        elif isinstance(body["prompt"], list):
            writer.write(whole(422, {"detail": "prompt must be a text"}))
        else:
            writer.write(OK_STREAM)

    async def run() -> None:
        async with asyncio.timeout(100), scripted_server(answer) as url:
            config = BenchConfig(url=url, max_requests=5, prompt_tokens="6:3", seed=7, warmup=2, concurrency=1)
            asking = await find_asking(config)
            assert (asking.model, asking.prompt_form) == ("the-model", "words")
            first, begin = await measure(config, asking), len(bodies)
            assert bodies[begin - 7 :] != bodies[begin - 6 :]
            second = await measure(config, asking)
            assert bodies[begin:] == bodies[begin - 7 : begin], "the same seed, the same requests"
        assert [len(body["prompt"].split()) for body in bodies[-5:]] == [each.prompt_tokens_asked for each in second]
        assert len(first) == len(second) == 5, "warm-up is not in it"
        assert bodies[-1]["ignore_eos"] is True and bodies[-1]["stream_options"] == {"include_usage": True}
        plain = Asking("m", "token_ids", is_stream=False, ignores_eos=False)
        assert set(json.loads(plain.body("[3,4]", 4))) == {"model", "prompt", "max_tokens", "temperature"}

    asyncio.run(run())


@pytest.mark.parametrize("data", [whole(404, {"error": "no such model"}), whole(500, {}), b"", b"SSH-2.0\r\n"])
def test_a_server_that_refuses_the_first_request_is_told_in_one_sentence(data: bytes) -> None:
    async def run() -> None:
        async with asyncio.timeout(100), scripted_server(writing(data)) as url:
            with pytest.raises(ServerProblem, match="--url"):
                await find_asking(BenchConfig(url=url, model="m"))

    asyncio.run(run())


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://a:1", "http://a:1"),
        ("http://a:1/v1", "http://a:1"),
        ("https://a/b/v1/", "https://a:443/b"),
        ("http://[::1]:80/", "http://[::1]:80"),
    ],
)
def test_a_url_may_end_in_v1_or_not(url: str, base: str) -> None:
    assert Server.parse(url).base_url == base


@pytest.mark.parametrize("url", ["a:1", "ftp://a", "http://", "http://a:x", "http://a/?q=1"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="--url"):
        BenchConfig(url=url)
