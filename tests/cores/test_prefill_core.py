"""The prefill core by example: when it reserves, what it writes when, whom it tells of failure."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from connector.transport import Answered, BlocksTaken, LinkClosed
from engine.plan import NO_TOKEN, Plan, SlotResult, StepResult
from node import events as ev
from node.identity import NodeIdentity
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey
from tests.cores.nodes import DECODE, ROUTER, Prefill, grant, only

KEY = AttemptKey("r", 0, 0)
PROMPT = list(range(1, 15))  # 14 tokens: chunks of 8 and 6, blocks of 4: 3 full and a tail


def plans(actions: Sequence[ev.Action]) -> list[Plan]:
    return [action.plan for action in actions if isinstance(action, ev.RunStep)]


def done(plan: Plan, token_id: int) -> ev.StepDone:
    """The runner's answer: `token_id` where the plan samples."""
    rows = [SlotResult(c.slot, c.generation, token_id if c.samples else NO_TOKEN) for c in plan.chunks]
    return ev.StepDone(StepResult.of(plan.step_id, rows))


def writes(actions: Sequence[ev.Action]) -> list[int]:
    return [index for action in actions if isinstance(action, ev.WriteBlocks) for index, _ in action.blocks]


def messages(actions: Sequence[ev.Action]) -> list[pb.NodeMessage]:
    return [action.message for action in actions if isinstance(action, ev.ToRouter)]


@pytest.mark.covers("P05", "P01")
def test_computing_starts_together_with_reserve() -> None:
    actions = Prefill().dispatch(KEY, PROMPT, 4)
    assert [c.token_ids for p in plans(actions) for c in p.chunks] == [tuple(PROMPT[:8]), tuple(PROMPT[8:])]
    assert only(actions, ev.SendReserve).request.num_tokens == 14


@pytest.mark.covers("P01")
def test_prompts_that_fit_the_budget_share_a_step() -> None:
    prefill = Prefill()
    first, second = plans(prefill.dispatch(KEY, PROMPT, 4))
    for name in ("s", "t"):
        assert not plans(prefill.dispatch(AttemptKey(name, 0, 0), PROMPT[:3], 4)), (
            "two steps are planned ahead, not three"
        )
    (shared,) = plans(prefill.core.receive(done(first, 0), 0.0))
    assert [len(chunk.token_ids) for chunk in shared.chunks] == [3, 3] and second.num_tokens == 6


@pytest.mark.covers("H01")
def test_blocks_are_written_as_chunks_complete_them_and_the_tail_only_behind_the_last() -> None:
    prefill = Prefill()
    first, second = plans(prefill.dispatch(KEY, PROMPT, 4))
    actions = list(prefill.core.receive(ev.ReserveAnswered(KEY, grant(1, 14)), 0.0))
    assert only(actions, ev.OpenLink) and not writes(actions)
    actions = list(prefill.core.receive(done(first, 0), 0.0))
    assert writes(actions) == [0, 1] and not messages(actions), "the first chunk's blocks go while the second computes"
    actions = list(prefill.core.receive(done(second, 7), 0.0))
    assert writes(actions) == [2, 3]
    kinds = [type(action) for action in actions if isinstance(action, ev.WriteBlocks | ev.NotifyLink)]
    assert kinds == [ev.WriteBlocks, ev.NotifyLink], "Commit goes behind the last write"
    commit = only(actions, ev.NotifyLink).message.commit
    assert list(commit.prompt_token_ids) == PROMPT and list(commit.branches[0].branch.generated_token_ids) == [7]
    assert [list(m.tokens.branches[0].token_ids) for m in messages(actions)] == [[7]]


