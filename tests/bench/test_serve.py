"""`baton bench` as a user runs it: against a real cluster, and where it cannot run."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.distribution import summarize
from bench.fleet import wait_until
from bench.machine import cpu_model
from bench.report import LAG_WARNING_S
from tests.e2e.cluster import BATON, Cluster, started_cluster


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One node of each role."""
    flags = ("--max-num-seqs", "8", "--num-blocks", "256", "--max-model-len", "512")
    with started_cluster(tiny_model, tmp_path_factory.mktemp("bench"), *flags) as running:
        yield running


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    """The command's end and output, which is no terminal."""
    return subprocess.run([BATON, "bench", *flags], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("pace", [("--rate", "30"), ("--rate", "inf"), ("--concurrency", "3")])
def test_a_run_gives_figures_a_histogram_and_a_result_with_every_request(
    cluster: Cluster, tmp_path: Path, pace: tuple[str, str]
) -> None:
    path = tmp_path / "result.json"
    lengths = ("--prompt-tokens", "20:10", "--output-tokens", "8:4", "--max-requests", "20", "--seed", "3")
    ended = run("--url", cluster.url, *pace, *lengths, "--output", str(path))
    assert ended.returncode == 0, ended.stderr
    assert "20 of 20 sent, 0 in flight, 20 done, 0 failed" in ended.stdout and "TTFT, milliseconds:" in ended.stdout
    result: dict[str, Any] = json.loads(path.read_text())
    assert result["command"].startswith("baton bench --url http://127.0.0.1:") and result["date"]
    assert result["machine"]["cores"] >= 1 and result["machine"]["cpu_model"]
    assert result["settings"]["seed"] == 3 and result["model"] == "llama-tiny"
    (result,) = result["runs"]
    assert (result["num_ok"], result["errors"], result["num_wrong_length"]) == (20, {}, 0)
    requests = result["requests"]
    assert [each["prompt_tokens"] for each in requests] == [each["prompt_tokens_asked"] for each in requests]
    assert len({each["prompt_tokens"] for each in requests}) > 1
    assert all(10 <= each["prompt_tokens"] <= 30 and 4 <= each["output_tokens"] <= 12 for each in requests)
    for name in ("ttft_s", "tpot_s"):
        summary = summarize([each[name] for each in requests])
        assert (
            summary is not None
            and result[name]["p90"] == pytest.approx(summary.p90, abs=1e-6)
            and result[name]["count"] == 20
        )
    assert all(0 < each["connect_s"] < each["ttft_s"] <= each["end_s"] for each in requests)
    assert result["arrival_lag_s"]["count"] == 20
    offsets = [each["arrival_s"] for each in requests]
    assert (
        offsets == sorted(offsets) and (pace[1] != "inf" or offsets[-1] == 0) and (pace[1] == "inf" or offsets[-1] > 0)
    )


def test_whole_answers_have_no_first_token_and_their_counts_all_the_same(cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    ended = run("--url", cluster.url, "--stream", "off", "--max-requests", "5", "--output", str(path))
    assert ended.returncode == 0, ended.stderr
    (result,) = json.loads(path.read_text())["runs"]
    assert result["num_ok"] == 5 and result["ttft_s"] is None and result["end_to_end_s"]["count"] == 5
    assert [each["output_tokens"] for each in result["requests"]] == [32] * 5


def test_requests_that_are_refused_are_counted_by_status_and_a_run_with_nothing_but_errors_fails(
    cluster: Cluster,
) -> None:
    ended = run("--url", cluster.url, "--prompt-tokens", "600", "--max-requests", "4")
    assert ended.returncode == 1
    assert (
        "error 400 context_length_exceeded: 4 requests, one of them: prompt: 600 tokens leave no room" in ended.stdout
    )


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--url", "http://127.0.0.1:1"), "--url http://127.0.0.1:1: cannot be reached"),
        (("--rate", "2", "--concurrency", "2"), "--rate and --concurrency: give one of them"),
        (("--rate", "0"), "--rate 0: must be requests per second above 0"),
        (("--prompt-tokens", "0"), "--prompt-tokens 0: must be at least one token"),
        (("--output-tokens", "5:5"), "--output-tokens 5:5: the spread must be below the mean"),
        (("--slo-share", "1.5"), "--slo-share 1.5: must be a number between 0.01 and 1"),
        (("--trace", "/"), "--trace /: is a folder; name one of its files"),
        (("--rates", "2,,x"), "--rates 2,,x: number 2 is empty and must be requests per second above 0"),
        (("--plot", "x.gif"), "--plot x.gif: must end in .png"),
        (("--output", "/nowhere/x.json"), "--output /nowhere/x.json: its folder does not exist"),
    ],
)
def test_what_the_user_can_mend_is_one_line_and_exit_code_2(flags: tuple[str, ...], sentence: str) -> None:
    ended = run(*flags)
    assert ended.returncode == 2
    assert ended.stderr.startswith("baton bench: ") and ended.stderr.count("\n") == 1
    assert sentence in ended.stderr


