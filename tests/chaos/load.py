"""A steady load whose every answer is judged: so many clients, each asking one request after the other.

A new request is asked of an undisturbed cluster first; most are asked several times of the one under fault, streamed or not, of
any of its routers. A connection may break only with its router: what came until then must be right, and the client asks again.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import httpx

from tests.chaos.answers import Told, Verdict, ask, drawn_from_all, judge, undisturbed
from tests.plain_http import NO_CERTIFICATES

KNOWN: Final = 200  # requests that are asked again
NEW_SHARE: Final = 0.3
ALLOWED: Final = ("equal", "refused", "broken")  # any other end of an answer is a bug to find
WasTouched = Callable[[str, float], bool]  # a process, since an instant by time.monotonic
_TURNED_AWAY_S: Final = 0.1  # until a client that was told to come back does


@dataclass(slots=True)
class Tally:
    """What the clients got."""

    verdicts: Counter[str] = field(default_factory=Counter)
    streams: int = 0  # streamed answers that were right to the end
    wholes: int = 0  # answers in one piece that were right
    tokens: int = 0  # completion tokens that were compared and right
    longest_pause_s: float = 0.0  # between two parts of a stream
    bad: list[str] = field(default_factory=list)  # one paragraph each

    def take(self, body: dict[str, Any], told: Told, verdict: Verdict) -> None:
        """One more answer."""
        self.verdicts[verdict.kind] += 1
        self.tokens += verdict.num_tokens
        if verdict.kind == "equal":
            self.streams += told.is_stream
            self.wholes += not told.is_stream
        if verdict.kind not in ALLOWED:
            self.bad.append(f"{verdict.kind}, stream={told.is_stream}: {verdict.detail}\n    asked: {body}")
        pauses = [b - a for a, b in zip(told.heard_at, told.heard_at[1:], strict=False)]
        self.longest_pause_s = max([self.longest_pause_s, *pauses])

    @property
    def answered(self) -> int:
        """Answers that were right to the end."""
        return self.verdicts["equal"]


class Load:
    """Clients on threads; made in the thread whose network namespace they are to be in."""

    def __init__(
        self, seed: int, reference_url: str, routers: Mapping[str, str], was_touched: WasTouched, num_clients: int
    ) -> None:
        """`routers`: the urls of those that a client may choose from; `was_touched` tells of one of them."""
        self._reference_url = reference_url
        self._routers = routers
        self._was_touched = was_touched
        self._known: deque[tuple[dict[str, Any], dict[str, Any]]] = deque(maxlen=KNOWN)
        self._tally = Tally()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._clients = [
            threading.Thread(target=self._run, args=(random.Random(f"{seed} {number}"),), daemon=True)
            for number in range(num_clients)
        ]
        self._died: list[BaseException] = []

    def start(self) -> None:
        """Begin to ask."""
        for client in self._clients:
            client.start()

    def stop(self, bound_s: float) -> Tally:
        """Ask nothing new, wait for the answers under way; what all of them were."""
        self._stopping.set()
        until = time.monotonic() + bound_s
        for client in self._clients:
            client.join(max(0.0, until - time.monotonic()))
        assert not any(client.is_alive() for client in self._clients), f"requests hang: {self._tally}"
        return self.tally()

    def tally(self) -> Tally:
        """What was got until now; raises what ended a client."""
        with self._lock:
            if self._died:
                raise self._died[0]
            return self._tally

    def _run(self, rng: random.Random) -> None:
        try:
            with httpx.Client(trust_env=False, verify=NO_CERTIFICATES) as client:
                while not self._stopping.is_set():
                    self._ask_one(client, rng)
        except BaseException as error:
            with self._lock:
                self._died.append(error)

    def _ask_one(self, client: httpx.Client, rng: random.Random) -> None:
        if not self._known or rng.random() < NEW_SHARE:
            body = drawn_from_all(rng)
            self._known.append((body, undisturbed(client, self._reference_url, body)))
        body, reference = rng.choice(list(self._known))
        is_stream = rng.random() < 0.6
        while not self._stopping.is_set():
            router, began_at = rng.choice(list(self._routers)), time.monotonic()
            told = ask(client, self._routers[router], body, is_stream)
            verdict = judge(told, reference)
            if verdict.kind == "broken" and not self._was_touched(router, began_at):
                verdict = replace(verdict, kind="wrong", detail=f"nothing happened to {router}: {verdict.detail}")
            with self._lock:
                self._tally.take(body, told, verdict)
            if verdict.kind not in ("refused", "broken"):
                return
            self._stopping.wait(_TURNED_AWAY_S)
