"""What a router may have on its way to a node: all that it dispatches there at once, however long, and no message of any length."""

from __future__ import annotations

import pytest

from proto import baton_pb2 as pb
from router.entrance import RouterCoreConfig
from router.process import session_timing
from runtime.session import State
from runtime.session_events import CloseStream, Lost, Send
from tests.session.test_session_end import open_dialer


@pytest.mark.covers("R12")
def test_a_node_that_comes_back_is_given_all_long_prompts_that_waited_for_it_and_none_that_no_frame_takes() -> None:
    """As many as a router dispatches to a prefill node at once, of a million tokens each."""
    num_prompts = RouterCoreConfig().max_inflight_prefills
    end = open_dialer(timing=session_timing(grace_s=2.0))
    long = pb.RouterMessage(dispatch=pb.Dispatch(prompt_token_ids=[100_000] * 1_000_000))
    for _ in range(num_prompts):
        end.receive(Send(long), 0.0)
    assert (
        end.state is State.OPEN and end.snapshot()["unacknowledged_bytes"] == num_prompts * long.ByteSize() > 80 << 20
    )
    too_long = pb.RouterMessage(cancel=pb.Cancel(key=pb.AttemptKey(request_id="x" * (16 << 20))))
    assert [type(output) for output in end.receive(Send(too_long), 0.0)] == [CloseStream, Lost]
