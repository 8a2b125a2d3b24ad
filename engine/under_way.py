"""A step that was launched on a device with memory of its own, until it is read.

The blocks that its chunks wrote are put where senders read when it is read, and so in the order of the steps: two steps may write
into one block, and the second may be launched, and drawn, before the first is read.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from engine.device import HostCopies
from engine.kv_memory import KvSides
from engine.plan import NO_TOKEN, Plan, SlotResult, StepResult


class UnderWay(NamedTuple):
    """A step whose tokens were drawn on the device; see Launched."""

    plan: Plan
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
        plan, decodes = self.plan, self.plan.decodes
        if not (plan.chunks or plan.marks):  # nearly always; each row drew, in their order
            return StepResult(plan.step_id, decodes.slots, decodes.generations, drawn.numpy(), {})
        token_ids = dict(zip(self.drawn_slots, drawn.tolist(), strict=True))
        rows = (*decodes, *plan.chunks)
        answers = (SlotResult(row.slot, row.generation, token_ids.get(row.slot, NO_TOKEN)) for row in rows)
        return StepResult.of(plan.step_id, (*answers, *self.marked))


class Drawn(NamedTuple):
    """A step whose tokens were drawn on the host; see Launched."""

    result: StepResult
    written: list[int]  # see UnderWay
    gathered: Tensor  # what they hold
    kv: KvSides

    def is_done(self) -> bool:
        """Always."""
        return True

    def read(self) -> StepResult:
        """Waits for nothing."""
        self.kv.to_host(self.written, self.gathered)
        return self.result
