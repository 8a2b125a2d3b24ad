"""Text and token ids: what the model directory says holds, and streamed text is the whole answer's text."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from router.chat_template import ModelDirectoryError, TemplateRefusal
from router.detokenizer import REPLACEMENT, IncrementalDetokenizer
from router.text import ModelText, _WholeTexts
from tests.router.tiny_model import BOS_ID, EOS_ID, TURN_ID, VOCAB_SIZE, byte_level_tokenizer, write_model_text

SPECIAL_IDS = frozenset({BOS_ID, EOS_ID, TURN_ID})
BYTE_LEVEL = byte_level_tokenizer()
BYTE_TOKENS = {byte: f"<0x{byte:02X}>" for byte in range(256)}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    return ModelText(write_model_text(tmp_path_factory.mktemp("model")))


def byte_fallback_tokenizer() -> Tokenizer:
    """As SentencePiece models have it: words with a leading mark, and byte tokens for what no word covers."""
    vocabulary = {"<unk>": 0, "▁the": 1, "▁cat": 2, "s": 3, "▁": 4} | {
        BYTE_TOKENS[byte]: 5 + byte for byte in range(256)
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


FALLBACK = byte_fallback_tokenizer()


def byte_level_decode(token_ids: Sequence[int]) -> str:
    return str(BYTE_LEVEL.decode(token_ids, skip_special_tokens=True))


def fallback_decode(token_ids: Sequence[int]) -> str:
    return str(FALLBACK.decode(token_ids, skip_special_tokens=True))


def streamed(detokenizer: IncrementalDetokenizer, groups: list[list[int]]) -> list[str]:
    return [*(detokenizer.push(group) for group in groups), detokenizer.finish()]


any_tokens = st.lists(
    st.one_of(
        st.integers(0, VOCAB_SIZE - 1),
        st.sampled_from([0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80, 0xFF, 0xC3]),
    ),
    max_size=60,
)


@given(any_tokens, any_tokens)
def test_whole_characters_that_are_not_decoded_again_change_no_part_of_a_stream(
    prompt: list[int], tokens: list[int]
) -> None:
    whole = _WholeTexts(byte_level_decode, VOCAB_SIZE)
    quick = IncrementalDetokenizer(byte_level_decode, SPECIAL_IDS, prompt, whole)
    slow = IncrementalDetokenizer(byte_level_decode, SPECIAL_IDS, prompt)
    groups = [[token_id] for token_id in tokens]
    assert streamed(quick, groups) == streamed(slow, groups)
    assert all(text == "" or text == byte_level_decode([token_id]) for token_id, text in whole.items())


@pytest.mark.covers("A08")
@given(any_tokens, st.data())
def test_a_stream_reads_like_the_whole_however_its_tokens_are_grouped(tokens: list[int], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(tokens)), max_size=8)))
    groups = [tokens[start:end] for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True)]
    parts = streamed(IncrementalDetokenizer(byte_level_decode, SPECIAL_IDS), groups)
    assert "".join(parts) == byte_level_decode(tokens)


@pytest.mark.covers("A08")
@given(st.text(max_size=40))
def test_no_part_of_a_valid_text_ever_shows_half_a_character(text: str) -> None:
    tokens = list(text.encode())
    parts = streamed(IncrementalDetokenizer(byte_level_decode, SPECIAL_IDS), [[token] for token in tokens])
    assert "".join(parts) == text
    assert "".join(parts).count(REPLACEMENT) == text.count(REPLACEMENT)


@pytest.mark.covers("A08")
@given(
    st.lists(
        st.one_of(
            st.integers(1, 4).map(lambda i: [i]),
            st.text(min_size=1, max_size=3).map(lambda text: [5 + byte for byte in text.encode()]),
        ),
        max_size=20,
    )
)
def test_byte_fallback_characters_come_whole_and_words_keep_their_spaces(groups: list[list[int]]) -> None:
    tokens = [token for group in groups for token in group]
    parts = streamed(IncrementalDetokenizer(fallback_decode, ()), [[token] for token in tokens])
    assert "".join(parts) == fallback_decode(tokens)


@pytest.mark.covers("A08")
@given(st.text(st.sampled_from("\ufffd\ufffd\ufffd😀éक"), max_size=40))
def test_replacement_characters_that_a_model_says_do_not_spoil_what_follows(text: str) -> None:
    """They read like half a character, and are held back like one: a run of them is never cut within the next."""
    tokens = [5 + byte for byte in text.encode()]
    parts = streamed(IncrementalDetokenizer(fallback_decode, ()), [[token] for token in tokens])
    assert "".join(parts) == fallback_decode(tokens) == text


WORDS = st.sampled_from([1, 2, 3, 4, 5 + ord("A"), 5 + ord("\n")])


@pytest.mark.covers("A08")
@given(st.lists(WORDS, max_size=6), st.text(max_size=20), st.lists(WORDS, max_size=12), st.data())
def test_a_completion_reads_as_it_does_behind_its_prompt(
    words: list[int], end: str, completion: list[int], data: st.DataObject
) -> None:
    """As vLLM has it: the decoder strips a text's first blank, and a completion is not where its text begins."""
    prompt = [*words, *(5 + byte for byte in end.encode())]
    padding = data.draw(st.lists(st.sampled_from([0, 300]), max_size=3))  # one special here, one that no token has
    before = fallback_decode(prompt)
    parts = streamed(IncrementalDetokenizer(fallback_decode, {0}, prompt + padding), [[token] for token in completion])
    assert before + "".join(parts) == fallback_decode(prompt + completion)


