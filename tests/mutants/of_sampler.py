"""Bugs in how tokens are drawn: races, truncation, and what requests change of logits."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_TRUNCATION: Final = ("tests/engine_torch/test_truncation.py",)
_RACES: Final = ("tests/kernels/test_races.py",)
_CONTENDERS: Final = ("tests/kernels/test_contenders.py",)

MUTANTS: Final = (
    Mutant(
        "winner-not-held-against-top-p",
        "Who wins among all is drawn though top_p leaves it out.",
        "engine/truncation.py",
        "if above + beside < sampling.top_p - _LOSS:",
        "if above + beside < 2:",
        _TRUNCATION,
    ),
    Mutant(
        "equals-out-too-early",
        "One of many that are as likely is out, and with it those before it that are left.",
        "engine/truncation.py",
        "return False if above > sampling.top_p + _LOSS else None",
        "return False if above + beside > sampling.top_p + _LOSS else None",
        _TRUNCATION,
    ),
    Mutant(
        "once-more-with-all",
        "Behind a winner that is out all run once more, and the same one wins, for ever; or whoever is no likelier does.",
        "engine/race.py",
        "heights > heights[token_id]",
        "heights != heights[token_id]",
        _RACES,
    ),
    Mutant(
        "said-tokens-run-unchanged",
        "What a penalty made likelier is not among those that run.",
        "engine/draw.py",
        "        touched.append(draw.counts.token_ids)",
        "        pass",
        _RACES,
    ),
    Mutant(
        "cold-rows-raced",
        "A changed row that nobody ran for, beside one that somebody did, is drawn among those that changed alone.",
        "engine/sampler.py",
        "few is not None and is_raced(draws[row]) else None",
        "few is not None else None",
        _RACES,
    ),
    Mutant(
        "all-equals-at-the-edge",
        "Of equal tokens where top_p ends all are left, not the first.",
        "engine/truncation.py",
        "[: size - len(above)]",
        "[:]",
        _TRUNCATION,
    ),
    Mutant(
        "share-of-logits-without-temperature",
        "How much comes before a token is added up at temperature 1.",
        "kernels/cpu/share.h",
        "weights[i] = below[i] * sharpness",
        "weights[i] = below[i]",
        _CONTENDERS,
    ),
    Mutant(
        "itself-beside-itself",
        "A token counts among those that are as likely as it is.",
        "kernels/cpu/share.h",
        "(beside - own) / total",
        "beside / total",
        _CONTENDERS,
    ),
)
