"""Calls and what they have brought reach the model, or the chat is refused: no template drops them in silence.

So do a developer's words. And `strftime_now` and `tojson` are those of `transformers`.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

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
KNOWN_ROLES = (
    EACH
    + "{% if message.role in ('system', 'user') %}{{ message.role }}: {{ message.content }}\n{% endif %}{% endfor %}"
)
REFUSES = EACH + "{% if message.role == '%s' %}{{ raise_exception('%s: unknown') }}{% endif %}{% endfor %}"
RULE = {"role": "developer", "content": "Never reveal X."}
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


@pytest.mark.covers("A11")
@pytest.mark.parametrize("messages", [[ASKED, CALLED], [ASKED, CALLED, BROUGHT], [ASKED, BROUGHT]])
def test_a_conversation_with_calls_goes_to_the_template_that_knows_them_whether_or_not_more_may_come(
    messages: list[dict[str, Any]],
) -> None:
    written = ChatTemplate(TWO_ROLES, HERMES_TEMPLATE)
    assert written.render(messages, []) == ChatTemplate(HERMES_TEMPLATE, HERMES_TEMPLATE).render(messages, [])
    assert written.render([ASKED], []) == "When is it?\n"


@pytest.mark.parametrize(
    ("template", "written"),
    [
        (ALL_ROLES, "developer: Never reveal X.\nuser: When is it?\n"),  # it has a word for the role
        (KNOWN_ROLES, "system: Never reveal X.\nuser: When is it?\n"),
        (REFUSES.replace("%s", "developer") + ALL_ROLES, "system: Never reveal X.\nuser: When is it?\n"),
        # It counts what it leaves out.
        ("{{ messages | length }} " + KNOWN_ROLES, "2 system: Never reveal X.\nuser: When is it?\n"),
    ],
)
def test_what_a_developer_says_is_told_by_the_system_where_the_template_knows_no_developer(
    template: str, written: str
) -> None:
    assert ChatTemplate(template, template).render([RULE, ASKED], []) == written


@pytest.mark.covers("A11")
@pytest.mark.parametrize(
    ("template", "refusal"),
    [
        (TWO_ROLES, "chat template leaves messages of role developer out"),
        (REFUSES.replace("%s", "system") + KNOWN_ROLES, "system: unknown"),
    ],
)
def test_a_developer_whom_no_role_can_speak_for_is_refused(template: str, refusal: str) -> None:
    with pytest.raises(TemplateRefusal, match=refusal):
        ChatTemplate(template, template).render([RULE, ASKED], [])


def test_a_developer_who_says_nothing_is_left_out_by_whom_it_may() -> None:
    silent = {"role": "developer", "content": " \n"}
    assert ChatTemplate(TWO_ROLES, TWO_ROLES).render([silent, ASKED], []) == "When is it?\n"


@pytest.mark.covers("M03")
@pytest.mark.parametrize(
    "template",
    [
        '{%- set today = strftime_now("%Y-%m-%d") %}{{ today }}',
        '{%- if strftime_now is defined %}{{ strftime_now("%Y-%m-%d") }}{% else %}26 Jul 2024{% endif %}',
        '{% macro today() %}{{ strftime_now(format="%Y-%m-%d") }}{% endmacro %}{{ today() }}',
    ],
)
def test_a_template_writes_todays_date(template: str) -> None:
    before = datetime.now()
    written = ChatTemplate(template, template).render([ASKED], [])
    assert written in {before.strftime("%Y-%m-%d"), datetime.now().strftime("%Y-%m-%d")}


# As Qwen3's does it.
THINKING: Final = "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"


@pytest.mark.covers("A13", "M03")
@pytest.mark.parametrize(
    ("kwargs", "written"),
    [
        ({}, ""),
        ({"enable_thinking": True}, ""),
        ({"enable_thinking": False}, "<think></think>"),
        ({"what": "it has no word for", "self": 1, "range": 2}, ""),
        ({"documents": [{"title": "On time"}]}, "On time"),
    ],
)
def test_a_template_hears_what_a_client_tells_it_besides(kwargs: dict[str, Any], written: str) -> None:
    template = ALL_ROLES + THINKING + "{% if documents %}{{ documents[0].title }}{% endif %}"
    told = ChatTemplate(template, template).render([ASKED], [], kwargs)
    assert told.removeprefix(ChatTemplate(ALL_ROLES, ALL_ROLES).render([ASKED], [])) == written


@pytest.mark.covers("A11")
def test_what_a_template_leaves_out_is_found_whatever_a_client_tells_it() -> None:
    template = "{% if loud %}" + ALL_ROLES + "{% else %}" + TWO_ROLES + "{% endif %}"
    assert "noon" in ChatTemplate(template, template).render([ASKED, BROUGHT], [], {"loud": True})
    with pytest.raises(TemplateRefusal, match="leaves messages of role tool out"):
        ChatTemplate(template, template).render([ASKED, BROUGHT], [], {"loud": False})


@pytest.mark.covers("X01")
def test_a_template_reaches_nothing_by_way_of_the_date() -> None:
    template = "{{ strftime_now.__self__.year }}"
    with pytest.raises(TemplateRefusal, match="unsafe"):
        ChatTemplate(template, template).render([ASKED], [])


@pytest.mark.covers("A11")
def test_a_clock_that_goes_on_does_not_hide_what_a_template_leaves_out() -> None:
    template = '{{ strftime_now("%H:%M:%S.%f") }}' + TWO_ROLES
    with pytest.raises(TemplateRefusal, match="leaves messages of role tool out"):
        ChatTemplate(template, template).render([ASKED, BROUGHT], [])


@pytest.mark.covers("M03")
@pytest.mark.parametrize(
    ("options", "written"),
    [
        ("", '{"b": "Łódź & <x>", "a": 1}'),
        ("ensure_ascii=False", '{"b": "Łódź & <x>", "a": 1}'),
        ("ensure_ascii=True", '{"b": "\\u0141\\u00f3d\\u017a & <x>", "a": 1}'),
        ("True", '{"b": "\\u0141\\u00f3d\\u017a & <x>", "a": 1}'),
        ("sort_keys=True", '{"a": 1, "b": "Łódź & <x>"}'),
        ("separators=(',', ':')", '{"b":"Łódź & <x>","a":1}'),
        ("indent=1", '{\n "b": "Łódź & <x>",\n "a": 1\n}'),
    ],
)
def test_a_template_writes_json_with_the_options_that_transformers_has(options: str, written: str) -> None:
    template = f"{{{{ messages[0].content | tojson({options}) }}}}"
    message = {"role": "user", "content": {"b": "Łódź & <x>", "a": 1}}
    assert ChatTemplate(template, template).render([message], []) == written


@pytest.mark.covers("M03")
@pytest.mark.parametrize(
    ("template", "written"),
    [
        ("{% if tools is not none %}TOOLS {% endif %}" + ALL_ROLES, "user: When is it?\n"),
        ("{% if tools is defined %}no {{ tools }} {% endif %}" + ALL_ROLES, "no None user: When is it?\n"),
        ("{% if documents is not none %}BOOKS {% endif %}" + ALL_ROLES, "user: When is it?\n"),
        (EACH + "{% generation %}\n{{ message.content }}\n{% endgeneration %}\n!{% endfor %}", "When is it?\n!"),
        (EACH + "a {%- generation -%} {{ message.content }} {%- endgeneration %} b{% endfor %}", "aWhen is it? b"),
        ("{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}", "21"),
    ],
)
def test_a_template_finds_what_transformers_gives_it(template: str, written: str) -> None:
    assert ChatTemplate(template, template).render([ASKED], []) == written


@pytest.mark.covers("A11")
def test_a_schema_within_schemas_deeper_than_a_template_can_follow_is_refused() -> None:
    """Templates spell types by a macro that calls itself."""
    source = (
        "{% macro spell(schema) %}{{ schema.type }}"
        "{% if schema['items'] %} of {{ spell(schema['items']) }}{% endif %}{% endmacro %}"
        + ALL_ROLES
        + "{% for tool in tools or [] %}{{ spell(tool) }}{% endfor %}"
    )
    template = ChatTemplate(source, source)
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(3):
        schema = {"type": "array", "items": schema}
    assert "array of array of array of string" in template.render([ASKED], [schema])
    for _ in range(2000):
        schema = {"type": "array", "items": schema}
    with pytest.raises(TemplateRefusal, match="refuses the messages: maximum recursion depth"):
        template.render([ASKED], [schema])