@pytest.mark.covers("A08")
@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ((), "the cat"),
        ((0,), "the cat"),
        ((2, 0), " the cat"),
        ((2, *[0] * 20), " the cat"),
        ((4,), " the cat"),
        ((2, 5 + 0xE2, 5 + 0x82), " the cat"),
        ((2, *[5 + byte for byte in "😀€é".encode()]), " the cat"),
        ([5 + byte for byte in ("ខ្មែរ" * 20).encode()], " the cat"),
        ([5 + byte for byte in ("😀" * 20).encode()[:-1]], " the cat"),
    ],
    ids=["empty", "special", "marker", "markers", "blank", "half a character", "bytes", "script", "script, half"],
)
def test_a_completion_keeps_its_blank_behind_any_text(prompt: Sequence[int], text: str) -> None:
    parts = streamed(IncrementalDetokenizer(fallback_decode, {0}, prompt), [[1], [2]])
    assert parts == [text.removesuffix(" cat"), " cat", ""]


@pytest.mark.covers("A08")
@given(any_tokens, any_tokens)
def test_a_byte_level_completion_reads_the_same_behind_any_prompt(prompt: list[int], tokens: list[int]) -> None:
    """Even where the prompt ends within a character: its half is the prompt's, and the rest is no character."""
    groups = [[token] for token in tokens]
    alone = streamed(IncrementalDetokenizer(byte_level_decode, SPECIAL_IDS), groups)
    assert streamed(IncrementalDetokenizer(byte_level_decode, SPECIAL_IDS, prompt), groups) == alone


def test_a_long_prompt_costs_its_completion_no_more_than_a_short_one() -> None:
    num_decoded = 0

    def decode(token_ids: Sequence[int]) -> str:
        nonlocal num_decoded
        num_decoded += len(token_ids)
        return fallback_decode(token_ids)

    for prompt in ([1] * 100_000, [300] * 100_000, [5 + 0xE2] * 100_000):
        IncrementalDetokenizer(decode, (), prompt).push_one(2)
    assert num_decoded < 2000


def test_bytes_that_never_become_a_character_are_not_held_back_for_ever() -> None:
    detokenizer = IncrementalDetokenizer(byte_level_decode, SPECIAL_IDS)
    parts = [detokenizer.push([0xFF]) for _ in range(300)]
    assert 300 - len("".join(parts)) <= 8
    assert "".join(parts) + detokenizer.finish() == REPLACEMENT * 300


@pytest.mark.covers("A08")
def test_ids_without_any_text_cost_no_more_the_more_there_are_and_what_follows_keeps_its_space() -> None:
    """As a vocabulary has them that is padded beyond its tokens: half a minute of the router's time for 32,000 of them once."""
    tokens, num_decoded = [1, *[len(BYTE_TOKENS) + 300] * 3000, 2], 0

    def decode(token_ids: Sequence[int]) -> str:
        nonlocal num_decoded
        num_decoded += len(token_ids)
        return fallback_decode(token_ids)

    parts = streamed(IncrementalDetokenizer(decode, ()), [[token] for token in tokens])
    assert "".join(parts) == fallback_decode(tokens) == "the cat"
    assert num_decoded < 100 * len(tokens)


def test_many_tokens_have_the_text_that_few_have_and_others_run_meanwhile(text: ModelText) -> None:
    few = (BOS_ID, *b"abc", EOS_ID, VOCAB_SIZE - 1, 10**6)
    many, turns, is_over = few * 200_000, 0, threading.Event()

    def take_turns() -> None:
        nonlocal turns
        while not is_over.wait(0.001):
            turns += 1

    other = threading.Thread(target=take_turns)
    other.start()
    try:
        decoded = text.decode(many)
        num_turns = turns
    finally:
        is_over.set()
        other.join()
    assert decoded == text.decode(few) * 200_000
    whole = text.decode(many[:7000], skip_special_tokens=False)
    assert whole == text.decode(few, skip_special_tokens=False) * 1000
    assert num_turns >= 5, "of about a hundred"


@pytest.mark.covers("M03")
def test_special_tokens_have_no_text(text: ModelText) -> None:
    detokenizer = text.detokenizer()
    assert detokenizer.push([EOS_ID, ord("a"), BOS_ID, ord("b"), TURN_ID]) == "ab"


@pytest.mark.covers("M03")
def test_a_completions_prompt_gets_the_tokenizers_own_special_tokens(text: ModelText) -> None:
    assert text.encode_prompt("ab") == [BOS_ID, ord("a"), ord("b")]


def test_a_long_prompt_is_never_cut_even_if_the_tokenizers_file_asks_for_it(tmp_path: Path) -> None:
    directory = write_model_text(tmp_path)
    tokenizer = byte_level_tokenizer()
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(directory / "tokenizer.json"))
    assert len(ModelText(directory).encode_prompt("x" * 20)) == 21


@pytest.mark.covers("M03")
def test_a_chat_prompt_is_what_the_template_writes_and_nothing_twice(text: ModelText) -> None:
    token_ids = text.encode_chat([{"role": "user", "content": "hi"}])
    assert token_ids == [BOS_ID, *b"user: hi", TURN_ID, *b"assistant: "]


def test_a_template_that_refuses_says_why(text: ModelText) -> None:
    with pytest.raises(TemplateRefusal, match="no tools here"):
        text.encode_chat([{"role": "tool", "content": "42"}])


@pytest.mark.covers("M03", "X01")
@pytest.mark.parametrize(
    "template", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{% for i in range(10**9) %}x{% endfor %}"]
)
def test_a_hostile_template_reaches_nothing(tmp_path: Path, template: str) -> None:
    directory = write_model_text(tmp_path)
    (directory / "chat_template.jinja").write_text(template)
    with pytest.raises(TemplateRefusal):
        ModelText(directory).encode_chat([{"role": "user", "content": "hi"}])


@pytest.mark.covers("M03")
def test_stop_tokens_are_those_of_the_generation_config_or_of_the_model_and_the_tokenizers_own(tmp_path: Path) -> None:
    directory = write_model_text(tmp_path)
    assert ModelText(directory).stop_token_ids == (EOS_ID, TURN_ID)
    (directory / "generation_config.json").unlink()
    assert ModelText(directory).stop_token_ids == (EOS_ID,)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": None}))
    assert ModelText(directory).stop_token_ids == (EOS_ID,)
    (directory / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE}))
    assert ModelText(directory).stop_token_ids == (EOS_ID,)
    # A chat model made of a base one: the end of a turn is in its tokenizer alone.
    (directory / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE, "eos_token_id": TURN_ID}))
    assert ModelText(directory).stop_token_ids == (TURN_ID, EOS_ID)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "not json"),
        ("config.json", None),
        ("config.json", "[]"),
        ("config.json", "{"),
        ("config.json", '{"vocab_size": "many"}'),
        ("config.json", '{"vocab_size": 300, "eos_token_id": 300}'),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}'),
        ("generation_config.json", '{"temperature": "warm"}'),
        ("generation_config.json", '{"top_p": -0.5}'),
        ("generation_config.json", '{"top_k": NaN}'),
        ("generation_config.json", '{"temperature": 2.5}'),
        ("generation_config.json", '{"top_k": 1.5}'),
        ("generation_config.json", '{"top_p": true}'),
    ],
)
def test_a_bad_model_directory_is_one_line_that_names_the_place(tmp_path: Path, name: str, content: str | None) -> None:
    directory = write_model_text(tmp_path)
    (directory / "generation_config.json").unlink()
    if content is None:
        (directory / name).unlink()
    else:
        (directory / name).write_text(content)
    with pytest.raises(ModelDirectoryError) as failure:
        ModelText(directory)
    assert str(directory) in str(failure.value)
    assert "\n" not in str(failure.value)


def test_a_share_of_nothing_is_a_sampling_default_like_any(tmp_path: Path) -> None:
    """It means the likeliest token alone, as with OpenAI."""
    directory = write_model_text(tmp_path)
    (directory / "generation_config.json").write_text('{"top_p": 0}')
    assert ModelText(directory).sampling_defaults.top_p == 0


@pytest.mark.covers("A02")
@pytest.mark.parametrize(
    ("prompt", "offsets"),
    [
        ("<turn>hi</s>the", [0, 0, 6, 7, 8, 12, 14]),
        ("é€x", [0, 0, 0, 1, 1, 1, 2]),
        ("<s><s>", [0, 0, 3]),
    ],
)
def test_tokens_of_a_prompt_begin_where_its_text_has_them_special_ones_that_it_spells_too(
    text: ModelText, prompt: str, offsets: list[int]
) -> None:
    assert text.offsets_in(prompt) == offsets
    assert len(text.encode_prompt(prompt)) == len(offsets)


@pytest.mark.covers("A02")
def test_a_token_that_the_tokenizer_adds_behind_a_prompt_begins_where_its_text_ends(tmp_path: Path) -> None:
    path = write_model_text(tmp_path) / "tokenizer.json"
    told = json.loads(path.read_text())
    told["post_processor"]["single"].append({"SpecialToken": {"id": "</s>", "type_id": 0}})
    told["post_processor"]["special_tokens"]["</s>"] = {"id": "</s>", "ids": [EOS_ID], "tokens": ["</s>"]}
    path.write_text(json.dumps(told))
    assert ModelText(tmp_path).offsets_in("hi") == [0, 0, 1, 2]
