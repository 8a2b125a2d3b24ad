"""Several branches in one attempt, over both cores: one KV, computed and sent once; tokens, cancels and ends of their own."""

from __future__ import annotations

from unittest.mock import Mock

import numpy as np
import pytest

from connector.transport import BlocksLanded, NotifyArrived, RevokeDone
from engine.fake_runner import BYTES_PER_TOKEN, FakeRunner, expected_tokens
from engine.plan import BROKEN_ROW, SlotResult, StepResult
from node import events as ev
from node.sampling import to_sampling_params
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey
from proto.block_key import block_keys
from tests.cores.nodes import (
    BLOCK_SIZE,
    ROUTER,
    SEED,
    VOCAB_SIZE,
    Decode,
    Prefill,
    commit,
    grant,
    only,
    reserve_request,
)
from tests.cores.pair import Pair

NUM_BRANCHES = 4
KEY = AttemptKey("r", 0, 0)
PROMPT = list(range(1, 8))  # one full block and three tokens of another
SAMPLING = pb.Sampling(temperature=0.7, max_tokens=6)


def dispatch(prompt: list[int], sampling: pb.Sampling, num_branches: int = NUM_BRANCHES) -> pb.Dispatch:
    branches = [pb.Branch(choice=choice, seed=100 + choice) for choice in range(num_branches)]
    target = pb.Target(node=pb.PeerId(name="decode-0", incarnation=5), grpc_address="decode-0:1")
    return pb.Dispatch(
        request_id="r", branches=branches, prompt_token_ids=prompt, sampling=sampling, target=target, ms_left=60_000
    )


def right_tokens(prompt: list[int], sampling: pb.Sampling, choice: int) -> list[int]:
    params = to_sampling_params(sampling, 100 + choice)
    tokens = expected_tokens(prompt, (), params, sampling.max_tokens, VOCAB_SIZE)
    stops = [index for index, token_id in enumerate(tokens) if token_id in sampling.stop_token_ids]
    return tokens[: stops[0] + 1] if stops else tokens


def cancel(choice: int) -> ev.FromRouter:
    key = KEY._replace(choice=choice).to_proto()
    return ev.FromRouter(ROUTER, pb.RouterMessage(cancel=pb.Cancel(key=key, ms_left=60_000)))


def reserve_all(decode: Decode, prompt: list[int], max_tokens: int, num_branches: int = 3) -> pb.ReserveReply:
    request = reserve_request(KEY, prompt, max_tokens)
    request.more_choices.extend(range(1, num_branches))
    return decode.ask(request)


@pytest.mark.covers("A02", "H02", "P02")
@pytest.mark.parametrize("num_tokens", [3, 7, 8, 13])
def test_each_branch_gets_its_own_completion_and_the_shared_kv_crosses_once(num_tokens: int) -> None:
    pair, prompt = Pair(), list(range(1, num_tokens + 1))
    heard = pair.complete(dispatch(prompt, SAMPLING))
    assert not heard.errors
    completions = []
    for choice in range(NUM_BRANCHES):
        tokens = right_tokens(prompt, SAMPLING, choice)
        of_choice = heard.of_choice(choice)
        assert [token_id for token_id, _ in of_choice.by_index().values()] == tokens
        assert len(of_choice.of_sender) == 1 and of_choice.of_receiver[-1].finish == pb.FINISH_LENGTH
        completions.append(tokens)
    assert len({*map(tuple, completions)}) > 1, "the seeds make no difference"
    num_full, tail = divmod(num_tokens, BLOCK_SIZE)
    num_blocks = num_full + (NUM_BRANCHES if tail else 0)
    num_bytes = num_blocks * BLOCK_SIZE * BYTES_PER_TOKEN
    assert pair.prefill.transport.snapshot()["kv_bytes_sent"] == {"decode-0": num_bytes}
    for node in (pair.prefill, pair.decode):
        counts = node.pool.counts()
        assert (counts.used, counts.leased, counts.quarantined, node.pool.num_promised) == (0, 0, 0, 0)


@pytest.mark.covers("D06")
def test_branches_that_end_with_their_first_token_end_at_the_sender_and_the_others_go_on() -> None:
    first_tokens = [right_tokens(PROMPT, SAMPLING, choice)[0] for choice in range(NUM_BRANCHES)]
    stopping = pb.Sampling(temperature=0.7, max_tokens=6, stop_token_ids=[first_tokens[0], first_tokens[2]])
    pair = Pair()
    heard = pair.complete(dispatch(PROMPT, stopping))
    for choice, first_token in enumerate(first_tokens):
        of_choice = heard.of_choice(choice)
        assert [each for each, _ in of_choice.by_index().values()] == right_tokens(PROMPT, stopping, choice)
        assert bool(of_choice.of_receiver) is (first_token not in stopping.stop_token_ids)
    assert pair.decode.pool.counts().used == pair.decode.pool.num_promised == 0
    assert pair.decode.core.snapshot()["leases"] == 0


