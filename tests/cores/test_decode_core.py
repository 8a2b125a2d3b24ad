"""The decode core by example: admission at the boundary, leases and their ends, commits that do not fit."""

from __future__ import annotations

import pytest

from connector.transport import BlocksLanded, NotifyArrived, RevokeDone, WriteRefused
from engine.plan import BROKEN_ROW, STALLED_ROW, SlotResult, StepResult
from node import events as ev
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey
from tests.cores.nodes import BLOCK_SIZE, MAX_MODEL_LEN, ROUTER, VOCAB_SIZE, Decode, commit, only, reserve_request

KEY = AttemptKey("r", 0, 0)
PROMPT = [1, 2, 3, 4, 5, 6, 7]  # one full block and a tail


@pytest.mark.covers("D01", "D03")
@pytest.mark.parametrize("prompt_len", [3, 4, 5, 8])
@pytest.mark.parametrize("max_tokens", [2, 3, 5, 9])
def test_reserve_is_accepted_at_exactly_enough_blocks_and_refused_at_one_too_few(
    prompt_len: int, max_tokens: int
) -> None:
    prompt = list(range(1, prompt_len + 1))
    # The KV of every token but the last sampled one, and room for the first token at once.
    need = max(-(-(prompt_len + max_tokens - 1) // BLOCK_SIZE), -(-(prompt_len + 1) // BLOCK_SIZE))
    for others in range(16):
        decode = Decode(num_blocks=16)
        decode.pool.lease(others)
        reply = decode.reserve(KEY, prompt, max_tokens)
        if 16 - others >= need:
            assert reply.WhichOneof("result") == "lease"
            assert decode.core.load().blocks_leased == others + -(-(prompt_len + 1) // BLOCK_SIZE)
        else:
            assert reply.error.code == pb.NO_BLOCKS and reply.error.retryable
            assert decode.core.load().blocks_leased == others, "a refusal took blocks"
            assert decode.scheduler.num_free_slots == 4, "a refusal took a slot"


@pytest.mark.covers("D01")
def test_a_lease_holds_a_slot_and_without_one_reserve_is_busy() -> None:
    decode = Decode(num_slots=1)
    assert decode.reserve(KEY, PROMPT, 4).HasField("lease")
    assert decode.reserve(AttemptKey("other", 0, 0), PROMPT, 4).error.code == pb.BUSY


@pytest.mark.covers("H06")
def test_the_same_attempt_twice_gets_the_same_lease() -> None:
    decode = Decode()
    first, second = (decode.reserve(KEY, PROMPT, 4) for _ in range(2))
    assert first.lease.lease_id == second.lease.lease_id and first.lease.secret == second.lease.secret
    assert decode.core.load().blocks_leased == 2, "the repeat leased again"


@pytest.mark.covers("H06", "R19")
def test_a_refused_attempt_that_comes_again_is_refused_again_and_may_be_retried_for_nothing() -> None:
    decode = Decode()
    decode.pool.lease(15)
    assert decode.reserve(KEY, PROMPT, 4).error.code == pb.NO_BLOCKS
    for _ in range(2):
        error = decode.reserve(KEY, PROMPT, 4).error
        assert error.code == pb.BUSY and error.retryable and error.retry_after_ms > 0
    assert decode.reserve(KEY._replace(attempt=2), PROMPT, 4).error.code == pb.NO_BLOCKS
    error = decode.reserve(KEY, PROMPT, 4).error
    assert error.code == pb.CANCELLED and not error.retryable, "a newer one has been here since"


@pytest.mark.covers("H10")
@pytest.mark.parametrize(
    ("field", "value"),
    [("architecture", "Other"), ("num_kv_heads", 3), ("dtype", "bf16"), ("block_size", 8), ("weights", "cd")],
)
def test_another_fingerprint_is_refused_by_the_name_of_the_field(field: str, value: object) -> None:
    decode = Decode()
    request = reserve_request(KEY, PROMPT, 4)
    setattr(request.fingerprint, field, value)
    error = decode.ask(request).error
    assert (
        error.code == pb.INCOMPATIBLE and not error.retryable and field in error.message and str(value) in error.message
    )
    assert decode.core.load().blocks_leased == 0


@pytest.mark.covers("H07")
def test_a_lease_that_nobody_renews_expires_by_its_timer_alone() -> None:
    decode = Decode()
    decode.reserve(KEY, PROMPT, 4)
    deadline = decode.core.next_deadline()
    assert deadline == 10.0
    revoke = only(list(decode.core.tick(deadline)), ev.RevokeLease)
    assert decode.pool.counts().quarantined == 2, "blocks were free before the transport was quiet"
    decode.core.receive(RevokeDone(revoke.lease_id), deadline)
    assert decode.pool.counts().free == 16 and decode.pool.num_promised == 0
    assert decode.scheduler.num_free_slots == 4


@pytest.mark.covers("H07")
def test_a_renewal_and_an_arriving_write_prolong_a_lease() -> None:
    decode = Decode()
    lease = decode.reserve(KEY, PROMPT, 4).lease
    renew = pb.RenewRequest(key=KEY.to_proto(), lease_id=lease.lease_id, secret=lease.secret)
    assert only(list(decode.core.receive(ev.RenewAsked(2, renew), 6.0)), ev.AnswerRenew).reply.life_ms == 10_000
    assert not decode.core.tick(10.0), "its old instant means nothing any more"
    assert decode.core.next_deadline() == 16.0
    decode.core.receive(BlocksLanded(lease.lease_id, (0,), 64, "prefill-0"), 12.0)
    assert decode.core.next_deadline() == 22.0


@pytest.mark.covers("H05")
def test_a_renewal_with_a_wrong_secret_is_refused_and_counted() -> None:
    decode = Decode()
    lease = decode.reserve(KEY, PROMPT, 4).lease
    renew = pb.RenewRequest(key=KEY.to_proto(), lease_id=lease.lease_id, secret=b"x" * 16)
    actions = list(decode.core.receive(ev.RenewAsked(2, renew), 6.0))
    assert only(actions, ev.AnswerRenew).reply.life_ms == 0 and only(actions, ev.Count).name == "stale_refused"
    assert decode.core.next_deadline() == 10.0


@pytest.mark.covers("D02", "D06", "H04")
def test_a_sequence_runs_only_after_every_block_and_commit_and_quiet() -> None:
    decode = Decode()
    lease = decode.reserve(KEY, PROMPT, 4).lease
    assert not _plans(decode.core.receive(BlocksLanded(lease.lease_id, (0, 1), 128, "prefill-0"), 1.0))
    arrived = NotifyArrived("link", commit(KEY, lease, PROMPT, 9, 4))
    actions = list(decode.core.receive(arrived, 1.0))
    assert only(actions, ev.RevokeLease) and not _plans(actions) and decode.scheduler.num_running == 0
    actions = list(decode.core.receive(RevokeDone(lease.lease_id), 1.0))
    batch = only(actions, ev.ToRouter).message.tokens
    assert batch.from_receiver and list(batch.branches[0].token_ids) == [9] and batch.branches[0].first_index == 0
    assert not only(actions, ev.AnswerCommit).message.answer.HasField("error")
    assert len(_plans(actions)) == 2, "two steps are planned ahead"
    counts = decode.pool.counts()
    assert counts.leased == 0 and counts.used == 3, "the second step begins a block that was promised"


@pytest.mark.covers("H04")
def test_a_commit_with_a_block_missing_is_refused_and_its_blocks_come_back() -> None:
    decode = Decode()
    lease = decode.reserve(KEY, PROMPT, 4).lease
    decode.core.receive(BlocksLanded(lease.lease_id, (0,), 64, "prefill-0"), 1.0)
    actions = list(decode.core.receive(NotifyArrived("link", commit(KEY, lease, PROMPT, 9, 4)), 1.0))
    error = only(actions, ev.AnswerCommit).message.answer.error
    assert error.code == pb.TRANSFER_FAILED and error.retryable
    decode.core.receive(RevokeDone(lease.lease_id), 1.0)
    assert decode.pool.counts().free == 16 and decode.scheduler.num_running == 0


@pytest.mark.covers("H09")
def test_a_checksum_that_does_not_match_ends_the_lease_and_its_commit_hears_why() -> None:
    decode = Decode()
    lease = decode.reserve(KEY, PROMPT, 4).lease
    decode.core.receive(BlocksLanded(lease.lease_id, (0,), 64, "prefill-0"), 1.0)
    decode.core.receive(WriteRefused(lease.lease_id, pb.CHECKSUM, "block 1"), 1.0)
    decode.core.receive(RevokeDone(lease.lease_id), 1.0)
    actions = list(decode.core.receive(NotifyArrived("link", commit(KEY, lease, PROMPT, 9, 4)), 2.0))
    assert only(actions, ev.AnswerCommit).message.answer.error.code == pb.CHECKSUM
    decode.core.tick(30.0)
    assert decode.core.snapshot()["leases_by_state"] == {}, "what a bad write ended is remembered for a lease life only"


@pytest.mark.covers("R17", "H07")
def test_a_lease_that_the_deadline_ended_tells_its_renewal_and_its_commit_so() -> None:
    """By this node's clock it is over first; as LEASE_EXPIRED it would cost a retry, and count against the node."""
    decode = Decode()
    lease = decode.ask(reserve_request(KEY, PROMPT, 4, ms_left=5_000)).lease
    assert only(list(decode.core.tick(5.0)), ev.Ended).outcome == "DEADLINE"
    decode.core.receive(RevokeDone(lease.lease_id), 5.0)
    renew = pb.RenewRequest(key=KEY.to_proto(), lease_id=lease.lease_id, secret=lease.secret)
    renewed = only(list(decode.core.receive(ev.RenewAsked(2, renew), 5.1)), ev.AnswerRenew).reply
    assert renewed == pb.RenewReply(life_ms=0, is_too_late=True)
    actions = list(decode.core.receive(NotifyArrived("link", commit(KEY, lease, PROMPT, 9, 4)), 5.1))
    error = only(actions, ev.AnswerCommit).message.answer.error
    assert error.code == pb.DEADLINE and not error.retryable and error.message.endswith("deadline has passed")
    decode.core.tick(60.0)
    assert decode.core.snapshot()["leases_by_state"] == {}, "remembered for a lease life only"


@pytest.mark.covers("D08", "H07")
def test_a_lease_that_a_drain_gave_up_tells_its_renewal_and_its_commit_so() -> None:
    """As LEASE_EXPIRED it would cost a retry, and count against both nodes."""
    decode = Decode()
    lease = decode.reserve(KEY, PROMPT, 4).lease
    assert only(list(decode.core.receive(ev.DrainAsked(1.0), 1.0)), ev.Ended).outcome == "DRAINING"
    decode.core.receive(RevokeDone(lease.lease_id), 1.0)
    renew = pb.RenewRequest(key=KEY.to_proto(), lease_id=lease.lease_id, secret=lease.secret)
    renewed = only(list(decode.core.receive(ev.RenewAsked(2, renew), 1.1)), ev.AnswerRenew).reply
    assert renewed == pb.RenewReply(life_ms=0, is_draining=True)
    actions = list(decode.core.receive(NotifyArrived("link", commit(KEY, lease, PROMPT, 9, 4)), 1.1))
    error = only(actions, ev.AnswerCommit).message.answer.error
    assert error.code == pb.DRAINING and error.retryable


@pytest.mark.covers("H05")
@pytest.mark.parametrize(
    "field", ["secret", "attempt", "prompt", "length", "length below the keys", "token", "max_tokens"]
)
def test_a_commit_that_does_not_fit_its_lease_starts_nothing(field: str) -> None:
    decode = Decode()
    lease = decode.reserve(KEY, PROMPT, 4).lease
    decode.core.receive(BlocksLanded(lease.lease_id, (0, 1), 128, "prefill-0"), 1.0)
    key, prompt, token, max_tokens = KEY, PROMPT, 9, 4
    match field:
        case "secret":
            lease.secret = b"x" * 16
        case "attempt":
            key = KEY._replace(attempt=1)
        case "prompt":
            prompt = [8, *PROMPT[1:]]
        case "length":
            prompt = [*PROMPT, 8]
        case "length below the keys":
            prompt = PROMPT[: len(PROMPT) // BLOCK_SIZE * BLOCK_SIZE - 1]
        case "token":
            token = VOCAB_SIZE
        case "max_tokens":
            max_tokens = 5
    actions = list(decode.core.receive(NotifyArrived("link", commit(key, lease, prompt, token, max_tokens)), 1.0))
    assert only(actions, ev.AnswerCommit).message.answer.HasField("error")
    assert decode.scheduler.num_running == 0
    assert ev.Count("commits_refused") in actions


@pytest.mark.covers("R04", "H05")
def test_a_cancel_fences_attempts_that_never_came_this_far() -> None:
    decode = Decode()
    cancel = pb.RouterMessage(cancel=pb.Cancel(key=KEY.to_proto(), ms_left=60_000))
    decode.core.receive(ev.FromRouter(ROUTER, cancel), 0.0)
    assert decode.reserve(KEY, PROMPT, 4, now=1.0).error.code == pb.CANCELLED
    assert decode.reserve(KEY._replace(attempt=1), PROMPT, 4, now=1.0).HasField("lease")


@pytest.mark.covers("R04")
def test_a_newer_attempts_reserve_ends_the_older_lease_first() -> None:
    decode = Decode()
    old = decode.reserve(KEY, PROMPT, 4).lease
    actions = list(decode.core.receive(ev.ReserveAsked(2, reserve_request(KEY._replace(attempt=1), PROMPT, 4)), 1.0))
    assert only(actions, ev.RevokeLease).lease_id == old.lease_id
    assert only(actions, ev.AnswerReserve).reply.lease.lease_id != old.lease_id


@pytest.mark.covers("D04")
def test_tokens_for_a_branch_that_was_cancelled_are_ignored_and_counted() -> None:
    decode = Decode()
    lease = decode.reserve(KEY, PROMPT, 4).lease
    decode.core.receive(BlocksLanded(lease.lease_id, (0, 1), 128, "prefill-0"), 1.0)
    decode.core.receive(NotifyArrived("link", commit(KEY, lease, PROMPT, 9, 4)), 1.0)
    plans = _plans(decode.core.receive(RevokeDone(lease.lease_id), 1.0))
    cancel = pb.RouterMessage(cancel=pb.Cancel(key=KEY.to_proto(), ms_left=60_000))
    decode.core.receive(ev.FromRouter(ROUTER, cancel), 1.0)
    assert decode.pool.counts().used > 0, "blocks were freed under a launched step (Q08)"
    for run in plans:
        row = run.plan.decodes[0]
        result = ev.StepDone(_result(run.plan.step_id, row.slot, row.generation, 3))
        assert not [a for a in decode.core.receive(result, 1.0) if isinstance(a, ev.ToRouter)]
    assert decode.pool.counts().used == 0
    assert decode.scheduler.snapshot()["num_late"] == len(plans) > 0


@pytest.mark.covers("R17")
def test_a_running_branch_ends_at_its_deadline_with_one_error_that_has_all_its_tokens() -> None:
    decode = Decode()
    lease = decode.ask(reserve_request(KEY, PROMPT, 4, ms_left=5_000)).lease
    decode.core.receive(BlocksLanded(lease.lease_id, (0, 1), 128, "prefill-0"), 1.0)
    decode.core.receive(NotifyArrived("link", commit(KEY, lease, PROMPT, 9, 4)), 1.0)
    decode.core.receive(RevokeDone(lease.lease_id), 1.0)
    error = only(list(decode.core.tick(5.0)), ev.ToRouter).message.error
    assert error.code == pb.DEADLINE and not error.retryable and list(error.completion_token_ids) == [9]


@pytest.mark.covers("H11", "A14")
@pytest.mark.parametrize(("answered", "code"), [(BROKEN_ROW, pb.INTERNAL), (STALLED_ROW, pb.INVALID)])
def test_a_row_that_gives_none_ends_its_own_branch_with_one_error(answered: int, code: pb.ErrorCode.ValueType) -> None:
    decode = Decode()
    lease = decode.reserve(KEY, PROMPT, 4).lease
    decode.core.receive(BlocksLanded(lease.lease_id, (0, 1), 128, "prefill-0"), 1.0)
    decode.core.receive(NotifyArrived("link", commit(KEY, lease, PROMPT, 9, 4)), 1.0)
    plans = _plans(decode.core.receive(RevokeDone(lease.lease_id), 1.0))
    for run in plans:
        row = run.plan.decodes[0]
        actions = decode.core.receive(ev.StepDone(_result(run.plan.step_id, row.slot, row.generation, answered)), 1.0)
        if run is plans[0]:
            error = only(list(actions), ev.ToRouter).message.error
            assert (error.code, error.retryable) == (code, code == pb.INTERNAL)
            assert list(error.completion_token_ids) == [9]
    assert decode.pool.counts().used == 0


@pytest.mark.covers("H05")
@pytest.mark.parametrize("keys", ["repeated", "too many", "too few for several"])
def test_a_reserve_with_other_keys_than_its_full_blocks_is_refused(keys: str) -> None:
    decode = Decode()
    request = reserve_request(KEY, PROMPT + PROMPT, 4)
    match keys:
        case "repeated":
            request.block_keys[1] = request.block_keys[0]
        case "too many":
            request.num_tokens = 3
        case "too few for several":  # one that moves comes alone, and may not know all of them
            del request.block_keys[-1]
            request.more_choices.append(1)
    assert decode.ask(request).error.code == pb.INCOMPATIBLE


@pytest.mark.covers("R04", "H05")
def test_an_attempt_that_ended_here_never_begins_again() -> None:
    decode = Decode()
    decode.reserve(KEY, PROMPT, 4)
    decode.core.receive(ev.RouterLost(ROUTER), 1.0)
    assert decode.reserve(KEY, PROMPT, 4, now=2.0).error.code == pb.CANCELLED


@pytest.mark.covers("A10", "R17")
def test_a_lost_routers_leases_and_branches_end() -> None:
    decode = Decode()
    lease = decode.reserve(KEY, PROMPT, 4).lease
    actions = list(decode.core.receive(ev.RouterLost(ROUTER), 1.0))
    assert only(actions, ev.RevokeLease).lease_id == lease.lease_id


@pytest.mark.covers("H03", "D09")
def test_leading_blocks_that_the_cache_holds_are_referenced_and_need_not_be_sent() -> None:
    decode = Decode()
    lease = decode.reserve(KEY, PROMPT, 2).lease
    decode.core.receive(BlocksLanded(lease.lease_id, (0, 1), 128, "prefill-0"), 1.0)
    decode.core.receive(NotifyArrived("link", commit(KEY, lease, PROMPT, 9, 2)), 1.0)
    decode.core.receive(RevokeDone(lease.lease_id), 1.0)
    actions = list(decode.core.receive(ev.ReserveAsked(2, reserve_request(AttemptKey("s", 0, 0), PROMPT, 4)), 2.0))
    second = only(actions, ev.AnswerReserve).reply.lease
    assert second.num_blocks_held == 1 and only(actions, ev.AdmitLease).block_ids[0] == -1


@pytest.mark.covers("P02", "S13", "H03")
def test_a_refusal_returns_the_blocks_that_it_found_in_the_cache() -> None:
    decode = Decode()
    lease = decode.reserve(KEY, PROMPT, 2).lease
    decode.core.receive(BlocksLanded(lease.lease_id, (0, 1), 128, "prefill-0"), 1.0)
    decode.core.receive(NotifyArrived("link", commit(KEY, lease, PROMPT, 9, 2)), 1.0)
    (run,) = _plans(decode.core.receive(RevokeDone(lease.lease_id), 1.0))
    row = run.plan.decodes[0]
    decode.core.receive(ev.StepDone(_result(run.plan.step_id, row.slot, row.generation, 3)), 1.0)
    before = decode.pool.counts()
    assert (before.used, before.cached) == (0, 2)
    decode.pool.lease(13)
    assert decode.reserve(AttemptKey("s", 0, 0), PROMPT, 20, now=2.0).error.code == pb.NO_BLOCKS
    assert (decode.pool.counts().used, decode.pool.counts().cached) == (0, 2)


@pytest.mark.covers("H05", "D04")
def test_an_attempt_whose_launched_step_is_unread_does_not_begin_again_though_its_floor_is_forgotten() -> None:
    """Found by the model of leases: a runner that hangs for as long as a floor rests, and a Reserve that comes later still."""
    decode = Decode()
    lease = decode.ask(reserve_request(KEY, PROMPT, 4, ms_left=5_000)).lease
    decode.core.receive(BlocksLanded(lease.lease_id, (0, 1), 128, "prefill-0"), 1.0)
    decode.core.receive(NotifyArrived("link", commit(KEY, lease, PROMPT, 9, 4)), 1.0)
    decode.core.receive(RevokeDone(lease.lease_id), 1.0)
    decode.core.tick(5.0)
    decode.core.tick(15.0)
    assert decode.core.snapshot()["fences"] == 0
    assert decode.reserve(KEY, PROMPT, 4, now=15.0).error.code == pb.CANCELLED


@pytest.mark.covers("C09")
def test_a_lost_router_takes_its_own_work_along_and_nobody_elses() -> None:
    decode = Decode()
    for name, number in ((ROUTER.name, ROUTER.incarnation), ("other", 8)):
        key, router = AttemptKey(name, 0, 0), ev.RouterId(name, number)
        lease = decode.ask(_of_router(key, router)).lease
        decode.core.receive(BlocksLanded(lease.lease_id, (0, 1), 64, "prefill-0"), 1.0)
        decode.core.receive(NotifyArrived("link", commit(key, lease, PROMPT, 9, 4)), 1.0)
        decode.core.receive(RevokeDone(lease.lease_id), 1.0)
        decode.core.receive(ev.ReserveAsked(2, _of_router(AttemptKey(f"{name}'s lease", 0, 0), router)), 1.0)
    actions = list(decode.core.receive(ev.RouterLost(ROUTER), 1.0))
    assert [action.key.request_id for action in actions if isinstance(action, ev.Ended)] == ["router's lease", "router"]
    assert decode.core.snapshot()["branches"] == decode.core.snapshot()["leases"] == 1


def _of_router(key: AttemptKey, router: ev.RouterId) -> pb.ReserveRequest:
    request = reserve_request(key, PROMPT, 4)
    request.router.CopyFrom(pb.PeerId(name=router.name, incarnation=router.incarnation))
    return request


@pytest.mark.covers("A11")
def test_a_sequence_that_could_outgrow_the_model_is_refused_by_name() -> None:
    error = Decode(num_blocks=64).reserve(KEY, PROMPT, MAX_MODEL_LEN).error
    assert error.code == pb.INCOMPATIBLE and f"max_model_len {MAX_MODEL_LEN}" in error.message


def _plans(actions: object) -> list[ev.RunStep]:
    assert isinstance(actions, list)
    return [action for action in actions if isinstance(action, ev.RunStep)]


def _result(step_id: int, slot: int, generation: int, token_id: int) -> StepResult:
    return StepResult.of(step_id, (SlotResult(slot, generation, token_id),))
