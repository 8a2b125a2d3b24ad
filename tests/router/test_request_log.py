"""What the router's log says of requests: why an attempt failed, each end once, and a node's circuit."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from proto import baton_pb2 as pb
from router.entrance import RouterCoreConfig
from tests.router.live_router import LiveRouter
from tests.router.scripted_nodes import ScriptedAttempt, replying
from tests.router.test_api import play
from tests.router.tiny_model import write_model_text


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_text(tmp_path_factory.mktemp("model"))


def lines_of(caplog: pytest.LogCaptureFixture, *events: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith(events)]


@pytest.mark.covers("O05")
def test_an_answer_that_was_retried_says_so_and_why(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def script(attempt: ScriptedAttempt) -> None:
        if attempt.key.attempt == 0:
            attempt.prefill_fails(pb.CHECKSUM, retryable=True)
        else:
            await replying(b"hello")(attempt)

    async def scenario(router: LiveRouter) -> None:
        request = (await router.post()).json()["id"].removeprefix("cmpl-")
        failed, ended = lines_of(caplog, "attempt_failed", "request_ended")
        assert failed.startswith(f"attempt_failed request={request} attempt=0 code=CHECKSUM nodes=decode why=")
        assert f"request={request} outcome=length" in ended and " attempts=2" in ended

    with caplog.at_level(logging.INFO):
        play(model, scenario, script)


@pytest.mark.covers("O05")
def test_an_answer_that_is_given_up_says_why_and_a_circuit_that_opens_is_told(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def script(attempt: ScriptedAttempt) -> None:
        attempt.prefill_fails(pb.INTERNAL, retryable=True)

    async def scenario(router: LiveRouter) -> None:
        assert (await router.post()).status_code == 503
        for _ in range(8):
            await router.post()
        given_up = lines_of(caplog, "request_given_up")
        assert len(given_up) == 9 and " code=INTERNAL why=" in given_up[0]
        assert lines_of(caplog, "circuit_opened")

    with caplog.at_level(logging.INFO):
        play(model, scenario, script, core_config=RouterCoreConfig(preempt_retry_count=1))


def test_a_refusal_for_want_of_room_is_no_line(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def script(attempt: ScriptedAttempt) -> None:
        if attempt.key.attempt == 0:
            attempt.prefill_fails(pb.NO_BLOCKS, retryable=True)
        else:
            await replying(b"hello")(attempt)

    async def scenario(router: LiveRouter) -> None:
        assert (await router.post()).status_code == 200
        assert lines_of(caplog, "attempt_failed") == []
        (ended,) = lines_of(caplog, "request_ended")
        assert " attempts=2" in ended

    with caplog.at_level(logging.INFO):
        play(model, scenario, script)