def test_an_unknown_model_is_the_servers_own_sentence(cluster: Cluster) -> None:
    ended = run("--url", cluster.url, "--model", "no-such")
    assert ended.returncode == 2 and "no-such" in ended.stderr and ended.stderr.count("\n") == 1


def test_a_replayed_trace_shares_its_prefixes_in_the_nodes_caches(cluster: Cluster, tmp_path: Path) -> None:
    """Fifteen prompts of four blocks that share three: the prefill node computes them once, and then a block each."""
    trace, path = tmp_path / "trace.jsonl", tmp_path / "result.json"
    first = tmp_path / "first.jsonl"  # by itself, so that its blocks are there before any other arrives
    lines = [
        {"timestamp": 100 * index, "input_length": 2048, "output_length": 64, "hash_ids": [0, 1, 2, 3 + index]}
        for index in range(15)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    first.write_text(json.dumps(lines[0] | {"hash_ids": [0, 1, 2, 99]}) + "\n")
    before = samples_of(cluster.nodes_of("prefill")[0])['tokens_computed_total{phase="prefill"}']
    flags = ("--length-scale", "0.0625", "--warmup", "0", "--seed", "5", "--output", str(path))
    for file in (first, trace):
        ended = run(cluster.url, "--trace", str(file), *flags)
        assert ended.returncode == 0, ended.stderr
    (result,) = json.loads(path.read_text())["runs"]
    assert [each["prompt_tokens"] for each in result["requests"]] == [128] * 15
    assert [each["output_tokens"] for each in result["requests"]] == [4] * 15
    assert [each["arrival_s"] for each in result["requests"]] == pytest.approx([0.1 * index for index in range(15)])
    computed = samples_of(cluster.nodes_of("prefill")[0])['tokens_computed_total{phase="prefill"}'] - before
    assert computed == 128 + 15 * 32 + 2 * 4, (
        "the first one, a block of each, and twice what asks which prompts are taken"
    )


def test_rates_give_a_line_each_goodput_and_a_picture_and_a_sweep_ends_with_a_rate(
    cluster: Cluster, tmp_path: Path
) -> None:
    path, picture = tmp_path / "result.json", tmp_path / "runs.png"
    each = ("--max-requests", "6", "--output-tokens", "3", "--slo-ttft-ms", "60000", "--return-token-ids", "on")
    files = ("--output", str(path), "--plot", str(picture))
    ended = run(cluster.url, "--rates", "40,80", *each, *files)
    assert ended.returncode == 0, ended.stderr
    result = json.loads(path.read_text())
    assert [run["rate"] for run in result["runs"]] == [40, 80]
    first_late, second_late = (run["arrival_lag_s"]["p99"] > LAG_WARNING_S for run in result["runs"])
    assert result["highest_rate_that_met_slo"] == (None if first_late else 40 if second_late else 80)
    assert ("WARNING" in ended.stdout) == (
        first_late or second_late
    ) and "of the requests met the limits" in ended.stdout
    assert all(run["goodput"]["num_met"] == len(run["requests"]) == 6 for run in result["runs"])
    assert all(len(request["token_ids"]) == 3 for run in result["runs"] for request in run["requests"])
    assert picture.read_bytes().startswith(b"\x89PNG")
    limits = ("--slo-ttft-ms", "60000", "--slo-tpot-ms", "60000")
    ended = run(cluster.url, "--sweep", "--rate", "80", "--sweep-max-rate", "80", "--max-requests", "4", *limits)
    assert ended.returncode == 0 and "80 per second: 100.0% met the limits" in ended.stdout, ended.stdout
    ended = run(
        cluster.url, "--slo-ttft-ms", "0.001", "--rates", "50,90", "--max-requests", "1", "--output-tokens", "1"
    )
    assert ended.returncode == 0 and "no rate was found" in ended.stdout


def test_ctrl_c_reports_what_is_done_and_what_was_given_up(cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    flags = (cluster.url, "--concurrency", "4", "--duration-s", "3600", "--output-tokens", "400", "--output", str(path))
    with subprocess.Popen([BATON, "bench", *flags], stdout=subprocess.PIPE, text=True) as bench:
        assert bench.stdout is not None
        began_with = num_answered(cluster)
        # A question, the warm-up, and six of the run: four may be on their way to it, so it knows of two at least.
        while num_answered(cluster) < began_with + 8:
            assert bench.poll() is None
        bench.send_signal(signal.SIGINT)
        output, _ = bench.communicate(timeout=60)
    assert bench.returncode == 130
    assert "ending: what is under way is given up" in output and "halted" in output
    result = json.loads(path.read_text())
    (ran,) = result["runs"]
    assert result["is_halted"] and ran["num_ok"] >= 2
    assert ran["num_requests"] == len(ran["requests"]) == ran["num_ok"] + ran["errors"].get("interrupted", 0)
    assert [each["index"] for each in ran["requests"]] == list(range(ran["num_requests"]))


def num_answered(cluster: Cluster) -> float:
    """By the router, since it began."""
    return sum(number for name, number in cluster.metrics().items() if name.startswith("requests_total"))


@pytest.mark.covers("O01")
def test_a_nodes_metrics_tell_what_the_run_made_it_do(cluster: Cluster) -> None:
    before = {node["role"]: samples_of(node) for node in cluster.nodes}
    ended = run(
        "--url", cluster.url, "--max-requests", "10", "--prompt-tokens", "40", "--output-tokens", "6", "--warmup", "0"
    )
    assert ended.returncode == 0, ended.stderr

    def since(role: str) -> dict[str, float]:
        samples = samples_of(cluster.nodes_of(role)[0])
        return {name: value - before[role].get(name, 0.0) for name, value in samples.items()}

    def num_ended(role: str) -> float:
        return sum(value for name, value in since(role).items() if name.startswith("attempts_ended_total"))

    # Beside the ten there is the request that asks which prompts the server takes: its one token comes of its prefill.
    wait_until("all attempts have ended", lambda: (num_ended("prefill"), num_ended("decode")) == (11, 10))
    prefill, decode = since("prefill"), since("decode")
    assert prefill['tokens_computed_total{phase="prefill"}'] == 10 * 40 + 4
    assert decode['tokens_computed_total{phase="decode"}'] == 10 * 5
    # The end of its request may overtake the answer to its Commit.
    committed, cancelled = (prefill[f'attempts_ended_total{{outcome="{each}"}}'] for each in ("committed", "cancelled"))
    assert committed + cancelled == 10
    assert decode['attempts_ended_total{outcome="finished"}'] == 10
    assert prefill["queue_seconds_count"] == prefill["reserve_seconds_count"] == 10
    assert committed <= prefill["transfer_seconds_count"] <= 10
    assert all(0 <= prefill[f"{each}_seconds_sum"] < 120 for each in ("queue", "reserve", "transfer"))
    assert prefill["reserve_seconds_sum"] > 0, "who is planned at once did not queue"
    assert (prefill["transfer_seconds_sum"] > 0) == (prefill["transfer_seconds_count"] > 0)
    assert decode["step_seconds_count"] >= 5 and decode["step_seconds_sum"] > 0
    (sent,) = (value for name, value in prefill.items() if name.startswith("transfer_bytes_total") and "sent" in name)
    (landed,) = (
        value for name, value in decode.items() if name.startswith("transfer_bytes_total") and "received" in name
    )
    assert sent == landed > 0
    assert {value for name, value in prefill.items() if name.startswith("transfer_failures_total")} == {0}


def samples_of(node: dict[str, Any]) -> dict[str, float]:
    """A node's metrics by name, labels included, without their common beginning."""
    text = httpx.get(f"http://{node['http']}/metrics", trust_env=False).text
    lines = [line.rpartition(" ") for line in text.splitlines() if line.startswith("baton_node_")]
    return {name.removeprefix("baton_node_"): float(value) for name, _, value in lines}


def test_the_processors_name_is_read_where_there_is_one() -> None:
    assert cpu_model("processor\t: 0\nmodel name\t: Fast 9000\nmodel name\t: Other\n") == "Fast 9000"
    assert cpu_model("processor : 0\n")
