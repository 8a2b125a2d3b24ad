"""A Release that comes too late, or twice, ends nothing and is counted, as whatever else is of an ended attempt."""

from __future__ import annotations

import pytest

from node import events as ev
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey
from tests.cores.nodes import Decode

KEY = AttemptKey("r", 0, 0)
PROMPT = [1, 2, 3, 4, 5, 6, 7]


def release(decode: Decode, key: AttemptKey) -> list[ev.Action]:
    """What the core does about it."""
    request = pb.ReleaseRequest(key=key.to_proto(), ms_left=60_000)
    return list(decode.core.receive(ev.ReleaseAsked(request), 0.0))


@pytest.mark.covers("H05")
def test_a_release_of_an_older_attempt_touches_nothing_and_is_counted() -> None:
    decode = Decode()
    newer = KEY._replace(attempt=1)
    assert decode.reserve(newer, PROMPT, 4).HasField("lease")
    assert release(decode, KEY) == [ev.Count("stale_refused")]
    assert decode.core.load().blocks_leased == 2
    assert ev.Count("stale_refused") not in release(decode, newer)
    assert release(decode, newer) == [ev.Count("stale_refused")], "it has been given back before"


@pytest.mark.covers("H05")
def test_a_release_of_an_attempt_that_was_never_heard_of_is_none_too_many() -> None:
    """Its Reserve may be on the way yet, or lost."""
    assert release(Decode(), KEY) == []
