"""Counts of regular expressions, against writing them out; and what is refused by name."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.regex_rules import RegexRefusal, num_repeats


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


@pytest.mark.parametrize("pattern", [r"[\b]", r"\\b", "(?:a)", "[(?=]", "(?<name>a)"])
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


@given(st.text(alphabet="a\\[](){},0123456789?=!<bB"))
def test_any_text_is_counted_or_refused(pattern: str) -> None:
    with suppress(RegexRefusal):
        assert num_repeats(pattern) >= 0
