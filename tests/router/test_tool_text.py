"""A model's text taken apart into content and calls: equal however it is cut, and nothing lost."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from typing import ClassVar, Final, SupportsIndex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.json_scan import MAX_OWN, CallScan, JsonScan, Want
from router.tool_syntax import HERMES, LIST, LLAMA, MISTRAL, ToolSyntax, call_id, digest_of, syntax_of
from router.tool_text import Called, Said, Told, ToolReader
from tests.thorough import IS_THOROUGH

OFFERED: Final = ("f", "get_weather")
CITY: Final = '{"city": "São Paulo {\\"x\\"} </tool_call>", "n": [1, -2.5e3, {}, true, null]}'
F: Final = '{"name": "f", "arguments": {}}'

# syntax, text, content, calls
CASES: Final[Sequence[tuple[ToolSyntax, str, str, list[tuple[str, str]]]]] = [
    (HERMES, "No call here, 1 < 2. \n", "No call here, 1 < 2. \n", []),
    (HERMES, " <tool_call>\n" + F + "\n</tool_call>\n", "", [("f", "{}")]),
    (HERMES, f'<tool_call>{{"arguments": {CITY}, "name": "f"}}</tool_call>', "", [("f", CITY)]),
    (HERMES, f'Well.\n<tool_call>{{"name": "f", "id": [7], "arguments": {CITY}, "x": 1}}', "Well.", [("f", CITY)]),
    (
        HERMES,
        f"a\n<tool_call>{F}</tool_call>\n<tool_call>{F}</tool_call> b",
        "a b",
        [("f", "{}"), ("f", "{}")],
    ),
    (HERMES, f"<tool_call>{F[:-1]}</tool_call>", "", [("f", "{}")]),
    (HERMES, f"<tool_call>{F}<tool_call>{F}", "", [("f", "{}"), ("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a', "", [("f", '{"a')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "b\nc"}}</tool_call>', "", [("f", '{"a": "b\\nc"}')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1 2}}</tool_call> b', " b", [("f", '{"a": 1 2}}')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {]<tool_call>' + F, "", [("f", "{]"), ("f", "{}")]),
    (HERMES, f"<tool_call>{F} c</tool_call>", " c</tool_call>", [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>', []),
    (HERMES, " <tool_call> <tool_call>" + F, " <tool_call>", [("f", "{}")]),
    (HERMES, '<tool_call>{"name": 1, ', '<tool_call>{"name": 1, ', []),
    (HERMES, '<tool_call>{"name": "f", "arguments": "x"}', '<tool_call>{"name": "f", "arguments": "x"}', []),
    (HERMES, '<tool_call>{"name": "no name", "arguments"', '<tool_call>{"name": "no name", "arguments"', []),
    (HERMES, "<tool_call>{'name': 'f'}</tool_call>", "<tool_call>{'name': 'f'}</tool_call>", []),
    (HERMES, '<tool_call>\n{"na', '<tool_call>\n{"na', []),
    (HERMES, "x <tool_ca", "x <tool_ca", []),
    (LLAMA, ' {"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    (LLAMA, '{"name": "f", "parameters": {}}; ' + F + " {", " {", [("f", "{}"), ("f", "{}")]),
    (LLAMA, "<|python_tag|>" + F + F, "", [("f", "{}"), ("f", "{}")]),
    (LLAMA, "See: <|python_tag|>" + F, "See:", [("f", "{}")]),
    (LLAMA, "See: " + F, "See: " + F, []),
    (LLAMA, "<|x" + F, "<|x" + F, []),
    (LLAMA, '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
    (LLAMA, '{"city": "Paris", "list": []}', '{"city": "Paris", "list": []}', []),
    (LLAMA, F + "; and", "; and", [("f", "{}")]),
    (MISTRAL, f"[TOOL_CALLS] [{F}, {F}]\n", "", [("f", "{}"), ("f", "{}")]),
    (MISTRAL, f"So[TOOL_CALLS][{F}, 7]", "So, 7]", [("f", "{}")]),
    (MISTRAL, f"[TOOL_CALLS]f{CITY}[TOOL_CALLS]get_weather[ARGS]{{}}", "", [("f", CITY), ("get_weather", "{}")]),
    (MISTRAL, "[TOOL_CALLS]f[CALL_ID]123456789[ARGS] {}", "", [("f", "{}")]),
    (MISTRAL, "[TOOL_CALLS]f g{}", "[TOOL_CALLS]f g{}", []),
    (MISTRAL, "[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
    (MISTRAL, "[TOOL_CALLS]f[ARGS]", "[TOOL_CALLS]f[ARGS]", []),
    (LIST, f' [{F}, {{"name": "get_weather", "parameters": {CITY}}}]', "", [("f", "{}"), ("get_weather", CITY)]),
    (LIST, "[1, 2]", "[1, 2]", []),
]


def read(syntax: ToolSyntax, parts: Sequence[str]) -> tuple[list[Told], list[list[Told]]]:
    """All that was told, and what by each part and the end."""
    reader = ToolReader(syntax, OFFERED)
    steps = [*(reader.push(part) for part in parts), reader.finish()]
    return [each for step in steps for each in step], steps


def whole(told: Sequence[Told]) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls, as a client puts them together."""
    content = "".join(each.text for each in told if isinstance(each, Said))
    calls: list[tuple[str, str]] = []
    for each in told:
        if isinstance(each, Called):
            if each.name is not None:
                assert each.index == len(calls)
                calls.append((each.name, ""))
            name, arguments = calls[each.index]
            calls[each.index] = (name, arguments + each.arguments)
    return content, calls


