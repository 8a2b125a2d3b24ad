"""The deep look at a cluster: real KV from every prefill node to every decode node, and whether it was the right KV.

    for each pair (P, D):   random prompt ──> P computes ── KV ──> D generates: tokens t0 … t3
                            prompt, t0 … t2 ─> P alone computes, its prefix cache not asked: the likeliest behind each position
    equal: D's tokens follow from what P had, so what crossed is what was sent

Each prompt is new, so no cache has any of it, and blocks must cross. One look at a time, bounded in time however the nodes are; a
few pairs at once. A canary is a request like any other, but that it goes to its pair alone and is not retried: the first failure is
what is to be seen. Not here: HTTP (api.py).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice, product, zip_longest
from typing import Any, Final

from proto import baton_pb2 as pb
from router.answer import Answer, Arrival, Asked, Delivery
from router.choice_text import TextRules
from router.events import Failed, GenerationRequest, Sampling
from router.node_state import Node, Session
from router.shell import RouterShell
from router.text import ModelText

NAME: Final = "canary"  # as whose requests they show in the log and at /v1/requests
MAX_TOKENS: Final = 4
PAIR_TIMEOUT_S: Final = 5.0
ALL_TIMEOUT_S: Final = 30.0
_AT_ONCE: Final = 4
MAX_PAIRS: Final = 400  # of a look: so many are tried in its time where each takes a quarter of a second


class AlreadyLooking(Exception):
    """One look at a time."""


@dataclass(frozen=True, slots=True)
class PairSeen:
    """What became of a pair's canary."""

    prefill: str
    decode: str
    problem: str | None  # one sentence; None: all is well
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """For people and tools."""
        return asdict(self) | {"ok": self.problem is None, "seconds": round(self.seconds, 4)}


def pairs_of(nodes: Sequence[Node], most: int) -> tuple[list[tuple[Node, Node]], int]:
    """Pairs of who prefills and who decodes that may exchange KV, and how many are left out for there being more than `most`.

    Each turn has every node in one pair at least, but where a mixed node meets itself; kinds of nodes come by turns, too.
    """
    kinds: dict[bytes, list[Node]] = {}
    for node in nodes:
        kinds.setdefault(node.fingerprint, []).append(node)
    by_turns = chain.from_iterable(zip_longest(*map(_pairs_of_a_kind, kinds.values())))
    found = list(islice((pair for pair in by_turns if pair is not None), most))
    num_both = sum(node.prefills and node.decodes for node in nodes)  # with itself none does
    num_all = sum(
        sum(node.prefills for node in alike) * sum(node.decodes for node in alike) for alike in kinds.values()
    )
    return found, num_all - num_both - len(found)


def _pairs_of_a_kind(nodes: Sequence[Node]) -> Iterator[tuple[Node, Node]]:
    prefills, decodes = [node for node in nodes if node.prefills], [node for node in nodes if node.decodes]
    for turn, number in product(range(min(len(prefills), len(decodes))), range(max(len(prefills), len(decodes)))):
        shift = (0, turn) if len(prefills) > len(decodes) else (turn, 0)  # of the longer list all come in each turn
        prefill, decode = (each[(number + by) % len(each)] for each, by in zip((prefills, decodes), shift, strict=True))
        if prefill.ref != decode.ref:
            yield prefill, decode


class _Problem(Exception):
    """A pair's canary did not come through; the message is one sentence."""


