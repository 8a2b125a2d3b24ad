"""Words without a flag's name, wherever they stand among the flags: each is the flag's that waits for it, or left to be refused."""

from __future__ import annotations

import pytest

from runtime.command_words import as_flags

FREE = ("--node", "--role")
BARE = ("--force",)


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        ("d p", "--node=d --role=p"),
        ("--run-dir run d p", "--run-dir run --node=d --role=p"),
        ("d --run-dir run p", "--node=d --run-dir run --role=p"),
        ("d --run-dir=run p --force", "--node=d --run-dir=run --role=p --force on"),
        ("--force d p", "--force on --node=d --role=p"),
        ("--force off d p", "--force off --node=d --role=p"),
        ("--node d p", "--node d --role=p"),
        ("--role=p d", "--role=p --node=d"),
        ("d p q", "--node=d --role=p q"),
        ("--timeout-s -1 d", "--timeout-s -1 --node=d"),
        ("--timeout-s --force d", "--timeout-s --force on --node=d"),
        ("--help d", "--help --node=d"),
        ("d --timeout-s", "--node=d --timeout-s"),
    ],
)
def test_a_word_is_the_value_of_the_flag_before_it_or_of_the_next_one_that_needs_no_name(
    words: str, flags: str
) -> None:
    assert as_flags(words.split(), FREE, BARE) == flags.split()
