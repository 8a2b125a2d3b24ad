"""The KV pool in Redis: each record a value, all round trips pipelined, each bounded in time.

    baton:{kv}:block:NAME        one record (kv_record.py); expires ttl_s after it was last written or read
    baton:{kv}:id                drawn by whoever came first: the pool's identity; every batch of writes sets it where it is gone
    baton:{kv}:used:BYTES        names of the records of this length, by when they were last used: the bound, kept by the scripts

A batch of writes is one round trip: room is made for it (the least recently used records go), then the values are set. What
dies in between leaves a name without a value, which counts against the bound until it is the oldest. All clocks are the
server's; one that takes over may be behind, and goes on from the last time that was noted. Its own eviction (maxmemory) may
take anything at any time; where it is out of memory and takes nothing, writes fail.

A connection that failed is never used again: what it still carries could be taken for the next call's answer. Nor is one whose
server refused something: it may have become another's replica, and the name lead elsewhere by now. Every wait for the server is
bounded by timeout_s, and there are no retries.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import ssl
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ReadOnlyError, RedisError
from redis.retry import Retry

from connector.kv_record import HEADER_BYTES, KvRecords
from connector.kv_store import Count, KvStoreError, KvStoreLimits, RunRead, count_nowhere

_BATCH_BYTES: Final = 8 << 20  # of one round trip, and so of the memory that client and server need for it
_READ_SIZE: Final = 1 << 20  # of one recv
_BLOCK: Final = b"baton:{kv}:block:"  # in braces: one slot, should Redis be a cluster
_USED: Final = "baton:{kv}:used:%d"
_ID: Final = "baton:{kv}:id"

# `now` in us, and behind whatever was used before: clocks are set back, and a server that takes over may be behind.
_BEGIN: Final = """
local kind = redis.call('TYPE', KEYS[1]).ok
if kind ~= 'zset' and kind ~= 'none' then redis.call('DEL', KEYS[1]) end  -- somebody else's
local t = redis.call('TIME')
local last = redis.call('ZREVRANGE', KEYS[1], 0, 0, 'WITHSCORES')[2] or 0
local now = math.max(t[1] * 1000000 + t[2], last + 1)
"""

# ARGV: length of a record. How many leading keys have such a value; an error other than that the value is of another kind is told:
# who may not look would else find nothing, for ever.
_LEADING: Final = """
for i, key in ipairs(KEYS) do
  local length = redis.pcall('STRLEN', key)
  if type(length) == 'table' and length.err and not string.find(length.err, 'WRONGTYPE', 1, true) then return length end
  if length ~= tonumber(ARGV[1]) then return i - 1 end
end
return #KEYS
"""

# KEYS: used, then those to be written. ARGV: the most records, ttl in ms. Answers how many records were dropped. They go before
# anything comes: who is out of memory refuses what comes, unless something has been dropped.
_MAKE_ROOM: Final = f"""
{_BEGIN}
local num_evicted = 0
local function drop(names)
  for _, name in ipairs(names) do
    redis.call('ZREM', KEYS[1], name)
    num_evicted = num_evicted + redis.call('UNLINK', name)
  end