@pytest.mark.covers("H01", "H04")
def test_a_block_that_a_chunk_leaves_half_computed_is_written_with_the_next_chunk() -> None:
    prefill = Prefill()
    (small,) = plans(prefill.dispatch(AttemptKey("s", 0, 0), PROMPT[:3], 4))
    (filler,) = plans(prefill.dispatch(AttemptKey("t", 0, 0), PROMPT[:3], 4))
    assert not plans(prefill.dispatch(AttemptKey("u", 0, 0), PROMPT[:3], 4) + prefill.dispatch(KEY, PROMPT, 4))
    (mixed,) = plans(prefill.core.receive(done(small, 7), 0.0))
    assert [len(chunk.token_ids) for chunk in mixed.chunks] == [3, 5], "the chunk ends inside its second block"
    prefill.core.receive(ev.ReserveAnswered(KEY, grant(1, 14)), 0.0)
    prefill.core.receive(done(filler, 7), 0.0)
    assert writes(prefill.core.receive(done(mixed, 7), 0.0)) == [0]


@pytest.mark.covers("H03")
def test_blocks_that_the_receiver_holds_are_not_written() -> None:
    prefill = Prefill()
    first, _ = plans(prefill.dispatch(KEY, PROMPT, 4))
    prefill.core.receive(ev.ReserveAnswered(KEY, grant(1, 14, num_held=1)), 0.0)
    assert writes(prefill.core.receive(done(first, 0), 0.0)) == [1]


@pytest.mark.covers("P08", "D06")
def test_one_token_is_no_handoff() -> None:
    prefill = Prefill()
    actions = prefill.dispatch(KEY, PROMPT[:3], max_tokens=1)
    assert not [a for a in actions if isinstance(a, ev.SendReserve)]
    actions = list(prefill.core.receive(done(plans(actions)[0], 7), 0.0))
    branch = messages(actions)[0].tokens.branches[0]
    assert branch.finish == pb.FINISH_LENGTH and list(branch.token_ids) == [7]
    assert prefill.pool.counts().used == 0 and only(actions, ev.Ended).outcome == "finished"


@pytest.mark.covers("P03", "P08")
def test_a_refusal_reaches_the_router_at_once_and_the_computing_stops() -> None:
    prefill = Prefill()
    first, second = plans(prefill.dispatch(KEY, PROMPT, 4))
    refusal = pb.ReserveReply(
        error=pb.PDError(code=pb.NO_BLOCKS, message="PD Error", retryable=True, retry_after_ms=50)
    )
    actions = list(prefill.core.receive(ev.ReserveAnswered(KEY, refusal), 0.0))
    error = messages(actions)[0].error
    assert error.code == pb.NO_BLOCKS and error.retry_after_ms == 50 and error.key == KEY.to_proto()
    prefill.core.receive(done(first, 0), 0.0)
    assert prefill.pool.counts().used > 0, "a launched step still writes there (Q08)"
    prefill.core.receive(done(second, 7), 0.0)
    assert prefill.pool.counts().used == 0


@pytest.mark.covers("P06", "R17")
def test_at_the_deadline_the_attempt_ends_with_no_new_work() -> None:
    prefill = Prefill()
    first, second = plans(prefill.dispatch(KEY, PROMPT, 4, ms_left=3_000))
    assert prefill.core.next_deadline() == 3.0
    actions = list(prefill.core.tick(3.0))
    assert messages(actions)[0].error.code == pb.DEADLINE and only(actions, ev.SendRelease)
    prefill.core.receive(done(first, 0), 3.0)
    prefill.core.receive(done(second, 7), 3.0)
    assert prefill.pool.counts().used == 0 and prefill.core.snapshot()["attempts"] == 0


@pytest.mark.covers("H06")
def test_a_lease_granted_to_an_attempt_that_gave_up_is_released() -> None:
    prefill = Prefill()
    prefill.dispatch(KEY, PROMPT, 4)
    prefill.core.receive(cancel(KEY), 0.0)
    actions = list(prefill.core.receive(ev.ReserveAnswered(KEY, grant(1, 14)), 0.0))
    assert only(actions, ev.SendRelease).request.key == KEY.to_proto()
    assert not [a for a in actions if isinstance(a, ev.OpenLink | ev.WriteBlocks)]