@pytest.mark.covers("D06")
def test_an_attempt_all_of_whose_branches_end_with_their_first_token_is_never_handed_over() -> None:
    pair = Pair()
    heard = pair.complete(dispatch(PROMPT, pb.Sampling(temperature=0.7, max_tokens=1)))
    assert [batch.finish for batch in heard.of_sender] == [pb.FINISH_LENGTH] * NUM_BRANCHES and not heard.of_receiver
    assert not pair.prefill.transport.snapshot()["kv_bytes_sent"]


@pytest.mark.covers("D01", "A02")
def test_several_branches_are_admitted_at_exactly_enough_blocks_and_slots() -> None:
    need = 1 + 3 * 3  # one full block; each branch: the one it begins in, and two up to its 7 + 9 - 1 positions
    for others in range(16):
        decode = Decode(num_blocks=16)
        decode.pool.lease(others)
        reply = reserve_all(decode, PROMPT, 9)
        assert reply.HasField("lease") == (16 - others >= need), reply
        assert decode.scheduler.num_free_slots == (1 if reply.HasField("lease") else 4)
        assert decode.pool.counts().leased == others + (4 if reply.HasField("lease") else 0)
    assert reserve_all(Decode(num_slots=2), PROMPT, 4).error.code == pb.BUSY
    assert reserve_all(Decode(num_slots=3), PROMPT, 4).HasField("lease")


@pytest.mark.covers("R04", "A02")
@pytest.mark.parametrize("cancelled", [[0], [1], [0, 2], [0, 1, 2]])
@pytest.mark.parametrize("when", ["before Reserve", "before Commit", "before quiet", "running"])
def test_a_cancelled_branch_never_runs_and_the_others_do(cancelled: list[int], when: str) -> None:
    decode, left = Decode(), [choice for choice in range(3) if choice not in cancelled]

    def now(moment: str) -> None:
        if moment == when:
            for choice in cancelled:
                decode.core.receive(cancel(choice), 1.0)

    now("before Reserve")
    reply = reserve_all(decode, PROMPT, 4)
    if when == "before Reserve" and not left:
        assert reply.error.code == pb.CANCELLED
        return
    lease = reply.lease
    decode.core.receive(BlocksLanded(lease.lease_id, (0, 1, 2, 3), 256, "prefill-0"), 1.0)
    now("before Commit")
    decode.core.receive(NotifyArrived("link", commit(KEY, lease, PROMPT, 9, 4, (1, 2))), 1.0)
    now("before quiet")
    actions = list(decode.core.receive(RevokeDone(lease.lease_id), 1.0))
    now("running")
    said = [b.key.choice for a in actions if isinstance(a, ev.ToRouter) for b in a.message.tokens.branches]
    assert said == (left if when != "running" else [0, 1, 2])
    assert decode.core.snapshot()["branches"] == len(left)
    assert decode.core.snapshot()["leases"] == 0
    for choice in left:
        decode.core.receive(cancel(choice), 2.0)
    # Without results no launched step ends, so slots and blocks that those use stay; what never ran is back.
    counts = decode.pool.counts()
    assert counts.leased == counts.quarantined == decode.pool.num_promised == 0
    if not left:
        assert decode.scheduler.num_free_slots == (4 if when != "running" else 1)


@pytest.mark.covers("H05")
@pytest.mark.parametrize("choices", [(), (0, 0), (0, 3), (0, 1, 2, 7)])
def test_a_commit_of_branches_that_nobody_reserved_for_starts_nothing(choices: tuple[int, ...]) -> None:
    decode = Decode()
    lease = reserve_all(decode, PROMPT, 4).lease
    decode.core.receive(BlocksLanded(lease.lease_id, (0, 1, 2, 3), 256, "prefill-0"), 1.0)
    message = pb.DataMessage.FromString(commit(KEY, lease, PROMPT, 9, 4))
    started = message.commit.branches.pop()
    for choice in choices:
        started.branch.choice = choice
        message.commit.branches.append(started)
    actions = list(decode.core.receive(NotifyArrived("link", message.SerializeToString()), 1.0))
    assert "choices" in only(actions, ev.AnswerCommit).message.answer.error.message
    decode.core.receive(RevokeDone(lease.lease_id), 1.0)
    assert decode.pool.counts().free == 16 and decode.scheduler.num_free_slots == 4


