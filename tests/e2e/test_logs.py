"""The logs of a whole cluster at their most talkative: JSON, with the names to search for, and nothing that a client wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.e2e.role_by_role import started_role_by_role, wait_until

SECRET: Final = "The password is kumquat, and nobody must know"
KEY: Final = "sk-kumquat-0123456789"
WORD: Final = "kumquat"
TALKATIVE: Final = ("--log-format", "json", "--log-level", "debug")


def bad_bodies() -> list[dict[str, Any]]:
    """What is refused, with the secret wherever one can put it."""
    good = {"model": "llama-tiny", "prompt": SECRET}
    chat = {"model": "llama-tiny", "messages": [{"role": "user", "content": SECRET}]}
    return [
        {**good, "temperature": SECRET},
        {**good, "prompt": {"text": SECRET}},
        {**good, "prompt": [SECRET, 7]},
        {**good, "logit_bias": {SECRET: 1}},
        {**good, "stop": {"word": SECRET}},
        {**good, "max_tokens": 10**9},
        {**good, "model": SECRET},
        {**good, "request_id": SECRET},
        {**chat, "messages": [{"role": SECRET, "content": SECRET}]},
        {**chat, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": SECRET}]}]},
    ]


@pytest.mark.covers("O05")
def test_logs_are_json_name_every_request_and_hold_no_prompt_and_no_key(tiny_model: Path, tmp_path: Path) -> None:
    flags = {"router": TALKATIVE, "prefill-0": TALKATIVE, "decode-0": TALKATIVE}
    with started_role_by_role(tiny_model, tmp_path, flags) as cluster:
        headers = {"Authorization": f"Bearer {KEY}", "X-Api-Key": KEY, "X-Request-Id": "mine"}
        with httpx.Client(base_url=cluster.url, headers=headers, timeout=60, trust_env=False) as client:
            good = {"model": "llama-tiny", "prompt": SECRET, "max_tokens": 4, "ignore_eos": True}
            answer = client.post("/v1/completions", json=good)
            assert answer.status_code == 200
            assert client.post("/v1/completions", json=good | {"stream": True, "echo": True}).status_code == 200
            for bad in bad_bodies():
                path = "/v1/chat/completions" if "messages" in bad else "/v1/completions"
                refused = client.post(path, json=bad)
                assert 400 <= refused.status_code < 500, refused.text
            assert client.post("/v1/completions", content=b'{"prompt": "' + SECRET.encode()).status_code == 400
            assert client.get("/v1/no/such/page", params={"prompt": SECRET, "key": KEY}).status_code == 404
        request = answer.json()["id"].removeprefix("cmpl-")
        wait_until("the decode node says that it has ended", lambda: request in cluster.log_text("decode-0"))
        cluster.kill("decode-0")  # what is said then, too
        wait_until("the router says so", lambda: "session_lost" in cluster.log_text("router"))
        logs = {name: cluster.log_text(name) for name in flags}
    lines = {name: [json.loads(line) for line in text.splitlines()] for name, text in logs.items()}
    for name, text in logs.items():
        assert len(lines[name]) > 3 and WORD not in text.lower(), name
        for line in lines[name]:
            assert {"time", "level", "process", "event"} <= set(line) and line["process"] == name
    (ended,) = (line for line in lines["router"] if line["event"] == "request_ended" and line["request"] == request)
    assert ended["completion_tokens"] == 4 and ended["client_request"] == "mine" and ended["outcome"] == "length"
    assert sum(line["event"] == "request_refused" for line in lines["router"]) == len(bad_bodies()) + 2
    for node in ("prefill-0", "decode-0"):
        found = [line for line in lines[node] if line["event"] == "attempt_ended" and line["request"] == request]
        assert [(line["choice"], line["attempt"], line["node"]) for line in found] == [(0, 0, node)]
    others = [line for line in lines["prefill-0"] if line["event"].startswith("link")]
    assert others and all({"message", "logger"} <= set(line) for line in others), "of rooms that log by themselves"
