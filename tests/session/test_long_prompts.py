"""What may be on its way between a router and a node: all that either has to say at once, and no message of any length."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.block_pool import BlockPool
from engine.fake_runner import BYTES_PER_TOKEN, FakeRunner
from engine.plan import Plan
from engine.scheduler import Scheduler, SchedulerConfig
from node import events as ev
from node.identity import NodeLimits
from node.steps import STEPS_AHEAD
from node.validate import Bounds, dispatch_problem
from prefill_node.core import PrefillCore
from proto import baton_pb2 as pb
from proto.bounds import MAX_PROMPT_LOGPROBS
from router.entrance import RouterCoreConfig
from runtime.session import SessionTiming, State
from runtime.session_events import CloseStream, Lost, Send
from tests.cores.nodes import DECODE, FINGERPRINT, PREFILL, ROUTER, SEED
from tests.session.test_session_end import open_dialer

BLOCK_SIZE = 4
VOCAB = 32_000
NUM_LOGPROBS = 20
PROMPT_TOKENS = 100
MOST_PROMPTS = RouterCoreConfig().max_inflight_prefills  # that a router dispatches to a prefill node at once


@pytest.mark.covers("R12")
def test_a_node_that_comes_back_is_given_all_long_prompts_that_waited_for_it_and_none_that_no_frame_takes() -> None:
    """As many as a router dispatches to a prefill node at once, of a million tokens each."""
    end = open_dialer(timing=SessionTiming())
    long = pb.RouterMessage(dispatch=pb.Dispatch(prompt_token_ids=[100_000] * 1_000_000))
    for _ in range(MOST_PROMPTS):
        end.receive(Send(long), 0.0)
    assert (
        end.state is State.OPEN and end.snapshot()["unacknowledged_bytes"] == MOST_PROMPTS * long.ByteSize() > 80 << 20
    )
    too_long = pb.RouterMessage(cancel=pb.Cancel(key=pb.AttemptKey(request_id="x" * (16 << 20))))
    assert [type(output) for output in end.receive(Send(too_long), 0.0)] == [CloseStream, Lost]


@pytest.mark.covers("R12")
def test_a_router_is_told_the_logprobs_of_all_prompts_that_end_in_one_step_message_by_message() -> None:
    """As many prompts as it dispatches to a node at once, of each all logprobs that can be asked for, while it reads nothing."""
    messages = told_of(3)
    assert [len(each.tokens.branches) for each in messages] == [1, 1, 1]
    assert all(len(each.tokens.timings) == 1 for each in messages)
    largest = messages[0]
    scores = largest.tokens.branches[0].prompt_logprobs
    scores.extend([scores[0]] * (MAX_PROMPT_LOGPROBS // (NUM_LOGPROBS + 1) - len(scores)))
    assert largest.ByteSize() > 2 << 20
    end = open_dialer(timing=SessionTiming())
    for _ in range(MOST_PROMPTS):
        end.receive(Send(largest), 0.0)
    assert end.state is State.OPEN and end.num_unacknowledged == MOST_PROMPTS


def told_of(num_prompts: int) -> list[pb.NodeMessage]:
    """What a prefill node says of so many prompts that it computes in one step."""
    total = num_prompts * PROMPT_TOKENS
    config = SchedulerConfig(MOST_PROMPTS, total, PROMPT_TOKENS + 1)
    pool = BlockPool(num_prompts * (PROMPT_TOKENS // BLOCK_SIZE + 1) + STEPS_AHEAD, BLOCK_SIZE)
    runner = FakeRunner(
        np.zeros((pool.num_blocks, BYTES_PER_TOKEN * BLOCK_SIZE), np.uint8), BLOCK_SIZE, VOCAB, MOST_PROMPTS
    )
    limits = NodeLimits(config.max_model_len, VOCAB)
    core = PrefillCore(PREFILL, limits, Scheduler(config, pool, SEED), pool, FINGERPRINT, SEED)
    plans: list[Plan] = []
    told: list[pb.NodeMessage] = []

    def feed(event: ev.Event) -> None:
        for action in core.receive(event, 0.0):
            if isinstance(action, ev.RunStep):
                plans.append(action.plan)
            elif isinstance(action, ev.ToRouter):
                told.append(action.message)

    def dispatch(name: str, num_tokens: int, **sampling: Any) -> None:
        message = pb.Dispatch(
            request_id=name,
            branches=[pb.Branch(choice=0, seed=1)],
            prompt_token_ids=[(len(name) + 3 * at) % VOCAB for at in range(num_tokens)],
            sampling=pb.Sampling(max_tokens=1, **sampling),
            ms_left=600_000,
            target=pb.Target(node=DECODE.to_proto(), grpc_address="d:1"),
        )
        assert dispatch_problem(message, Bounds(pb.ROLE_PREFILL, VOCAB, config.max_model_len)) is None
        feed(ev.FromRouter(ROUTER, pb.RouterMessage(dispatch=message)))

    for number in range(STEPS_AHEAD):  # what comes behind these steps waits for one
        dispatch(f"short {number}", 3)
    for number in range(num_prompts):
        dispatch(f"r{number}", PROMPT_TOKENS, num_logprobs=NUM_LOGPROBS, prompt_logprobs=True)
    num_chunks = list[int]()
    while plans:
        num_chunks.append(len(plans[0].chunks))
        feed(ev.StepDone(runner.run(plans.pop(0))))
    assert num_chunks == [1] * STEPS_AHEAD + [num_prompts]
    return [each for each in told if each.tokens.branches and each.tokens.branches[0].prompt_logprobs]
