"""Bugs of what goes to the KV pool: whose blocks, which of them, until when they are kept, and what the prefix cache gets."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_SAVING: Final = ("tests/engine_pure/test_saving.py",)
_RANDOM: Final = ("tests/engine_pure/test_saving.py", "tests/engine_pure/test_scheduler_random.py")
_CORES: Final = ("tests/cores/test_saving_cores.py",)

MUTANTS: Final = (
    Mutant(
        "saved-without-a-reference",
        "What is being copied may be given to somebody else, who overwrites it.",
        "engine/saving.py",
        "        self._pool.acquire([block_id for _, block_id in save.blocks])\n",
        "",
        _RANDOM,
    ),
    Mutant(
        "saved-and-never-dropped",
        "A block that was copied is never free again.",
        "engine/saving.py",
        "        self._pool.free([block_id for _, block_id in self._kept.pop(save_id).blocks])\n",
        "        self._kept.pop(save_id)\n",
        _RANDOM,
    ),
    Mutant(
        "kept-blocks-are-not-coming",
        "While a victim's blocks are copied the same need takes a second victim.",
        "engine/planning.py",
        "[*self._saves.block_ids(), *self.shown_block_ids()]",
        "[*self.shown_block_ids()]",
        _SAVING,
    ),
    Mutant(
        "shared-blocks-never-come",
        "Blocks that two who leave share count for neither.",
        "engine/block_pool.py",
        "sum(self._num_references[block_id] == number for block_id, number in Counter(block_ids).items())",
        "sum(self._num_references[block_id] == 1 for block_id in {*block_ids})",
        _SAVING,
    ),
    Mutant(
        "saved-before-it-is-named",
        "What finished is copied before a device has brought it to the host.",
        "engine/saving.py",
        "            self._unnamed.append(self._keep(sequence))\n",
        "            self._ready.append(self._keep(sequence))\n",
        _SAVING,
    ),
    Mutant(
        "copied-before-the-step-is-read",
        "What a plan names is copied as soon as the plan is made.",
        "engine/saving.py",
        "        self._named += [(step_id, save) for save in self._unnamed]\n",
        "        self._ready += self._unnamed\n",
        _SAVING,
    ),
    Mutant(
        "mark-without-its-blocks",
        "The plan with the mark does not name what will be saved, and a device never brings it to the host.",
        "engine/planning.py",
        "                leaving += sequence.block_ids[:num_full]\n",
        "                pass\n",
        _SAVING,
    ),
    Mutant(
        "saved-though-wanted-no-more",
        "What was cancelled, or whose numbers broke, goes to the pool, too.",
        "engine/reading.py",
        "            if sequence.is_complete:\n",
        "            if True:\n",
        _RANDOM,
    ),
    Mutant(
        "saved-though-it-moved",
        "Who went to another node is saved like one that nobody took.",
        "engine/scheduler.py",
        "        if (paused := self._all.paused.get(sequence_id)) is not None:\n            self._all.drop(paused)\n",
        "        if (paused := self._all.paused.get(sequence_id)) is not None:\n            self._saves.preempted(paused)\n"
        "            self._all.drop(paused)\n",
        _RANDOM,
    ),
    Mutant(
        "given-up-and-not-saved",
        "Who waited for another node in vain is dropped as if it had moved.",
        "decode_node/mover.py",
        "            self._scheduler.abandon(key)\n",
        "            self._scheduler.abort(key)\n",
        _CORES,
    ),
    Mutant(
        "not-saved-where-it-goes-on",
        "A mixed node forgets to save who gave way, since it goes on there.",
        "engine/reading.py",
        "            self._saves.preempted(sequence)\n            self._all.requeue(sequence)\n",
        "            self._all.requeue(sequence)\n",
        _RANDOM,
    ),
    Mutant(
        "drained-before-it-is-staged",
        "A node says that it has drained while blocks are being copied, and takes their copies with it.",
        "engine/scheduler.py",
        "return bool(here.waiting or here.admitted or here.paused or here.lent or self._unread or self._saves)",
        "return bool(here.waiting or here.admitted or here.paused or here.lent or self._unread)",
        (*_SAVING, *_CORES),
    ),
    Mutant(
        "prefill-node-drained-before-it-is-staged",
        "A prefill node says that it has drained while blocks are being copied.",
        "prefill_node/core.py",
        "self._handovers.num_asked or self._scheduler.has_sequences)",
        "self._handovers.num_asked)",
        _CORES,
    ),
    Mutant(
        "saves-asked-for-in-the-next-turn",
        "What is to be stored is asked for when something else happens, which may be never.",
        "mixed_node/core.py",
        "        return [*out, *saves_of(self._scheduler)]\n",
        "        return [*saves_of(self._scheduler), *out][: len(out)]\n",
        _CORES,
    ),
    Mutant(
        "recent-for-ever",
        "What the pool had once is never stored again, though it has dropped it since.",
        "node/kv_recent.py",
        "return noted_at is not None and now - noted_at < self._life_s",
        "return noted_at is not None",
        ("tests/kv_pool/test_kv_recent.py",),
    ),
    Mutant(
        "recent-though-it-failed",
        "A block whose writing failed is taken for one that the pool has.",
        "node/kv_pool_writer.py",
        '                if outcome == "present":\n',
        "                if True:\n",
        ("tests/kv_pool/test_kv_pool_threads.py",),
    ),
    Mutant(
        "prompts-chunks-cache-what-was-generated",
        "A prefill node caches completion tokens of earlier attempts.",
        "engine/room.py",
        "(num_computed if decodes and self._cache_generated else min(num_computed, num_prompt))",
        "(num_computed if self._cache_generated else min(num_computed, num_prompt))",
        _RANDOM,
    ),
    Mutant(
        "cache-generated-off-is-ignored",
        "Completion tokens are cached, and saved, although the flag says that they are not.",
        "engine/room.py",
        "(num_computed if decodes and self._cache_generated else min(num_computed, num_prompt))",
        "(num_computed if decodes else min(num_computed, num_prompt))",
        _RANDOM,
    ),
    Mutant(
        "tail-block-saved",
        "The incomplete last block goes to the pool under the key of a full one.",
        "engine/room.py",
        "else min(num_computed, num_prompt)) // self.block_size\n",
        "else min(num_computed, num_prompt) + self.block_size - 1) // self.block_size\n",
        _RANDOM,
    ),
)