@pytest.mark.covers("H08", "P08")
def test_blocks_that_a_link_still_reads_stay_until_it_has_read_them() -> None:
    prefill = Prefill()
    first, second = plans(prefill.dispatch(KEY, PROMPT, 4))
    prefill.core.receive(ev.ReserveAnswered(KEY, grant(1, 14)), 0.0)
    link_id = only(list(prefill.core.receive(done(first, 0), 0.0)), ev.WriteBlocks).link_id
    prefill.core.receive(cancel(KEY), 0.0)
    prefill.core.receive(done(second, 7), 0.0)
    assert prefill.pool.counts().used == 4
    prefill.core.receive(BlocksTaken(link_id, 1, (1,)), 0.0)
    assert prefill.pool.counts().used == 4, "one of two blocks is still to be read"
    prefill.core.receive(BlocksTaken(link_id, 1, (0,)), 0.0)
    assert prefill.pool.counts().used == 0


@pytest.mark.covers("P04", "H11")
def test_a_link_that_never_reads_is_closed_after_a_lease_life_and_a_new_attempt_gets_a_new_one() -> None:
    prefill = Prefill()
    first, _ = plans(prefill.dispatch(KEY, PROMPT, 4))
    opened = only(list(prefill.core.receive(ev.ReserveAnswered(KEY, grant(1, 14)), 0.0)), ev.OpenLink)
    prefill.core.receive(done(first, 0), 0.0)
    prefill.core.receive(cancel(KEY), 1.0)
    assert prefill.core.next_deadline() == 11.0
    assert only(list(prefill.core.tick(11.0)), ev.CloseLink).link_id == opened.link_id
    prefill.dispatch(AttemptKey("s", 0, 0), PROMPT[:3], 4, now=11.0)
    again = list(prefill.core.receive(ev.ReserveAnswered(AttemptKey("s", 0, 0), grant(2, 3)), 11.0))
    second = only(again, ev.OpenLink).link_id
    assert second != opened.link_id, "a link that is being closed takes no new attempt"
    prefill.core.receive(LinkClosed(opened.link_id, "closed"), 11.0)


@pytest.mark.covers("C06")
def test_a_restarted_receiver_is_not_written_to_on_the_link_to_the_process_before_it() -> None:
    prefill = Prefill()
    restarted = NodeIdentity(DECODE.name, DECODE.incarnation + 1)
    steps = plans(prefill.dispatch(KEY, PROMPT, 4))
    first = only(list(prefill.core.receive(ev.ReserveAnswered(KEY, grant(1, 14)), 0.0)), ev.OpenLink).link_id
    for step in steps:
        prefill.core.receive(done(step, 7), 0.0)
    other = AttemptKey("s", 0, 0)
    prefill.dispatch(other, PROMPT[:3], 4, target=restarted)
    second = only(list(prefill.core.receive(ev.ReserveAnswered(other, grant(1, 3)), 0.0)), ev.OpenLink).link_id
    assert second != first


@pytest.mark.covers("R21")
def test_after_commit_no_release_is_sent_and_the_report_says_so() -> None:
    prefill = Prefill()
    first, second = plans(prefill.dispatch(KEY, PROMPT, 4))
    opened = only(list(prefill.core.receive(ev.ReserveAnswered(KEY, grant(1, 14)), 0.0)), ev.OpenLink)
    prefill.core.receive(done(first, 0), 0.0)
    prefill.core.receive(done(second, 7), 0.0)
    prefill.core.receive(BlocksTaken(opened.link_id, 1, (0, 1, 2, 3)), 0.0)
    assert only(list(prefill.core.tick(5.0)), ev.SendRenew), "the Commit may be on its way"
    actions = list(prefill.core.receive(LinkClosed(opened.link_id, "connection lost"), 6.0))
    error = messages(actions)[0].error
    assert error.code == pb.TRANSFER_FAILED and error.commit_unanswered and list(error.completion_token_ids) == [7]
    assert not [a for a in actions if isinstance(a, ev.SendRelease)]


