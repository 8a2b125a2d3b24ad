"""Keys and limits at a router on real sockets: who is let in, what others are told, and a file that changes while it serves."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import ASGIApp

from router.api import ApiSettings
from router.api_keys import KeyFileError
from router.gate import OVER_LIMIT, Gate
from router.key_file import KeyFile
from router.shell import RouterShell
from tests.router.live_router import MAX_MODEL_LEN, MODEL_NAME, LiveRouter, live_router, until
from tests.router.tiny_model import write_model_text
from tests.without_root import without_root

KEY = "sk-of-alice-0123456789"
OTHER = "sk-of-bob-01234567890"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model_text(tmp_path / "model")


@asynccontextmanager
async def guarded_router(model: Path, lines: str, **details: Any) -> AsyncIterator[tuple[LiveRouter, Path]]:
    """A router behind the keys of a file."""
    path = model.parent / "keys"
    path.write_text(lines)
    path.chmod(0o600)
    file = KeyFile(path)

    def behind(app: ASGIApp, shell: RouterShell) -> ASGIApp:
        gate = Gate(app, lambda: file.keys, shell.metrics, **details)
        file.start(gate.keys_changed)
        return gate

    async with live_router(model, behind=behind) as router:
        try:
            yield router, path
        finally:
            await file.close()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def ask(router: LiveRouter, key: str | None, **body: Any) -> httpx.Response:
    headers = {} if key is None else bearer(key)
    content = {"model": MODEL_NAME, "prompt": "hi", "max_tokens": 5} | body
    return await router.client.post("/v1/completions", json=content, headers=headers)


def count(router: LiveRouter, name: str, **labels: str) -> float:
    text = router.shell.metrics.render(names_clients=True).decode()
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == f"baton_router_{name}_total" and labels.items() <= sample.labels.items()
    )


@pytest.mark.covers("X02")
def test_without_a_known_key_the_answer_is_401_and_no_node_hears_of_it(model: Path) -> None:
    async def run() -> None:
        async with guarded_router(model, f"{KEY} name=alice\n") as (router, _):
            pages = ("/v1/models", "/v1/models/tiny", "/openapi.json", "/nowhere", "/ready?deep=1")
            for path in ("/v1/completions", *pages):
                method = "POST" if path == "/v1/completions" else "GET"
                for headers in ({}, bearer(OTHER), bearer("x"), {"Authorization": KEY}, {"X-Api-Key": KEY}):
                    answer = await router.client.request(method, path, headers=headers)
                    assert answer.status_code == 401, (path, headers)
                    assert answer.headers["WWW-Authenticate"] == "Bearer"
                    error = answer.json()["error"]
                    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
                    assert error["message"].endswith("send one as Authorization: Bearer KEY.")
                    assert KEY not in answer.text and OTHER not in answer.text
            twice = [("Authorization", f"Bearer {KEY}"), ("Authorization", f"Bearer {OTHER}")]
            assert (await router.client.get("/v1/models", headers=twice)).status_code == 401
            assert not router.pair.prefill.dispatches
            assert count(router, "turned_away", reason="no_key") == 12
            assert count(router, "turned_away", reason="unknown_key") == 19
            assert (await ask(router, KEY)).status_code == 200
            assert router.pair.prefill.dispatches

    asyncio.run(run())


@pytest.mark.covers("X02")
def test_probes_and_scrapers_need_no_key_unless_metrics_are_to(model: Path) -> None:
    async def run() -> None:
        for needs_key in (False, True):
            async with guarded_router(model, f"{KEY}\n", metrics_need_key=needs_key) as (router, _):
                for path in ("/health", "/ready", "/ready?accepting=1"):
                    assert (await router.client.get(path)).status_code == 200
                assert (await router.client.get("/ready?accepting=1&deep=1")).status_code == 401
                assert (await router.client.get("/metrics")).status_code == (401 if needs_key else 200)
                assert (await router.client.get("/metrics", headers=bearer(KEY))).status_code == 200

    asyncio.run(run())


@pytest.mark.covers("X02")
def test_who_the_clients_are_is_on_the_page_of_metrics_for_one_of_them_alone(model: Path) -> None:
    async def run() -> None:
        async with guarded_router(model, f"{KEY} name=alice\n{OTHER} name=bob\n") as (router, _):
            assert (await ask(router, KEY)).status_code == 200
            await until(lambda: count(router, "client_tokens", client="alice", kind="completion") == 5)
            twice = [("Authorization", f"Bearer {KEY}"), ("Authorization", f"Bearer {OTHER}")]
            for headers in ({}, bearer("x" * 20), {"Authorization": KEY}, twice):
                answer = await router.client.get("/metrics", headers=headers)
                assert answer.status_code == 200 and "baton_router_choices_total{" in answer.text
                assert "alice" not in answer.text and "baton_router_client" not in answer.text
            for key in (KEY, OTHER):  # Prometheus may have one of its own
                page = (await router.client.get("/metrics", headers=bearer(key))).text
                shown = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
                used = [
                    s for s in shown if s.name == "baton_router_client_tokens_total" and s.labels["client"] == "alice"
                ]
                assert sorted((s.labels["kind"], s.value) for s in used) == [("completion", 5), ("prompt", 3)]
                assert any(s.name == "baton_router_choices_total" for s in shown)

    asyncio.run(run())


@pytest.mark.covers("X02")
def test_openais_client_passes_its_key_on_and_understands_the_refusal(model: Path) -> None:
    async def run() -> None:
        async with guarded_router(model, f"{KEY} name=alice\n") as (router, _):
            url = f"http://127.0.0.1:{router.port}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
                answer = await client.completions.create(model=MODEL_NAME, prompt="hi", max_tokens=5)
                assert answer.choices[0].text == "hello"
            async with openai.AsyncOpenAI(base_url=url, api_key=OTHER, max_retries=0) as client:
                with pytest.raises(openai.AuthenticationError, match="not known here"):
                    await client.completions.create(model=MODEL_NAME, prompt="hi", max_tokens=5)

    asyncio.run(run())


@pytest.mark.covers("X02")
def test_over_its_limit_of_requests_a_client_is_told_when_to_come_back(model: Path) -> None:
    async def run() -> None:
        lines = f"{KEY} name=alice requests_per_minute=2\n{OTHER} name=bob\n"
        async with guarded_router(model, lines) as (router, _):
            began = time.monotonic()
            assert [(await ask(router, KEY)).status_code for _ in range(2)] == [200, 200]
            refused = await ask(router, KEY)
            assert refused.status_code == 429
            assert 30 - (time.monotonic() - began) <= int(refused.headers["Retry-After"]) <= 30
            error = refused.json()["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
            assert error["message"].startswith("The limit of alice is 2 requests a minute; there is room in ")
            assert (await ask(router, OTHER)).status_code == 200
            assert (await router.client.get("/v1/models", headers=bearer(KEY))).status_code == 200, "no generation"
            assert count(router, "turned_away", reason="requests_limit") == 1
            assert OVER_LIMIT not in router.shell.metrics.render().decode(), "it is counted once"
            assert count(router, "client_requests", client="alice") == 2

    asyncio.run(run())


@pytest.mark.covers("X02")
@pytest.mark.parametrize("is_stream", [False, True])
def test_prompts_and_what_was_generated_count_as_tokens(model: Path, is_stream: bool) -> None:
    async def run() -> None:
        async with guarded_router(model, f"{KEY} name=alice tokens_per_minute=8\n") as (router, _):
            began = time.monotonic()
            answer = await ask(router, KEY, stream=is_stream)  # 3 tokens, and 5 more
            assert answer.status_code == 200
            assert count(router, "client_tokens", client="alice", kind="prompt") == 3
            await until(lambda: count(router, "client_tokens", client="alice", kind="completion") == 5)
            refused = await ask(router, KEY)
            assert refused.status_code == 429
            waited_s = time.monotonic() - began
            assert 22.5 - waited_s <= int(refused.headers["Retry-After"]) <= 23  # three tokens of eight a minute
            assert "8 tokens a minute" in refused.json()["error"]["message"]
            assert len(router.pair.prefill.dispatches) == 1

    asyncio.run(run())


@pytest.mark.covers("X02")
@pytest.mark.parametrize("hangs_up", [False, True])
def test_a_file_that_changes_counts_without_a_restart(
    model: Path, hangs_up: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def status(router: LiveRouter, key: str) -> int:
        return (await router.client.get("/v1/models", headers=bearer(key))).status_code

    def change(path: Path, content: str) -> None:
        before = path.stat()
        path.write_text(content)
        if hangs_up:  # nothing shows that it has changed, but the signal
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
            os.kill(os.getpid(), signal.SIGHUP)

    async def run() -> None:
        async with guarded_router(model, f"{KEY} name=alice\n") as (router, path):
            assert [await status(router, each) for each in (KEY, OTHER)] == [200, 401]
            change(path, f"{OTHER} name=bobby\n")
            await until(logged(caplog, "api_keys_read", 2))
            assert [await status(router, each) for each in (KEY, OTHER)] == [401, 200]
            change(path, "half a li")
            await until(logged(caplog, "api_keys_kept", 1))
            assert [await status(router, each) for each in (KEY, OTHER)] == [401, 200]
            if not hangs_up:
                path.unlink()
                await until(logged(caplog, "api_keys_kept", 2))
                assert "cannot be read: No such file" in caplog.messages[-1]
                assert [await status(router, each) for each in (KEY, OTHER)] == [401, 200]
            change(path, f"{KEY}\n") if path.exists() else path.write_text(f"{KEY}\n")
            await until(logged(caplog, "api_keys_read", 3))
            assert [await status(router, each) for each in (KEY, OTHER)] == [200, 401]

    asyncio.run(run())
    assert not [message for message in caplog.messages if KEY in message or OTHER in message]


@pytest.mark.covers("X02")
def test_who_was_missing_for_a_moment_has_not_got_a_new_limit(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def run() -> None:
        alice, unnamed = f"{KEY} name=alice requests_per_minute=1\n", f"{OTHER} requests_per_minute=1\n"
        async with guarded_router(model, alice + unnamed) as (router, path):
            assert [(await ask(router, key)).status_code for key in (KEY, OTHER)] == [200, 200]
            for times, lines in enumerate((alice, f"sk-of-carol-012345678\n{unnamed}{alice}"), 2):
                path.write_text(lines)
                os.kill(os.getpid(), signal.SIGHUP)
                await until(logged(caplog, "api_keys_read", times))
            assert [(await ask(router, key)).status_code for key in (KEY, OTHER)] == [429, 429]

    asyncio.run(run())


@pytest.mark.covers("X02")
def test_who_has_gone_is_shown_for_a_while_and_not_for_ever(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.metrics.MOST_GONE_CLIENTS", 1)

    async def run() -> None:
        async with guarded_router(model, f"{KEY} name=alice\n{OTHER} name=bob\n") as (router, path):
            for key in (KEY, OTHER):
                assert (await ask(router, key)).status_code == 200
            path.write_text("sk-of-carol-012345678 name=carol\n")
            await until(lambda: count(router, "client_requests", client="alice") == 0)
            assert count(router, "client_requests", client="bob") == 1

    asyncio.run(run())


@pytest.mark.covers("X02")
def test_a_new_file_that_nobody_may_read_counts_once_its_mode_is_mended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Root copies, and only then gives it away: neither what is in it nor when it was written changes any more."""
    caplog.set_level(logging.INFO)
    path = Path("keys")
    (tmp_path / "keys").write_text(f"{KEY}\n")
    (tmp_path / "new").write_text(f"{KEY}\n{OTHER}\n")

    def renew() -> None:
        new = Path("new")
        new.chmod(0)
        new.replace(path)

    async def run() -> None:
        file = KeyFile(path)
        file.start(lambda: None)
        renew()
        await until(logged(caplog, "api_keys_kept", 1))
        assert "cannot be read: Permission denied" in caplog.messages[-1]
        mend()
        await until(logged(caplog, "api_keys_read", 2))
        assert len(file.keys) == 2
        await file.close()

    mend = partial(path.chmod, 0o600)
    with without_root(tmp_path):
        asyncio.run(run())


