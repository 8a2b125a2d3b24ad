"""The dashboard's endpoints over real sockets: what is open, what wants a key, and the button that is there on `baton up` alone."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from deploy.control import Control
from router import dashboard
from router.api import ApiSettings
from router.dashboard import AllWorkers
from router.launcher_link import LauncherLink
from router.page_files import PREFIX
from router.shell import RouterShell
from router.worker_pages import own_page
from tests.architecture.source_tree import ROOT
from tests.router.live_router import MODEL_NAME, LiveRouter, live_router
from tests.router.test_api import play
from tests.router.test_gate import KEY, bearer, guarded_router
from tests.router.tiny_model import write_model_text

PAGE = ROOT / "router" / "page"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_text(tmp_path_factory.mktemp("dashboard") / "model")


def kill_headers(router: LiveRouter) -> dict[str, str]:
    return {"Origin": f"http://127.0.0.1:{router.port}"}


@pytest.mark.covers("X02", "O03")
def test_the_page_is_open_and_what_it_asks_for_wants_a_key(model: Path) -> None:
    async def run() -> None:
        async with guarded_router(model, f"{KEY}\n") as (router, _):
            page = await router.client.get("/")
            assert page.status_code == 200 and page.headers["Content-Type"].startswith("text/html")
            for path in ("/dashboard/state", "/dashboard/requests/x", "/dashboard/pages", "/dashboard/page"):
                assert (await router.client.get(path)).status_code == 401, path
            assert (await router.client.post("/dashboard/kill", json={"node": "decode"})).status_code == 401
            assert (await router.client.get("/dashboard/page/..%2Fstate")).status_code == 404
            assert (await router.client.get("/dashboard/page/none.js")).status_code == 404
            assert (await router.client.get("/dashboard/state", headers=bearer(KEY))).status_code == 200

    asyncio.run(run())


@pytest.mark.covers("X05")
def test_every_file_comes_with_a_policy_that_lets_nothing_in_and_is_not_sent_twice(model: Path) -> None:
    async def scenario(router: LiveRouter) -> None:
        for path in ["/", *(PREFIX + file.name for file in PAGE.iterdir())]:
            answer = await router.client.get(path)
            policy = answer.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy and "script-src 'self';" in policy and "unsafe" not in policy
            assert "frame-ancestors 'none'" in policy and "trusted-types 'none'" in policy
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            again = await router.client.get(path, headers={"If-None-Match": answer.headers["ETag"]})
            assert (again.status_code, again.content) == (304, b"")
            head = await router.client.head(path)
            assert head.status_code == 200 and head.content == b""

    play(model, scenario)


@pytest.mark.covers("O03")
def test_the_state_has_nodes_requests_and_counts_and_a_request_its_picture(model: Path) -> None:
    async def scenario(router: LiveRouter) -> None:
        answer = await router.client.post(
            "/v1/completions", json={"model": MODEL_NAME, "prompt": "hi"}, headers={"X-Request-Id": "mine"}
        )
        state = (await router.client.get("/dashboard/state")).json()
        assert (state["model"], state["can_kill"]) == (MODEL_NAME, False)
        assert {node["name"] for node in state["state"]["nodes"]} == {"prefill", "decode"}
        shown = set(re.findall(r"\bnode\.(\w+)", (PAGE / "nodes.js").read_text()))
        assert all(set(node) == shown for node in state["state"]["nodes"]), "no more than the page reads, and no less"
        assert state["generated_tokens"] == answer.json()["usage"]["completion_tokens"] > 0
        (listed,) = state["requests"]
        assert listed["id"] == answer.json()["id"].partition("-")[2] and state["first_token_s"]["num"] == 1
        for name in ("mine", listed["id"]):
            found = (await router.client.get(f"/dashboard/requests/{name}")).json()
            assert found["timeline"]["id"] == listed["id"] and found["picture"]["panels"][-1]["kind"] == "whole"
        assert (await router.client.get("/dashboard/requests/mine?choice=9")).json()["picture"]["choice"] == 0
        assert (await router.client.get("/dashboard/requests/mine?choice=x")).status_code == 400
        assert (await router.client.get("/dashboard/requests/nobodys")).status_code == 404

    play(model, scenario)


def test_tabs_that_ask_within_the_same_second_share_a_look(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = ApiSettings(MODEL_NAME, 30.0, max_body_bytes=1 << 20)
    shells: list[RouterShell] = []
    asked: list[str] = []

    async def parts(page: str) -> dict[int, str]:
        asked.append(page)
        await asyncio.sleep(0)
        return {0: own_page(shells[0], page)}

    async def run() -> None:
        async with live_router(model, settings=replace(usual, all_workers=AllWorkers(0, 2, parts))) as router:
            shells.append(router.shell)
            monkeypatch.setattr(dashboard, "SHARED_S", 60.0)
            looks = await asyncio.gather(*(router.client.get("/dashboard/state") for _ in range(5)))
            looks.append(await router.client.get("/dashboard/state"))
            assert len(asked) == 1 == len({look.content for look in looks})
            monkeypatch.setattr(dashboard, "SHARED_S", 0.0)  # as if that long had passed
            later = await router.client.get("/dashboard/state")
            assert len(asked) == 2 and later.json()["at"] > looks[0].json()["at"]

    asyncio.run(run())


@pytest.mark.parametrize("is_one_late", [True, False])
def test_a_timeline_is_gone_only_where_all_workers_say_so(model: Path, is_one_late: bool) -> None:
    """One that has not answered in time may have it."""
    usual = ApiSettings(MODEL_NAME, 30.0, max_body_bytes=1 << 20)
    shells: list[RouterShell] = []

    async def parts(page: str) -> dict[int, str]:
        text = own_page(shells[0], page)
        return {1: text} if is_one_late else {1: text, 0: text}

    async def run() -> None:
        async with live_router(model, settings=replace(usual, all_workers=AllWorkers(1, 2, parts))) as router:
            shells.append(router.shell)
            state = (await router.client.get("/dashboard/state")).json()
            assert state["num_workers"] == 2
            assert [each["worker"] for each in state["state"]["workers"]] == ([1] if is_one_late else [0, 1])
            for path in ("/dashboard/requests/nobodys", "/v1/requests/nobodys/timeline"):
                answer = await router.client.get(path)
                assert answer.status_code == (503 if is_one_late else 404), path
                assert ("Retry-After" in answer.headers) == is_one_late

    asyncio.run(run())


@pytest.mark.covers("X02")
def test_without_a_launcher_there_is_no_button_and_with_one_only_the_page_presses_it(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    killed: list[str] = []

    async def kill(name: str) -> str | None:
        killed.append(name)
        return None if name == "decode" else "There is no such node here."

    async def run() -> None:
        usual = ApiSettings(MODEL_NAME, 30.0, max_body_bytes=1 << 20)
        async with live_router(model) as router:
            answer = await router.client.post("/dashboard/kill", json={"node": "decode"}, headers=kill_headers(router))
            assert answer.status_code == 404
        control = Control(kill)
        link = LauncherLink(await control.open())
        async with live_router(model, settings=replace(usual, launcher=link)) as router:
            assert (await router.client.get("/dashboard/state")).json()["can_kill"] is True
            headers = kill_headers(router)

            async def post(more: dict[str, str], **content: object) -> httpx.Response:
                return await router.client.post("/dashboard/kill", headers=more, **content)  # type: ignore[arg-type]

            strange = {"Origin": "http://evil.example"}
            assert [(await post(each, json={"node": "decode"})).status_code for each in ({}, strange)] == [403, 403]
            assert (await post(headers, content=b'{"node": "decode"}')).status_code == 403, "a form's content type"
            assert (await post(headers, json={"node": 1})).status_code == 400
            assert (await post(headers, json=["decode"])).status_code == 400
            assert (await post(headers, json={"node": "x" * 2000})).status_code == 413
            as_json = headers | {"Content-Type": "application/json"}
            _, writer = await asyncio.open_connection("127.0.0.1", router.port)
            head = "".join(f"{name}: {value}\r\n" for name, value in as_json.items())
            writer.write(f"POST /dashboard/kill HTTP/1.1\r\nHost: 127.0.0.1:{router.port}\r\n{head}".encode())
            writer.write(b"Content-Length: 100\r\n\r\n{")
            await writer.drain()
            writer.close()  # before it has said all: nobody's bug
            deep = await post(as_json, content=b"[" * 1024)
            assert deep.status_code == 400, "deeper than Python follows"
            assert not killed
            assert (await post(headers, json={"node": "decode"})).json() == {"killed": "decode"}
            refused = await post(headers, json={"node": "other"})
            assert (refused.status_code, refused.json()["error"]["message"]) == (409, "There is no such node here.")
            assert killed == ["decode", "other"]
            await control.close()
            assert (await post(headers, json={"node": "decode"})).status_code == 502
        assert killed == ["decode", "other"]
        assert "request_failed" not in caplog.text

    asyncio.run(run())


def test_the_page_is_of_its_own_files_alone_and_has_no_script_or_style_in_it() -> None:
    """It works offline, and under its policy."""
    html = (PAGE / "index.html").read_text()
    assert not re.findall(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=|javascript:", html)
    for file in PAGE.iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.findall(r"https?://|\binnerHTML|outerHTML|insertAdjacentHTML|\beval\(|document\.write", text), (
            file.name
        )
    named = re.findall(r'(?:src|href)="(/[^"]*)"', html)
    assert {PREFIX + "dashboard.js", PREFIX + "dashboard.css"} <= set(named)
    for path in named:
        assert (PAGE / path.removeprefix(PREFIX)).is_file(), path
    for script in PAGE.glob("*.js"):
        for imported in re.findall(r'from "\./([^"]+)"', script.read_text()):
            assert (PAGE / imported).is_file(), imported


def test_the_page_says_who_it_is_for_readers_of_its_code() -> None:
    """Files that fit into a head, each with a first line that says its job; every id that a script asks for is there."""
    html = (PAGE / "index.html").read_text()
    ids = set(re.findall(r'\bid="([\w-]+)"', html))
    for script in PAGE.glob("*.js"):
        text = script.read_text()
        assert text.startswith("// ") and text.count("\n") <= 400, script.name
        assert set(re.findall(r'byId\("([\w-]+)"\)', text)) <= ids, script.name
