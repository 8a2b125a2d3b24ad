"""`python -m bench.interference`: a tiny run of both sides, and how gaps and ratios are reckoned; and the pages of results."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from bench import interference
from bench.fleet import Fleet
from bench.http_exchange import Server
from bench.interference import InterferenceConfig, Round, figures_of, main
from bench.page import main as write_pages
from bench.page import page
from tests import forked


def test_gaps_are_those_that_end_in_the_window_and_never_between_two_requests() -> None:
    streams = [[0.0, 1.0, 2.0, 4.0], [5.0, 5.5]]
    assert interference._gaps(streams, 1.5, 5.2) == [1.0, 2.0]
    assert interference._gaps(streams, 1.5, 6.0) == [0.5, 1.0, 2.0]


def test_tokens_are_counted_wherever_the_answer_is_cut(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 9, "max_position_embeddings": 4096}')
    content = b"".join(b'data: {"choices":[{"index":0,"text":"a"}]}\n\n' for _ in range(3)) + b"data: [DONE]\n\n"

    async def count(num_bytes: int) -> int:
        parts = [content[at : at + num_bytes] for at in range(0, len(content), num_bytes)]
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (*parts, b""))

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks)
            await writer.drain()
            writer.close()

        instants: list[float] = []
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            load = interference._Load(InterferenceConfig(model=tmp_path))
            await load._ask(Server.parse(url), "m", 1, 3, instants)
        return len(instants)

    assert [asyncio.run(count(num_bytes)) for num_bytes in (1, 5, 44, 1000)] == [3] * 4


def test_ratios_are_of_the_same_round() -> None:
    def of(*p99s: float) -> list[Round]:
        return [Round(quiet=[0.01] * 50, loud=[0.01] * 50 + [each] * 50, first_tokens=[0.5]) for each in p99s]

    apart, mixed = figures_of({"apart": of(0.1, 0.2, 0.3), "mixed": of(0.2, 0.2, 1.0)}).sides
    assert apart.ratio is None and mixed.ratio == pytest.approx(0.5)  # of 0.5, 1, 0.3
    assert apart.own_ratio == pytest.approx(20) and mixed.loud_max == 1.0


@pytest.mark.parametrize("gaps", [[], [0.0] * 3])
def test_a_round_without_gaps_has_no_ratio_and_says_which_flag_gives_it_some(gaps: list[float]) -> None:
    for flag, quiet, loud in (("--quiet-s", gaps, [0.1]), ("--loud-s", [0.1], gaps)):
        with pytest.raises(ValueError, match=f"{flag}: too short, {len(gaps)} tokens"):
            Round(quiet=quiet, loud=loud, first_tokens=[0.5])


def test_a_tiny_run_has_streams_and_long_prompts_on_both_sides(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fleet, "popen", forked.Popen)
    path, plot = tmp_path / "interference.json", tmp_path / "interference.svg"
    flags = "--streams 2 --prompt-tokens 96 --interval-s 0.2 --quiet-s 1 --loud-s 0.5 --rounds 1"
    assert main([*flags.split(), "--model", str(tiny_model), "--output", str(path), "--plot", str(plot)]) == 0
    result = json.loads(path.read_text())
    assert [each["side"] for each in result["sides"]] == ["apart", "mixed"]
    for each in result["sides"]:
        assert 0 <= each["quiet_p50"] <= each["quiet_p99"] > 0  # of two tokens in one read, the second came at once
        assert 0 <= each["loud_p50"] <= each["loud_p99"] <= each["loud_max"] > 0
        assert each["first_token_p50"] > 0
    assert plot.read_text().count("<svg") == 1
    assert write_pages([str(path)]) == 0
    assert "apart ÷ mixed: **" in path.with_suffix(".md").read_text()


def test_a_page_says_where_apart_loses() -> None:
    facts: dict[str, Any] = {"date": "2026-01-01", "machine": {"cores": 2, "cpu_model": "x", "python": "3"}}
    seconds = dict.fromkeys(("ttft", "tpot", "gap_p99", "seconds"), 0.01)
    cells = [
        {
            "prompt_tokens": 16,
            "load": 1,
            "by_side": {"apart": seconds, "mixed": seconds},
            "ratios": {**seconds, "ttft": 1.5},
        },
        {"prompt_tokens": 512, "load": 1, "by_side": {"apart": seconds, "mixed": seconds}, "ratios": seconds},
    ]
    crossovers = {name: {"1": 512 if name == "ttft" else 16} for name in seconds}
    told = page({**facts, "command": "python -m bench.crossover --x", "cells": cells, "crossovers": crossovers})
    assert (
        "- *first token*: in 1 of 2 (prompt/under way: 16/1). Ahead from some length on: 1 under way from 512 tokens."
        in told
    )
    assert "- *time per token*: in 0 of 2 (prompt/under way: none)" in told


def test_what_has_no_page_is_said_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"command": "python -m bench.engine"}')
    assert write_pages([str(path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