@pytest.mark.covers("A15")
@pytest.mark.parametrize(("syntax", "text", "content", "calls"), CASES)
def test_calls_are_taken_out_and_what_is_none_is_content(
    syntax: ToolSyntax, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert whole(read(syntax, [text])[0]) == (content, calls)


@pytest.mark.covers("A08", "A15")
@pytest.mark.parametrize(("syntax", "text", "content", "calls"), CASES)
def test_every_two_cuts_give_the_same(
    syntax: ToolSyntax, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    expected = (content, calls)
    assert whole(read(syntax, list(text))[0]) == expected
    step = 1 + len(text) // (40 if IS_THOROUGH else 12)
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1, step):
            assert whole(read(syntax, [text[:first], text[first:second], text[second:]])[0]) == expected


@pytest.mark.covers("A05", "A08")
@pytest.mark.parametrize(("syntax", "text", "content", "calls"), CASES)
def test_who_goes_on_behind_a_given_text_tells_what_nobody_told(
    syntax: ToolSyntax, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    for cut in range(len(text) + 1):
        first, second = ToolReader(syntax, OFFERED), ToolReader(syntax, OFFERED)
        told = first.push(text[:cut])
        assert second.push(text[:cut]) == told
        assert whole([*told, *second.push(text[cut:]), *second.finish()]) == (content, calls)


PIECES: Final = [
    *("<tool_call>", "</tool_call>", "<tool", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|py"),
    *('{"name": "f", "arguments": ', '{"name": "f", "parameters": {', '"name": "Bob"', '{"a": [1, "x"]}', F),
    *("{", "}", "[", "]", ",", ";", ":", '"', "\\", " ", "\n", "a", "1", "f", "u00e9", "é", "true", "nul"),
]
texts = st.lists(st.sampled_from(PIECES), max_size=14).map("".join)


@pytest.mark.covers("A08", "A15")
@given(st.sampled_from([HERMES, LLAMA, MISTRAL, LIST]), texts, st.data())
def test_any_text_cut_anyhow_gives_the_same_and_loses_nothing(
    syntax: ToolSyntax, text: str, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    bounds = [0, *cuts, len(text)]
    parts = [text[begin:end] for begin, end in itertools.pairwise(bounds)]
    content, calls = whole(read(syntax, parts)[0])
    assert (content, calls) == whole(read(syntax, list(text))[0]) == whole(read(syntax, [text])[0])
    if not calls:
        assert content == text
    rest = iter(text)  # content and arguments are what the model wrote, in its order, each character once
    assert all(character in rest for character in content)
    for name, arguments in calls:
        assert name in text and (arguments.replace("\\n", "\n") in text.replace("\\n", "\n"))
    lost = len(text) - len(content) - sum(len(arguments) for _, arguments in calls)
    assert lost <= sum(len(F) + 60 for _ in calls) + text.count(" ") + text.count("\n")


@pytest.mark.covers("A15")
def test_arguments_come_as_they_are_written_and_the_name_before_them() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"city": "Oslo"}}</tool_call>'
    steps = read(HERMES, list(text))[1]
    told = [(at, each) for at, step in enumerate(steps) for each in step]
    begin, end = text.index('{"city'), text.index("}}")
    assert told[0] == (begin, Called(0, "f", "{"))
    assert told[1:] == [(at, Called(0, None, text[at])) for at in range(begin + 1, end + 1)]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), json_values, max_size=3), st.booleans(), st.sampled_from([None, 1]))
