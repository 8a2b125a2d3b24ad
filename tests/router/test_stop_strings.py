"""Stop strings end a text at the same place however it is cut, and no part of one is ever shown."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.choice_text import ChoiceText, TextPart, TextRules
from router.detokenizer import IncrementalDetokenizer
from router.stop_strings import StopMatcher, Stops
from tests.router.tiny_model import EOS_ID, byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
texts = st.text("ab€", max_size=24)
ragged_tokens = st.lists(  # multi-byte characters whole and in pieces, what begins a stop string, a stop token
    st.sampled_from([b"a", b"b", b"ab", "€".encode(), b"\xe2", b"\x82", b"\xff", b"\xf0\x9f"]), max_size=12
).map(lambda pieces: [*b"".join(pieces)])
stop_lists = st.lists(st.text("ab€", min_size=1, max_size=5), min_size=1, max_size=4)


def decode(token_ids: Sequence[int]) -> str:
    return str(TOKENIZER.decode(token_ids, skip_special_tokens=True))


def first_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Slowly: the shortest beginning of the text that ends with a stop string, without the longest such."""
    for end in range(len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, found))], True
    return text, False


def choice_text(rules: TextRules, given_ids: Sequence[int] = ()) -> ChoiceText:
    return ChoiceText(IncrementalDetokenizer(decode, {EOS_ID}), rules, given_ids)


def shown(choice: ChoiceText, groups: Sequence[Sequence[int]]) -> tuple[str, bool]:
    """All that a choice shows of these tokens, and whether it was stopped."""
    parts = []
    for group in groups:
        part = choice.push(group)
        parts.append(part.text)
        if part.is_stopped:
            return "".join(parts), True
    last = choice.finish()
    return "".join([*parts, last.text]), last.is_stopped


