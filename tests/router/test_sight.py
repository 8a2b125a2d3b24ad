"""The pages about requests and nodes, over real sockets."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.router.live_router import MODEL_NAME, LiveRouter
from tests.router.test_api import play
from tests.router.tiny_model import write_model_text


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_text(tmp_path_factory.mktemp("model"))


@pytest.mark.covers("O03")
def test_a_timeline_is_found_by_any_of_a_requests_names_and_one_that_is_not_there_is_404(model: Path) -> None:
    async def scenario(router: LiveRouter) -> None:
        answer = await router.client.post(
            "/v1/completions", json={"model": MODEL_NAME, "prompt": "hi"}, headers={"X-Request-Id": "mine"}
        )
        (listed,) = (await router.client.get("/v1/requests")).json()["data"]
        for name in ("mine", answer.json()["id"], listed["id"]):
            found = await router.client.get(f"/v1/requests/{name}/timeline")
            assert found.status_code == 200 and found.json()["id"] == listed["id"] == answer.json()["id"][5:]
        assert found.json()["time_to_first_token"]["seconds"] > 0
        missing = await router.client.get("/v1/requests/nobodys/timeline")
        assert missing.status_code == 404 and "nobodys" in missing.json()["error"]["message"]
        assert (await router.client.get("/v1/requests?limit=x")).status_code == 400
        assert (await router.client.get("/v1/requests?limit=0")).json()["data"] == []
        state = (await router.client.get("/state")).json()
        assert {node["name"]: node["session"] for node in state["nodes"]} == {"prefill": "up", "decode": "up"}
        assert state["ready"] and state["queued"] == state["live_requests"] == 0

    play(model, scenario)
