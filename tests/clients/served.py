"""The cluster that clients are sent to, and what plain HTTP gets from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx


@dataclass(frozen=True, slots=True)
class Served:
    """What clients are told of it, and a way of our own to ask it."""

    url: str
    model: str
    folder: Path  # of the model, for clients that tokenize
    http: httpx.Client

    def plainly(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to one request, not streamed."""
        answer = self.http.post(f"{self.url}{path}", json=body | {"model": self.model}, timeout=120)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found
