"""`python -m bench.exposed`: what of a handoff is not hidden, on a tiny cluster, and what its figures mean."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.exposed import figures_of, main
from bench.fleet import Fleet
from bench.page import page
from tests import forked


def test_a_share_is_of_the_requests_own_prefill() -> None:
    part = {"reserve_wait": 0.0, "admit": 0.01}
    found = [part | {"transfer": t, "prefill": p} for t, p in ((0.01, 1.0), (0.03, 1.0), (0.09, 0.5))]
    figures = figures_of("shm", 1024, found)
    assert figures.shares == pytest.approx([0.02, 0.04, 0.2])
    assert (figures.share, figures.exposed_s, figures.prefill_s) == pytest.approx((0.04, 0.04, 1.0))
    assert figures.share_p90 == pytest.approx(0.2)


@pytest.mark.covers("H01")
def test_a_tiny_run_asks_the_cluster_and_writes_what_it_said(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fleet, "popen", forked.Popen)
    path = tmp_path / "exposed.json"
    flags = "--lengths 64,200 --chunk 32 --transports shm,zmq --rounds 2"
    assert main([*flags.split(), "--model", str(tiny_model), "--output", str(path)]) == 0
    result = json.loads(path.read_text())
    assert {(each["transport"], each["prompt_tokens"]) for each in result["figures"]} == {
        (transport, length) for transport in ("shm", "zmq") for length in (64, 200)
    }
    for each in result["figures"]:
        assert len(each["shares"]) == 2 and each["prefill_s"] > 0
        # 0 where a busy router has heard the receiver's first token before it heard of the last chunk.
        assert 0 <= each["exposed_s"] < 10 * each["prefill_s"] + 10
    assert any(each["exposed_s"] > 0 for each in result["figures"])
    assert "| zmq | 200 |" in page(result)


@pytest.mark.parametrize("transports", ["", "pigeon", "shm,,zmq"])
def test_what_is_no_transport_is_one_line(
    transports: str, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--model", str(tiny_model), "--transports", transports])
    assert ended.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1
