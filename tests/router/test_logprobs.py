"""How tokens are named, and what the two shapes of logprobs hold."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proto import baton_pb2 as pb
from router.json_parts import dump_ascii
from router.logprobs import LOWEST, ScoredToken, chat_logprobs, completion_logprobs
from router.spelling import Spelling
from tests.router.test_text import FALLBACK
from tests.router.tiny_model import EOS_ID, VOCAB_SIZE, byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
BYTE_LEVEL = Spelling(TOKENIZER)


def read(logprobs: Any) -> Any:
    """As a client gets it."""
    return json.loads(dump_ascii(logprobs))


def scored(token_id: int, logprob: float, top: list[tuple[int, float]]) -> pb.TokenLogprobs:
    likeliest = [pb.TopLogprob(token_id=each, logprob=value) for each, value in top]
    return pb.TokenLogprobs(logprob=logprob, top=likeliest)


@pytest.mark.covers("A02")
@given(st.text(max_size=30))
def test_the_bytes_of_a_texts_tokens_are_the_text(text: str) -> None:
    token_ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert b"".join(map(BYTE_LEVEL.bytes_of, token_ids)) == text.encode()


@pytest.mark.parametrize(
    ("token_id", "name"),
    [(ord(" "), " "), (259, "th"), (0xE2, r"bytes:\xe2"), (260, r"bytes:\xf0\x9f"), (EOS_ID, "</s>"), (319, "")],
)
def test_a_token_is_named_by_its_text_or_by_its_bytes(token_id: int, name: str) -> None:
    assert BYTE_LEVEL.name_of(token_id) == name


def test_words_keep_their_space_and_byte_tokens_are_bytes_in_a_vocabulary_with_fallback() -> None:
    spelling = Spelling(FALLBACK)
    assert [spelling.name_of(token_id) for token_id in (1, 3, 5 + ord("A"), 5 + 0xE2)] == [
        " the",
        "s",
        "A",
        r"bytes:\xe2",
    ]


@pytest.mark.covers("A02")
def test_a_completions_top_names_the_token_itself_too() -> None:
    tokens = [
        ScoredToken(ord("a"), 0, None),
        ScoredToken(ord("b"), 1, scored(ord("b"), -0.5, [(ord("b"), -0.5), (ord("c"), -1.0), (ord("d"), -2.0)])),
        ScoredToken(ord("e"), 2, scored(ord("e"), -4.0, [(ord("c"), -0.25), (VOCAB_SIZE - 1, -0.5), (300, -0.75)])),
    ]
    assert read(completion_logprobs(tokens, 2, BYTE_LEVEL)) == {
        "tokens": ["a", "b", "e"],
        "token_logprobs": [None, -0.5, -4.0],
        "top_logprobs": [None, {"b": -0.5, "c": -1.0}, {"c": -0.25, "": -0.5, "e": -4.0}],
        "text_offset": [0, 1, 2],
    }
    assert read(completion_logprobs(tokens, 0, BYTE_LEVEL))["top_logprobs"] == [None, {"b": -0.5}, {"e": -4.0}]


@pytest.mark.covers("A02")
def test_a_chats_entries_have_bytes_and_only_the_most_likely() -> None:
    token = ScoredToken(0xE2, 0, scored(0xE2, -3.0, [(ord("c"), -0.25), (ord("d"), -0.5)]))
    [entry] = read(chat_logprobs([token], 1, BYTE_LEVEL))["content"]
    assert (entry["token"], entry["logprob"], entry["bytes"]) == (r"bytes:\xe2", -3.0, [0xE2])
    assert entry["top_logprobs"] == [{"token": "c", "logprob": -0.25, "bytes": [ord("c")]}]


@pytest.mark.parametrize("value", [float("-inf"), float("nan"), float("inf"), -1e30])
def test_what_json_cannot_hold_is_a_very_small_number(value: float) -> None:
    token = ScoredToken(65, 0, scored(65, value, [(65, value)]))
    assert read(completion_logprobs([token], 1, BYTE_LEVEL))["token_logprobs"] == [LOWEST]
    assert read(chat_logprobs([token], 1, BYTE_LEVEL))["content"][0]["top_logprobs"][0]["logprob"] == LOWEST
