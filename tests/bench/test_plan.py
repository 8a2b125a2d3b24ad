"""`baton plan` itself: rates, the search over clusters, and what a user sees."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import plan_error, plan_probe, planner
from bench.plan_outcome import Counts, Outcome
from bench.plan_rates import Measured, ModelSize, Rates, Shape, Terms, fit, of_hardware, pairs_of, read_rates
from bench.plan_search import Search

SUMS = st.builds(Terms, *[st.floats(1e-6, 1e-2)] * 3)
RATES = {
    "decode": [{"base_s": 0.005, "row_s": 0.001}],
    "chunk": [{"base_s": 0.004, "token_s": 1e-3}],
    "token_bytes": 1000,
    "link_bytes_per_s": 1e6,
    "link_latency_s": 0.002,
}


def _outcome(counts: Counts, attainment: float) -> Outcome:
    nothing = np.zeros(0)
    kept = round(1000 * attainment)
    return Outcome(counts, 1000, 0, nothing, nothing, nothing, nothing, kept, 1.0, {}, {}, 0, 0, 0, 0, True)


@given(st.lists(SUMS, min_size=1, max_size=3), st.integers(1, 64), st.integers(0, 10_000), st.integers(1, 400))
def test_many_steps_take_as_long_as_each_of_them(
    sums: list[Terms], num_rows: int, num_positions: int, num_steps: int
) -> None:
    """Also where another sum becomes the longest on the way; and so many have ended when that time has passed."""
    rates = Rates(tuple(sums), (Terms(1.0),), 1, 1.0, 0.0)
    shape = Shape(num_rows, num_positions)
    one_by_one = sum(rates.step_s(shape.after(index)) for index in range(num_steps))
    assert rates.run_s(shape, num_steps) == pytest.approx(one_by_one, rel=1e-9)
    assert rates.steps_within(shape, rates.run_s(shape, num_steps) * (1 + 1e-9), num_steps + 5) == num_steps


@given(st.integers(1, 3000), st.integers(0, 1000), st.integers(16, 700))
def test_a_prompt_alone_takes_its_chunks_steps(num_new: int, num_cached: int, most: int) -> None:
    rates = Rates((Terms(0.1),), (Terms(0.01, 0.0, 0.0, 1e-4, 1e-8),), 1, 1.0, 0.0, route_s=0.003, reply_s=0.002)
    starts = range(num_cached, num_cached + num_new, most)
    chunks = [(min(most, num_cached + num_new - start), start) for start in starts]
    steps = [rates.step_s(Shape(0, 0, number, pairs_of(number, context))) for number, context in chunks]
    assert rates.first_s(num_cached + num_new, num_cached, most) == pytest.approx(0.005 + sum(steps))


def test_a_fit_finds_the_terms_that_steps_were_made_of() -> None:
    """And none below 0, where one term explains nothing."""
    rng = random.Random(0)
    made = Terms(0.01, 0.0005, 2e-7)
    steps = []
    for _ in range(40):
        shape = Shape(rng.randint(1, 32), rng.randint(1, 60_000))
        steps.append(Measured(shape, made.seconds(shape) * rng.uniform(0.99, 1.01)))
    found = fit(steps, ("base_s", "row_s", "position_s", "token_s"))
    assert found.base_s == pytest.approx(made.base_s, rel=0.05)
    assert found.position_s == pytest.approx(made.position_s, rel=0.05)
    assert found.token_s == 0


def test_a_probe_finds_the_rates_of_what_it_is_shown() -> None:
    """First tokens, gaps and steps of a cluster that keeps to known rates."""
    decode, chunk = Terms(0.01, 0.001, 1e-7), Terms(0.02, 0.0, 0.0, 1e-4, 1e-8)
    probe = plan_probe.Probe("m", 100, 1000, 128, (16, 64, 128, 256, 512, 900), (1, 4), 1, 0)
    firsts, gaps = {}, {}
    for length in probe.lengths:
        chunks = -(-length // 128)
        firsts[length] = [0.005 + chunks * 0.02 + 1e-4 * length + 1e-8 * pairs_of(length, 0)]
        gaps[length] = [0.003 + decode.seconds(Shape(1, 16)) + min(length, 128) * 1000 / 1e7]
    steps = [Measured(shape, decode.seconds(shape)) for shape in (Shape(1, 99), Shape(4, 400), Shape(4, 9999))]
    rates = plan_probe.rates_of(probe, firsts, gaps, steps)
    assert rates.chunk[0].token_s == pytest.approx(chunk.token_s, rel=0.01)
    assert rates.chunk[0].base_s == pytest.approx(chunk.base_s, rel=0.01)
    assert (rates.route_s, rates.link_latency_s) == pytest.approx((0.005, 0.003), rel=0.01)
    assert rates.link_bytes_per_s == pytest.approx(1e7, rel=0.01)
    gaps[64] = [0.0]  # two tokens that one read brought
    rates = plan_probe.rates_of(probe, firsts, gaps, steps)
    handoff_s = [rates.link_latency_s + rates.transfer_s(length) for length in (16, 128)]
    assert handoff_s == pytest.approx([0.003 + 16e-4, 0.003 + 128e-4], rel=0.65)


def test_limits_of_hardware_are_the_longer_of_reading_and_multiplying() -> None:
    """A few rows wait for the memory, a long chunk for the arithmetic."""
    rates = of_hardware(ModelSize(1000, 10, 2000, 500, 1), bytes_per_s=100, operations_per_s=1000, link_bytes_per_s=5)
    assert rates.step_s(Shape(1, 10)) == pytest.approx(11.0)
    assert rates.step_s(Shape(0, 0, 100, 500)) == pytest.approx(200.5), "a prompt's positions have no head"
    assert rates.step_s(Shape(100, 500)) == pytest.approx(250.5)
    assert rates.transfer_s(3) == pytest.approx(6.0)


@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 6))
def test_the_search_finds_the_smallest_sum(prefill: int, decode: int, slack: int) -> None:
    """Of clusters that keep the objective from two numbers on, or a few more together."""
    total = prefill + decode + slack

    def try_(counts: Counts) -> Outcome:
        enough = counts.prefill >= prefill and counts.decode >= decode and counts.total >= total
        return _outcome(counts, 0.99 if enough or counts.mixed >= total else 0.5)

    search = Search(0.95, 128, try_)
    apart, mixed = search.smallest_pair(), search.smallest_mixed()
    assert apart is not None and apart.total == total
    assert mixed is not None and mixed.mixed == total
    assert Search(0.95, total - 1, try_).smallest_pair() is None


@given(st.integers(1, 30), st.integers(1, 30), st.integers(0, 6), st.integers(1, 40))
def test_no_pair_that_may_be_is_overlooked(prefill: int, decode: int, slack: int, max_nodes: int) -> None:
    """However uneven it is: half and half of `max_nodes` need not keep what many of one role and few of the other do."""
    total, most = prefill + decode + slack, 0

    def try_(counts: Counts) -> Outcome:
        nonlocal most
        most = max(most, counts.total)
        enough = counts.prefill >= prefill and counts.decode >= decode and counts.total >= total
        return _outcome(counts, 0.99 if enough else 0.5)

    found = Search(0.95, max_nodes, try_).smallest_pair()
    assert found is None if total > max_nodes else found is not None and found.total == total
    assert most <= max_nodes * 5 / 4


def test_many_prefill_nodes_and_one_decode_node_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prompts that follow each other five times as fast as one node computes them, and short answers."""
    files = ["--slo-ttft-ms", "150", "--slo-tpot-ms", "100", "--speed", "9", "--max-nodes", "7"]
    assert planner.main([*_files(tmp_path), *files]) == 0
    assert "5 prefill + 1 decode nodes keep" in capsys.readouterr().out


def _files(tmp_path: Path) -> list[str]:
    rates, trace = tmp_path / "rates.json", tmp_path / "trace.jsonl"
    rates.write_text(json.dumps(RATES))
    entries = [{"timestamp": 200 * n, "input_length": 100, "output_length": 5, "hash_ids": [n]} for n in range(30)]
    trace.write_text("\n".join(map(json.dumps, entries)))
    return ["--trace", str(trace), "--rates", str(rates)]


def test_a_plan_says_how_many_nodes_and_writes_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """100 ms of computing every 200 ms are one node's work; the table, the JSON and the picture."""
    output, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    objective = ["--slo-ttft-ms", "150", "--slo-tpot-ms", "100"]
    files = ["--output", str(output), "--plot", str(picture)]
    assert planner.main([*_files(tmp_path), *objective, *files]) == 0
    said = capsys.readouterr().out
    assert "1 prefill + 1 decode nodes keep TTFT <= 150 ms and TPOT <= 100 ms for 95.0% of requests." in said
    assert "Mixed needs fewer: 1 mixed instead of 2 nodes." in said
    result = json.loads(output.read_text())
    assert result["clusters"][0]["attainment"] == 1
    assert picture.stat().st_size > 1000


def test_what_cannot_be_kept_is_said_with_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No number of nodes computes a prompt sooner than one does."""
    objective = ["--slo-ttft-ms", "50", "--slo-tpot-ms", "100", "--max-nodes", "8"]
    assert planner.main([*_files(tmp_path), *objective]) == 1
    said = capsys.readouterr().out
    assert "no cluster of up to 8 nodes keeps TTFT <= 50 ms" in said
    assert (
        "TTFT: 95.0% of the answered requests have 104 ms or less, 2.08 times the limit of 50 ms; 100.0% miss it."
        in said
    )
    assert "TPOT alone is kept: " in said
    assert "TTFT: 104 ms even of prompts that are alone, so more nodes hardly help: a larger --slo-ttft-ms" in said


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--speed", "10"], "TTFT: prefill nodes have a step in "),
        (["--slo-tpot-ms", "2"], "TPOT: a sequence alone takes 6 ms a step: a larger --slo-tpot-ms"),
        (
            ["--speed", "1000", "--max-queue", "1", "--requests", "300"],
            "requests found the router's queue full: more nodes (--max-nodes)",
        ),
    ],
)
def test_a_named_cluster_that_misses_is_told_what_to_try(
    flags: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Too much load, a limit below any step, a queue that is full."""
    objective = ["--slo-ttft-ms", "150", "--slo-tpot-ms", "100", "--prefill", "1", "--decode", "1"]
    picture = tmp_path / "plan.svg"
    assert planner.main([*_files(tmp_path), *objective, *flags, "--plot", str(picture)]) == 1
    assert line in capsys.readouterr().out
    assert "<!-- 1 prefill + 1 decode -->" in picture.read_text(), "its title"


@pytest.mark.parametrize(
    ("load", "more"),
    [
        ([(100 * n, 200) for n in range(20)], ["--max-num-seqs", "2", "--prefill", "1", "--decode", "20"]),
        ([(5000 * (n // 8), 2) for n in range(40)], ["--prefill", "8", "--decode", "1"]),
    ],
)
def test_prompts_that_wait_while_their_nodes_rest_are_told_of_what_helps(
    load: list[tuple[int, int]], more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Room at decode nodes, or, of prompts that come eight at a time, more prefill nodes: with these the same is kept."""
    flags = [*_files(tmp_path), "--slo-ttft-ms", "150", "--slo-tpot-ms", "200"]
    lines = [{"timestamp": at, "input_length": 50, "output_length": new, "hash_ids": []} for at, new in load]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert planner.main([*flags, *more, "--prefill", "1", "--decode", "1"]) == 1
    assert "TTFT: prompts wait, though prefill nodes have a step in " in capsys.readouterr().out
    assert planner.main([*flags, *more]) == 0


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--mixed", "1", "--plot", "plan.png"], "--plot: is of prefill and decode nodes; leave it out with --mixed"),
        (["--prefill", "1"], "give --prefill and --decode together, or --mixed, or none of them"),
        (["--placement-prefill", "best"], "--placement-prefill best: is none of cache_aware"),
        (["--num-blocks", "2"], "a request of 105 tokens fits no node of 2 blocks of 16"),
        (
            ["--num-blocks", "1000000"],
            "--num-blocks 1000000: up to 256 nodes would have 256000000 blocks, more than 134217728: a smaller --num-blocks",
        ),
        (
            ["--length-scale", "0.001", "--block-size", "1", "--mixed", "100"],
            "--num-blocks 3360000, for --max-num-seqs 32 of 105000 tokens, the longest: up to 100 nodes would have",
        ),
        (["--output", "."], "--output .: is a folder; name a file in it"),
        (["--trace", "."], "--trace .: cannot be read: Is a directory; it must be a file of JSON lines"),
        (["--rates", "/nowhere"], "--rates /nowhere: cannot be read: No such file or directory"),
        (["--operations-per-s", "1"], "--operations-per-s: is of rates that are limits of hardware"),
        (["--bytes-per-s", "1"], "give --rates FILE, or --bytes-per-s, --operations-per-s and --model"),
    ],
)
def test_a_wrong_value_is_one_line_and_exit_code_2(
    flags: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before, or instead of, any run."""
    with pytest.raises(SystemExit) as ended:
        planner.main([*_files(tmp_path), "--slo-ttft-ms", "1", "--slo-tpot-ms", "1", *flags])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert line in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"decode": []}, "need at least one sum each"),
        ({"chunk": [{"base_s": -1}]}, "base_s -1: must be seconds from 0 to below"),
        ({"chunk": {}}, "chunk {}: must be a list of objects with base_s, row_s"),
        ({"decode": [{"rows": 1}]}, "decode: rows is none of base_s"),
        ({"decode": [{}]}, "decode: base_s is missing"),
        ({"speed": 1}, "speed is none of"),
        ({"token_bytes": None}, "token_bytes None: must be bytes from 0"),
        ({"link_latency_s": float("nan")}, "link_latency_s nan: must be seconds from 0"),
    ],
)
def test_rates_that_are_none_are_refused_by_name(change: dict[str, object], line: str, tmp_path: Path) -> None:
    """In one sentence that names the file."""
    path = tmp_path / "rates.json"
    path.write_text(json.dumps(RATES | change))
    with pytest.raises(ValueError, match=line) as error:
        read_rates(path)
    assert str(path) in str(error.value)


def test_the_page_of_an_error_names_the_worst() -> None:
    """Every percentile in a row."""
    times = {"ttft": [0.1, 0.2, 0.3], "tpot": [0.01, 0.02, 0.03]}
    errors = {"ttft": [0.1, -0.05, 0.0], "tpot": [0.02, -0.25, 0.01]}
    result = {
        "command": "python -m bench.plan_error",
        "date": "2026-01-01T00:00",
        "machine": {"cores": 2, "cpu_model": "a CPU"},
        "settings": {"rounds": 2},
        "real": times,
        "simulated": times,
        "error": errors,
        "error_alone": errors | {"tpot": [-0.4, -0.5, -0.6]},
        "spread": errors,
        "num_requests": 80,
        "use": {"prefill": 0.5, "decode": 0.25},
        "lag_p99_s": 0.001,
    }
    page = plan_error.page_of(result)
    assert "| TPOT p90 | 20.0 | 20.0 | -25% | -25% | -50% |" in page
    assert "The largest error is 25%, of TPOT." in page
