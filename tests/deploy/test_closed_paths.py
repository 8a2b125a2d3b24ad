"""Paths that the user may not look at, or that are none: one line that names the flag, of every command that is given one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bench.planner import PlanConfig
from bench.serve_config import BenchConfig
from deploy.chat import ChatConfig
from deploy.status import StatusConfig
from deploy.up_config import UpConfig
from runtime.config import ConfigError, parse
from tests.without_root import without_root

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

LOAD = ("--trace", "trace", "--rates", "rates", "--slo-ttft-ms", "1", "--slo-tpot-ms", "1")
TAKERS: list[tuple[type[DataclassInstance], str, tuple[str, ...]]] = [
    (UpConfig, "--model", ()),
    (StatusConfig, "--tls-dir", ()),
    (ChatConfig, "--ca", ()),
    (ChatConfig, "--history", ()),
    (BenchConfig, "--ca", ()),
    (BenchConfig, "--trace", ()),
    (BenchConfig, "--output", ()),
    (PlanConfig, "--output", LOAD),
]


@pytest.mark.parametrize(("taker", "flag", "words"), TAKERS, ids=[f"{each.__name__}{flag}" for each, flag, _ in TAKERS])
def test_a_path_that_is_closed_to_the_user_or_too_long_is_one_sentence_of_its_flag(
    tmp_path: Path, taker: type[DataclassInstance], flag: str, words: tuple[str, ...]
) -> None:
    def sentence(path: str) -> str:
        with pytest.raises(ConfigError) as caught:
            parse(taker, "baton", "Test.", [*words, flag, path], {})
        return str(caught.value)

    too_long = f"{'x' * 300}/it"
    assert sentence(too_long) == f"{flag} {too_long}: File name too long"
    (tmp_path / "closed").mkdir(mode=0)
    with without_root(tmp_path):
        assert sentence("closed/there/it") == f"{flag} closed/there/it: Permission denied"