@pytest.mark.covers("H05", "R21")
def test_an_acknowledgement_that_comes_before_the_link_has_read_the_commit_is_not_believed() -> None:
    prefill = Prefill()
    first, second = plans(prefill.dispatch(KEY, PROMPT, 4))
    opened = only(list(prefill.core.receive(ev.ReserveAnswered(KEY, grant(1, 14)), 0.0)), ev.OpenLink)
    prefill.core.receive(done(first, 0), 0.0)
    prefill.core.receive(done(second, 7), 0.0)
    acked = Answered(opened.link_id, pb.DataMessage(answer=pb.CommitAnswer(lease_id=1)).SerializeToString())
    assert list(prefill.core.receive(acked, 0.0)) == [ev.Count("unexpected_events")]
    assert prefill.pool.counts().used == 4, "the link still reads"
    prefill.core.receive(BlocksTaken(opened.link_id, 1, (0, 1, 2, 3)), 0.0)
    assert only(list(prefill.core.receive(acked, 0.0)), ev.Ended).outcome == "committed"
    assert prefill.pool.counts().used == 0


@pytest.mark.covers("H07")
def test_a_lease_is_renewed_every_third_of_its_life_while_it_is_written() -> None:
    prefill = Prefill()
    prefill.dispatch(KEY, PROMPT, 4)
    prefill.core.receive(ev.ReserveAnswered(KEY, grant(1, 14, life_ms=9_000)), 0.0)
    assert prefill.core.next_deadline() == 3.0
    assert only(list(prefill.core.tick(3.0)), ev.SendRenew).request.lease_id == 1
    prefill.core.receive(ev.RenewAnswered(KEY, pb.RenewReply(life_ms=9_000)), 3.0)
    for now in (6.0, 9.0):
        assert only(list(prefill.core.tick(now)), ev.SendRenew) and prefill.core.snapshot()["attempts_by_state"] == {
            "WRITING": 1
        }, "the first life is over at 9 s; the renewal gave another"
    actions = list(prefill.core.receive(ev.RenewAnswered(KEY, pb.RenewReply(life_ms=0)), 9.5))
    assert messages(actions)[0].error.code == pb.LEASE_EXPIRED


@pytest.mark.covers("R17", "H07")
def test_a_lease_that_ended_with_the_request_ends_the_attempt_as_that() -> None:
    prefill = Prefill()
    prefill.dispatch(KEY, PROMPT, 4)
    prefill.core.receive(ev.ReserveAnswered(KEY, grant(1, 14, life_ms=9_000)), 0.0)
    prefill.core.tick(3.0)
    actions = list(prefill.core.receive(ev.RenewAnswered(KEY, pb.RenewReply(is_too_late=True)), 3.5))
    error = messages(actions)[0].error
    assert error.code == pb.DEADLINE and not error.retryable


@pytest.mark.covers("D08")
def test_a_lease_that_its_receiver_gave_up_to_end_ends_the_attempt_in_its_name() -> None:
    """In this node's own name it would be this one that drains."""
    prefill = Prefill()
    prefill.dispatch(KEY, PROMPT, 4)
    prefill.core.receive(ev.ReserveAnswered(KEY, grant(1, 14, life_ms=9_000)), 0.0)
    prefill.core.tick(3.0)
    actions = list(prefill.core.receive(ev.RenewAnswered(KEY, pb.RenewReply(is_draining=True)), 3.5))
    error = messages(actions)[0].error
    assert error.code == pb.DRAINING and error.retryable and error.node_id == "decode-0"


@pytest.mark.covers("D08")
def test_a_receivers_refusal_is_passed_on_in_its_name_whomever_it_names() -> None:
    """A broken receiver must not have its sender taken for the node that is to end."""
    prefill = Prefill()
    prefill.dispatch(KEY, PROMPT, 4)
    refusal = pb.PDError(code=pb.DRAINING, retryable=True, node_id="prefill-0")
    error = messages(list(prefill.core.receive(ev.ReserveAnswered(KEY, pb.ReserveReply(error=refusal)), 0.0)))[0].error
    assert error.code == pb.DRAINING and error.node_id == "decode-0"


