"""Bugs of nodes with several ranks: whose columns a rank has, where its heads lie, what the others are told, who ends with whom."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_SPLIT: Final = ("tests/engine_torch/test_split.py",)
_RANKS: Final = ("tests/node/test_ranks.py",)

MUTANTS: Final = (
    Mutant(
        "every-rank-has-the-first-heads",
        "A rank sees and writes the KV of rank 0's heads.",
        "engine/kv_memory.py",
        "heads = split.part(self._host.shape[4])",
        "heads = slice(0, split.width(self._host.shape[4]))",
        _SPLIT,
    ),
    Mutant(
        "columns-interleaved",
        "What ranks computed is put together number by number, not part by part.",
        "engine/ranks.py",
        ".transpose(0, 1).reshape(num_rows",
        ".permute(1, 2, 0).reshape(num_rows",
        _SPLIT,
    ),
    Mutant(
        "biases-of-another-rank",
        "A rank adds the bias of the first columns to its own.",
        "engine/model_weights.py",
        'torch.cat([self._part(f"{name}.bias") for name in names])',
        'torch.cat([self.whole(f"{name}.bias")[: len(self._part(f"{name}.bias"))] for name in names])',
        _SPLIT,
    ),
    Mutant(
        "a-vocabulary-that-does-not-divide-is-cut-off",
        "The last tokens of a vocabulary that does not divide are nobody's.",
        "engine/split.py",
        "return -(-count // self.size)",
        "return count // self.size",
        _SPLIT,
    ),
    Mutant(
        "a-block-of-the-rank-s-own-heads",
        "The C++ is told that a block has this rank's heads alone.",
        "kernels/cpu_kernels.py",
        "num_heads, kv.stride(3))",
        "num_heads, num_kv_heads * head_dim)",
        _SPLIT,
    ),
    Mutant(
        "ranks-are-not-waited-for",
        "A node with devices tells a step before the other ranks' heads of its blocks are on the host.",
        "engine/lockstep.py",
        "return bool(self.leaving or self.written)",
        "return False",
        ("tests/engine_torch/test_lockstep.py",),
    ),
    Mutant(
        "what-arrived-is-told-to-no-rank",
        "On devices, only rank 0 copies its heads of blocks that came over the wire to its device.",
        "engine/lockstep.py",
        """        if step.arrived:
            kv.to_device(step.arrived)
""",
        "",
        (f"{_SPLIT[0]}::test_where_ranks_have_devices_each_copies_its_heads_before_a_step_is_told",),
    ),
    Mutant(
        "a-rank-s-death-is-not-noticed",
        "Nobody watches the other ranks: a node that lost one takes work until a step fails.",
        "node/process.py",
        "in self._engine.rank_ends:",
        "in ():",
        _RANKS,
    ),
    Mutant(
        "heads-that-do-not-divide-are-taken",
        "A model whose KV heads do not divide among the ranks is loaded all the same.",
        "engine/split.py",
        '"num_key_value_heads": config.num_kv_heads,',
        '"num_key_value_heads": size,',
        _SPLIT,
    ),
    Mutant(
        "a-rank-hears-signals",
        "A service manager that asks all processes of a node to stop ends its ranks at once, and the node with them.",
        "node/rank_process.py",
        "signal.signal(number, signal.SIG_IGN)",
        "signal.signal(number, signal.SIG_DFL)",
        _RANKS,
    ),
    Mutant(
        "a-rank-that-died-is-waited-for-to-meet",
        "A node whose rank dies between loading and the first step waits a minute for it.",
        "node/ranks.py",
        "wait([over, *ends], return_when=FIRST_COMPLETED)",
        "wait([over])",
        (f"{_RANKS[0]}::test_a_rank_that_dies_between_loading_and_the_first_step_is_one_sentence_at_once",),
    ),
    Mutant(
        "a-rank-that-hangs-as-it-loads-is-waited-for",
        "A stopped rank is waited for without limit.",
        "node/ranks.py",
        "idle_s += _LOOK_S  #",
        "idle_s += 0  #",
        (f"{_RANKS[0]}::test_a_rank_that_hangs_as_it_loads_is_given_up_in_one_sentence_and_a_slow_one_is_not",),
    ),
    Mutant(
        "a-rank-that-loads-for-long-is-given-up",
        "A large model is one that hangs.",
        "node/ranks.py",
        "computed, idle_s = now, 0.0",
        "computed, idle_s = now, idle_s + _LOOK_S",
        (f"{_RANKS[0]}::test_a_rank_that_hangs_as_it_loads_is_given_up_in_one_sentence_and_a_slow_one_is_not",),
    ),
    Mutant(
        "ranks-that-part-are-a-traceback",
        "A connection that a dying rank ends while ranks meet is told as torch tells it.",
        "node/ranks.py",
        "            except (OSError, RuntimeError) as error:",
        "            except OSError as error:",
        (f"{_RANKS[0]}::test_ranks_that_do_not_meet_are_one_sentence",),
    ),
    Mutant(
        "a-rank-that-hangs-takes-no-step-and-nobody-minds",
        "What a rank that hangs does not read of a step is dropped, and rank 0 goes on as if it had been told.",
        "engine/lockstep.py",
        'raise TimeoutError(f"a rank has taken nothing of a step for {seconds:g} s") from None',
        "return",
        ("tests/engine_torch/test_lockstep.py::test_a_rank_that_takes_no_more_of_a_step_is_given_up",),
    ),
    Mutant(
        "a-step-is-cut-where-a-pipe-is-full",
        "Of a step that is more than a pipe holds a rank is told the beginning.",
        "engine/lockstep.py",
        "        while data:\n",
        "        if data:\n",
        ("tests/engine_torch/test_lockstep.py",),
    ),
)
