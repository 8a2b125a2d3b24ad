"""How models write tool calls: what the families have in common, and which one a chat template belongs to. Pure.

    hermes   <tool_call>{"name": …, "arguments": {…}}</tool_call>              Hermes, Qwen, and many that follow them
    llama    {"name": …, "parameters": {…}}; {…}                               Llama 3.1 and later; with or without <|python_tag|>
    mistral  [TOOL_CALLS][{"name": …, "arguments": {…}}, …]                    Mistral
             [TOOL_CALLS]name[ARGS]{…}                                         … and its newer ones
    list     [{"name": …, "parameters": {…}}, …]                               what constrained decoding makes a model write

Sources: the models' own chat templates; the parsers of vLLM (docs/features/tool_calling.md).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

_SHORT_ID: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """How a family writes a call."""

    mark: str = ""  # stands before a call
    closes: str = ""  # stands behind it
    bare: str = ""  # what a text that is calls and nothing else may begin with instead of the mark
    is_list: bool = False  # behind the mark there may be several, as a JSON array
    is_named: bool = False  # or a name, and its arguments behind it
    argument_keys: Sequence[str] = ("arguments", "parameters")
    has_short_ids: bool = False  # of 9 letters and digits: templates insist
    tokens: Sequence[str] = ()  # that are text in an answer with tools, though a tokenizer may call them special


HERMES: Final = ToolSyntax("<tool_call>", "</tool_call>", tokens=("<tool_call>", "</tool_call>"))
LLAMA: Final = ToolSyntax("<|python_tag|>", bare="{", tokens=("<|python_tag|>",))
MISTRAL: Final = ToolSyntax(
    "[TOOL_CALLS]",
    is_list=True,
    is_named=True,
    has_short_ids=True,
    tokens=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
)
LIST: Final = ToolSyntax(bare="[", is_list=True)

SYNTAXES: Final[Mapping[str, ToolSyntax]] = {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL}


def syntax_of(template: str) -> ToolSyntax | None:
    """The syntax that a chat template teaches; None: none that is known here."""
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<tool_call>" in template:  # Qwen3-Coder and others write XML between the tags
        return None if "<function=" in template or "<arg_key>" in template else HERMES
    if "<|python_tag|>" in template or '{"name": function name, "parameters":' in template:
        return LLAMA
    return None


def digest_of(prompt_token_ids: Sequence[int]) -> str:
    """What a prompt's calls are named by."""
    return hashlib.sha256(",".join(map(str, prompt_token_ids)).encode("ascii")).hexdigest()


def call_id(seed: int, prompt_digest: str, index: int, *, is_short: bool) -> str:
    """The id of a choice's call: the same for whoever asks for the same choice again, and another for any other."""
    digest = hashlib.sha256(f"baton call {seed} {prompt_digest} {index}".encode("ascii")).digest()
    if is_short:
        return "".join(_SHORT_ID[byte % len(_SHORT_ID)] for byte in digest[:9])
    return f"call_{digest[:12].hex()}"
