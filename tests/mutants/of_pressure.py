"""Bugs of what happens when blocks are short: preemption and its signal, the reserve, the line before a decode node."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_PRESSURE: Final = ("tests/engine_pure/test_pressure.py",)
_RANDOM: Final = ("tests/engine_pure/test_pressure.py", "tests/engine_pure/test_scheduler_random.py")
_RESERVE: Final = ("tests/engine_pure/test_reserve.py",)
_DOOR: Final = ("tests/cores/test_door.py",)
_CONTRACT: Final = ("tests/engine_torch/test_signal_contract.py",)

MUTANTS: Final = (
    Mutant(
        "second-preemption-for-the-same-need",
        "Blocks on their way are not counted, so the same need takes a victim with every step.",
        "engine/planning.py",
        "self._room.num_coming(self._population.leaving(), kept) < num_lacking",
        "num_lacking > 0 and not (self._to_mark and self._to_mark[0] is needy)",
        _PRESSURE,
    ),
    Mutant(
        "oldest-gives-way",
        "The one that has run longest is preempted, and starves.",
        "engine/planning.py",
        "victim = self._slots[candidates[-1]]",
        "victim = self._slots[candidates[0]]",
        _PRESSURE,
    ),
    Mutant(
        "admitted-while-somebody-gives-way",
        "A newcomer takes the blocks that somebody gave way for.",
        "engine/planning.py",
        "if waiting is None or self.is_short or self._slots.num_free < 1 or population.num_preempting:",
        "if waiting is None or self._slots.num_free < 1:",
        _PRESSURE,
    ),
    Mutant(
        "requeued-before-the-signal",
        "A victim is queued again when it is marked, though launched steps still write its blocks and sample its tokens.",
        "engine/planning.py",
        "        self._to_mark.append(victim)\n",
        "        self._to_mark.append(victim)\n        self._population.requeue(victim)\n",
        _RANDOM,
    ),
    Mutant(
        "requeued-last",
        "A preempted sequence goes to the end of the line.",
        "engine/population.py",
        "        self.waiting.move_to_end(spec.sequence_id, last=False)\n",
        "",
        _PRESSURE,
    ),
    Mutant(
        "resumed-from-the-prompt",
        "What a preempted sequence has said is forgotten, and said again.",
        "engine/sequence.py",
        "            token_ids=tuple(self.token_ids),\n            num_generated=self.num_generated,\n",
        "",
        _RANDOM,
    ),
    Mutant(
        "resumed-with-a-new-age",
        "A resumed sequence is the youngest, and gives way again and again.",
        "engine/population.py",
        "self.waiting[spec.sequence_id] = Waiting(spec, sequence.arrival)",
        "self.waiting[spec.sequence_id] = Waiting(spec, self.new_arrival())",
        _PRESSURE,
    ),
    Mutant(
        "mark-not-answered",
        "A runner drops the mark of a step that has no rows.",
        "engine/runner.py",
        "            return Done(StepResult.of(plan.step_id, list(map(self._leave, plan.marks))))\n",
        "            return Done(StepResult.of(plan.step_id, []))\n",
        _CONTRACT,
    ),
    Mutant(
        "mark-for-anybody",
        "A runner takes a slot from whoever has it.",
        "engine/runner.py",
        "if mark.generation != (held := self._generation[slot]):",
        "if mark.generation > (held := self._generation[slot]) + 9:",
        _CONTRACT,
    ),
    Mutant(
        "no-token-is-a-mark",
        "The scheduler takes any answer to a mark for the signal.",
        "engine/reading.py",
        "if (answer.generation, answer.token_id) != (sequence.generation, PREEMPTED_TOKEN_ID):",
        "if answer.generation != sequence.generation:",
        _PRESSURE,
    ),
    Mutant(
        "mark-of-a-row-taken",
        "A row that answers the signal without having been marked passes for a token.",
        "engine/reading.py",
        "        elif answer.token_id == PREEMPTED_TOKEN_ID:\n"
        '            raise ValueError(f"slot {answer.slot} answered a mark that it was not given")\n',
        "",
        _PRESSURE,
    ),
    Mutant(
        "aborted-victim-requeued",
        "A sequence that is aborted while it gives way comes back.",
        "engine/reading.py",
        "        if self.is_finished(sequence):  # meanwhile, or aborted\n            return []\n",
        "",
        _PRESSURE,
    ),
    Mutant(
        "prompts-not-counted",
        "Admission does not count what running prompts have yet to take.",
        "engine/room.py",
        "return num_blocks + num_prompt + num_reserved <= self._pool.num_available",
        "return num_blocks + num_reserved <= self._pool.num_available",
        _PRESSURE,
    ),
    Mutant(
        "reserve-not-counted",
        "Admission leaves nothing to those that run, whatever the policy.",
        "engine/room.py",
        "return num_blocks + num_prompt + num_reserved <= self._pool.num_available",
        "return num_blocks + num_prompt <= self._pool.num_available",
        (*_PRESSURE, *_DOOR),
    ),
    Mutant(
        "ratio-above-the-first",
        "A preemption can raise the ratio above where it began.",
        "engine/reserve.py",
        "self._ratio = min(self._config.init_ratio, (num_generated + margin) / (num_limit + 1))",
        "self._ratio = (num_generated + margin) / (num_limit + 1)",
        _RESERVE,
    ),
    Mutant(
        "ratio-falls-through-the-floor",
        "The ratio goes on falling.",
        "engine/reserve.py",
        "self._ratio = max(config.min_ratio, self._ratio - decay)",
        "self._ratio = self._ratio - decay",
        _RESERVE,
    ),
    Mutant(
        "negative-remaining-frees-room",
        "A sequence beyond its limit makes room for others.",
        "engine/reserve.py",
        "np.minimum(np.maximum(remaining, 0), clip)",
        "np.minimum(remaining, clip)",
        _RESERVE,
    ),
    Mutant(
        "line-overtaken",
        "A Reserve that would fit is granted although others wait.",
        "decode_node/door.py",
        "        elif not len(self.line):\n            result",
        "        else:\n            result",
        _DOOR,
    ),
    Mutant(
        "line-of-one-sender",
        "The sender that asked first has the next turn too, so one that asks for much holds up the rest.",
        "decode_node/waiting.py",
        "        elif was_next:\n            self._lines.move_to_end(sender)\n",
        "",
        _DOOR,
    ),
    Mutant(
        "line-without-end",
        "Any number of Reserve calls may wait.",
        "decode_node/door.py",
        "if until <= now or self.line.is_full or",
        "if until <= now or",
        _DOOR,
    ),
    Mutant(
        "waits-for-ever",
        "A Reserve whose time is over is not answered.",
        "decode_node/core.py",
        "            self._door.expire(waiting, now)\n",
        "            pass\n",
        _DOOR,
    ),
    Mutant(
        "cancelled-in-the-line",
        "A Cancel leaves the attempt in the line, and it gets a lease that nobody wants.",
        "decode_node/core.py",
        "        for waiting, older in self._door.line.older(floors):\n            self._door.close(waiting, older, now)\n",
        "",
        _DOOR,
    ),
    Mutant(
        "preempted-in-silence",
        "A decode node drops a preempted branch without a word to its router.",
        "decode_node/running.py",
        '                    self._report(branch, *ENDS_WITHOUT_TOKEN["preempted"], is_sent=False)\n',
        "",
        _DOOR,
    ),
    Mutant(
        "preempted-fails-the-request",
        "A router gives a preempted branch up instead of dispatching it again.",
        "router/retry.py",
        "    pb.PREEMPTED: Cost.PART,\n",
        "",
        ("tests/router/test_core_retry.py",),
    ),
)