def test_any_json_object_is_followed_to_its_end(value: dict[str, object], is_ascii: bool, indent: int | None) -> None:
    scan = JsonScan()
    text = json.dumps(value, ensure_ascii=is_ascii, indent=indent)
    for position, character in enumerate(text):
        assert scan.want is not Want.NOTHING, position
        assert scan.push(character), position
    assert scan.want is Want.NOTHING


@given(st.text(alphabet='{}[],:"\\ 01.e-tfnrualse', max_size=12))
def test_what_python_takes_for_json_is_taken_and_nothing_else(text: str) -> None:
    text = "{" + text
    try:
        json.loads(text, parse_constant=lambda name: 1 / 0)
        is_json = True
    except ValueError:
        is_json = False
    scan = JsonScan()
    assert (all(scan.push(character) for character in text) and scan.want is Want.NOTHING) is is_json


def test_what_no_call_has_is_not_collected() -> None:
    """A string is followed to its end, and kept only where it is asked for: each character of a long one was a copy of it."""
    scan = CallScan(frozenset({"arguments"}))
    for character in '{"note": "' + "a" * 5000 + '", "name": "f", "arguments": {':
        scan.push(character)
        assert len(scan._text) <= MAX_OWN + 1
    assert not scan.is_broken and (scan.name, scan.is_begun) == ("f", True)
    for text in ('{"' + "a" * (MAX_OWN + 1), '{"name": "' + "a" * (MAX_OWN + 1), '{"name": ' + "1" * (MAX_OWN + 1)):
        scan = CallScan(frozenset({"arguments"}))
        for character in text:
            if not scan.is_broken:
                scan.push(character)
        assert scan.is_broken


def test_blanks_behind_a_mark_cost_what_any_text_costs() -> None:
    """A model that repeats itself writes thousands; all streams wait for the one whose text is looked at."""
    reader, began_at = ToolReader(MISTRAL, OFFERED), time.thread_time()
    told = [*reader.push("[TOOL_CALLS]"), *reader.push(" " * 30_000), *reader.push(") {"), *reader.finish()]
    assert told == [Said("[TOOL_CALLS]" + " " * 30_000 + ") {")]
    assert time.thread_time() - began_at < 0.5


@pytest.mark.parametrize(("syntax", "before"), [(HERMES, "a"), (HERMES, "<tool_call>"), (LLAMA, ""), (LIST, " ")])
def test_blanks_that_come_one_by_one_are_not_looked_through_with_each(syntax: ToolSyntax, before: str) -> None:
    reader, began_at = ToolReader(syntax, OFFERED), time.thread_time()
    told = reader.push(before)
    assert not any(reader.push("\n") for _ in range(100_000))
    assert whole([*told, *reader.push("b"), *reader.finish()]) == (before + "\n" * 100_000 + "b", [])
    assert time.thread_time() - began_at < 1.0


