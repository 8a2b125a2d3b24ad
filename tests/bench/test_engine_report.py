"""The text of bench.engine's figures: made of its JSON alone, runs side by side, verdicts by the design's targets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.engine_report import markdown

RESULTS = Path(__file__).parents[2] / "bench" / "results"


def case(name: str, ratio: float, **parts_s: float) -> dict[str, Any]:
    return {
        "case": name,
        "step_s": 0.004,
        "limit_is": "bytes",
        "ratio": ratio,
        "best_ratio": ratio - 0.01,
        "parts_s": parts_s,
    }


def run(threads: int, kernels: str, *cases: dict[str, Any]) -> dict[str, Any]:
    return {
        "command": f"python -m bench.engine --threads {threads} --kernels {kernels}",
        "date": f"2026-01-0{threads}T00:00:00",
        "machine": {"cores": 2, "cpu_model": "CPU"},
        "settings": {
            "model": "x/m",
            "threads": threads,
            "kernels": kernels,
            "weight_dtype": "auto",
            "temperature": 1.0,
        },
        "bytes_per_s": 4e10,
        "operations_per_s": 5e11,
        "cases": [*cases],
    }


def rows_of(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|") and "---" not in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_runs_stand_side_by_side_and_a_case_that_one_lacks_is_empty_there() -> None:
    cpu = run(1, "cpu", case("decode 1 x 128", 1.1, qkv=0.001, down=0.002, attend=0.003), case("decode 32 x 128", 1.6))
    torch = run(2, "torch", case("decode 1 x 128", 2.5), case("chunk of 512 behind 0", 1.4))
    rows = rows_of(markdown([cpu, torch]))
    assert rows[0] == ["case", "by", "target", "1 thread", "best", "ms", "torch, 2 threads", "best", "ms"]
    assert rows[1] == ["decode 1 x 128", "bytes", "1.15", "1.10", "1.09", "4.00", "2.50", "2.49", "4.00"]
    assert rows[2] == ["decode 32 x 128", "bytes", "", "1.60", "1.59", "4.00", "", "", ""]
    assert rows[3] == ["chunk of 512 behind 0", "bytes", "1.43", "", "", "", "1.40", "1.39", "4.00"]
    assert rows[5] == ["decode 1 x 128", "0.00", "0.00", "3.00", "3.00", "0.00", "0.00"]


def test_verdicts_name_what_is_met_and_what_is_missed() -> None:
    text = markdown(
        [run(1, "cpu", case("decode 1 x 128", 1.15), case("decode 8 x 512", 1.4), case("decode 32 x 128", 2.0))]
    )
    assert "- 1 thread: met by decode 1 x 128; missed by decode 8 x 512 (1.40)." in text


def test_a_page_of_a_device_names_it_and_tells_the_steps_that_were_read_first() -> None:
    on_device = run(1, "cpu", case("decode 1 x 128", 1.1, launch=0.001, device=0.003, sampler=0.0005, rest=0.0002))
    on_device["settings"] |= {"device": "cuda", "model": None, "shape": "llama-3.1-8b"}
    on_device |= {"device": "NVIDIA H100", "torch": "2.13.0", "triton": "3.7.1", "kernels": "triton-sm90-0123abcd"}
    on_device["cases"][0]["alone_s"] = 0.005
    text = markdown([on_device])
    assert text.startswith("# Engine steps against the machine's limits: llama-3.1-8b\n")
    assert "NVIDIA H100 (torch 2.13.0, Triton 3.7.1), host 2 cores of an CPU." in text
    rows = rows_of(text)
    assert rows[0] == ["case", "by", "target", "NVIDIA H100, triton", "best", "ms", "alone, ms"]
    assert rows[1] == ["decode 1 x 128", "bytes", "1.15", "1.10", "1.09", "4.00", "5.00"]
    assert rows[2:] == [
        ["case", "launch", "device", "of it sampler", "rest"],
        ["decode 1 x 128", "1.00", "3.00", "0.50", "0.20"],
    ]


def test_what_is_kept_in_the_repository_is_what_its_figures_say() -> None:
    names = ("1_thread", "2_threads", "torch")
    runs = [json.loads((RESULTS / f"engine_smollm2-135m_{name}.json").read_text()) for name in names]
    assert (RESULTS / "engine.md").read_text() == markdown(runs)
