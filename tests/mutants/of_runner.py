"""Bugs of how steps are run: their overlap on a device that computes by itself, and decode steps in one call."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_LAUNCH: Final = ("tests/engine_torch/test_launch.py",)
_THREAD: Final = ("tests/node/test_runner_thread.py",)
_IN_ONE_CALL: Final = ("tests/kernels/test_decode_steps.py", "tests/engine_torch/test_steps_in_one_call.py")

MUTANTS: Final = (
    Mutant(
        "host-has-a-block-as-an-earlier-step-left-it",
        "A step that is launched, but read late, puts a block back that a later one has written to its end.",
        "engine/runner.py",
        "        return Done(result) if gathered is None else Drawn(result, written, gathered.cpu(), self._kv)\n",
        "        if gathered is not None:\n"
        "            self._kv.to_host(written, gathered.cpu())\n"
        "        return Done(result)\n",
        ("tests/engine_torch/test_mirrored_memory.py",),
    ),
    Mutant(
        "last-block-of-a-piece-left",
        "Of blocks that lie together, which the device copies by itself, the last one stays where it was.",
        "engine/kv_memory.py",
        "            yield block_ids[begin], block_ids[end - 1] + 1\n",
        "            yield block_ids[begin], block_ids[end - 1]\n",
        ("tests/engine_torch/test_mirrored_memory.py",),
    ),
    Mutant(
        "device-not-waited-for",
        "What a device is to copy by itself is taken for copied.",
        "engine/kv_memory.py",
        "        if self.is_direct:\n            wait_for(self.tensor.device)\n",
        "",
        ("tests/engine_torch/test_mirrored_memory.py",),
    ),
    Mutant(
        "code-of-other-numbers-launched",
        "Machine code that was compiled for a multiple of 16 is launched for any number.",
        "kernels/triton_launch.py",
        ", *[arguments[at] for at in self._numbers])",
        ")",
        ("tests/kernels/test_triton_launch.py",),
    ),
    Mutant(
        "descriptor-of-other-rows-kept",
        "Rows behind those of the last product with the same memory are read as zeros.",
        "kernels/triton_kernels.py",
        " or left.shape[0] != len(x)",
        "",
        ("tests/kernels/test_triton_launch.py",),
    ),
    Mutant(
        "lent-prefix-left-on-the-device",
        "What decode rows wrote, and a prompt that is handed over found in the prefix cache, is sent as host memory has it.",
        "engine/planning.py",
        "            self._matched += block_ids\n",
        "            pass\n",
        (
            "tests/engine_torch/test_mirrored_memory.py::"
            "test_what_decoding_wrote_is_on_the_hosts_side_when_a_prompt_that_begins_so_is_handed_over",
        ),
    ),
    Mutant(
        "drawn-token-not-fed",
        "The next decode row feeds the token that the host knows, which is an older one.",
        "engine/runner.py",
        "        token_ids = torch.cat((self._last_on_device[slots], told[len(slots) :]))\n",
        "        token_ids = told\n",
        _LAUNCH,
    ),
    Mutant(
        "host-draw-not-told-to-device",
        "A token that the host drew is not fed to the next row, which reads the device's.",
        "engine/runner.py",
        "            self._last_on_device[at] = fed\n",
        "",
        _LAUNCH,
    ),
    Mutant(
        "chunk-draws-for-all",
        "A step some of whose rows want more than a token is drawn on the device as if they did not.",
        "engine/runner.py",
        "or all(map(self._is_drawn_there,",
        "or any(map(self._is_drawn_there,",
        _LAUNCH,
    ),
    Mutant(
        "read-before-launch",
        "A step is waited for though the next one could be launched behind it.",
        "node/runner_thread.py",
        "if launched is not None and launched.is_done():",
        "if launched is not None:",
        _THREAD,
    ),
    Mutant(
        "told-before-laid-out",
        "A step is told at once: the loop then has the interpreter while the next step should be laid out.",
        "node/runner_thread.py",
        "self._untold, launched = launched.read(), None",
        "launched = self._on_result(launched.read())",
        _THREAD,
    ),
    Mutant(
        "told-behind-computing",
        "The runner never says that all that is left is computing: a step's tokens wait for the whole next step.",
        "engine/runner.py",
        "        led = self._lead(plan, batch, written)\n        on_ready()\n",
        "        led = self._lead(plan, batch, written)\n",
        _LAUNCH,
    ),
    Mutant(
        "told-behind-computing-in-one-call",
        "The same of a step that is laid out, computed and drawn in one call.",
        "engine/runner.py",
        "            on_ready()\n            return Done(self._decode(plan))\n",
        "            return Done(self._decode(plan))\n",
        (*_IN_ONE_CALL, *_LAUNCH),  # the first of which compile what these compute with
    ),
    Mutant(
        "near-radii-of-sums-alone",
        "How far near logits may be off leaves out what 8 bits lose of the weights, and the wrong token wins.",
        "kernels/cpu_contest.py",
        ".norm(dim=1) * 1.001\n",
        ".norm(dim=1) * 0\n",
        _IN_ONE_CALL,
    ),
    Mutant(
        "drawn-plainly-for-everybody",
        "Rows with penalties or sets of likely tokens are drawn as if they had none.",
        "engine/runner.py",
        "is_decided and not (start.sampling.looks_back or self._is_told_more[slot])",
        "True",
        _IN_ONE_CALL,
    ),
    Mutant(
        "near-tried-again-and-again",
        "A model whose draws near logits cannot tell pays for them at every step.",
        "kernels/cpu_contest.py",
        "self.num_untold + 1, _REST",
        "self.num_untold + 1, 0",
        _IN_ONE_CALL,
    ),
    Mutant(
        "near-logits-for-full",
        "What cannot be told is drawn from the near logits.",
        "kernels/cpu_kernels.py",
        "            if not outcome:\n                self._head(self._normed[:num_rows], logits)\n",
        "",
        _IN_ONE_CALL,
    ),
    Mutant(
        "draw-by-another-index",
        "Steps in one call draw every token with its completion's first noise.",
        "kernels/cpu/draw.h",
        " + uint64_t(slots.next_indices[slot])",
        "",
        _IN_ONE_CALL,
    ),
    Mutant(
        "draw-that-is-not-noted",
        "What a step in one call has drawn is not what the next one feeds.",
        "kernels/cpu/draw.h",
        "        slots.token_ids[rows.slots[row]] = draws.drawn[row];\n",
        "",
        _IN_ONE_CALL,
    ),
    Mutant(
        "a-hung-step-is-waited-for",
        "A node whose step never ends answers every probe, and each request placed there waits for its deadline.",
        "node/step_watch.py",
        "        silent_looks = silent_looks + 1 if is_silent else 0\n",
        "        silent_looks = 0\n",
        ("tests/node/test_step_watch.py",),
    ),
    Mutant(
        "who-has-nothing-to-do-has-hung",
        "An idle node ends itself.",
        "node/step_watch.py",
        "steps.num_unanswered > 0 and ",
        "",
        ("tests/node/test_step_watch.py",),
    ),
    Mutant(
        "no-token-stops",
        "Of a step's tokens none is taken for one that may stop its sequence.",
        "engine/reading.py",
        "(is_plain & slots.may_stop(token_ids)).nonzero()[0].tolist()",
        "()",
        ("tests/engine_pure/test_scheduler_random.py",),
    ),
    Mutant(
        "stops-of-who-is-gone-are-kept-and-of-who-is-there-are-not",
        "Two sequences stop at one token; the first that ends takes it along.",
        "engine/slots.py",
        "            self._num_stopped[stop] += number\n",
        "            self._num_stopped[stop] = max(number, 0)\n",
        ("tests/engine_pure/test_scheduler_random.py",),
    ),
    Mutant(
        "last-token-lacks-those-said-before",
        "Whose row is looked at by itself has lost the tokens of its block that were told in columns.",
        "engine/reading.py",
        "        self._all.slots.catch_up(sequence)\n        self._all.slots.num_computed[row.slot] = num_computed\n",
        "        self._all.slots.num_computed[row.slot] = num_computed\n",
        ("tests/engine_pure/test_scheduler_random.py",),
    ),
    Mutant(
        "who-leaves-lacks-the-last-tokens",
        "Who gives way goes on without the tokens of its last block.",
        "engine/reading.py",
        "        self._all.slots.catch_up(sequence)\n        is_paused = sequence.is_pausing\n",
        "        is_paused = sequence.is_pausing\n",
        ("tests/engine_pure/test_scheduler_random.py",),
    ),
    Mutant(
        "key-of-a-block-without-its-tokens",
        "A full block gets its key before its tokens are there.",
        "engine/reading.py",
        "            slots.catch_up(sequence)\n",
        "            pass\n",
        ("tests/engine_pure/test_scheduler_random.py",),
    ),
)