class Counted(str):
    """Text that counts what is copied of it, or searched for a mark; so do the parts of it that stay text of this kind."""

    __slots__ = ()
    num_seen: ClassVar[int] = 0

    @classmethod
    def _copy(cls, text: str) -> Counted:
        cls.num_seen += len(text)
        return cls(text)

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        part = super().__getitem__(key)
        return self._copy(part) if isinstance(key, slice) else part

    def __add__(self, other: str) -> Counted:
        return self._copy(super().__add__(other))

    def __radd__(self, other: str) -> Counted:
        return self._copy(other + str(self))

    def lstrip(self, chars: str | None = None) -> Counted:
        return self._copy(super().lstrip(chars))

    def rstrip(self, chars: str | None = None) -> Counted:
        return self._copy(super().rstrip(chars))

    def find(self, sub: str, start: SupportsIndex | None = None, end: SupportsIndex | None = None) -> int:
        at = super().find(sub, start, end)
        first, last, _ = slice(start, end).indices(len(self))
        Counted.num_seen += (at if at >= 0 else last) - first
        return at


@pytest.mark.parametrize(
    ("syntax", "before", "unit"),
    [
        *[(HERMES, "", unit) for unit in ("<tool_call>", "<tool_call>{", '<tool_call>\n{"', '<tool_call>{"name": ')],
        *[(MISTRAL, "a", unit) for unit in ("[TOOL_CALLS]", "[TOOL_CALLS][", "[TOOL_CALLS] [{", "[TOOL_CALLS]f ")],
        *[(LLAMA, "", unit) for unit in ("<|python_tag|>", "{<|python_tag|>", "<|python_tag|>{")],
        *[(HERMES, "", unit) for unit in (f"<tool_call>{F}", f"<tool_call>{F[:-1]},", f"<tool_call>{F}</tool_call>")],
        *[(LLAMA, "", unit) for unit in (F, F + ";")],
        *[(LIST, "[", unit) for unit in (F + ",",)],
        *[(MISTRAL, "", unit) for unit in ("[TOOL_CALLS]f{}", f"[TOOL_CALLS][{F}]")],
        (HERMES, "", F[:-2].join(("<tool_call>", "]"))),  # arguments that are no JSON, and nothing that closes a call
    ],
)
@pytest.mark.parametrize("num_pushes", [1, 2])
def test_marks_again_and_again_cost_what_any_text_costs(
    syntax: ToolSyntax, before: str, unit: str, num_pushes: int
) -> None:
    """Somebody who goes on behind a text brings all of it at once; copied from each mark on, 64,000 marks took seconds."""
    text = before + unit * 500
    cut = len(text) // num_pushes + 1
    parts = [text[at : at + cut] for at in range(0, len(text), cut)]
    reader, num_seen = ToolReader(syntax, OFFERED), Counted.num_seen
    told = [*itertools.chain(*[reader.push(Counted(part)) for part in parts]), *reader.finish()]
    assert Counted.num_seen - num_seen < 12 * len(text)
    assert whole(told) == whole(read(syntax, list(text))[0])


def test_ids_are_the_same_for_the_same_choice_and_no_other() -> None:
    ids = [
        call_id(seed, digest_of(prompt), index, is_short=short)
        for seed in (1, 11)
        for prompt in ((1, 2), (12,), (1, 2, 3))
        for index in (0, 1)
        for short in (False, True)
    ]
    assert len(set(ids)) == len(ids)
    assert call_id(1, digest_of((1, 2)), 0, is_short=False) == ids[0] and len(ids[0]) == 29
    assert len(ids[1]) == 9 and ids[1].isalnum()


@pytest.mark.parametrize(
    ("template", "syntax"),
    [
        ("{{ '<tool_call>' }}", HERMES),
        ("<tool_call>\n<function=", None),
        ("[TOOL_CALLS]", MISTRAL),
        ("{{ '<|python_tag|>' }}", LLAMA),
        ('Respond in the format {"name": function name, "parameters": dictionary', LLAMA),
        ("{{ tools | tojson }}", None),
    ],
)
def test_a_template_says_how_its_model_writes_calls(template: str, syntax: ToolSyntax | None) -> None:
    assert syntax_of(template) is syntax
