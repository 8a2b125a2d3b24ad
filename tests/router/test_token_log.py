"""The token log against a naive model: a dictionary from index to token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.token_log import Appended, Differs, Gap, TokenLog, TooLong

MAX_TOKENS = 6  # few, so that the end is often reached
batches = st.lists(st.tuples(st.integers(0, MAX_TOKENS + 2), st.lists(st.integers(0, 1), max_size=4)), max_size=30)
given_tokens = st.lists(st.integers(0, 1), max_size=MAX_TOKENS)


@pytest.mark.covers("Q03")
@given(given_tokens, batches)
def test_it_accepts_repeats_and_continuations_and_nothing_else(
    start: list[int], appends: list[tuple[int, list[int]]]
) -> None:
    log, known = TokenLog(MAX_TOKENS, start), dict(enumerate(start))
    for first_index, token_ids in appends:
        told = {first_index + offset: token_id for offset, token_id in enumerate(token_ids)}
        differing = [index for index in told if index in known and known[index] != told[index]]
        outcome = log.append(first_index, token_ids)
        if first_index > len(known):
            assert outcome == Gap(len(known), first_index)
        elif differing:
            assert outcome == Differs(differing[0], known[differing[0]], told[differing[0]])
        elif first_index + len(token_ids) > MAX_TOKENS:
            assert outcome == TooLong(MAX_TOKENS)
        else:
            fresh = tuple(token for index, token in told.items() if index not in known)
            assert outcome == Appended(len(known), fresh)
            known |= told
        assert log.token_ids == tuple(known[index] for index in range(len(known)))
        assert len(log) == len(known)
        assert log.last_token_id == (known[len(known) - 1] if known else None)