@pytest.mark.covers("H05")
def test_a_commit_of_several_branches_whose_kv_is_not_the_same_starts_nothing() -> None:
    """Both lengths are right, and so are the keys of the full block; the tokens behind it differ."""
    decode = Decode()
    lease = reserve_all(decode, PROMPT, 4, 2).lease
    decode.core.receive(BlocksLanded(lease.lease_id, (0, 1, 2), 256, "prefill-0"), 1.0)
    message = pb.DataMessage.FromString(commit(KEY, lease, PROMPT[:-1], 9, 4, (1,)))
    for started in message.commit.branches:
        started.branch.generated_token_ids[:] = [started.branch.choice, 9]
    actions = list(decode.core.receive(NotifyArrived("link", message.SerializeToString()), 1.0))
    assert "share their KV" in only(actions, ev.AnswerCommit).message.answer.error.message
    decode.core.receive(RevokeDone(lease.lease_id), 1.0)
    assert decode.pool.counts().free == 16 and decode.scheduler.num_free_slots == 4


@pytest.mark.covers("H06")
def test_the_same_attempt_twice_gets_the_same_lease_even_after_its_first_branch_was_cancelled() -> None:
    decode = Decode()
    first = reserve_all(decode, PROMPT, 4)
    decode.core.receive(cancel(0), 1.0)
    assert reserve_all(decode, PROMPT, 4) == first
    release = pb.ReleaseRequest(key=KEY.to_proto(), more_choices=[1, 2], ms_left=60_000)
    actions = decode.core.receive(ev.ReleaseAsked(release), 1.0)
    decode.core.receive(RevokeDone(only(list(actions), ev.RevokeLease).lease_id), 1.0)
    assert decode.pool.counts().free == 16
    assert reserve_all(decode, PROMPT, 4).error.code == pb.CANCELLED, "a Release fences every branch"


@pytest.mark.covers("R04", "P08")
def test_a_prefill_node_goes_on_for_the_branches_that_are_left_and_reports_for_each() -> None:
    prefill = Prefill()
    message = pb.RouterMessage(dispatch=dispatch(PROMPT, SAMPLING, 3))
    actions = list(prefill.core.receive(ev.FromRouter(ROUTER, message), 0.0))
    assert list(only(actions, ev.SendReserve).request.more_choices) == [1, 2]
    assert not [a for a in prefill.core.receive(cancel(0), 0.0) if isinstance(a, ev.SendRelease)]
    again = pb.RouterMessage(dispatch=dispatch(PROMPT, SAMPLING, 2))
    assert only(list(prefill.core.receive(ev.FromRouter(ROUTER, again), 0.0)), ev.Count).name == "stale_refused"
    refusal = pb.ReserveReply(error=pb.PDError(code=pb.NO_BLOCKS, message="PD Error", retryable=True))
    actions = list(prefill.core.receive(ev.ReserveAnswered(KEY, refusal), 0.0))
    errors = [action.message.error for action in actions if isinstance(action, ev.ToRouter)]
    assert [(error.key.choice, error.code) for error in errors] == [(1, pb.NO_BLOCKS), (2, pb.NO_BLOCKS)]


@pytest.mark.covers("R04")
def test_a_lease_that_is_granted_for_too_few_blocks_is_not_used() -> None:
    prefill = Prefill()
    message = pb.RouterMessage(dispatch=dispatch(PROMPT, SAMPLING, 3))
    prefill.core.receive(ev.FromRouter(ROUTER, message), 0.0)
    actions = list(prefill.core.receive(ev.ReserveAnswered(KEY, grant(1, len(PROMPT))), 0.0))
    errors = [action.message.error for action in actions if isinstance(action, ev.ToRouter)]
    assert len(errors) == 3 and all("num_blocks 2" in error.message for error in errors)


@pytest.mark.covers("R04")
def test_a_branch_that_is_over_is_not_dispatched_anew_while_its_attempt_goes_on_for_others() -> None:
    """By whichever of its branches the attempt is named."""
    first_tokens = [right_tokens(PROMPT, SAMPLING, choice)[0] for choice in range(2)]
    assert first_tokens[0] != first_tokens[1]
    stopping = pb.Sampling(temperature=0.7, max_tokens=6, stop_token_ids=[first_tokens[1]])
    prefill = Prefill()
    memory = np.zeros((prefill.num_blocks, BYTES_PER_TOKEN * BLOCK_SIZE), dtype=np.uint8)
    runner = FakeRunner(memory, BLOCK_SIZE, VOCAB_SIZE, prefill.num_slots)
    message = pb.RouterMessage(dispatch=dispatch(PROMPT, stopping, 2))
    actions = list(prefill.core.receive(ev.FromRouter(ROUTER, message), 0.0))
    prefill.core.receive(ev.StepDone(runner.run(only(actions, ev.RunStep).plan)), 0.0)
    assert prefill.core.snapshot()["attempts"] == 1, "branch 0 waits for its lease"
    del message.dispatch.branches[0]
    actions = list(prefill.core.receive(ev.FromRouter(ROUTER, message), 0.0))
    assert only(actions, ev.Count).name == "stale_refused" and prefill.core.snapshot()["attempts"] == 1


