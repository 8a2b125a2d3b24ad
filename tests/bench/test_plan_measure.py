"""`baton plan measure`: the rates of a cluster that keeps to known ones, both roles at work; and whatever a server does instead."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, cast

import pytest

from bench import frame, plan_measure
from bench.completions import Asked, Record
from bench.http_exchange import Server
from bench.load import Sender
from bench.plan_probe import Probe, Prober, step_of
from bench.plan_rates import Shape, Terms, pairs_of
from runtime.process import write_atomically

DECODE: Final = Terms(0.010, 0.0005, 1e-6)
CHUNK: Final = Terms(0.020, 0.0, 0.0, 1e-4, 1e-8)
LENGTHS: Final = (16, 64, 128, 256, 512, 900)
SLOWER: Final = 1.5  # a step, and a handoff, while prompts are computed
HANDOFF_S: Final = 0.004


@dataclass(frozen=True, slots=True)
class _Settings:
    output: Path


class _Cluster:
    """In place of a Sender: all that is asked at once is computed in its order, and decodes side by side. No time passes."""

    def __init__(self, spoil: Callable[[Record], None] = lambda record: None) -> None:
        self.server = Server.parse("http://cluster:1")
        self._spoil = spoil
        self._asked: list[tuple[Asked, Record]] = []

    def begin(self, asked: Asked, started_at: float, due_at: float) -> Record:
        """As Sender's."""
        record = Record(asked.index, asked.prompt_tokens, asked.output_tokens, 0.0)
        self._asked.append((asked, record))
        return record

    async def send(self, asked: Asked, record: Record) -> None:
        """The first one of those that were begun answers them all."""
        together, self._asked = self._asked, []
        at_s, firsts = 0.005, []
        for each, _ in together:
            num_tokens = len(json.loads(each.body)["prompt"])
            shape = Shape(0, 0, num_tokens, pairs_of(num_tokens, 0))
            at_s += CHUNK.seconds(shape) + (-(-num_tokens // 128) - 1) * CHUNK.base_s
            firsts.append(at_s)
        num_rows = sum(each.output_tokens > 1 for each, _ in together)
        for (each, answer), first_s in zip(together, firsts, strict=True):
            answer.status, answer.output_tokens, answer.chunk_at_s = "200", each.output_tokens, [first_s]
            for number in range(1, each.output_tokens):
                last_s = answer.chunk_at_s[-1]
                step_s = DECODE.seconds(Shape(num_rows, num_rows * (each.prompt_tokens + number)))
                took_s = step_s + HANDOFF_S if number == 1 else step_s
                answer.chunk_at_s.append(last_s + took_s * (SLOWER if last_s < at_s else 1))
            answer.end_s = answer.chunk_at_s[-1]
            self._spoil(answer)


def _prober(cluster: _Cluster) -> Prober:
    probe = Probe("m", 100, 1000, 128, LENGTHS, (1, 2, 4), 1, 0)
    return Prober(probe, cast(Sender, cluster), lambda _: None)


def test_the_rates_are_those_of_steps_beside_prompts_and_those_at_rest_are_known_too() -> None:
    """What single prompts take is the same in both."""
    prober = _prober(_Cluster())
    beside, alone = prober.run(), prober.rates(is_beside=False)
    for shape in (Shape(1, 100), Shape(4, 400), Shape(4, 2000)):
        assert alone.step_s(shape) == pytest.approx(DECODE.seconds(shape), rel=0.03)
        assert beside.step_s(shape) == pytest.approx(SLOWER * DECODE.seconds(shape), rel=0.03)
    assert alone.link_latency_s == pytest.approx(HANDOFF_S, rel=0.1)
    assert beside.link_latency_s == pytest.approx(SLOWER * HANDOFF_S, rel=0.1)
    assert (beside.chunk[0].token_s, beside.route_s) == pytest.approx((CHUNK.token_s, 0.005), rel=0.02)


def _step(streams: list[Record], beside: list[Record]) -> tuple[Shape, float]:
    measured = step_of(streams, beside, 16)
    assert measured is not None
    return measured.shape, round(measured.seconds, 9)


def test_a_step_is_counted_while_all_streams_decode_and_prompts_beside_them_are_computed() -> None:
    """Not before the last stream's second token, nor behind the last prompt's first; merged events are as many steps as tokens."""
    early = Record(0, 16, 6, 0.0, output_tokens=6, chunk_at_s=[0.0, 0.1, 0.2, 1.2, 2.2, 9.0])
    late = Record(1, 16, 3, 0.0, lag_s=0.05, output_tokens=3, chunk_at_s=[0.05, 0.15, 2.15])
    assert _step([early, late], []) == (Shape(2, 36), 1.5)  # within 0.2 to 2.2: 1.0 and 2.0
    beside = Record(2, 900, 1, 0.0, output_tokens=1, chunk_at_s=[1.3])
    assert _step([early, late], [beside]) == (Shape(2, 36), 1.0)
    assert step_of([early, late], [replace(beside, chunk_at_s=[0.15])], 16) is None
    assert _step([replace(early, output_tokens=11)], []) == (Shape(1, 19), round(8.9 / 4 / 2, 9))


def _refused(record: Record) -> None:
    record.status, record.code, record.error = "404", "model_not_found", "no such model"


def _cut_off(record: Record) -> None:
    if record.output_tokens_asked == 1:
        record.status, record.error = "broken", "the server closed the connection"


def _short(record: Record) -> None:
    record.output_tokens = 1


def _uncounted(record: Record) -> None:
    record.output_tokens = None


def _whole(record: Record) -> None:
    record.chunk_at_s = record.chunk_at_s[:1]


def _at_once(record: Record) -> None:
    record.chunk_at_s = [0.1] * len(record.chunk_at_s)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_uncounted, "to be answered by 4, came without a count of its tokens (usage)"),
        (_refused, "a prompt of 16 tokens, to be answered by 4, failed: 404 model_not_found no such model"),
        (_cut_off, "a prompt of 900 tokens, to be answered by 1, failed: broken the server closed the connection"),
        (
            _short,
            "a prompt of 16 tokens, to be answered by 4, was answered by 1 in 4 events; it must stream token by token",
        ),
        (
            _whole,
            "to be answered by 4, was answered by 4 in 1 events; it must stream token by token, and know ignore_eos",
        ),
        (
            _at_once,
            "0 steps cannot tell 3 terms; it must stream token by token, and have one prefill and one decode node",
        ),
    ],
)
def test_a_cluster_that_cannot_be_measured_is_one_line_and_exit_code_2(
    spoil: Callable[[Record], None],
    said: str,
    tmp_path: Path,
    tiny_model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A wrong model, one killed in the middle, a server of another kind; nothing is written."""
    monkeypatch.setattr(plan_measure, "served_name", lambda *_: "m")
    monkeypatch.setattr(plan_measure, "Sender", lambda *args, **named: _Cluster(spoil))
    output = tmp_path / "rates.json"
    with pytest.raises(SystemExit) as ended:
        flags = ["--url", "http://cluster:1", "--lengths", ",".join(map(str, LENGTHS)), "--rows", "1,2"]
        plan_measure.main(["--model", str(tiny_model), "--output", str(output), *flags])
    assert ended.value.code == 2
    complaint = capsys.readouterr().err
    assert complaint.startswith("baton plan measure: http://cluster:1: ")
    assert said in complaint and complaint.count("\n") == 1
    assert not list(tmp_path.iterdir())


class _Named(BaseHTTPRequestHandler):
    """Of a server that names its model, and serves it under no other name."""

    def do_GET(self) -> None:
        self._say(200, {"data": [{"id": "baton-demo"}]})

    def do_POST(self) -> None:
        model = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["model"]
        self._say(404, {"error": {"message": f"asked for {model}"}})

    def _say(self, status: int, content: object) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def log_message(self, *_: object) -> None:
        pass


def test_a_model_is_asked_for_by_the_name_that_the_cluster_gives_it(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`baton up` of the demo model serves it under a name that its folder has not."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Named) as server, pytest.raises(SystemExit):
        threading.Thread(target=server.serve_forever).start()
        try:
            flags = ["--model", str(tiny_model), "--output", str(tmp_path / "rates.json")]
            plan_measure.main([*flags, "--url", f"http://127.0.0.1:{server.server_port}"])
        finally:
            server.shutdown()
    assert capsys.readouterr().err.endswith("failed: 404 asked for baton-demo\n")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--url", "http://127.0.0.1:1"], "--url http://127.0.0.1:1: cannot be reached: "),
        (["--url", "ftp://x"], "ftp://x: must be http(s)://HOST[:PORT][/PREFIX]"),
        (["--lengths", "16,16,32,64"], "--lengths 16,16,32,64: at least 4 different numbers"),
        (["--rows", "2,2"], "--rows 2,2: at least 2 different numbers"),
        (["--model", "/nowhere"], "--model /nowhere: has no config.json"),
        (["--rows", "1,512"], "decode 512 x 2048: takes "),
    ],
)
def test_a_wrong_value_is_one_line_and_exit_code_2(
    flags: list[str],
    said: str,
    tmp_path: Path,
    tiny_model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No cluster there, nothing to fit, no room for the KV of so many rows."""
    monkeypatch.setattr(plan_measure, "free_memory_bytes", lambda: 1 << 20)
    with pytest.raises(SystemExit) as ended:
        plan_measure.main(["--model", str(tiny_model), "--output", str(tmp_path / "rates.json"), *flags])
    assert ended.value.code == 2
    complaint = capsys.readouterr().err
    assert said in complaint and complaint.count("\n") == 1


def test_a_result_that_cannot_be_written_is_one_line_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that is not ours, and a disk that is full when the measurement is over."""
    output = tmp_path / "out.json"
    with (
        monkeypatch.context() as patched,
        pytest.raises(ValueError, match=r"out\.json: its folder cannot be written to"),
    ):
        patched.setattr("os.access", lambda *_: False)
        frame.check_files(output)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    bench: frame.Bench[_Settings, None] = frame.Bench("prog", lambda *_: None, lambda *_: None, lambda _: {})
    with pytest.raises(SystemExit) as ended:
        bench.run(_Settings(output), [])
    assert ended.value.code == 2
    assert f"prog: --output {output}: cannot be written: No space left on device" in capsys.readouterr().err
    with pytest.raises(OSError, match="No space left"):
        write_atomically(output, {})
    assert not list(tmp_path.iterdir())
