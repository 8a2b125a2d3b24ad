"""Blocks for sequences: who is admitted into the pool, what growth takes, what the prefix cache is offered. Pure.

Two ways to hold room, by policy (engine/reserve.py):

    promised    the pool sets it aside at admission: growth cannot fail. Under the policy "full", and for a sequence that lends its
                blocks, everything up to the limit; the prompt where its logprobs are wanted. Such a prompt is never taken back,
                for somebody has read of it already
    counted     admission leaves room for the rest of every prompt that runs and the policy's reserve for what decodes; growth
                takes what is there, and may find nothing

Nothing here decides who gives way: that is engine/scheduler.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np

from engine.block_pool import BlockPool
from engine.prefix_cache import PrefixCache
from engine.reserve import Reserve, ReserveConfig, make_reserve
from engine.sequence import Sequence as Admitted
from engine.sequence import SequenceSpec, blocks_for
from engine.slots import Slots


class Room:
    """One pool, as its scheduler uses it."""

    def __init__(self, pool: BlockPool, config: ReserveConfig, cache_generated: bool) -> None:
        self._pool = pool
        self._cache = PrefixCache(pool)
        self._cache_generated = cache_generated
        self.block_size = pool.block_size
        self.promises_growth = config.policy == "full"
        self.reserve: Reserve = make_reserve(config, pool.block_size)

    def admits(self, num_blocks: int, remaining: Sequence[int], slots: Slots, granted: Sequence[int] = ()) -> bool:
        """Whether newcomers that take so many blocks find room beside those that run.

        `remaining`: how many tokens each of them may say; `granted`: the same of others that were promised a slot. Who would
        run alone needs no reserve: nobody is there who could be preempted for it.
        """
        is_running = slots.is_running()
        num_prompt, num_reserved = 0, 0
        lacks_prompt = is_running & ~slots.is_promised & (slots.num_blocks * self.block_size <= slots.begins)
        for slot in lacks_prompt.nonzero()[0].tolist():  # few: who decodes has its prompt's blocks
            num_prompt += slots.begins.item(slot) // self.block_size + 1 - slots.num_blocks.item(slot)
        growing = slots.num_remaining()[is_running & ~slots.is_lending]
        if len(growing) or granted:
            newcomers = np.array((*granted, *remaining), np.int64)
            num_reserved = self.reserve.num_blocks(np.concatenate((growing, newcomers)))
        return num_blocks + num_prompt + num_reserved <= self._pool.num_available

    def _max_matched(self, spec: SequenceSpec) -> int:
        return 0 if spec.sampling.prompt_logprobs else (len(spec.token_ids) - 1) // self.block_size

    def is_coming(self, spec: SequenceSpec, slots: Slots) -> bool:
        """Whether who runs computes half or more of the blocks that the prefix cache lacks of a newcomer, in steps that are planned
        and not read: it had better wait for those than compute the same beside them."""
        unread = np.flatnonzero((slots.num_computed <= slots.begins) & (slots.num_planned > slots.num_computed))
        if not len(unread):  # the usual case, and to match a long prompt takes longer
            return False
        most = min(self._max_matched(spec), len(spec.block_keys))
        num_found = len(self._cache.match(spec.block_keys, most))
        if num_found == most:
            return False
        index = num_found + (most - num_found - 1) // 2
        end = (index + 1) * self.block_size
        key = spec.block_keys[index : index + 1]  # which names all that is before its block, too
        return any(
            slots.num_computed.item(slot) < end <= slots.num_planned.item(slot)
            and (owner := slots.owners[slot]) is not None
            and owner.spec.block_keys[index : index + 1] == key
            and slots.is_running().item(slot)
            for slot in unread.tolist()
        )

    def admit(self, spec: SequenceSpec, slots: Slots) -> tuple[list[int], int] | None:
        """The blocks of its cached prefix and what is promised on top; None, and no change, if there is no room."""
        # At least the last token is computed: its logits are what the first sampled token is drawn from. Every token of a
        # prompt whose logprobs are wanted is: a cached block has KV, but no logits.
        wants_prompt = spec.sampling.prompt_logprobs
        matched = self._cache.acquire_match(spec.block_keys, self._max_matched(spec))
        is_to_limit = self.promises_growth or spec.lends
        num_total = spec.num_blocks_at_limit(self.block_size) if is_to_limit else self._num_blocks(spec)
        num_needed = num_total - len(matched)
        if not self.admits(num_needed, () if is_to_limit else (spec.max_new_tokens,), slots):
            self._pool.free(matched)
            return None
        num_promised = num_needed if is_to_limit or wants_prompt else 0
        self._pool.promise(num_promised)
        return matched, num_promised

    def grow(self, sequence: Admitted, end: int) -> bool:
        """Give the sequence the blocks of its positions up to `end`; False, and no change, if they are not there."""
        num_new = blocks_for(end, self.block_size) - len(sequence.block_ids)
        if num_new <= 0:
            return True
        is_promised = sequence.num_promised > 0
        if not is_promised and not self._pool.can_allocate(num_new):
            return False
        sequence.block_ids += self._pool.allocate(num_new, promised=is_promised)
        sequence.num_promised -= num_new if is_promised else 0
        return True

    def grow_each(self, sequences: Sequence[Admitted]) -> bool:
        """Give each of them one block; False, and no change, if they are not all there."""
        promised = [sequence for sequence in sequences if sequence.num_promised]
        others = [sequence for sequence in sequences if not sequence.num_promised]
        if not self._pool.can_allocate(len(others)):
            return False
        for group, is_promised in ((promised, True), (others, False)):
            block_ids = self._pool.allocate(len(group), promised=is_promised) if group else []
            for sequence, block_id in zip(group, block_ids, strict=True):
                sequence.block_ids.append(block_id)
                sequence.num_promised -= is_promised
        return True

    def num_coming(self, leaving: Iterable[Admitted], kept: Iterable[int]) -> int:
        """Blocks that become available when these retire, and each reference on what is kept beside them is dropped."""
        tables = (sequence.block_ids for sequence in leaving if not sequence.is_lending)
        return self._pool.num_freed_by(chain(kept, *tables))

    def keep(self, block_ids: Sequence[int]) -> None:
        """Blocks that somebody has are not to become available before let_go()."""
        self._pool.acquire(block_ids)

    def let_go(self, block_ids: Sequence[int]) -> None:
        """What keep() took."""
        self._pool.free(block_ids)

    def take_arrived(self) -> tuple[int, ...]:
        """Blocks that a transfer filled and that no plan told of."""
        return self._pool.take_arrived()

    def _num_blocks(self, spec: SequenceSpec) -> int:
        """Of the tokens known at the start."""
        return blocks_for(len(spec.token_ids), self.block_size)

    def publish(self, sequence: Admitted, num_computed: int, *, decodes: bool) -> None:
        """Offer the blocks that became full and final to the prefix cache; a twin published earlier stays the one found.

        Those with completion tokens only of who decodes (`decodes`): what a prompt's chunks compute of them once more is of use to
        this sequence alone. Of adopted blocks some have their keys already: offering them again changes nothing.
        """
        self._publish(((sequence, num_computed),), decodes)

    def publish_each(self, sequences: Iterable[tuple[Admitted, int]]) -> None:
        """publish() of all of these, which decode, at once; each with the number of its computed positions."""
        self._publish(sequences, decodes=True)

    def _publish(self, sequences: Iterable[tuple[Admitted, int]], decodes: bool) -> None:
        full: dict[int, bytes] = {}  # by block
        block_size, takes_all = self.block_size, decodes and self._cache_generated
        for sequence, num_computed in sequences:
            keys, spec = sequence.keys, sequence.spec
            first = len(keys)
            behind = num_computed // block_size if takes_all else self.num_cacheable(spec, num_computed, decodes=False)
            if first >= behind:
                continue
            if first < len(spec.block_keys):
                keys += spec.block_keys[first:behind]
            while len(keys) < behind:
                keys.append(sequence.next_key(block_size))
            block_ids = sequence.block_ids
            # Those before were found, and whoever has forgotten one since knew why.
            for index in range(max(first, sequence.num_matched), behind):
                full[block_ids[index]] = keys[index]
        if full:
            self._pool.publish(full)

    def forget(self, sequence: Admitted) -> None:
        """Its rows have no numbers, so some block behind them has none, nobody knows which: whoever found it would break as well.

        Others that have it already go on, and find out by themselves.
        """
        self._pool.forget(sequence.block_ids)

    def num_cacheable(self, spec: SequenceSpec, num_computed: int, *, decodes: bool) -> int:
        """How many leading blocks of so many computed positions the prefix cache, and the KV pool, are to have."""
        num_prompt = len(spec.token_ids) - spec.num_generated
        return (num_computed if decodes and self._cache_generated else min(num_computed, num_prompt)) // self.block_size
