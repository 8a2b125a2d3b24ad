"""A step that was launched on a device which computes by itself, until it is read."""

from __future__ import annotations

from typing import NamedTuple

from engine.device import HostCopies
from engine.kv_memory import KvSides
from engine.plan import NO_TOKEN, SlotResult, StepResult


class UnderWay(NamedTuple):
    """A step whose tokens were drawn on the device; see Launched."""

    step_id: int
    rows: list[tuple[int, int]]  # slot and generation of each
    drawn_slots: list[int]
    marked: list[SlotResult]
    copies: HostCopies  # of the drawn tokens, and of the blocks
    written: list[int]  # blocks that senders may read once the step is told
    kv: KvSides

    def is_done(self) -> bool:
        """See Launched."""
        return self.copies.is_done()

    def read(self) -> StepResult:
        """See Launched."""
        drawn, *gathered = self.copies.wait()
        if gathered:
            self.kv.to_host(self.written, gathered[0])
        token_ids = dict(zip(self.drawn_slots, drawn.tolist(), strict=True))
        answers = [SlotResult(slot, generation, token_ids.get(slot, NO_TOKEN)) for slot, generation in self.rows]
        return StepResult.of(self.step_id, (*answers, *self.marked))