@pytest.mark.covers("R04")
def test_a_dispatch_behind_its_own_cancel_is_refused_and_counted() -> None:
    prefill = Prefill()
    prefill.core.receive(cancel(KEY), 0.0)
    actions = prefill.dispatch(KEY, PROMPT, 4)
    assert actions == [ev.Count("stale_refused")] and prefill.scheduler.num_waiting == 0


@pytest.mark.covers("P07")
def test_above_its_cap_a_dispatch_is_answered_busy() -> None:
    prefill = Prefill()
    for n in range(8):
        prefill.dispatch(AttemptKey(f"r{n}", 0, 0), PROMPT, 4)
    error = messages(prefill.dispatch(AttemptKey("one more", 0, 0), PROMPT, 4))[0].error
    assert error.code == pb.BUSY and error.retryable and error.retry_after_ms > 0


@pytest.mark.covers("H05")
def test_an_answer_for_a_lease_that_is_not_ours_is_counted_and_changes_nothing() -> None:
    prefill = Prefill()
    prefill.dispatch(KEY, PROMPT, 4)
    opened = only(list(prefill.core.receive(ev.ReserveAnswered(KEY, grant(1, 14)), 0.0)), ev.OpenLink)
    answer = pb.DataMessage(answer=pb.CommitAnswer(key=KEY.to_proto(), lease_id=99)).SerializeToString()
    assert list(prefill.core.receive(Answered(opened.link_id, answer), 0.0)) == [ev.Count("stale_refused")]
    early = pb.DataMessage(answer=pb.CommitAnswer(key=KEY.to_proto(), lease_id=1)).SerializeToString()
    assert list(prefill.core.receive(Answered(opened.link_id, early), 0.0)) == [ev.Count("unexpected_events")]
    assert list(prefill.core.receive(Answered(opened.link_id, b"\xff\xff"), 0.0)) == [ev.Count("malformed_messages")]


def cancel(key: AttemptKey) -> ev.FromRouter:
    return ev.FromRouter(ROUTER, pb.RouterMessage(cancel=pb.Cancel(key=key.to_proto(), ms_left=60_000)))


@pytest.mark.covers("R04")
def test_the_same_dispatch_again_after_the_router_was_lost_is_refused() -> None:
    prefill = Prefill()
    prefill.dispatch(KEY, PROMPT, 4)
    prefill.core.receive(ev.RouterLost(ROUTER), 0.0)
    assert prefill.dispatch(KEY, PROMPT, 4) == [ev.Count("stale_refused")]


@pytest.mark.covers("H05")
def test_an_attempt_whose_launched_step_is_unread_does_not_begin_again_though_its_floor_is_forgotten() -> None:
    prefill = Prefill()
    prefill.dispatch(KEY, PROMPT, 4, ms_left=3_000)
    prefill.core.tick(3.0)
    prefill.core.receive(ev.ReserveAnswered(KEY, None), 3.0)
    prefill.core.tick(13.0)
    assert prefill.core.snapshot()["fences"] == 0
    assert prefill.dispatch(KEY, PROMPT, 4, now=13.0) == [ev.Count("stale_refused")]


@pytest.mark.covers("C09")
def test_a_lost_router_takes_its_own_prompts_along_and_nobody_elses() -> None:
    prefill = Prefill()
    prefill.dispatch(KEY, PROMPT[:3], 4)
    prefill.dispatch(AttemptKey("s", 0, 0), PROMPT[:3], 4)
    actions = list(prefill.core.receive(ev.RouterLost(ev.RouterId(ROUTER.name, ROUTER.incarnation + 1)), 0.0))
    assert not actions, "a router of the same name, but another process"
    actions = list(prefill.core.receive(ev.RouterLost(ROUTER), 0.0))
    assert sum(isinstance(action, ev.Ended) for action in actions) == 2 and prefill.core.snapshot()["attempts"] == 0


