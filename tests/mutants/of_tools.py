"""Bugs of what is made of a model's text besides text: tool calls and responses."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_TEXT: Final = ("tests/router/test_tool_text.py",)
_CALLS: Final = ("tests/router/test_tool_calls.py",)
_FORCED: Final = ("tests/router/test_forced_calls.py",)
_RESPONSES: Final = ("tests/router/test_responses.py",)
_STREAM: Final = ("tests/router/test_stream_equals_whole.py",)
_TEMPLATE: Final = ("tests/router/test_chat_template.py",)
_EITHER: Final = ("tests/router/test_either_grammar.py",)

MUTANTS: Final = (
    Mutant(
        "half-a-mark-is-content",
        "The beginning of a tool call's tag is shown before what follows decides it.",
        "router/tool_text.py",
        "until = at if at >= 0 else len(self._rest) - _begun(mark, self._rest)",
        "until = at if at >= 0 else len(self._rest)",
        _TEXT,
    ),
    Mutant(
        "what-looked-like-a-call-is-lost",
        "Text that looked like a call and is none loses its tag.",
        "router/tool_text.py",
        "        self._say(self._held[: self._mark_length])\n",
        "",
        _TEXT,
    ),
    Mutant(
        "any-object-is-a-call",
        "An answer in JSON that happens to have a name is taken for a call of a function that nobody offered.",
        "router/tool_text.py",
        "return not self._syntax.bare or scan.name in self._offered",
        "return True",
        _TEXT,
    ),
    Mutant(
        "a-call-may-begin-anywhere",
        "An object in the middle of a text is a call, if a piece of text happens to begin with it.",
        "router/tool_text.py",
        "            self._may_be_bare = False\n",
        "            self._may_be_bare = rest[0] != self._syntax.bare\n",
        _TEXT,
    ),
    Mutant(
        "control-characters-stay",
        "A line break within an argument's string makes the arguments no JSON.",
        "router/json_scan.py",
        "json.dumps(character)[1:-1] if is_control else character",
        "character",
        _TEXT,
    ),
    Mutant(
        "resubmission-reads-a-call-from-its-middle",
        "What goes on behind a call that was begun does not know of it.",
        "router/tool_calls.py",
        "        self.push(text_before)\n",
        "",
        _CALLS,
    ),
    Mutant(
        "handed-up-half-calls-are-content",
        "A choice that is handed up in the middle of a tag shows it, and its resubmission shows it again.",
        "router/tool_answers.py",
        "finish_reason in (None, RESCHEDULED)",
        "finish_reason is None",
        _CALLS,
    ),
    Mutant(
        "calls-share-an-id",
        "The calls of a choice have one id.",
        "router/tool_syntax.py",
        "{seed} {prompt_digest} {index}",
        "{seed} {prompt_digest}",
        _CALLS,
    ),
    Mutant(
        "a-mark-has-no-text",
        "A special token that begins a call is skipped, as special tokens are.",
        "router/choice_text.py",
        "if token_id in self._rules.spelled:",
        "if False:",
        _CALLS,
    ),
    Mutant(
        "definitions-get-mixed-up",
        "The arguments of one function must fit a definition of another.",
        "router/forced_calls.py",
        'moved[key] = f"#/$defs/{number}"',
        'moved[key] = "#/$defs/0"',
        _FORCED,
    ),
    Mutant(
        "an-item-is-never-done",
        "A message that a call follows stays open in the stream of a response.",
        "router/responses_answers.py",
        '            events += self._close("completed")\n            call_id',
        "            call_id",
        _RESPONSES,
    ),
    Mutant(
        "cut-off-is-complete",
        "A response that max_output_tokens cuts off says that it is complete.",
        "router/responses_answers.py",
        '_COMPLETE: Final = ("stop", "tool_calls")',
        '_COMPLETE: Final = ("stop", "tool_calls", "length")',
        _RESPONSES,
    ),
    Mutant(
        "tools-that-are-not-there-are-not-null",
        "A template that asks whether tools are none, as it may with transformers, writes of tools where there are none.",
        "router/chat_template.py",
        '{"documents": None, **kwargs, "tools": tools or None, **_now(), **more}',
        '{**kwargs, **({"tools": tools} if tools else {}), **_now(), **more}',
        _TEMPLATE,
    ),
    Mutant(
        "template-hears-nothing-of-the-client",
        "What a client tells the chat template besides the conversation, that the model is not to think, is dropped in silence.",
        "router/chat_template.py",
        '{"documents": None, **kwargs, "tools"',
        '{"documents": None, "tools"',
        _TEMPLATE,
    ),
    Mutant(
        "client-tells-the-template-of-other-tools",
        "What a client tells the chat template besides may name the tools, or the special tokens, that the request has already.",
        "router/chat_types.py",
        "if taken := sorted(TOLD_BY_OTHERS & kwargs.keys()):",
        "if taken := list[str]():",
        ("tests/router/test_tokenizing.py",),
    ),
    Mutant(
        "trainers-tag-is-unknown",
        "A model whose chat template marks what an assistant said for its training is not served.",
        "router/chat_template.py",
        "extensions=[_Generation, loopcontrols]",
        "extensions=[loopcontrols]",
        _TEMPLATE,
    ),
    Mutant(
        "nothing-was-cached",
        "A response's usage says that nothing of the prompt was cached, whatever nodes tell.",
        "router/answer.py",
        "piece.num_cached = self.num_cached or 0",
        "piece.num_cached = 0",
        _RESPONSES,
    ),
    Mutant(
        "a-retry-tells-what-was-cached",
        "What an attempt has left in a cache counts as cached for the request's next attempt.",
        "router/answer.py",
        "if choice.num_cached is None:",
        "if True:",
        _RESPONSES,
    ),
    Mutant(
        "whatever-is-repeated-is-taken",
        "A response repeats megabytes of metadata thrice, and everybody's streams wait while they are written.",
        "router/openai_types.py",
        "if len(text) > MAX_METADATA_TEXT:",
        "if len(text) > MAX_METADATA_TEXT << 20:",
        _RESPONSES,
    ),
    Mutant(
        "deep-notes-are-taken",
        "A schema's notes may be nested so deep that they can be read, and an answer that repeats them cannot be written.",
        "router/structured.py",
        "if depth > MAX_JSON_DEPTH:",
        "if depth > 10 * MAX_JSON_DEPTH:",
        _RESPONSES,
    ),
    Mutant(
        "whoever-speaks-first-opens-the-stream",
        "A chat's stream of several choices begins with the one that happens to speak first, which breaks OpenAI's client.",
        "router/openai_answers.py",
        "self._is_opened = not form.opens_choices or len(self._choices) == 1",
        "self._is_opened = True",
        _STREAM,
    ),
    Mutant(
        "a-long-call-is-read-at-the-end",
        "A whole answer's text is taken apart when all of it is there, and everybody else waits.",
        "router/openai_answers.py",
        "            choice.told += told_of(choice.calls, piece.text, piece.finish_reason)\n",
        "            choice.texts.append(piece.text)\n"
        "            if piece.finish_reason is not None:\n"
        '                choice.told = told_of(choice.calls, "".join(choice.texts), piece.finish_reason)\n',
        ("tests/router/test_answers.py",),
    ),
    Mutant(
        "mark-within-an-answer",
        "An answer that fits its format, and speaks of <tool_call> in a string, loses that part to a call.",
        "router/tool_calls.py",
        "            self._is_answer = not opening.lstrip().startswith(mark)\n",
        "",
        _EITHER,
    ),
    Mutant(
        "said-before-it-is-decided",
        "The beginning of a mark is told as content.",
        "router/tool_calls.py",
        "            if mark.startswith(opening.lstrip()):",
        "            if mark == opening:",
        _EITHER,
    ),
    Mutant(
        "one-call-is-many",
        "Beside a format parallel_tool_calls: false lets more than one call come.",
        "router/either_grammar.py",
        "    if not body.parallel_tool_calls:",
        "    if False:",
        _EITHER,
    ),
    Mutant(
        "no-grammar-can-name-a-special-token",
        "A special token's bit is always out, so that a model whose mark is one can call nothing beside a format.",
        "engine/grammars.py",
        "        is_text[[token_id for token_id in special if token_id < len(spelled)]] = True\n",
        "",
        _EITHER,
    ),
)
