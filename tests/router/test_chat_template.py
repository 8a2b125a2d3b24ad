"""Calls and what they have brought reach the model, or the chat is refused: no template drops them in silence."""

from __future__ import annotations

from typing import Any

import pytest

from router.chat_template import ChatTemplate, TemplateRefusal
from tests.router.tool_model import HERMES_TEMPLATE

CALL = {"id": "c", "type": "function", "function": {"name": "now", "arguments": {}}}
ASKED = {"role": "user", "content": "When is it?"}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
BROUGHT = {"role": "tool", "content": "noon", "tool_call_id": "c"}
EACH = "{% for message in messages %}"
ALL_ROLES = EACH + "{{ message.role }}: {{ message.content }}\n{% endfor %}"
TWO_ROLES = EACH + "{% if message.role in ('user', 'assistant') %}{{ message.content }}\n{% endif %}{% endfor %}"
STRICT = "{% if messages[-1].role == 'tool' and not messages[-2].tool_calls %}{{ raise_exception('alone') }}{% endif %}"


@pytest.mark.covers("A11")
@pytest.mark.parametrize(
    ("template", "messages", "left_out"),
    [
        (HERMES_TEMPLATE, [ASKED, CALLED, BROUGHT], None),
        (ALL_ROLES, [ASKED], None),
        (ALL_ROLES, [ASKED, BROUGHT], None),
        (ALL_ROLES, [ASKED, CALLED], "tool_calls"),
        (ALL_ROLES, [ASKED, CALLED, BROUGHT], "tool_calls"),
        (TWO_ROLES, [ASKED, BROUGHT], "messages of role tool"),
        (STRICT + HERMES_TEMPLATE, [ASKED, CALLED, BROUGHT], None),
    ],
)
def test_a_template_that_leaves_calls_out_is_not_asked_to_write_them(
    template: str, messages: list[dict[str, Any]], left_out: str | None
) -> None:
    written = ChatTemplate(template, template)
    if left_out is None:
        assert "When is it?" in written.render(messages, [])
    else:
        with pytest.raises(TemplateRefusal, match=f"chat template leaves {left_out} out"):
            written.render(messages, [])