@pytest.mark.covers("R04")
def test_what_is_being_committed_at_its_deadline_is_fenced_until_it_has_ended() -> None:
    decode, newer = Decode(), KEY._replace(attempt=1)
    lease = decode.ask(reserve_request(newer, PROMPT, 4, ms_left=500)).lease
    decode.core.receive(BlocksLanded(lease.lease_id, (0, 1), 256, "prefill-0"), 0.1)
    decode.core.receive(NotifyArrived("link", commit(newer, lease, PROMPT, 9, 4)), 0.1)
    decode.core.tick(1.0)
    assert decode.reserve(KEY, PROMPT, 4, 1.0).error.code == pb.CANCELLED, "two attempts of one branch"


def test_blocks_that_branches_share_are_offered_to_the_prefix_cache_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 branches of a prompt of 8k tokens would hold up the node for 20 ms."""
    decode, prompt = Decode(num_blocks=32), list(range(1, 14))  # three full blocks
    lease = reserve_all(decode, prompt, 4).lease
    publish = Mock(wraps=decode.pool.publish)
    monkeypatch.setattr(decode.pool, "publish", publish)
    decode.core.receive(BlocksLanded(lease.lease_id, tuple(range(6)), 256, "prefill-0"), 1.0)
    decode.core.receive(NotifyArrived("link", commit(KEY, lease, prompt, 9, 4, (1, 2))), 1.0)
    decode.core.receive(RevokeDone(lease.lease_id), 1.0)
    assert decode.core.snapshot()["branches"] == 3
    assert [len(call.args[0]) for call in publish.call_args_list] == [3]
    assert decode.pool.find(block_keys(SEED, prompt, BLOCK_SIZE)[-1]) is not None


@pytest.mark.covers("A02")
def test_completions_of_branches_are_found_by_their_own_keys_afterwards() -> None:
    """A branch that did not publish the shared blocks itself goes on from the right key behind them."""
    pair, prompt = Pair(), list(range(1, 14))
    pair.complete(dispatch(prompt, SAMPLING, 3))
    for choice in range(3):
        tokens = prompt + right_tokens(prompt, SAMPLING, choice)[:-1]
        keys = block_keys(SEED, tokens, BLOCK_SIZE)
        assert len(keys) == 4 and pair.decode.pool.find(keys[-1]) is not None


def start(decode: Decode, key: AttemptKey, lease: pb.Lease, written: tuple[int, ...]) -> list[ev.RunStep]:
    """What a sender does from its last write to the answer to its Commit; the steps that are launched then."""
    decode.core.receive(BlocksLanded(lease.lease_id, written, 64, "prefill-0"), 0.0)
    decode.core.receive(NotifyArrived("link", commit(key, lease, PROMPT, 9, 4)), 0.0)
    actions = decode.core.receive(RevokeDone(lease.lease_id), 0.0)
    return [action for action in actions if isinstance(action, ev.RunStep)]


@pytest.mark.covers("P02", "H11")
def test_blocks_that_a_lease_holds_are_not_offered_again_when_a_row_behind_them_had_no_numbers_meanwhile() -> None:
    """Or each lease that overlaps with one that breaks would hand them on to the next."""
    decode, late = Decode(), KEY._replace(request_id="late")
    (of_block,) = block_keys(SEED, PROMPT, BLOCK_SIZE)
    run, *_ = start(decode, KEY, decode.reserve(KEY, PROMPT, 4).lease, (0, 1))
    lease = decode.reserve(late, PROMPT, 4).lease
    assert lease.num_blocks_held == 1 and decode.pool.find(of_block) is not None
    row = run.plan.decodes[0]
    answer = SlotResult(row.slot, row.generation, BROKEN_ROW)
    decode.core.receive(ev.StepDone(StepResult.of(run.plan.step_id, (answer,))), 0.0)
    assert decode.pool.find(of_block) is None
    start(decode, late, lease, (1,))
    assert decode.scheduler.knows(late) and decode.pool.find(of_block) is None