@pytest.mark.covers("X02")
def test_a_key_that_was_taken_out_while_nothing_could_be_opened_is_out_soon_after(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Clients had all descriptors, say; the file does not change again."""
    caplog.set_level(logging.INFO)
    path = tmp_path / "keys"
    path.write_text(f"{KEY}\n{OTHER}\n")

    async def run() -> None:
        file = KeyFile(path)
        file.start(lambda: None)
        path.write_text(f"{KEY}\n")
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        os.close(free := os.dup(0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
        try:
            await until(logged(caplog, "api_keys_kept", 1))
            await asyncio.sleep(1.5)  # it is looked at again
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        await until(logged(caplog, "api_keys_read", 2))
        assert len(file.keys) == 1
        await file.close()

    asyncio.run(run())
    assert sum("api_keys_kept" in each for each in caplog.messages) == 1 and "Too many open files" in caplog.text


@pytest.mark.covers("X02")
def test_a_file_that_nobody_watches_any_more_leaves_the_signal_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{KEY}\n")

    async def run() -> None:
        file = KeyFile(path)
        file.start(lambda: None)
        assert signal.getsignal(signal.SIGHUP) is not before
        await file.close()

    outside = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        before = signal.getsignal(signal.SIGHUP)
        asyncio.run(run())
        assert signal.getsignal(signal.SIGHUP) is before
    finally:
        signal.signal(signal.SIGHUP, outside)


def logged(caplog: pytest.LogCaptureFixture, event: str, times: int) -> Callable[[], bool]:
    return lambda: sum(message.startswith(event) for message in caplog.messages) >= times


@pytest.mark.covers("X02")
def test_a_file_that_others_can_read_is_warned_about_and_a_bad_one_ends_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        path = tmp_path / "keys"
        with pytest.raises(KeyFileError, match=f"--api-keys {path}: cannot be read: No such file"):
            KeyFile(path)
        path.write_text("short\n")
        with pytest.raises(KeyFileError, match="line 1: a key must be"):
            KeyFile(path)
        path.write_text(f"{KEY}\n")
        path.chmod(0o600)
        KeyFile(path)
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
        path.chmod(0o640)
        KeyFile(path)
        assert "api_keys_exposed" in caplog.messages[-1]
        assert "chmod 600" in caplog.messages[-1]

    asyncio.run(run())


@pytest.mark.covers("X02", "X05")
def test_the_operators_bounds_are_4xx_with_a_sentence(model: Path) -> None:
    async def run() -> None:
        settings = ApiSettings(MODEL_NAME, 30.0, max_body_bytes=500, max_prompt_tokens=10, max_n=2)
        async with live_router(model, settings=settings) as router:
            for body, status, told in (
                ({"n": 3}, 400, "n: must be less than or equal to 2, not 3"),
                ({"prompt": "x" * 20}, 400, "prompt: 21 tokens are more than the 10 that a prompt may have here"),
                ({"prompt": "x" * 600}, 413, "The body is larger than 500 bytes."),
                ({"prompt": [1] * MAX_MODEL_LEN}, 413, "The body is larger than 500 bytes."),
            ):
                answer = await router.post(**body)
                assert (answer.status_code, answer.json()["error"]["message"]) == (status, told)
            assert not router.pair.prefill.dispatches
            assert (await router.post(n=2, max_tokens=5)).status_code == 200

    asyncio.run(run())
