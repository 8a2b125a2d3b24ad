"""`continue_final_message` and `add_generation_prompt`, as transformers has them: where a prompt ends, and who may not ask."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from proto import baton_pb2 as pb
from router.chat_template import ChatTemplate, TemplateRefusal
from router.text import ModelText
from tests.router.live_router import LiveRouter
from tests.router.scripted_nodes import replying
from tests.router.test_api import events, play
from tests.router.test_histories import QWEN
from tests.router.tiny_model import write_model_text

CHAT: Final = "/v1/chat/completions"
EACH: Final = "{% for message in messages %}"
PROMPT: Final = "{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
PLAIN: Final = EACH + "<s>{{ message.role }}\n{{ message.content }}</s>\n" + PROMPT
TRIMS: Final = EACH + "<s>{{ message.role }}\n{{ message.content | trim }}</s>\n" + PROMPT
CLOCK: Final = "{{ strftime_now('%H:%M:%S.%f') }}" + PLAIN
ASKED: Final = {"role": "user", "content": "Say Yes, assistant"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_text(tmp_path_factory.mktemp("model"))


def begun(text: str) -> list[Any]:
    """A conversation whose last message is to go on."""
    return [ASKED, {"role": "assistant", "content": text}]


@pytest.mark.parametrize(
    ("template", "text", "end"),
    [
        (PLAIN, "Yes", "<s>assistant\nYes"),
        (PLAIN, "Yes ", "<s>assistant\nYes "),
        (PLAIN, " Yes, \n", "<s>assistant\n Yes, \n"),
        (TRIMS, " Yes \n", "<s>assistant\nYes"),
        # What stands behind it has the same words, and a search for the last of them would find those.
        (PLAIN, "s", "<s>assistant\ns"),
        (PLAIN, "</s>", "<s>assistant\n</s>"),
        (PLAIN, "", "<s>assistant\n"),
        (PLAIN, "\ue0000\ue001", "<s>assistant\n\ue0000\ue001"),
        (QWEN, "Yes", "<think></think>Yes"),
        (QWEN, "<think>Hm", "<think></think><think>Hm"),
        (QWEN, "<think>Hm</think>Yes", "<think>Hm</think>Yes"),
    ],
)
def test_the_prompt_ends_right_behind_the_last_messages_text(template: str, text: str, end: str) -> None:
    before = "user:Say Yes, assistant|" if template is QWEN else "<s>user\nSay Yes, assistant</s>\n"
    assert ChatTemplate(template, template).render_open(begun(text), []) == before + end


@pytest.mark.parametrize("template", [PLAIN, TRIMS, QWEN])
@pytest.mark.parametrize("text", ["Yes", "Yes ", " No, never.\n", "a\n\nb", "Yes, assistant"])
def test_it_is_where_transformers_has_it(template: str, text: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    theirs, _ = render_jinja_template([begun(text)], chat_template=template, continue_final_message=True)
    assert ChatTemplate(template, template).render_open(begun(text), []) == theirs[0]


def test_a_template_that_writes_the_time_is_written_at_one_instant() -> None:
    assert ChatTemplate(CLOCK, CLOCK).render_open(begun("Yes"), []).endswith("<s>assistant\nYes")


@pytest.mark.covers("A11")
@pytest.mark.parametrize(
    "template",
    [
        EACH + "{{ message.content | upper }}{% endfor %}{{ messages | length }}",  # of a mark it changes nothing
        EACH + "{{ message.content | length }}{% endfor %}",
        EACH + "{{ message.content }}{{ message.content }}{% endfor %}",
        EACH + "{{ message.content[::-1] }}{% endfor %}",
        "{{ messages[0].content }}",
    ],
)
def test_a_template_that_writes_something_else_is_refused(template: str) -> None:
    written = ChatTemplate(template, template)
    if "upper" in template:
        assert written.render_open(begun("Yes"), []) == "SAY YES, ASSISTANTYES"
        return
    with pytest.raises(TemplateRefusal, match="does not write the last message as it is, to go on behind it"):
        written.render_open(begun("Yes"), [])


@pytest.mark.covers("A01", "A13")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("asked", "end"),
    [
        ({"continue_final_message": True}, "assistant: He"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "assistant: He"),
        ({"add_generation_prompt": False}, "assistant: He<turn>"),
        ({"add_generation_prompt": True}, "assistant: He<turn>assistant: "),
        ({"continue_final_message": False, "add_generation_prompt": None}, "assistant: He<turn>assistant: "),
    ],
)
def test_a_chat_goes_on_where_it_is_asked_to_and_says_what_is_new(
    model: Path, asked: dict[str, Any], end: str, stream: bool
) -> None:
    async def scenario(router: LiveRouter) -> None:
        answer = await router.post(CHAT, messages=begun("He"), stream=stream, **asked)
        (dispatch,) = router.pair.prefill.dispatches
        written = ModelText(model).decode(dispatch.prompt_token_ids, skip_special_tokens=False)
        assert written == f"<s>user: Say Yes, assistant<turn>{end}"
        if stream:
            deltas = [chunk["choices"][0]["delta"] for chunk in events(answer.text)[:-1]]
            assert "".join(each.get("content", "") for each in deltas) == "llo"
        else:
            assert answer.json()["choices"][0]["message"]["content"] == "llo"
        tokens = await router.post("/tokenize", messages=begun("He"), **asked)
        assert tokens.json()["tokens"] == list(dispatch.prompt_token_ids)

    play(model, scenario, replying(b"llo", pb.FINISH_STOP))


CALLED: Final = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": {"name": "f"}}]}
BAD: Final[list[tuple[dict[str, Any], str]]] = [
    ({"messages": [ASKED]}, "needs messages of which the last one is an assistant's, not one of role user"),
    ({"messages": begun("x"), "add_generation_prompt": True}, "contradicts add_generation_prompt"),
    ({"messages": [ASKED, CALLED]}, "the last message has tool_calls, behind which its text cannot go on"),
]


@pytest.mark.covers("A11", "A13")
@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_what_cannot_go_on_is_one_sentence(model: Path, path: str) -> None:
    async def scenario(router: LiveRouter) -> None:
        for fields, words in BAD:
            error = (await router.post(path, continue_final_message=True, **fields)).json()["error"]
            assert (error["param"], words in error["message"]) == ("continue_final_message", True), error
        assert not router.pair.prefill.dispatches

    play(model, scenario)
