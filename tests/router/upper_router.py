"""What a router above ours does: sends what is handed up again until it is complete, and puts the parts together."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx

from router.events import RESCHEDULED
from tests.router.test_stream_equals_whole import flattened, joined


class UpperRouter:
    """Asks with streams and without, as it draws; `bodies` ask for `return_token_ids`."""

    def __init__(self, client: httpx.AsyncClient, model_name: str, rng: random.Random) -> None:
        self._client = client
        self._model_name = model_name
        self._rng = rng
        self.num_handed_up = 0  # choices
        self.num_turned_away = 0  # requests of which nothing was generated

    async def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """As one answer that nothing had happened to."""
        answer = await self._ask(path, body)
        prompts = body["prompt"] if isinstance(body.get("prompt"), list) else [body.get("prompt")]
        if isinstance(prompts[0], int):
            prompts = [prompts]
        for index, choice in enumerate(answer["choices"]):
            while choice["finish_reason"] == RESCHEDULED:
                self.num_handed_up += 1
                prompt = {} if body.get("prompt") is None else {"prompt": prompts[index // body["n"]], "echo": False}
                ids = {"n": 1, "seed": choice["seed"], "generated_token_ids": choice["completion_token_ids"]}
                again = await self._ask(path, body | prompt | ids)
                answer["usage"]["completion_tokens"] += again["usage"]["completion_tokens"]
                self._join(choice, again["choices"][0])
        answer["usage"]["total_tokens"] = sum(list(answer["usage"].values())[:2])
        return answer

    def _join(self, choice: dict[str, Any], rest: dict[str, Any]) -> None:
        if choice["logprobs"] is not None:
            offsets = rest["logprobs"].get("text_offset", [])
            offsets[:] = [len(choice["text"]) + offset for offset in offsets]
            for name, values in rest["logprobs"].items():
                choice["logprobs"][name] = values and (choice["logprobs"][name] or []) + values
        choice["text"] += rest["text"]
        given = [] if rest["finish_reason"] == RESCHEDULED else choice["completion_token_ids"]
        choice["completion_token_ids"] = given + rest["completion_token_ids"]
        assert rest["seed"] == choice["seed"]
        choice["finish_reason"] = rest["finish_reason"]

    async def _ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        is_stream = self._rng.random() < 0.5
        stream = {"stream": True, "stream_options": {"include_usage": True}} if is_stream else {}
        while True:
            answer = await self._client.post(path, json={"model": self._model_name} | body | stream)
            if answer.status_code != 503:
                break
            assert int(answer.headers["Retry-After"]) >= 1
            self.num_turned_away += 1
            await asyncio.sleep(0.05)
        assert answer.status_code == 200, (body, answer.text)
        return joined(answer.text) if is_stream else flattened(answer.json())
