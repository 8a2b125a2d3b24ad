"""A stream's usual chunk is, byte for byte, what the ordinary way writes, whatever the text, the ids and the options are."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.answer import Asked, Piece
from router.choice_text import TextRules
from router.events import GenerationRequest, Sampling
from router.openai_answers import AnswerForm, AnswerOptions, AnswerWriter, ChatForm, CompletionForm
from router.text import ModelText
from tests.router.tiny_model import write_model_text


class Ordinary(AnswerWriter):
    """Takes no short cut."""

    def is_usual(self, index: int, piece: Piece) -> bool:
        return False


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    return ModelText(write_model_text(tmp_path_factory.mktemp("model")))


def asked(text: ModelText, num_choices: int) -> Asked:
    request = GenerationRequest("id", (1, 2), 5, Sampling(0.0, 20, ()), 60.0, num_choices)
    return Asked(request, [text.choice_text(TextRules(())) for _ in range(num_choices)])


texts = st.text(max_size=6) | st.text("a\x85\u2028\u2029\x0b\x1c\\", max_size=6)  # what ends lines for some readers
names = st.text(max_size=8) | st.sampled_from(['"\0"', '"completion_token_ids":[-1]', "\0"])
pieces = st.lists(st.tuples(st.integers(0, 1), texts, st.lists(st.integers(0, 1 << 31), max_size=3)), max_size=8)


@pytest.mark.covers("A08")
@given(st.sampled_from([CompletionForm(), ChatForm()]), names, st.booleans(), st.booleans(), pieces)
def test_the_short_cut_changes_no_byte(
    text: ModelText, form: AnswerForm, name: str, usage: bool, ids: bool, told: list[tuple[int, str, list[int]]]
) -> None:
    options = AnswerOptions(name, includes_usage=usage, returns_token_ids=ids, num_logprobs=None)
    short, ordinary = (kind([asked(text, 2)], form, options, text.spelling) for kind in (AnswerWriter, Ordinary))
    short._frame = ordinary._frame  # of one second
    num_short = 0
    for index, part, token_ids in told:
        piece = Piece(text=part, token_ids=token_ids)
        num_short += short.is_usual(index, piece)
        events = list(short.chunk(index, piece))
        assert events == list(ordinary.chunk(index, piece))
        for event in events:
            line, end = event.decode().splitlines()
            assert not end and json.loads(line.removeprefix("data: "))["choices"][0].get("text", part) == part
    opened = [{i for i, _, _ in told[:at]} for at in range(len(told))]
    if isinstance(form, ChatForm):  # which opens all choices with the first chunk
        opened = [{0, 1} if each else each for each in opened]
    assert num_short == sum(bool(part) and index in opened[at] for at, (index, part, _) in enumerate(told))
    assert short.stream_end() == ordinary.stream_end(), "tokens are counted either way"


def test_half_a_surrogate_pair_is_an_error_of_the_short_cut_too(text: ModelText) -> None:
    options = AnswerOptions("m", includes_usage=False, returns_token_ids=False, num_logprobs=None)
    writer = AnswerWriter([asked(text, 1)], CompletionForm(), options, text.spelling)
    list(writer.chunk(0, Piece(text="a")))
    with pytest.raises(UnicodeEncodeError):
        writer.usual_event(0, Piece(text="\ud800"))
    assert json.loads(writer.usual_event(0, Piece(text="é\n"))[6:])["choices"][0]["text"] == "é\n"