@pytest.mark.covers("H05")
def test_a_lease_id_that_another_attempt_holds_is_given_back() -> None:
    prefill = Prefill()
    other = AttemptKey("s", 0, 0)
    prefill.dispatch(KEY, PROMPT[:3], 4)
    prefill.dispatch(other, PROMPT[:3], 4)
    prefill.core.receive(ev.ReserveAnswered(KEY, grant(1, 3)), 0.0)
    actions = list(prefill.core.receive(ev.ReserveAnswered(other, grant(1, 3)), 0.0))
    assert messages(actions)[0].error.code == pb.TRANSFER_FAILED and only(actions, ev.SendRelease)


def test_an_error_code_of_a_newer_version_counts_as_internal() -> None:
    prefill = Prefill()
    prefill.dispatch(KEY, PROMPT, 4)
    unknown = pb.ReserveReply.FromString(b"\x12\x02\x08\x63")  # error {code: 99}
    error = messages(list(prefill.core.receive(ev.ReserveAnswered(KEY, unknown), 0.0)))[0].error
    assert error.code == pb.INTERNAL


@pytest.mark.covers("H15", "D08")
def test_a_draining_prefill_node_gives_back_what_is_not_begun_and_finishes_the_rest() -> None:
    prefill = Prefill()
    late = AttemptKey("late", 0, 0)
    begun = [*prefill.dispatch(KEY, PROMPT, 4), *prefill.dispatch(late, [9] * 30, 4)]
    asked = [action.key for action in begun if isinstance(action, ev.SendReserve)]
    actions = list(prefill.core.receive(ev.DrainAsked(20.0), 1.0))
    given_back = [action.message.error for action in actions if isinstance(action, ev.ToRouter)]
    assert [error.code for error in given_back] == [pb.DRAINING] * (2 - len(asked)) and asked == [KEY]
    refused = prefill.dispatch(AttemptKey("new", 0, 0), PROMPT, 4, now=1.0)
    assert only(refused, ev.ToRouter).message.error.code == pb.DRAINING
    assert not any(isinstance(action, ev.Drained) for action in actions), "what was begun goes on"
    reply = pb.ReserveReply(error=pb.PDError(code=pb.NO_BLOCKS))
    answered = list(prefill.core.receive(ev.ReserveAnswered(KEY, reply), 2.0))
    assert not any(isinstance(action, ev.Drained) for action in answered), "it computes"
    assert said_when_all_is_computed(prefill, begun) == [ev.Drained()]
    assert len(prefill.core.receive(ev.DrainAsked(20.0), 3.0)) == 0, "said once"


def said_when_all_is_computed(prefill: Prefill, begun: list[ev.Action]) -> list[ev.Action]:
    """What the core does about the results of the steps that it has launched."""
    said: list[ev.Action] = []
    for plan in plans(begun):
        said += prefill.core.receive(done(plan, 7), 5.2)
    return said


@pytest.mark.covers("H15")
def test_at_the_deadline_a_draining_prefill_node_gives_back_what_nobody_has_taken() -> None:
    prefill = Prefill()
    begun = prefill.dispatch(KEY, PROMPT, 4)
    prefill.core.receive(ev.DrainAsked(5.0), 1.0)
    assert (at := prefill.core.next_deadline()) is not None and at <= 5.0
    actions = list(prefill.core.tick(5.0))
    assert only(actions, ev.ToRouter).message.error.code == pb.DRAINING
    assert (at := prefill.core.next_deadline()) is None or at > 5.0, "it would look again and again"
    assert not prefill.core.receive(ev.ReserveAnswered(KEY, None), 5.1), "it computes"
    assert said_when_all_is_computed(prefill, begun) == [ev.Drained()]