end
drop(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', '(' .. (now - ARGV[2] * 1000), 'LIMIT', 0, 1000))
local function leave_room_for(num_coming)
  local too_many = redis.call('ZCARD', KEYS[1]) + num_coming - ARGV[1]
  if too_many > 0 then drop(redis.call('ZRANGE', KEYS[1], 0, too_many - 1)) end
end
local num_new = 0
for i = 2, #KEYS do
  if not redis.call('ZSCORE', KEYS[1], KEYS[i]) then num_new = num_new + 1 end
end
leave_room_for(num_new)
for i = 2, #KEYS do
  redis.call('ZADD', KEYS[1], now, KEYS[i])
end
leave_room_for(0)  -- one of them, which had a name without a value, may have been dropped just now
redis.call('PEXPIRE', KEYS[1], ARGV[2] * 2)
return num_evicted
"""

# KEYS: used, then those that were read, or would have been written. ARGV: ttl in ms.
_TOUCH: Final = f"""
{_BEGIN}
for i = 2, #KEYS do
  if redis.call('PEXPIRE', KEYS[i], ARGV[1]) == 1 then redis.call('ZADD', KEYS[1], now, KEYS[i]) end
end
redis.call('PEXPIRE', KEYS[1], ARGV[1] * 2)
return 0
"""

# What redis-py, and we, make of answers that are not Redis's.
_OF_WHO_SPEAKS_SOMETHING_ELSE: Final = (
    TypeError,
    LookupError,
    ValueError,
    ArithmeticError,
    MemoryError,
    RecursionError,
)
_T = TypeVar("_T")


class RedisKvStore:
    """Implements KvStore. Connects when it is first called."""

    def __init__(self, url: str, records: KvRecords, limits: KvStoreLimits, count: Count = count_nowhere) -> None:
        """`url` as runtime/redis_address.py has checked it. max_bytes bounds the records of this length."""
        self._records = records
        self._count = count
        self._ttl_ms = max(1, round(limits.ttl_s * 1000))
        self._max_records = limits.max_bytes // records.record_bytes
        self._per_batch = max(1, min(_BATCH_BYTES // records.record_bytes, self._max_records))
        self._used = _USED % records.record_bytes
        self._drawn: bytes | None = None  # what stands under _ID; None: nobody has asked yet
        # Untyped: the client's own types allow for every version of every answer. Safe for threads: each call has a connection.
        self._client: Any = Redis.from_url(
            url,
            socket_timeout=limits.timeout_s,
            socket_connect_timeout=limits.timeout_s,
            socket_read_size=_READ_SIZE,
            retry=Retry(NoBackoff(), 0),
            protocol=2,  # spoken by every version
        )

    def identity(self) -> bytes:
        """As KvStore.identity."""
        if self._drawn is None:
            self._drawn = self._answer_of(self._ask_id)
        return self._records.identity(self._drawn)

    def missing(self, keys: Sequence[bytes]) -> list[bool]:
        """As KvStore.missing."""
        return self._answer_of(partial(self._ask_missing, self._names(keys))) if keys else []

    def num_leading(self, keys: Sequence[bytes]) -> int:
        """As KvStore.num_leading."""
        return self._answer_of(partial(self._ask_leading, self._names(keys))) if keys else 0

    def write(self, blocks: Sequence[tuple[bytes, memoryview]]) -> int:
        """As KvStore.write."""
        self._records.check_lengths([block for _, block in blocks])
        if self._max_records == 0:
            return 0
        is_missing = self.missing([key for key, _ in blocks])
        wanted = [block for block, missing in zip(blocks, is_missing, strict=True) if missing]
        present = [key for (key, _), missing in zip(blocks, is_missing, strict=True) if not missing]
        if present:
            self._answer_of(partial(self._renew, self._names(present)))
        num_stored = 0
        for first in range(0, len(wanted), self._per_batch):
            batch = wanted[first : first + self._per_batch]
            num_stored += self._answer_of(partial(self._write_batch, batch))
        return num_stored

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> RunRead:
        """As KvStore.read."""
        self._records.check_lengths(into)
        num_read = 0
        run = list(zip(keys, into, strict=True))
        for first in range(0, len(run), self._per_batch):
            batch = run[first : first + self._per_batch]
            found = self._answer_of(partial(self._read_batch, batch))
            num_read += found.num_blocks
            if found.num_blocks < len(batch):
                return RunRead(num_read, found.is_corrupt)
        return RunRead(num_read, is_corrupt=False)

    def remove(self, keys: Sequence[bytes]) -> None:
        """As KvStore.remove."""
        if keys:
            self._count("broken", self._answer_of(partial(self._drop, self._names(keys))))

    def close(self) -> None:
        """As KvStore.close."""
        self._client.close()

    # ------------------------------------------------------------ inside

    def _names(self, keys: Sequence[bytes]) -> list[bytes]:
        return [_BLOCK + self._records.name(key) for key in keys]

    def _ask_id(self) -> bytes:
        pipe = self._client.pipeline(transaction=False)
        pipe.set(_ID, secrets.token_bytes(32), nx=True)
        pipe.get(_ID)
        _, drawn = pipe.execute()
        if not isinstance(drawn, bytes):
            raise TypeError
        return drawn

    def _ask_missing(self, names: Sequence[bytes]) -> list[bool]:
        pipe = self._client.pipeline(transaction=False)
        for name in names:
            pipe.strlen(name)
        lengths = pipe.execute(raise_on_error=False)
        return [_unless_error(length) != self._records.record_bytes for length in lengths]

    def _ask_leading(self, names: Sequence[bytes]) -> int:
        return int(self._client.eval(_LEADING, len(names), *names, self._records.record_bytes))

    def _write_batch(self, batch: Sequence[tuple[bytes, memoryview]]) -> int:
        names = self._names([key for key, _ in batch])
        pipe = self._client.pipeline(transaction=False)
        pipe.eval(_MAKE_ROOM, 1 + len(names), self._used, *names, self._max_records, self._ttl_ms)
        for name, (key, block) in zip(names, batch, strict=True):
            pipe.set(name, b"".join((self._records.header(key, block), block)), px=self._ttl_ms)
        if self._drawn is not None:
            pipe.set(_ID, self._drawn, nx=True)
        num_evicted, *_ = pipe.execute()
        self._count("evicted", int(num_evicted))
        return len(batch)

    def _drop(self, names: Sequence[bytes]) -> int:
        pipe = self._client.pipeline(transaction=False)
        pipe.unlink(*names)
        pipe.zrem(self._used, *names)
        num_removed, _ = pipe.execute()
        return int(num_removed)

    def _renew(self, names: Sequence[bytes]) -> None:
        self._client.eval(_TOUCH, 1 + len(names), self._used, *names, self._ttl_ms)

    def _read_batch(self, batch: Sequence[tuple[bytes, memoryview]]) -> RunRead:
        names = self._names([key for key, _ in batch])
        pipe = self._client.pipeline(transaction=False)
        for name in names:  # never more than a record, whatever lies there
            pipe.getrange(name, 0, self._records.record_bytes)
        pipe.eval(_TOUCH, 1 + len(names), self._used, *names, self._ttl_ms)
        *values, touched = pipe.execute(raise_on_error=False)  # the last one writes, which a full server refuses
        if isinstance(touched, ReadOnlyError) or (isinstance(touched, RedisError) and "READONLY" in str(touched)):
            self._hang_up()  # it may be looked for elsewhere; what it has is right all the same
        for index, ((key, block), name, value) in enumerate(zip(batch, names, values, strict=True)):
            if value == b"":
                return RunRead(index, is_corrupt=False)
            if not self._take(key, _unless_error(value), block):
                with contextlib.suppress(RedisError, OSError):
                    self._client.unlink(name)  # who takes no writes keeps it; what is before it is right all the same
                return RunRead(index, is_corrupt=True)
        return RunRead(len(batch), is_corrupt=False)

    def _take(self, key: bytes, value: object, block: memoryview) -> bool:
        """Copy a record's bytes to their place; whether they are right there."""
        if not isinstance(value, bytes) or len(value) != self._records.record_bytes:
            return False
        np.copyto(np.frombuffer(block, np.uint8), np.frombuffer(value, np.uint8)[HEADER_BYTES:])
        return self._records.is_right(key, value[:HEADER_BYTES], block)

    def _answer_of(self, call: Callable[[], _T]) -> _T:
        try:
            return call()
        except (RedisError, OSError, *_OF_WHO_SPEAKS_SOMETHING_ELSE) as error:
            self._hang_up()
            raise KvStoreError(f"redis: {_word_for(error)}") from None

    def _hang_up(self) -> None:
        """The next call of each thread connects anew; another thread's call is not cut off."""
        self._client.connection_pool.disconnect(inuse_connections=False)


def _unless_error(answer: object) -> object:
    """One answer of several; raises it if it is an error, unless what lies there is no value: then it is no record."""
    if isinstance(answer, RedisError) and not str(answer).startswith("WRONGTYPE"):
        raise answer
    return answer


def _word_for(error: Exception) -> str:
    """Its kind and, where Redis or TLS has said one, the code: the rest of its text might quote what it was given."""
    if isinstance(cause := error.__cause__ or error.__context__, ssl.SSLError) and cause.reason:
        return f"SSLError:{cause.reason}"
    if type(error) is RedisConnectionError and " connecting to " not in str(error):
        return "ConnectionError:CLOSED"
    code = re.match(r"[A-Z]{2,20}\b", str(error))
    return type(error).__name__ + (f":{code[0]}" if code else "")
