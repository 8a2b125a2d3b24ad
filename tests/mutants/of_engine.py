"""Bugs of the engine's bookkeeping: block pool, prefix cache, scheduler."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_POOL: Final = ("tests/engine_pure/test_block_pool.py",)
_CACHE: Final = ("tests/engine_pure/test_prefix_cache.py",)
_SCHEDULER: Final = ("tests/engine_pure/test_scheduler.py", "tests/engine_pure/test_scheduler_handovers.py")
_RANDOM: Final = ("tests/engine_pure/test_scheduler_random.py",)

MUTANTS: Final = (
    Mutant(
        "evicted-key-stays",
        "An evicted block keeps its key, so its next owner's content is found under it.",
        "engine/block_pool.py",
        "        del self._block_of_key[key]\n        self._keys[block_id] = None\n",
        "        del self._block_of_key[key]\n",
        _POOL,
    ),
    Mutant(
        "leading-blocks-evicted-first",
        "Of a freed sequence the leading blocks are evicted first, and the rest is of no use without them.",
        "engine/block_pool.py",
        "for block_id in reversed(block_ids):",
        "for block_id in block_ids:",
        _POOL,
    ),
    Mutant(
        "promise-not-consumed",
        "Growth does not use up its promise, so less and less is available.",
        "engine/block_pool.py",
        "        if promised:\n            self._num_promised -= num_blocks\n",
        "",
        _POOL,
    ),
    Mutant(
        "promise-given-away",
        "A newcomer gets blocks that were promised to others.",
        "engine/block_pool.py",
        "return len(self._free) + len(self._cached) - self._num_promised",
        "return len(self._free) + len(self._cached)",
        _POOL,
    ),
    Mutant(
        "quarantined-counted-as-leased",
        "A quarantined block that is released is taken off the leased ones, and the counts drift.",
        "engine/block_pool.py",
        "            if self._states[block_id] is BlockState.LEASED:\n                self._num_leased -= 1\n"
        "            else:\n                self._num_quarantined -= 1\n",
        "            self._num_leased -= 1\n",
        _POOL,
    ),
    Mutant(
        "acquired-block-evictable",
        "A cached block that somebody acquired stays on the eviction list.",
        "engine/block_pool.py",
        "                del self._cached[block_id]\n",
        "",
        _POOL,
    ),
    Mutant(
        "twin-takes-the-key",
        "A second block with the same content takes the first one's key.",
        "engine/block_pool.py",
        "if self._block_of_key.setdefault(key, block_id) != block_id:",
        "if self._block_of_key.update({key: block_id}):",
        _POOL,
    ),
    Mutant(
        "match-over-a-hole",
        "A prefix match goes on behind a block that is missing.",
        "engine/prefix_cache.py",
        "            if block_id is None:\n                break\n",
        "            if block_id is None:\n                continue\n",
        _CACHE,
    ),
    Mutant(
        "match-breaks-a-promise",
        "A match acquires cached blocks that were promised to somebody else.",
        "engine/prefix_cache.py",
        "if room < 0:",
        "if room < -1:",
        _CACHE,
    ),
    Mutant(
        "freed-before-the-last-step-was-read",
        "An aborted sequence's blocks are free while a launched step still writes into them.",
        "engine/scheduler.py",
        "            if not has_unread_rows(sequence, self._last_read_step_id):\n                self._all.retire(sequence)\n",
        "            self._all.retire(sequence)\n",
        _RANDOM,
    ),
    Mutant(
        "retired-a-step-early",
        "A finished sequence's blocks are free when the step that finished it was read, though a later one has a row of it.",
        "engine/scheduler.py",
        "if sequence.phase is Phase.FINISHED and sequence.last_step_id == plan.step_id:",
        "if sequence.phase is Phase.FINISHED and sequence.spec.sequence_id in self._all.admitted:",
        _RANDOM,
    ),
    Mutant(
        "generation-not-checked",
        "A slot's next owner is given its last owner's token.",
        "engine/scheduler.py",
        "if answer.generation == sequence.generation:",
        "if answer.generation <= sequence.generation:",
        _SCHEDULER,
    ),
    Mutant(
        "published-before-read",
        "A block is offered to the prefix cache when its step is launched, before it is computed.",
        "engine/room.py",
        "        end = sequence.num_computed\n",
        "        end = min(sequence.num_planned, len(sequence.token_ids))\n",
        _RANDOM,
    ),
    Mutant(
        "nothing-left-to-compute",
        "A prompt that is cached as a whole has no token left whose logits could be sampled from.",
        "engine/room.py",
        "(len(spec.token_ids) - 1) // self._block_size",
        "len(spec.token_ids) // self._block_size",
        _RANDOM,
    ),
    Mutant(
        "failed-admission-keeps-references",
        "An admission that finds no room keeps the references of its match.",
        "engine/room.py",
        "            self._pool.free(matched)\n            return None\n",
        "            return None\n",
        _SCHEDULER,
    ),
    Mutant(
        "one-token-too-many",
        "A sequence is planned one token beyond its limit.",
        "engine/sequence.py",
        "return self.num_samples_planned < self.spec.max_new_tokens",
        "return self.num_samples_planned <= self.spec.max_new_tokens",
        _RANDOM,
    ),
    Mutant(
        "reserved-slots-given-away",
        "The waiting queue takes slots that leases have reserved.",
        "engine/slots.py",
        "return len(self._free) - self._num_reserved",
        "return len(self._free)",
        _SCHEDULER,
    ),
    Mutant(
        "lent-blocks-freed-at-the-end",
        "A prefill's blocks are free when its computing ends, while the link still reads them.",
        "engine/population.py",
        "        if sequence.is_lending:\n            self.lent",
        "        if not sequence.is_lending and sequence.spec.lends:\n            self.lent",
        _RANDOM,
    ),
    Mutant(
        "promises-kept-at-the-end",
        "A sequence that stops early keeps the promises for its growth.",
        "engine/population.py",
        "        self._pool.unpromise(sequence.num_promised)\n",
        "",
        _RANDOM,
    ),
    Mutant(
        "decodes-not-taken-from-the-budget",
        "Prefill chunks get the whole budget, as if nothing decoded.",
        "engine/planning.py",
        "self._max_batched_tokens - len(decodes)",
        "self._max_batched_tokens",
        _RANDOM,
    ),
)
