"""A model's folder whose chat template has tools. The demo model's own has none; a forced call needs no more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

_TOOL_USE: Final = (
    '{{ bos_token }}<|im_start|>system\nYou may call functions as <tool_call>{"name": ..., "arguments": ...}</tool_call>:'
    "{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}<|im_end|>\n"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def with_tools(model: Path, folder: Path) -> Path:
    """The model itself, if its template mentions tools; else a folder of its files with one more template, which does."""
    settings = json.loads((model / "tokenizer_config.json").read_text())
    own_file = model / "chat_template.jinja"
    own = own_file.read_text() if own_file.is_file() else settings.get("chat_template")
    if own is None or "tools" in json.dumps(own):
        return model
    folder.mkdir()
    for file in model.iterdir():
        if file.name not in ("tokenizer_config.json", "chat_template.jinja"):
            (folder / file.name).symlink_to(file)
    templates = own if isinstance(own, list) else [{"name": "default", "template": own}]
    templates.append({"name": "tool_use", "template": _TOOL_USE})
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": templates}))
    return folder
