"""What decides about grammars' processes: who has one, who is refused, how long a step waits, and the datagrams of rows."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.grammars import ADD_S as TRIED_S
from engine.plan import Grammar
from node.grammar_book import (
    ANSWER_S,
    IDLE_S,
    MAX_REFUSED,
    QUIET_S,
    STALL_CPU_S,
    STALL_S,
    TOKEN_S,
    GrammarBook,
    GrammarsBusyError,
    Patience,
    Verdict,
    check_cpu_s,
)
from node.grammar_lines import Asks, Outcome, allowed_of, asked, opening, read_asked, read_told, told

GRAMMARS = [Grammar("regex", f"[a-f]{{{number}}}", False, (1,)) for number in range(5)]
SIZE, REFUSED = 3, 2


def asked_for(book: GrammarBook[int], grammar: Grammar, number: int, now: float) -> tuple[int | None, int | None]:
    """The process that there is now, where there can be one, and the one that has gone for it."""
    if (found := book.find(grammar, now)) is not None:
        return found, None
    try:
        return number, book.add(grammar, number, now)
    except GrammarsBusyError:
        return None, None


@pytest.mark.covers("A14")
@given(st.lists(st.tuples(st.sampled_from(("ask", "forget", "refuse")), st.sampled_from(GRAMMARS), st.floats(0, 8))))
def test_a_grammar_has_one_process_and_the_longest_unused_goes(steps: Sequence[tuple[str, Grammar, float]]) -> None:
    """Against a book that is a list of (grammar, process, when it was used)."""
    book: GrammarBook[int] = GrammarBook(SIZE, REFUSED)
    model: list[tuple[Grammar, int, float]] = []
    refused: list[Grammar] = []
    now = 0.0
    for number, (what, grammar, later_s) in enumerate(steps):
        now += later_s
        there = [entry for entry in model if entry[0] == grammar]
        if what == "forget":
            book.forget(grammar, there[0][1] if there else -1)
            book.forget(GRAMMARS[0], -1)  # another one's than the book has
            model = [entry for entry in model if entry not in there]
        elif what == "refuse":
            book.refuse(grammar)
            refused = [*(each for each in refused if each != grammar), grammar][-REFUSED:]
        else:
            gone = min(model, key=lambda entry: entry[2]) if len(model) == SIZE and not there else None
            process = there[0][1] if there else number
            if gone is not None and now - gone[2] < QUIET_S:
                assert asked_for(book, grammar, number, now) == (None, None)
            else:
                assert asked_for(book, grammar, number, now) == (process, None if gone is None else gone[1])
                model = [entry for entry in model if entry not in there and entry != gone]
                model.append((grammar, process, now))
        assert len(book) == len(model) <= SIZE
        assert [each for each in GRAMMARS if book.is_refused(each)] == [each for each in GRAMMARS if each in refused]
    assert sorted(book.take_all()) == sorted(process for _, process, _ in model)
    assert not len(book)


@pytest.mark.covers("A14")
def test_who_was_thrown_out_is_not_put_back_by_being_used() -> None:
    book: GrammarBook[int] = GrammarBook(1)
    book.add(GRAMMARS[0], 1, 0.0)
    assert book.add(GRAMMARS[1], 2, QUIET_S) == 1
    book.used(GRAMMARS[0], 1, 2 * QUIET_S)
    assert book.find(GRAMMARS[0], 2 * QUIET_S) is None


@pytest.mark.covers("A14")
def test_who_has_not_been_used_for_long_goes() -> None:
    book: GrammarBook[int] = GrammarBook()
    for number, grammar in enumerate(GRAMMARS[:4]):
        book.add(grammar, number, float(number))
    book.used(GRAMMARS[0], 0, 3.5)
    assert book.take_idle(0.5 + IDLE_S) == []
    assert book.take_idle(3 + IDLE_S) == [1, 2, 3]
    assert book.find(GRAMMARS[3], 3 + IDLE_S) is None
    assert book.take_all() == [0]


@pytest.mark.covers("A14")
@given(st.lists(st.tuples(st.floats(0, 0.6), st.integers(0, 5000)), max_size=60))
def test_however_its_time_is_spread_a_grammar_costs_no_more_than_its_allowance(
    answers: Sequence[tuple[float, int]],
) -> None:
    """From whichever answer on one counts: what is computed beyond what answers may cost is less than the bound, or it is over."""
    patience, verdicts = Patience(), []
    for cost_s, num_tokens in answers:
        verdicts.append(patience.answered(cost_s, num_tokens))
        if verdicts[-1] is Verdict.STALLED:
            break
    beyond = [cost_s - ANSWER_S - TOKEN_S * num_tokens for cost_s, num_tokens in answers[: len(verdicts)]]
    most = [max((sum(beyond[begin:end]) for begin in range(end)), default=0.0) for end in range(1, len(beyond) + 1)]
    for of_book, spent_s, (_, num_tokens) in zip(verdicts, most, answers, strict=False):
        if abs(spent_s - STALL_CPU_S) > 1e-9:
            too_long = Verdict.LOST if num_tokens > 1 else Verdict.STALLED  # who goes on here did no harm elsewhere
            assert of_book is (too_long if spent_s > STALL_CPU_S else Verdict.WAIT)


@pytest.mark.covers("A14")
@given(st.floats(0, 3), st.floats(0, 3), st.integers(0, 5000))
def test_a_step_waits_so_long_at_most_and_only_who_computed_is_to_blame(
    cpu_s: float, waited_s: float, num_tokens: int
) -> None:
    patience = Patience()
    found = patience.waiting(cpu_s, waited_s, num_tokens)
    may_s = STALL_CPU_S + ANSWER_S + TOKEN_S * num_tokens
    is_to_blame = cpu_s >= may_s and num_tokens <= 1
    is_over = cpu_s >= may_s or waited_s >= STALL_S
    assert found is (Verdict.STALLED if is_to_blame else Verdict.LOST if is_over else Verdict.WAIT)
    left_s = patience.left_s(cpu_s, waited_s, num_tokens)
    assert 0.001 <= left_s <= max(0.001, STALL_S)
    if found is Verdict.WAIT and left_s > 0.001:
        assert patience.waiting(cpu_s + left_s + 1e-9, waited_s + left_s + 1e-9, num_tokens) is not Verdict.WAIT


@pytest.mark.covers("A14", "R10")
@given(st.lists(st.floats(0, 2 * TRIED_S), min_size=2, max_size=4000))
def test_what_decodes_can_be_gone_on_with_elsewhere(costs: Sequence[float]) -> None:
    """A grammar of which a token may take twice what it took when it was tried: one by one, and then all of them at once."""
    one_by_one, at_once = Patience(), Patience()
    assert {one_by_one.answered(cost_s, 1) for cost_s in costs} == {Verdict.WAIT}
    assert at_once.waiting(sum(costs), 0.0, len(costs)) is Verdict.WAIT
    assert at_once.answered(sum(costs), len(costs)) is Verdict.WAIT
    assert sum(costs) < check_cpu_s(len(costs))


@given(st.integers(0, 2**32 - 1), st.integers(0, 20_000))
def test_a_rows_tokens_arrive_in_order_however_many_and_the_last_message_asks(row: int, num_tokens: int) -> None:
    token_ids = [*range(num_tokens)]
    messages = [read_asked(data) for data in opening(row, token_ids)]
    assert {message.row for message in messages} == {row}
    assert [token_id for message in messages for token_id in message.token_ids] == token_ids
    assert [bool(message.asks & Asks.BEGINS) for message in messages] == [True, *[False] * (len(messages) - 1)]
    assert [bool(message.asks & Asks.WANTS_MASK) for message in messages] == [*[False] * (len(messages) - 1), True]
    assert read_asked(asked(row, Asks.ENDS)) == (row, Asks.ENDS, [])


@given(st.lists(st.booleans(), min_size=1, max_size=300), st.integers(0, 2**32 - 1))
def test_a_mask_arrives_as_it_was_sent(allowed: list[bool], row: int) -> None:
    found = read_told(told(row, np.packbits(allowed, bitorder="little"), 0.25, 7))
    assert (found.row, found.cost_s, found.num_tokens) == (row, 0.25, 7)
    if any(allowed):
        assert found.outcome is Outcome.MASK
        assert allowed_of(found.mask, len(allowed)).tolist() == allowed
    else:
        assert found.outcome is Outcome.NOTHING
    assert read_told(told(row, None, 0.0, 0)).outcome is Outcome.ANYTHING


@pytest.mark.covers("A14")
def test_what_is_remembered_of_a_refused_grammar_is_no_longer_for_a_long_one() -> None:
    """The most that there may be of the longest that clients may send, one letter of which makes the others four bytes wide."""
    most_bytes = 300 * MAX_REFUSED
    tracemalloc.start()
    try:
        book: GrammarBook[int] = GrammarBook()
        before = tracemalloc.get_traced_memory()[0]
        for number in range(MAX_REFUSED):
            book.refuse(Grammar("regex", f"{number}\U0001f512" + "a" * ((64 << 10) - 10), False, (1,)))
        assert tracemalloc.get_traced_memory()[0] - before < most_bytes
    finally:
        tracemalloc.stop()
    assert book.is_refused(Grammar("regex", "7\U0001f512" + "a" * ((64 << 10) - 10), False, (1,)))
    assert not book.is_refused(Grammar("ebnf", "7\U0001f512" + "a" * ((64 << 10) - 10), False, (1,))), "of a kind"
    assert not book.is_refused(Grammar("regex", "7\U0001f512" + "a" * ((64 << 10) - 10), True, (1,))), "of a form"
