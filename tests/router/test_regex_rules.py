"""Counts of regular expressions, against writing them out; and what is refused by name."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.regex_rules import RegexRefusal, num_repeats, within_quotes


@pytest.mark.covers("A14")
@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("abc*", 0),
        ("a{3}", 3),
        ("a{1,9}", 10),
        ("a{2,}b{4}", 6),
        ("(a{3}){2}", 2 + 2 * 3),
        ("(x(a{3}){2}|b{5}){10}", 10 + 10 * (8 + 5)),
        (r"\{3}[{4}\]]{2}(\(a{2}){3}", 2 + 3 + 3 * 2),
        ("(a{3}", 3),
        ("a{3})", 3),
        ("{", 0),
    ],
)
def test_counts_within_counts_multiply(pattern: str, count: int) -> None:
    assert num_repeats(pattern) == count


@pytest.mark.covers("A14")
@pytest.mark.parametrize("pattern", ["(?=a)b", "a(?!b)", "(?<=a)b", "(?<!a)b", r"a\b", r"\Ba"])
def test_what_looks_around_is_refused_by_name(pattern: str) -> None:
    with pytest.raises(RegexRefusal, match="is not supported"):
        num_repeats(pattern)


@pytest.mark.covers("A14")
@pytest.mark.parametrize("pattern", ["a^b", "a$b", "(a$)b", "(a$|b)c", "a(^b)", "a|b^", "x*^"])
def test_an_anchor_in_the_middle_is_refused_by_name(pattern: str) -> None:
    with pytest.raises(RegexRefusal, match=r"^[\^$] is not supported (behind|before) anything$"):
        num_repeats(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        "^a$",
        "^a|b$",
        "(^a)|^b$",
        "(a|b$)$",
        "((^a))",
        "(?P<n>^a)",
        "^^a$$",
        "$",
        r"\^a\$b",
        "[a^$]b",
        "(a$)?",
    ],
)
def test_an_anchor_where_a_text_begins_or_ends_anyway_is_taken(pattern: str) -> None:
    assert num_repeats(pattern) == 0


SPELLED = [
    ('^"$', r'^(?:\\")$'),
    (r"\"", r'(?:\\")'),
    (r"C:\\+", r"C:(?:\\\\)+"),
    ("a\nb", r"a(?:\\n)b"),
    (r"\n{2}", r"(?:\\n){2}"),
    (r"\x22\u0022\u{22}", r'(?:\\")(?:\\")(?:\\")'),
    (r"\0\cA", r"(?:\\u0000)(?:\\u0001)"),
    ('["a]é[à-ü]🙂', r'["a]\u00e9[\u00e0-\u00fc]\u{1f642}'),
    *((taken, taken) for taken in (r"\s\S\d.", "[^a]", r"[\x00-!]", "[!-#]", r"[-\"]", r"[\]\\]", "[]", r"\/\.")),
]


@pytest.mark.covers("A14")
@pytest.mark.parametrize(("pattern", "spelled"), SPELLED)
def test_within_quotes_what_json_escapes_is_spelled_out_and_all_is_ascii(pattern: str, spelled: str) -> None:
    assert within_quotes(pattern) == spelled


@pytest.mark.covers("A14")
@pytest.mark.parametrize("pattern", [r"[\x22]", r'["\\]', '["-"]', r"[\x00-\x1f]", "a[\n]"])
def test_a_class_of_nothing_but_what_json_escapes_is_refused(pattern: str) -> None:
    with pytest.raises(RegexRefusal, match="has only characters that JSON escapes") as refused:
        within_quotes(pattern)
    assert str(refused.value).isprintable()


@pytest.mark.covers("A14")
@pytest.mark.parametrize("pattern", [r"\Aab\Z", r"\h", r"\p{L}", r"(a)\1", r"[\b]", r"[^\p]", r"\Qa\E"])
def test_an_escape_that_would_be_the_letter_itself_is_refused_by_name(pattern: str) -> None:
    with pytest.raises(RegexRefusal, match=r"^\\. is not supported$"):
        num_repeats(pattern)


@pytest.mark.covers("A14")
@pytest.mark.parametrize("pattern", ["(?:^a)+", "(a$)*", "(^|b){2}", "((^a)b){1,2}", "^($|^a){2}"])
def test_an_anchor_in_what_is_repeated_is_refused_by_name(pattern: str) -> None:
    with pytest.raises(RegexRefusal, match="are not supported in what is repeated"):
        num_repeats(pattern)


@pytest.mark.parametrize("pattern", [r"\\b", "(?:a)", "[(?=]", "(?<name>a)"])
def test_what_only_looks_like_it_is_not(pattern: str) -> None:
    assert num_repeats(pattern) == 0


_TREES = st.recursive(
    st.sampled_from(["a", "[{9}]", r"\{", "b"]).map(lambda text: (text, 0)),
    lambda inner: st.tuples(st.lists(inner, min_size=1, max_size=3), st.integers(2, 9)).map(
        lambda drawn: (
            f"({''.join(text for text, _ in drawn[0])}){{{drawn[1]}}}",
            drawn[1] + drawn[1] * sum(count for _, count in drawn[0]),
        )
    ),
    max_leaves=12,
)


@given(_TREES)
def test_any_nesting_counts_as_its_tree_says(drawn: tuple[str, int]) -> None:
    pattern, count = drawn
    assert num_repeats(pattern) == count


@given(st.text(alphabet='a\\[](){},0123456789?=!<bB^$|*+-"\ncux\u00e9\U0001f642'))
def test_any_text_is_counted_or_refused(pattern: str) -> None:
    with suppress(RegexRefusal):
        assert num_repeats(pattern) >= 0
    with suppress(RegexRefusal):
        spelled = within_quotes(pattern)
        assert spelled.isascii() and spelled.isprintable()
