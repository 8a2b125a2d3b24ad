"""What rank 0 tells the others arrives as it was, step by step, and an end in the middle of one is no end in good order."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from datetime import timedelta
from threading import Thread

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import Batch, Segment, build_batch
from engine.lockstep import PipedFollowers, RankStep, encoded, read_step

BLOCK_IDS = st.lists(st.integers(0, 1 << 40), max_size=5)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    first, count = draw(st.integers(0, 20)), draw(st.integers(1, 9))
    token_ids = draw(st.lists(st.integers(0, 1 << 31), min_size=count, max_size=count))
    blocks = draw(st.lists(st.integers(0, 999), min_size=8, max_size=12))
    return Segment(token_ids, first, blocks, draw(st.integers(0, count)))


def flat(batch: Batch | None) -> list[object]:
    """Everything in it, with its type and shape."""
    if batch is None:
        return [None]
    attention = batch.attention
    tensors = (batch.token_ids, batch.positions, batch.logit_rows, attention.block_tables, attention.write_positions)
    assert attention.spans.dtype == np.int32 and all(each.dtype == torch.int64 for each in tensors)
    return [attention.spans.tolist(), *((tuple(each.shape), each.tolist()) for each in tensors)]


@given(
    steps=st.lists(
        st.builds(
            lambda rows, *ids: RankStep(build_batch(rows, 4) if rows else None, *ids),
            st.lists(segments(), max_size=3),
            BLOCK_IDS,
            BLOCK_IDS,
            BLOCK_IDS,
        ),
        min_size=1,
        max_size=3,
    )
)
def test_steps_arrive_as_they_were_in_order_and_then_the_end(steps: Sequence[RankStep]) -> None:
    stream = io.BytesIO(b"".join(map(encoded, steps)))
    for step in steps:
        found = read_step(stream)
        assert found is not None
        assert flat(found.batch) == flat(step.batch)
        assert found[1:] == step[1:]
        assert found.is_met == bool(step.leaving or step.written)
    assert read_step(stream) is None


def test_an_end_in_the_middle_of_a_step_is_an_error() -> None:
    whole = encoded(RankStep(build_batch([Segment([1, 2, 3], 0, [5], 1)], 4)))
    for length in range(1, len(whole)):
        with pytest.raises(EOFError, match="in the middle of a step"):
            read_step(io.BytesIO(whole[:length]))


class NobodyElse:
    """Ranks that are asked for nothing here."""

    def gathered(self, columns: torch.Tensor) -> torch.Tensor:
        return columns

    def meet(self) -> None:
        return None


def long_step() -> RankStep:
    """More than a pipe holds."""
    return RankStep(build_batch([Segment([7] * 40_000, 0, [*range(10_000)], 1)], 4))


def test_a_rank_that_takes_no_more_of_a_step_is_given_up() -> None:
    read_end, write_end = os.pipe()
    with os.fdopen(read_end, "rb"), os.fdopen(write_end, "wb") as pipe:
        followers = PipedFollowers([pipe], NobodyElse(), timedelta(milliseconds=50))
        with pytest.raises(TimeoutError, match=r"^a rank has taken nothing of a step for 0.05 s$"):
            followers.begin(long_step())


def test_a_step_that_is_more_than_a_pipe_holds_arrives_whole() -> None:
    read_end, write_end = os.pipe()
    with os.fdopen(read_end, "rb") as steps, os.fdopen(write_end, "wb") as pipe:
        telling = Thread(target=PipedFollowers([pipe], NobodyElse()).begin, args=(long_step(),), daemon=True)
        telling.start()
        found = read_step(steps)
        telling.join(30)
    assert found is not None and flat(found.batch) == flat(long_step().batch)
