"""The tiny model with chat templates that have tools, and what it would write."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer

from tests.router.tiny_model import write_model_text

HERMES_TEMPLATE: Final = (
    "{% if tools %}In <tool_call>: {% for tool in tools %}{{ tool | tojson }}{% endfor %}<turn>{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% if message.tool_call_id %}({{ message.tool_call_id }}){% endif %}<turn>{% endfor %}assistant: "
)
MISTRAL_TEMPLATE: Final = "{{ tools | length if tools }}[TOOL_CALLS]{{ messages[-1].content }}"
MARK_ID: Final = 261

CITY: Final[dict[str, Any]] = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER: Final[dict[str, Any]] = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
NOW: Final[dict[str, Any]] = {"type": "function", "function": {"name": "now"}}
CALL: Final = '<tool_call>\n{"name": "weather", "arguments": {"city": "Łódź"}}\n</tool_call>'
CALL_NOW: Final = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'


def write_tool_model(directory: Path, template: str = HERMES_TEMPLATE) -> Path:
    """Write the model directory; its tokenizer takes Mistral's mark for a special token."""
    write_model_text(directory)
    (directory / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True)])
    assert tokenizer.token_to_id("[TOOL_CALLS]") == MARK_ID
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory
