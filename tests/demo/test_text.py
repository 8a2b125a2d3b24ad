"""The text that the demo model learns from: right answers, nothing held out among what is learned, tokens as the router's."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random

import pytest
from tokenizers import Tokenizer

from deploy import chat, cli
from engine.demo.examine import EXAMS, draw_exam
from engine.demo.facts import FACTS
from engine.demo.split import Part, part_of
from engine.demo.talk import Kind, Turn, conversation, wordings
from engine.demo.train import draw_row
from engine.demo.vocabulary import NOT_LEARNED, VOCAB_SIZE, conversation_ids, learn_tokenizer

_LEARNED = [turn for seed in range(200) for turn in conversation(Random(seed), 2000)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return learn_tokenizer(text for turn in _LEARNED for text in (turn.asked, turn.answer))


def test_every_answer_is_right() -> None:
    """Recomputed from the question alone; a code is the one that this conversation told."""
    seen = set()
    for seed in range(100):
        codes: dict[str, str] = {}
        for turn in conversation(Random(seed), 4000):
            codes |= dict(re.findall(r"The code of the (\w+ \w+) is (\d{4})\.", turn.asked))
            _check(turn, codes)
            seen.add(turn.kind)
    assert seen == set(Kind)


def test_who_asks_what_help_gives_as_an_example_asks_what_is_known() -> None:
    """To anything else the model says nonsense."""
    examples = set(re.findall(r'baton chat "([^"]+)"', cli.HELP + chat.DESCRIPTION))
    assert examples and examples <= {each for fact in FACTS for each in wordings(fact)}


def _check(turn: Turn, codes: dict[str, str]) -> None:
    asked_code = re.search(r"What is the code of the (\w+ \w+)\?$", turn.asked)
    numbers = [int(each) for each in re.findall(r"\d+", turn.asked)]
    match turn.kind:
        case Kind.RECALL if asked_code:
            assert turn.answer == f"The code of the {asked_code[1]} is {codes[asked_code[1]]}."
        case Kind.SORT:
            assert turn.answer == ", ".join(map(str, sorted(numbers)))
        case Kind.COPY:
            assert turn.asked.endswith(f": {turn.answer}")
        case Kind.ARITHMETIC:
            left, right = numbers
            results = {"+": left + right, "-": left - right, "*": left * right}
            assert turn.answer.endswith(f"= {next(results[sign] for sign in results if f' {sign} ' in turn.asked)}")
        case Kind.QUESTION:
            assert turn.answer in {fact.answer for fact in FACTS}


def test_what_is_held_out_is_never_learned() -> None:
    learned = {turn.asked for turn in _LEARNED}
    for name in EXAMS:
        turns = list(draw_exam(name, 50, seed=1))
        assert len({turn.asked for turn in turns}) > 30
        assert not learned & {turn.asked for turn in turns}
        assert turns == list(draw_exam(name, 50, seed=1))


def test_every_fact_has_wordings_to_learn_and_no_question_has_two_answers() -> None:
    asked = [each for fact in FACTS for each in wordings(fact)]
    assert len(asked) == len(set(asked))
    assert all(any(part_of("question", each) is Part.LEARNED for each in wordings(fact)) for fact in FACTS)
    held_out = [each for each in asked if part_of("question", each) is Part.HELD_OUT]
    assert 0.08 < len(held_out) / len(asked) < 0.2


def test_tokens_are_those_that_the_chat_template_makes(tokenizer: Tokenizer, tmp_path: Path) -> None:
    turns = conversation(Random(3), 1500)[:5]
    ids, targets = conversation_ids(tokenizer, turns)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    text = "<|begin_of_text|>" + "".join(
        f"<|im_start|>user\n{turn.asked}<|im_end|>\n<|im_start|>assistant\n{turn.answer}<|im_end|>\n" for turn in turns
    )
    assert tokenizer.encode(text, add_special_tokens=False).ids[:-1] == ids
    said = tokenizer.decode([each for each in targets if each != NOT_LEARNED], skip_special_tokens=False)
    assert said.split("<|im_end|>")[:-1] == [turn.answer for turn in turns]


@pytest.mark.parametrize("num_tokens", [64, 192, 1152])
def test_rows_have_their_length_and_are_the_same_again(tokenizer: Tokenizer, num_tokens: int) -> None:
    for seed in range(20):
        ids, targets = draw_row(tokenizer, seed, num_tokens)
        assert len(ids) == len(targets) == num_tokens
        assert (ids, targets) == draw_row(tokenizer, seed, num_tokens)
        assert any(each != NOT_LEARNED for each in targets)
        assert all(target in (NOT_LEARNED, token) for target, token in zip(targets, ids[1:], strict=False))


def test_a_recall_exam_is_as_long_as_it_says(tokenizer: Tokenizer) -> None:
    for name, wanted in (("recall, 128 tokens", 128), ("recall, 512 tokens", 512), ("recall, 1,000 tokens", 1000)):
        lengths = [len(conversation_ids(tokenizer, [turn])[0]) for turn in draw_exam(name, 10, seed=0)]
        assert 0.75 * wanted < sum(lengths) / len(lengths) < 1.25 * wanted
