"""What a chat keeps, what lines mean, and what is made of an answer's events: all without a terminal or a server."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.chat import with_names
from deploy.chat_talk import COMMANDS, HELP, Answer, Command, Say, Talk, Typing, Unknown, meaning_of, shown, wait_s


def event(content: str | None, finish_reason: str | None = None, usage: dict[str, int] | None = None) -> dict[str, Any]:
    """One of a chat's stream."""
    return {"choices": [{"delta": {"content": content}, "finish_reason": finish_reason}], "usage": usage}


def is_open(typing: Typing) -> bool:
    """Whether it waits for more; a function, since it changes with each line."""
    return typing.is_open


def figures_of(answer: Answer) -> tuple[str, float | None, float | None]:
    """Likewise."""
    return answer.text, answer.ttft_s, answer.tokens_per_s


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("", None),
        ("  \n", None),
        ("hello", Say("hello")),
        (" indented", Say(" indented")),
        ("//etc/passwd is a file", Say("/etc/passwd is a file")),
        ("/etc\n/passwd", Say("/etc\n/passwd")),
        ("/quit", Command("/quit", "")),
        (" /system  Be brief. ", Command("/system", "Be brief.")),
        ("/sav x", Unknown("/sav: unknown command; did you mean /save?")),
        ("/xyzzy", Unknown("/xyzzy: unknown command; /help lists them")),
    ],
)
def test_a_line_is_a_message_a_command_or_nothing(text: str, meaning: object) -> None:
    assert meaning_of(text) == meaning


def test_every_command_is_in_the_help() -> None:
    assert all(name in HELP and isinstance(meaning_of(name), Command) for name in COMMANDS)


@given(st.lists(st.text('ab \\"', max_size=6), min_size=1, max_size=8))
def test_a_text_over_several_lines_is_complete_with_its_last_one_and_nothing_is_left_behind(lines: list[str]) -> None:
    """A backslash joins; between fences every line is taken as it is."""
    typing = Typing()
    fenced = [line for line in lines if line.strip() != '"""']
    assert [typing.take(line) for line in ['"""', *fenced]] == [None] * (len(fenced) + 1)
    assert is_open(typing) and typing.take(' """ ') == "\n".join(fenced) and not is_open(typing)
    plain = [line.replace("\\", "").replace('"', "") for line in lines]
    assert [typing.take(line + "\\") for line in plain[:-1]] == [None] * (len(plain) - 1)
    assert typing.take(plain[-1]) == "\n".join(plain) and not is_open(typing)
    typing.take("lost\\")
    typing.drop()
    assert not is_open(typing) and typing.take("kept") == "kept"


def test_an_answer_has_the_servers_count_of_tokens_and_the_instants_of_its_text() -> None:
    answer = Answer(begun_at=10.0)
    assert answer.take(event(""), 10.1) == "" and figures_of(answer) == ("", None, None), (
        "the event that opens it is no token"
    )
    assert answer.take(event("Hal"), 10.5) == "Hal"
    assert answer.take(event("lo\udc00"), 11.0) == "lo?"
    answer.take(event(None, "length"), 11.5)
    answer.take({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 11}}, 12.0)
    assert figures_of(answer) == ("Hallo?", 0.5, 20.0)
    assert answer.in_words() == "11 tokens · 20.0 tokens/s · first after 500 ms · ended by length"
    thinking = {"choices": [{"delta": {"reasoning_content": "So", "content": None}}]}
    thoughtful = Answer(begun_at=10.0)
    assert thoughtful.take(thinking, 10.2) == "" and thoughtful.take(event("Yes"), 10.5) == "Yes"
    assert (thoughtful.thought, thoughtful.text) == ("So", "Yes") and thoughtful.first_at == 10.2
    assert "cut short" in Answer(0.0, finish_reason="pd_reschedule").in_words()
    assert Answer(0.0, "x", 1.0, 1.0, 1).tokens_per_s is None and Answer(0.0, "x", 1.0, 2.0).tokens_per_s is None
    hostile: list[dict[str, Any]] = [{}, {"choices": [{}]}, {"choices": 3}, {"choices": [3]}]
    for each in [*hostile, {"choices": [{"delta": {"content": 5}}]}]:
        with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
            Answer(0.0).take(each, 1.0)


def test_a_chat_keeps_what_was_said_also_when_it_was_stopped_and_forgets_what_had_no_answer() -> None:
    talk = Talk("m", "Be old.")
    talk.answered("one", Answer(0.0, "eins", 0.1, 0.2, 3, 5))
    talk.answered("two", Answer(0.0))
    assert talk.messages("three") == [
        {"role": "system", "content": "Be old."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "eins"},
        {"role": "user", "content": "three"},
    ]
    assert json.loads(json.dumps(talk.to_json()))["messages"] == talk.messages("x")[:-1]
    assert "2 answers, 2 messages kept" in talk.in_words() and "5 tokens of prompts, 3 of answers" in talk.in_words()
    talk.reset()
    assert talk.messages("x") == [{"role": "system", "content": "Be old."}, {"role": "user", "content": "x"}]
    assert "2 answers, 0 messages kept" in talk.in_words(), "what it cost is not forgotten"


@given(st.text("\x00\x07\x1b\r\x7f\x85\x9b\u2028é\n\t ab"))
def test_a_terminal_is_shown_no_control_characters_but_lines_and_tabs(text: str) -> None:
    told = shown(text + "\x1b[2J\x9b1mé\r\n\t")
    assert len(told) == len(text) + 11 and told.endswith("é\ufffd\n\t")
    assert not any((ord(each) < 32 and each not in "\n\t") or 127 <= ord(each) < 160 for each in told)


def test_waiting_is_for_servers_that_say_when_and_no_longer_than_patience_lasts() -> None:
    assert wait_s(429, "3", 0, 60) == wait_s(503, "3", 57, 60) == 3
    assert wait_s(429, "0", 0, 60) == 0.1, "never a busy loop"
    for status, retry_after, waited_s in (
        (429, None, 0),
        (503, "soon", 0),
        (500, "3", 0),
        (429, "3", 58),
        (429, "61", 0),
    ):
        assert wait_s(status, retry_after, waited_s, 60) is None


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        ([], []),
        (["hi"], ["--question=hi"]),
        (["http://a", "hi", "--seed", "1"], ["--url=http://a", "--question=hi", "--seed", "1"]),
        (["--url", "http://a"], ["--url", "http://a"]),
        (["--url", "http://a", "hi"], ["--url", "http://a", "--question=hi"]),
        (["--url=http://a", "http://b"], ["--url=http://a", "--question=http://b"]),
        (["hi", "--seed", "1", "https://a"], ["--question=hi", "--seed", "1", "--url=https://a"]),
        (["https://a"], ["--url=https://a"]),
        (["why http://a?"], ["--question=why http://a?"]),
        (["http://a is what?"], ["--question=http://a is what?"]),
        (["-1 + 3?"], ["--question=-1 + 3?"]),
        (["--system", "-1 + 3?", "hi"], ["--system", "-1 + 3?", "--question=hi"]),
        (["localhost:8000", "hi"], ["--url=localhost:8000", "--question=hi"]),
        (["why 1:2?"], ["--question=why 1:2?"]),
        (["two", "words"], ["--question=two", "words"]),
    ],
)
def test_a_url_and_a_question_need_no_flags(words: list[str], flags: list[str]) -> None:
    assert with_names(words) == flags
