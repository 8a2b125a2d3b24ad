"""The shared registry in Redis: three calls, each bounded in time, each either done or RegistryUnreachable.

A connection that failed is never used again: what it still carries could be taken for the next call's answer. What is read is input
of whoever can write there: what no node has written is left out and counted. Not here: when a call is made and what follows
from it (registry_client.py, redis_reader.py); the rules (redis_scripts.py).
"""

from __future__ import annotations

import asyncio
import re
import ssl
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from proto import baton_pb2 as pb
from runtime import redis_scripts as scripts
from runtime.listing import FULL_SENTENCE, entry_problem, gone_sentence, older_sentence
from runtime.polled_listing import Row
from runtime.redis_address import shown
from runtime.registry_client import RegistryUnreachable
from runtime.registry_record import decode_gone, decode_record, encode_record, incarnation_text
from runtime.session import Peer

CALL_TIMEOUT_S: Final = 0.5
# The first call on a connection has up to eight round trips: TCP, TLS, AUTH, SELECT, and a script that the server has not heard.
# To be reached at all it has no more time than any call: where packets vanish, who waits is back no later than who tries again.
FIRST_CALL_TIMEOUT_S: Final = 2.0
# What redis-py makes of answers that are not Redis's.
_OF_WHO_SPEAKS_SOMETHING_ELSE: Final = (
    TypeError,
    LookupError,
    ValueError,
    ArithmeticError,
    MemoryError,
    RecursionError,
)
BACKOFF_MAX_S: Final = 0.4  # with a call's timeout less than a second: then everybody is back
_KEYS: Final = ("entries", "seen", "addresses", "gone", "read")
_NUM_HOLDERS: Final = 4  # the keys that say who holds what; the fifth is a reader's own
_ROW_PARTS: Final = 3  # name, seen_ms, record


@dataclass(frozen=True, slots=True)
class Content:
    """What one look at the registry finds."""

    rows: tuple[Row, ...]  # the one repeated last comes last
    gone: tuple[Peer, ...]  # who deregistered or was replaced of late
    num_skipped: int  # values that no node has written


class RedisStore:
    """One cluster's entries in one Redis: a Registry. Make and use it on the running loop; connects when it is first called."""

    backoff_max_s = BACKOFF_MAX_S

    def __init__(self, url: str, namespace: str, ttl_s: float, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """`url` and `namespace` have no registry_problem (redis_address.py)."""
        self.name = shown(url)
        self._url = url
        self._keys = [f"baton:{{{namespace}}}:{key}" for key in _KEYS]  # in braces: one slot, should Redis be a cluster
        self._ttl_ms = round(ttl_s * 1000)
        self._timeout_s = timeout_s  # of one call; the first on a connection has FIRST_CALL_TIMEOUT_S at least
        self._client: Redis | None = None
        self._read: dict[bytes, pb.NodeEntry] = {}  # by record: what it said when it was there last

    async def register(self, entry: pb.NodeEntry) -> str:
        """Take an entry or its repetition: empty, or the sentence that refuses it. Raises RegistryUnreachable."""
        problem = entry_problem(entry)
        if problem is not None:
            return problem
        name, incarnation = entry.node.name, incarnation_text(entry.node.incarnation)
        answer = await self._run(
            scripts.REGISTER, name, incarnation, entry.started_ms, entry.grpc_address, encode_record(entry)
        )
        peer = Peer(name, entry.node.incarnation)
        sentences = {
            scripts.GONE: gone_sentence(peer),
            scripts.OLDER: older_sentence(peer),
            scripts.FULL: FULL_SENTENCE,
        }
        for known, sentence in {scripts.TAKEN: "", **sentences}.items():
            if answer == known:
                return sentence
        raise RegistryUnreachable("answer")

    async def deregister(self, peer: Peer) -> None:
        """Forget a node process at its own wish. Raises RegistryUnreachable."""
        await self._run(scripts.DEREGISTER, peer.name, incarnation_text(peer.incarnation))

    async def read(self) -> Content:
        """Everything that was repeated in time. Raises RegistryUnreachable, also where Redis takes no writes."""
        answer = await self._run(scripts.READ, is_reader=True)
        try:
            return self._content(answer)
        except (TypeError, ValueError):
            raise RegistryUnreachable("answer") from None

    def _content(self, answer: object) -> Content:
        """Read what READ answers; raises TypeError or ValueError if it is something else."""
        if not isinstance(answer, list):
            raise TypeError
        now, num_unfit, found, left = answer
        if not all(isinstance(each, bytes) for each in (now, *found, *left)):
            raise TypeError
        now_ms, before = float(now), self._read
        self._read = {}
        rows: list[Row] = []
        for name, seen, record in zip(*(found[part::_ROW_PARTS] for part in range(_ROW_PARTS)), strict=True):
            entry = before.get(record)
            if entry is None or entry.node.name.encode() != name:
                entry = decode_record(name, record)
            if entry is None:
                num_unfit += 1
            else:
                self._read[record] = entry
                rows.append(Row(entry, seen, (now_ms - float(seen)) / 1000))
        gone = [decode_gone(text) for text in left]
        known = tuple(peer for peer in gone if peer is not None)
        return Content(tuple(rows), known, num_unfit + len(gone) - len(known))

    async def hang_up(self) -> None:
        """Drop the connection; the next call makes a new one."""
        client, self._client = self._client, None
        if client is not None:
            with suppress(RedisError, OSError):  # it is dropped, whatever it says to that
                async with asyncio.timeout(self._timeout_s):
                    await client.aclose()

    async def _run(self, script: str, *arguments: str | int | bytes, is_reader: bool = False) -> object:
        bound_s = self._timeout_s
        if self._client is None:
            self._client = _client(self._url, self._timeout_s)
            bound_s = max(bound_s, FIRST_CALL_TIMEOUT_S)
        keys = self._keys if is_reader else self._keys[:_NUM_HOLDERS]
        try:
            async with asyncio.timeout(bound_s):
                answer: object = await self._client.register_script(script)(keys, (self._ttl_ms, *arguments))
        except (RedisError, OSError, *_OF_WHO_SPEAKS_SOMETHING_ELSE) as error:
            await self.hang_up()
            raise RegistryUnreachable(_word_for(error)) from None
        return answer


def _word_for(error: Exception) -> str:
    """Its kind and, where Redis or TLS has said one, the code: the rest of its text might quote what it was given."""
    if isinstance(cause := error.__cause__ or error.__context__, ssl.SSLError) and cause.reason:
        return f"SSLError:{cause.reason}"
    if type(error) is RedisConnectionError and " connecting to " not in str(error):
        return "ConnectionError:CLOSED"
    code = re.match(r"[A-Z]{2,20}\b", str(error))
    return type(error).__name__ + (f":{code[0]}" if code else "")


def _client(url: str, connect_timeout_s: float) -> Redis:
    """Connects when first used. Tries once: the caller knows when to try again.

    Its own timeout of calls is off, ours are around each: with one it sends by asyncio.wait_for, which before Python 3.12 can lose
    a cancellation (python/cpython#86296), and who is cancelled then runs on for ever. That of connecting is asyncio.timeout.
    """
    client: Redis = Redis.from_url(
        url,
        socket_timeout=None,
        socket_connect_timeout=connect_timeout_s,
        retry=Retry(NoBackoff(), 0),
        protocol=2,  # spoken by every version
    )
    return client