class DeepLook:
    """Sends canaries through one router's nodes."""

    def __init__(
        self, shell: RouterShell, text: ModelText, pair_s: float = PAIR_TIMEOUT_S, all_s: float = ALL_TIMEOUT_S
    ) -> None:
        self._shell = shell
        self._text = text
        self._pair_s = pair_s
        self._all_s = all_s
        self._is_looking = False

    async def look(self) -> tuple[list[PairSeen], int]:
        """Pairs of nodes that may have to hand over to each other, MAX_PAIRS at most, and how many more there are.

        Raises AlreadyLooking.
        """
        if self._is_looking:
            raise AlreadyLooking
        self._is_looking = True
        try:
            ends_at, turn = self._shell.now() + self._all_s, asyncio.Semaphore(_AT_ONCE)
            pairs, num_left_out = pairs_of(self._nodes(), MAX_PAIRS)
            return await asyncio.gather(*(self._try(*pair, ends_at, turn) for pair in pairs)), num_left_out
        finally:
            self._is_looking = False

    def _nodes(self) -> list[Node]:
        """Those that are to serve: one that is to end, or has gone by its own word, is missed by nobody."""
        return [node for node, _ in self._shell.nodes() if not (node.is_gone or node.drains or node.is_left_out)]

    async def _try(self, prefill: Node, decode: Node, ends_at: float, turn: asyncio.Semaphore) -> PairSeen:
        async with turn:
            began_at, problem = self._shell.now(), None
            try:
                for node in (prefill, decode):
                    if node.session is not Session.UP:
                        raise _Problem(
                            f"{node.ref.name} cannot be reached by the router: its session is {node.session.value}"
                        )
                patience_s = min(self._pair_s, ends_at - began_at)
                if patience_s <= 0:
                    raise _Problem(f"not tried within the {self._all_s:g} s for all pairs")
                async with asyncio.timeout(patience_s):
                    await self._send(prefill, decode, patience_s)
            except TimeoutError:
                problem = f"no answer within {self._shell.now() - began_at:.1f} s"
            except _Problem as found:
                problem = str(found)
            return PairSeen(prefill.ref.name, decode.ref.name, problem, self._shell.now() - began_at)

    async def _send(self, prefill: Node, decode: Node, patience_s: float) -> None:
        """Raises _Problem."""
        block_size = prefill.entry.fingerprint.block_size
        most = min(node.max_total_tokens for node in (prefill, decode)) - MAX_TOKENS
        prompt = [secrets.randbelow(self._text.vocab_size) for _ in range(max(min(2 * block_size + 1, most), 1))]
        pair = (prefill.ref.name, decode.ref.name)
        token_ids, _ = await self._ask(pair, prompt, Sampling(0.0, MAX_TOKENS, (), num_logprobs=0), patience_s)
        alone = Sampling(0.0, 1, (), num_logprobs=1, wants_prompt_logprobs=True)
        last, scores = await self._ask(pair, [*prompt, *token_ids[:-1]], alone, patience_s)
        expected = [score.top[0].token_id for score in scores[len(prompt) - 1 :]] + last
        if expected != token_ids:
            where = next(i for i, pair in enumerate(zip(expected, token_ids, strict=True)) if pair[0] != pair[1])
            raise _Problem(
                f"{pair[1]} gave another token than follows from the KV of {pair[0]}, at position {where} of {MAX_TOKENS}"
            )

    async def _ask(
        self, pair: tuple[str, str], prompt: Sequence[int], sampling: Sampling, patience_s: float
    ) -> tuple[list[int], list[pb.TokenLogprobs]]:
        """The completion's tokens, and the logprobs of the prompt's where asked for. Raises _Problem."""
        request = GenerationRequest(
            request_id=secrets.token_hex(12),
            prompt_token_ids=tuple(prompt),
            seed=0,
            sampling=sampling,
            deadline=asyncio.get_running_loop().time() + patience_s,
            pinned=pair,
        )
        asked = Asked(request, [self._text.choice_text(TextRules(()))])
        delivery = Delivery([asked], Arrival(self._shell.now(), NAME))
        (answer,) = delivery.answers
        token_ids, scores = list[int](), list[pb.TokenLogprobs]()
        self._shell.submit(answer)
        try:
            while not delivery.is_complete:
                for _, piece in await delivery.take():
                    token_ids += piece.token_ids
                    scores += piece.prompt_logprobs
                if delivery.failure is not None:
                    failure = delivery.failure
                    raise _Problem(failure.message if isinstance(failure, Failed) else "the router is shutting down")
        finally:
            self._shell.abort(answer)
        if len(token_ids) != sampling.max_tokens:
            raise _Problem(self._why_short(answer))
        return token_ids, scores

    def _why_short(self, answer: Answer) -> str:
        record = self._shell.timelines.find(answer.request.request_id)
        codes = [] if record is None else [each.code for each in record.happenings if each.what == "given_up"]
        return f"it failed behind its first token: {', '.join(codes) or 'why is in the logs'}"
