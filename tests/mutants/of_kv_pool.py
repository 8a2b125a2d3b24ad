"""Bugs of the KV pool: what a record proves, which blocks a store keeps, when it is left alone, who waits for it."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_CONTRACT: Final = ("tests/kv_pool/test_store_contract.py",)  # for all of it there must be a redis-server
_FILE: Final = ("tests/kv_pool/test_file_store.py",)
_REDIS: Final = ("tests/kv_pool/test_redis_kv_store.py",)
_BREAKER: Final = ("tests/kv_pool/test_kv_breaker.py",)
_STAGING: Final = ("tests/kv_pool/test_kv_staging.py",)
_THREADS: Final = ("tests/kv_pool/test_kv_pool_threads.py",)
_ADDRESS: Final = ("tests/kv_pool/test_kv_pool_address.py",)

MUTANTS: Final = (
    Mutant(
        "kv-checksum-without-key",
        "The checksum covers the bytes alone, so that the right bytes under a wrong key pass.",
        "connector/kv_record.py",
        "        if bytes(header[: _HEAD.size]) != head:  # cheap, before the checksum\n            return False\n"
        "        return hmac.compare_digest(bytes(header[_HEAD.size :]), self._checksum(head, block))",
        "        return hmac.compare_digest(bytes(header[_HEAD.size :]), self._checksum(bytes(header[: _HEAD.size]), block))",
        _CONTRACT,
    ),
    Mutant(
        "kv-block-not-checked",
        "A record's header is checked, and its block is not.",
        "connector/kv_record.py",
        "        return hmac.compare_digest(bytes(header[_HEAD.size :]), self._checksum(head, block))",
        "        return True",
        _CONTRACT,
    ),
    Mutant(
        "kv-name-without-secret",
        "Clusters with different secrets find each other's records.",
        "connector/kv_record.py",
        "        if self._secret is None:\n            return key\n",
        "        return key\n",
        _CONTRACT,
    ),
    Mutant(
        "kv-part-of-a-block-stored",
        "A block of another length is stored.",
        "connector/kv_record.py",
        "            if block.nbytes != self.block_bytes:",
        "            if block.nbytes > self.block_bytes:",
        _CONTRACT,
    ),
    Mutant(
        "kv-corrupt-file-stays",
        "A file that failed its check stays, so that its block is never stored again.",
        "connector/file_store.py",
        "                if is_right is False:\n                    Path(path).unlink(missing_ok=True)\n",
        "",
        _CONTRACT,
    ),
    Mutant(
        "kv-file-written-in-place",
        "A record is written under its final name.",
        "connector/file_store.py",
        "        part = self._part_path()\n        try:\n            _write_file(part",
        '        part = path.removesuffix("kv") + "kv"\n        Path(path).parent.mkdir(exist_ok=True)\n'
        "        try:\n            _write_file(part",
        _FILE,
    ),
    Mutant(
        "kv-leftovers-stay",
        "What dead writers left is never removed.",
        "connector/file_store.py",
        "if now_ns - part.mtime_ns > LEFTOVER_S * 1e9 and _remove(part.path):",
        "if now_ns - part.mtime_ns > 1e30 and _remove(part.path):",
        _FILE,
    ),
    Mutant(
        "kv-file-of-a-living-writer-removed",
        "Whatever lies in tmp is removed, also what somebody is writing.",
        "connector/file_store.py",
        "if now_ns - part.mtime_ns > LEFTOVER_S * 1e9 and _remove(part.path):",
        "if _remove(part.path):",
        _FILE,
    ),
    Mutant(
        "kv-no-room-for-other-writers",
        "A writer of files leaves no room for what others write meanwhile.",
        "connector/file_store.py",
        "_NUM_WRITERS: Final = 4 ",
        "_NUM_WRITERS: Final = 1 ",
        _FILE,
    ),
    Mutant(
        "kv-read-does-not-renew",
        "What is read all the time goes all the same, for it was written long ago.",
        "connector/file_store.py",
        "        os.utime(file)",
        "        str(file)",
        _CONTRACT,
    ),
    Mutant(
        "kv-redis-not-bounded",
        "Redis drops nothing but what has expired.",
        "connector/redis_kv_store.py",
        "if too_many > 0 then",
        "if false then",
        _CONTRACT,
    ),
    Mutant(
        "kv-redis-read-does-not-renew",
        "Records in Redis expire though they are read.",
        "connector/redis_kv_store.py",
        "if redis.call('PEXPIRE', KEYS[i], ARGV[1]) == 1 then",
        "if false then",
        _REDIS,
    ),
    Mutant(
        "kv-redis-full-cannot-be-read",
        "A server that takes no writes cannot be read either.",
        "connector/redis_kv_store.py",
        "*values, _ = pipe.execute(raise_on_error=False)",
        "*values, _ = pipe.execute()",
        _REDIS,
    ),
    Mutant(
        "kv-circuit-never-tries-again",
        "A pool that was left alone is left alone for good.",
        "connector/kv_breaker.py",
        "            return until <= now",
        "            return until <= now - 1e9",
        _BREAKER,
    ),
    Mutant(
        "kv-circuit-probe-never-ends",
        "A try that says nothing holds up everybody for good.",
        "connector/kv_breaker.py",
        "    return Open(now, circuit.trips) if isinstance(circuit, Probing) else circuit",
        "    return circuit",
        _BREAKER,
    ),
    Mutant(
        "kv-slot-reused-while-written",
        "A slot of the staging buffer is free before the store has read it.",
        "node/kv_staging.py",
        "        self._leaving.update((slot, key) for key, slot in taken)\n",
        "        self._leaving.update((slot, key) for key, slot in taken)\n"
        "        self._free.extend(slot for _, slot in taken)\n",
        _STAGING,
    ),
    Mutant(
        "kv-late-bytes-land",
        "What a store brings after the answer lands in blocks that are somebody else's.",
        "node/kv_pool_reader.py",
        "            if call.is_answered:\n                return False\n            for",
        "            for",
        _THREADS,
    ),
    Mutant(
        "kv-look-waits-for-ever",
        "A question that the store does not answer is never answered.",
        "node/kv_pool_reader.py",
        '            self._loop.call_later(self._look_timeout_s, self._answer_look, call, "late", 0)\n',
        "",
        _THREADS,
    ),
    Mutant(
        "kv-answered-calls-wait-on",
        "What was asked of a store that hangs is kept until it comes back, answered or not: days of it.",
        "node/kv_pool_reader.py",
        "        self._looks.drop(call)\n",
        "",
        _THREADS,
    ),
    Mutant(
        "kv-empty-claims-are-no-failure",
        "A pool that claims blocks and never gives one is asked for ever.",
        "node/kv_pool_reader.py",
        'case "absent" | "corrupt" if num_read > 0:',
        'case "absent" | "corrupt":',
        _THREADS,
    ),
    Mutant(
        "kv-id-stays-lost-in-redis",
        "Who comes after Redis has dropped the identity draws another, and routers see two pools.",
        "connector/redis_kv_store.py",
        "            pipe.set(_ID, self._drawn, nx=True)\n",
        "            pass\n",
        ("tests/kv_pool/test_redis_kv_store.py",),
    ),
    Mutant(
        "kv-id-stays-lost-in-a-directory",
        "Who comes after somebody has emptied the directory draws another identity, and routers see two pools.",
        "connector/file_store.py",
        "                    self._id_or(self._drawn)  #",
        "                    pass  #",
        ("tests/kv_pool/test_file_store.py",),
    ),
    Mutant(
        "kv-saved-without-a-copy",
        "Blocks are reported as staged before they are copied.",
        "node/kv_pool_writer.py",
        "            np.copyto(self._buffer[slot], self._kv_bytes[block_id])\n",
        "            self._buffer[slot] = 0\n",
        _THREADS,
    ),
    Mutant(
        "kv-save-waits-for-room",
        "A save waits until the store has made room in the buffer.",
        "node/kv_pool_writer.py",
        "                is_present = self._recent.has(key, now)\n",
        "                self._changed.wait_for(lambda: self._staging.num_used < self.num_slots, 30)\n"
        "                is_present = self._recent.has(key, now)\n",
        _THREADS,
    ),
    Mutant(
        "kv-failed-writes-stop-reads",
        "One circuit serves both ways: a full pool is not read any more.",
        "node/kv_pool.py",
        'bounds.num_readers, timeouts_s, self._circuits["read"]',
        'bounds.num_readers, timeouts_s, self._circuits["write"]',
        _THREADS,
    ),
    Mutant(
        "kv-pool-password-shown",
        "A KV pool's URL is shown with its password.",
        "runtime/kv_pool_address.py",
        'return f"RedisPool({redis_address.shown(self.url)})"',
        'return f"RedisPool({self.url})"',
        _ADDRESS,
    ),
)
