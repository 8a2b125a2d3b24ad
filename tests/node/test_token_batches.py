"""What a step's tokens are told in: one message a router, and the short way says what the long one does, to the byte."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from node.events import RouterId
from node.token_batches import TokenBatches
from proto.attempt_key import AttemptKey

routers = st.sampled_from([RouterId("a", 1), RouterId("a", 2), RouterId("b", 1)])
keys = st.builds(AttemptKey, st.sampled_from(["x", "y"]), st.integers(0, 3), st.integers(0, 40))
tokens = st.tuples(routers, keys, st.integers(0, 1 << 20), st.integers(0, 1 << 18))


@given(st.lists(st.tuples(tokens, st.booleans()), max_size=20))
def test_one_more_token_is_said_the_same_either_way(
    said: list[tuple[tuple[RouterId, AttemptKey, int, int], bool]],
) -> None:
    long, either = TokenBatches(from_receiver=True), TokenBatches(from_receiver=True)
    for (router, key, index, token_id), is_short in said:
        long.add(router, key, index, (token_id,))
        if is_short:
            either.add_one(router, key, index, token_id)
        else:
            either.add(router, key, index, (token_id,))
    written = [
        [(each.router, each.message.SerializeToString(deterministic=True)) for each in batches.to_actions()]
        for batches in (long, either)
    ]
    assert written[0] == written[1] and len(written[0]) == len({router for (router, *_), _ in said})