@pytest.mark.covers("A09")
@given(texts, stop_lists, st.data())
def test_a_text_ends_before_the_first_stop_string_however_it_is_cut(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    matcher, parts, is_stopped = StopMatcher(Stops(stops)), [], False
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        part, is_stopped = matcher.push(text[start:end])
        parts.append(part)
        assert first_stop(text, stops)[0].startswith("".join(parts)), "shown too early"
        if is_stopped:
            break
    assert ("".join([*parts, "" if is_stopped else matcher.flush()]), is_stopped) == first_stop(text, stops)


def test_a_stop_string_that_begins_within_the_beginning_of_another_try_is_found() -> None:
    for text, stop in (("aaab", "aab"), ("ababac", "abac"), ("abacabab", "abab")):
        assert StopMatcher(Stops([stop])).push(text) == (text.removesuffix(stop), True)


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    matcher = StopMatcher(Stops(["abcd", "xy"]))
    assert matcher.push("12ab") == ("12", False)
    assert matcher.push("c") == ("", False)
    assert matcher.push("x") == ("abc", False)
    assert matcher.push("z") == ("xz", False)
    assert matcher.push("abcxy!") == ("abc", True)


@pytest.mark.covers("A08", "A09")
@given(texts, stop_lists, st.integers(0, 4), st.integers(0, 4))
def test_a_choice_counts_the_tokens_up_to_the_one_that_completes_the_stop(
    text: str, stops: list[str], min_tokens: int, group_size: int
) -> None:
    tokens = list(text.encode())
    size = group_size + 1
    groups = [tokens[start : start + size] for start in range(0, len(tokens), size)]
    rules = TextRules({EOS_ID}, Stops(stops), min_tokens)
    one_by_one, grouped = choice_text(rules), choice_text(rules)
    assert shown(one_by_one, [[token] for token in tokens]) == shown(grouped, groups)
    assert one_by_one.num_tokens == grouped.num_tokens
    if not min_tokens:
        expected, is_stopped = first_stop(text, stops)
        assert shown(choice_text(rules), groups) == (expected, is_stopped)
        counted = decode(tokens[: grouped.num_tokens])
        assert (first_stop(counted, stops)[1], counted == text) in ((True, True), (is_stopped, not is_stopped))


def test_the_first_min_tokens_tokens_are_not_looked_at() -> None:
    rules = TextRules({EOS_ID}, Stops(("ab",)), min_tokens=2)
    assert shown(choice_text(rules), [b"abab"]) == ("ab", True)
    assert shown(choice_text(rules), [b"xab"]) == ("xab", False), "nor what begins in them"


def test_half_a_character_of_the_first_min_tokens_is_not_looked_at_either() -> None:
    half = "€".encode()[:2]
    for min_tokens, is_stopped in ((2, False), (1, True)):
        rules = TextRules({EOS_ID}, Stops(("\ufffd",)), min_tokens)
        assert shown(choice_text(rules), [half]) == ("" if is_stopped else "\ufffd", is_stopped)


@pytest.mark.covers("A05", "A08", "A09", "R08", "R09")
@given(ragged_tokens, st.just([]) | stop_lists, st.integers(0, 4))
def test_wherever_a_completion_is_broken_off_both_halves_are_together_the_whole(
    tokens: list[int], stops: list[str], min_tokens: int
) -> None:
    rules = TextRules({EOS_ID}, Stops(stops), min_tokens)
    whole = choice_text(rules)
    expected, offsets = shown(whole, [tokens]), choice_text(rules).push(tokens).offsets
    for cut in range(len(tokens) + 1):
        before, resumed = choice_text(rules).push(tokens[:cut]), choice_text(rules, tokens[:cut])
        assert resumed.is_stopped == before.is_stopped
        if resumed.is_stopped:
            assert (before.text, cut >= whole.num_tokens) == (expected[0], True)
            assert resumed.finish() == TextPart("", [], True)
            continue
        assert cut < whole.num_tokens or not expected[1] or decode(tokens).endswith("\ufffd")
        after = choice_text(rules, tokens[:cut]).push(tokens[cut:])
        assert [len(before.text) + each for each in after.offsets] == offsets[cut:]
        text, is_stopped = shown(resumed, [tokens[cut:]])
        assert (before.text + text, is_stopped) == expected
        assert resumed.num_tokens == whole.num_tokens


@pytest.mark.covers("A08", "A09")
@given(texts, stop_lists, st.data())
def test_a_completion_that_is_broken_off_again_and_again_reads_like_the_whole(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    tokens, rules = list(text.encode()), TextRules({EOS_ID}, Stops(stops))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(tokens)), max_size=8)))
    parts = []
    for start, end in zip([0, *cuts], cuts, strict=False):
        part = choice_text(rules, tokens[:start]).push(tokens[start:end]) if start < end else TextPart("", [], False)
        parts.append(part.text)
        if part.is_stopped:
            break
    else:
        start = cuts[-1] if cuts else 0
        parts.append(shown(choice_text(rules, tokens[:start]), [tokens[start:]])[0])
    assert "".join(parts) == first_stop(text, stops)[0]
    assert not any("\ufffd" in part for part in parts), "half a character"


def test_a_stop_string_and_a_character_that_span_the_break_are_shown_by_neither_half_or_by_the_second() -> None:
    def halves(first: bytes, second: bytes, *stops: str) -> tuple[str, tuple[str, bool]]:
        rules = TextRules((), Stops(stops))
        return choice_text(rules).push(first).text, shown(choice_text(rules, first), [second])

    euro = "€".encode()
    assert halves(b"abST", b"OPcd", "STOP") == ("ab", ("", True))
    assert halves(b"abST", b"AY", "STOP") == ("ab", ("STAY", False))
    assert halves(b"abSTS", b"TOP", "STOP") == ("abST", ("", True))
    assert halves(b"a" + euro[:2], euro[2:] + b"b") == ("a", ("€b", False))
    assert halves(b"a" + euro[:2], euro[2:] + b"b", "€b") == ("a", ("", True))
    assert halves(b"a" + euro[:2], b"", "STOP") == ("a", ("\ufffd", False))


def test_a_stop_token_ends_the_text_and_is_not_in_it() -> None:
    choice = choice_text(TextRules({ord("!")}, Stops(("b!",))))
    assert shown(choice, [b"ab!"]) == ("ab", False)
    assert choice.num_tokens == 3


def test_offsets_say_where_in_the_text_each_token_begins() -> None:
    part = choice_text(TextRules(())).push([*"é€".encode(), ord("x")])
    assert (part.text, part.offsets) == ("é€x", [0, 0, 1, 1, 1, 2])
