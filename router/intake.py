"""From a checked body to requests in tokens: checks that need several fields, the model, or the nodes. Raises ApiError.

A list of prompts becomes that many requests, each drawn for as if it had been sent alone: with the seed given, or one of its
own. `max_tokens` 0 with `echo`, which scores a prompt, generates one token that is dropped.

Defaults: of sampling what the model's generation_config.json says, else OpenAI's. `max_tokens` is 16 for completions and, for
chat, whatever the model's length leaves. Decode nodes reserve that length in full as long as nothing can be preempted, so
clients that name a max_tokens share a node with more others.

A resubmission whose tokens are a whole completion is no error: who was cut off does not know whether more was to come. It is
answered with what its text still lacks, and no node hears of it.
"""

from __future__ import annotations

import asyncio
import functools
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar, TypeVarTuple

from proto.bounds import MAX_PROMPT_LOGPROBS
from router.answer import Asked, Echo
from router.answer_grammar import answer_grammar, is_bound
from router.chat_template import TemplateRefusal
from router.chat_types import ChatBody, Message
from router.choice_text import ChoiceText, TextRules
from router.events import GenerationRequest, Grammar, Sampling
from router.json_reading import LARGE
from router.max_tokens import chat_max_tokens, completion_max_tokens
from router.openai_types import IDS_AT_ONCE, ApiError, CompletionBody, bad_request, prompts_of, unknown_model
from router.seeds import SEED_BITS
from router.shell import RouterShell
from router.stop_strings import Stops
from router.text import ModelText, TextTooLong
from router.text_turns import TextTurns
from router.thinking import ReasoningParser, thinking_of
from router.thought_text import TAGS, Thinking
from router.tool_calls import AUTOMATIC, ToolUse, tool_use_of
from router.wrong_values import NO_CHARACTER, shown

MAX_CHOICES: Final = 1024  # of one HTTP answer: prompts times n
_DEFAULT_COMPLETION_TOKENS: Final = 16  # OpenAI's
TEXT_COST: Final = 16  # bytes of JSON are read in as long as one of a prompt is tokenized
_GRAMMAR_COST: Final = 64  # bytes of a prompt take as long as one of a grammar: its characters are looked at one by one
_TURN_COST: Final = 2 << 10  # of a conversation's turn or call, however short: a template writes it in Python
_turns: Final = TextTurns()
_LEAST_SHARE: Final = 1e-6  # what is closer to 0 means the same, and 0 itself would switch the parameter off

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


@dataclass(frozen=True, slots=True)
class _Prompt:
    """One prompt of a body."""

    field: str  # what errors call it
    token_ids: Sequence[int]
    text: str | None  # as the client wrote it


@dataclass(frozen=True, slots=True)
class IntakeLimits:
    """What the operator lets a request ask for."""

    request_timeout_s: float
    max_prompt_tokens: int | None
    max_n: int
    tool_parser: str = AUTOMATIC
    reasoning_parser: ReasoningParser = "auto"


class _Reading(NamedTuple):
    """What of an answer's text is more than text."""

    tools: ToolUse | None
    thinking: Thinking | None


class Intake:
    """Turns bodies into requests, over one model's text and what the nodes can hold."""

    def __init__(self, shell: RouterShell, text: ModelText, model_name: str, limits: IntakeLimits) -> None:
        self._shell = shell
        self._text = text
        self._model_name = model_name
        self._limits = limits

    async def asked(self, body: CompletionBody | ChatBody, arrived_at: float, num_bytes: int) -> list[Asked]:
        """The requests of a body of so many bytes, one per prompt."""
        if body.model != self._model_name:
            raise unknown_model(body.model, self._model_name)
        if body.n > self._limits.max_n:
            raise bad_request("n", f"must be less than or equal to {self._limits.max_n}, not {shown(body.n)}")
        body = body.with_defaults(self._text.sampling_defaults)
        field = "max_tokens"
        tools: ToolUse | None = None
        if isinstance(body, ChatBody):
            tools = tool_use_of(body, self._text.tool_template, self._limits.tool_parser)
            field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
            max_tokens = chat_max_tokens(body)
            size, takes = size_of_chat(num_bytes, body.messages), TEXT_COST * num_bytes
            prompts = [await off_loop(size, self._chat_prompt, body, self._most_tokens(), takes=takes)]
        else:
            max_tokens = completion_max_tokens(body)
            takes = TEXT_COST * num_bytes
            prompts = await off_loop(num_bytes, self._completion_prompts, body, self._most_tokens(), takes=takes)
        _check_resubmission(body, len(prompts))
        if self._shell.max_total_tokens is None:
            message = f"No nodes to serve the request: {', '.join(self._shell.missing())}."
            raise ApiError(503, message, code="NO_NODES", retry_after_s=1.0)
        if len(prompts) > (most := self._shell.most_prompts(body.n)):
            message = (
                f"{len(prompts)} prompts with n = {body.n} never find room at once: at most {most} do (--max-queue)"
            )
            raise bad_request("prompt", message)
        stop_token_ids, logit_bias = self._stop_token_ids(body), self._logit_bias(body)
        size = _GRAMMAR_COST * num_bytes if is_bound(body) else 0
        thinking = self._thinking(body, prompts[0])
        grammar = await off_loop(size, answer_grammar, body, tools, thinking, self._text)
        if thinking is Thinking.MAYBE and grammar is not None:
            thinking = None  # it begins with the first token
        stops = Stops(body.stop)
        timeout_s = min(self._limits.request_timeout_s, body.timeout_s or math.inf)
        asked = list[Asked]()
        for prompt in prompts:
            if asked:
                await asyncio.sleep(0)  # one may take a millisecond, and a thousand a second
            self._check_length(prompt)
            fitting = self._fitting_max_tokens(prompt, field, max_tokens, self._shell.max_total_tokens)
            if max_tokens is None and isinstance(body, CompletionBody):
                fitting = min(fitting, _DEFAULT_COMPLETION_TOKENS)
            sampling = _sampling(body, fitting, stop_token_ids, logit_bias, grammar)
            _check_prompt_logprobs(sampling, len(prompt.token_ids), body.n)
            size = 16 * len(body.generated_token_ids)
            generated = await off_loop(size, self._generated_token_ids, body, sampling)
            request = GenerationRequest(
                request_id=secrets.token_hex(12),
                prompt_token_ids=tuple(prompt.token_ids),
                seed=secrets.randbits(SEED_BITS) if body.seed is None else body.seed,
                sampling=sampling,
                deadline=arrived_at + timeout_s,
                num_choices=body.n,
                generated_token_ids=generated,
            )
            reading = _Reading(tools, thinking)
            asked.append(await self._with_text(body, prompt, request, stops, reading, num_bytes))
        return asked

    # ---------------------------------------------------------------- prompts

    def _chat_prompt(self, body: ChatBody, most_tokens: int | None) -> _Prompt:
        messages = [message.for_template() for message in body.messages]
        tools = [] if body.tool_choice == "none" else [tool.for_template() for tool in body.tools]
        try:
            token_ids = self._text.encode_chat(
                messages,
                tools,
                body.chat_template_kwargs,
                add_generation_prompt=body.add_generation_prompt is not False,
                continues=body.continue_final_message,
                most_tokens=most_tokens,
            )
            return _Prompt("messages", self._known("messages", token_ids), None)
        except TemplateRefusal as refusal:
            raise bad_request("messages", str(refusal)) from refusal
        except TextTooLong as error:
            raise _too_long("messages", error, most_tokens) from None
        except UnicodeError as error:
            raise bad_request("messages", NO_CHARACTER) from error

    def _completion_prompts(self, body: CompletionBody, most_tokens: int | None) -> list[_Prompt]:
        given = prompts_of(body.prompt)
        if len(given) * body.n > MAX_CHOICES:
            message = f"{len(given)} prompts with n = {body.n} are more than the {MAX_CHOICES} choices of an answer"
            raise bad_request("prompt", message)
        is_list = isinstance(body.prompt, list) and not isinstance(body.prompt[0], int)
        prompts = []
        for position, each in enumerate(given):
            field = f"prompt.{position}" if is_list else "prompt"
            if not each:
                raise bad_request(field, "must not be empty")
            if isinstance(each, str):
                prompts.append(_Prompt(field, self._encode(field, each, most_tokens), each))
            else:
                self._check_token_ids(field, each)
                prompts.append(_Prompt(field, each, None))
            if not prompts[-1].token_ids:
                raise bad_request(field, "has no tokens")
        return prompts

    def _check_length(self, prompt: _Prompt) -> None:
        most, num_tokens = self._limits.max_prompt_tokens, len(prompt.token_ids)
        if most is not None and num_tokens > most:
            message = f"{num_tokens} tokens are more than the {most} that a prompt may have here"
            raise bad_request(prompt.field, message, "context_length_exceeded")

    def _most_tokens(self) -> int | None:
        """That a prompt may have; None: there are no nodes that say so."""
        found = [most for most in (self._shell.max_total_tokens, self._limits.max_prompt_tokens) if most is not None]
        return min(found, default=None)

    def _encode(self, field: str, text: str, most_tokens: int | None) -> Sequence[int]:
        try:
            return self._known(field, self._text.encode_prompt(text, most_tokens=most_tokens))
        except TextTooLong as error:
            raise _too_long(field, error, most_tokens) from None
        except UnicodeError as error:
            raise bad_request(field, NO_CHARACTER) from error

    def _known(self, field: str, token_ids: Sequence[int]) -> Sequence[int]:
        """Those of a text, whose tokenizer may have more tokens than its model: one for padding, say."""
        if max(token_ids, default=0) >= self._text.vocab_size:
            wrong = next(each for each in token_ids if each >= self._text.vocab_size)
            raise bad_request(
                field, f"has the token {self._text.token_string(wrong)!r}, which this model does not know"
            )
        return token_ids

    async def _with_text(
        self,
        body: CompletionBody | ChatBody,
        prompt: _Prompt,
        request: GenerationRequest,
        stops: Stops,
        reading: _Reading,
        num_bytes: int,
    ) -> Asked:
        """The request with the ways to text of its choices."""
        tools, thinking = reading
        tokens = [*(() if tools is None else tools.syntax.tokens), *(() if thinking is None else TAGS)]
        spelled = self._text.spelled(tokens) if tokens else {}
        rules = TextRules(frozenset(request.sampling.stop_token_ids), stops, body.min_tokens, spelled)
        given = request.generated_token_ids
        if given:  # of one choice, without echo
            size = max(num_bytes, 16 * len(given))
            resumed = await off_loop(size, self._text.choice_text, rules, given, prompt.token_ids)
            known_end = _known_end(request, resumed)
            return Asked(request, [resumed], tools=tools, thinking=thinking, known_end=known_end)
        texts = [self._text.choice_text(rules, (), prompt.token_ids) for _ in range(body.n)]
        if isinstance(body, ChatBody) or not body.echo:
            return Asked(request, texts, tools=tools, thinking=thinking)
        token_ids, size = prompt.token_ids, max(num_bytes, 16 * len(prompt.token_ids))
        text = await off_loop(size, self._text.decode, token_ids) if prompt.text is None else prompt.text
        offsets: Sequence[int] = ()
        if request.sampling.wants_prompt_logprobs and prompt.text is None:
            offsets = await off_loop(size, self._text.offsets, token_ids)
        elif request.sampling.wants_prompt_logprobs:
            offsets = await off_loop(size, self._text.offsets_in, text)
        return Asked(request, texts, Echo(text, offsets), drops_tokens=body.max_tokens == 0)

    def _thinking(self, body: CompletionBody | ChatBody, prompt: _Prompt) -> Thinking | None:
        thinks = (
            self._text.thinks if self._limits.reasoning_parser == "auto" else self._limits.reasoning_parser == "think"
        )
        if not thinks or not isinstance(body, ChatBody):
            return None
        decode = functools.partial(self._text.decode, skip_special_tokens=False)
        return thinking_of(body, prompt.token_ids, decode)

    # ---------------------------------------------------------------- limits

    def _check_token_ids(self, field: str, token_ids: Sequence[int]) -> None:
        vocab_size = self._text.vocab_size
        for start in range(0, len(token_ids), IDS_AT_ONCE):
            some = token_ids[start : start + IDS_AT_ONCE]
            if not (min(some) >= 0 and max(some) < vocab_size):
                wrong = next(each for each in some if not 0 <= each < vocab_size)
                raise bad_request(field, f"token id {shown(wrong)} is not between 0 and {vocab_size - 1}")

    def _stop_token_ids(self, body: CompletionBody | ChatBody) -> tuple[int, ...]:
        self._check_token_ids("stop_token_ids", body.stop_token_ids)
        return tuple(dict.fromkeys([*([] if body.ignore_eos else self._text.stop_token_ids), *body.stop_token_ids]))

    def _logit_bias(self, body: CompletionBody | ChatBody) -> tuple[tuple[int, float], ...]:
        biases: dict[int, float] = {}
        for name, bias in body.logit_bias.items():
            if not (name.isascii() and name.isdecimal() and len(name) < 20 and name == str(int(name))):
                raise bad_request("logit_bias", f"its keys are token ids, not {name[:20]!a}")
            biases[int(name)] = bias
        self._check_token_ids("logit_bias", list(biases))
        return tuple(biases.items())

    def _generated_token_ids(self, body: CompletionBody | ChatBody, sampling: Sampling) -> tuple[int, ...]:
        given, ends = body.generated_token_ids, frozenset(sampling.stop_token_ids)
        self._check_token_ids("generated_token_ids", given)
        if len(given) > sampling.max_tokens:
            message = f"{len(given)} tokens are more than max_tokens, {sampling.max_tokens}"
            raise bad_request("generated_token_ids", message)
        end = next((index for index, each in enumerate(given) if each in ends), None)
        # Where a grammar says that nothing can follow the end comes whatever min_tokens says.
        least = 0 if sampling.grammar is not None else sampling.min_tokens
        if end is not None and end < max(len(given) - 1, least):
            why = "which ends a completion" if end >= least else f"before min_tokens, {least}"
            raise bad_request("generated_token_ids", f"hold the stop token {given[end]} at index {end}, {why}")
        return tuple(given)

    def _fitting_max_tokens(self, prompt: _Prompt, field: str, asked_tokens: int | None, longest: int) -> int:
        """max_tokens, which the client called `field`, or what the prompt leaves."""
        num_prompt_tokens = len(prompt.token_ids)
        room = longest - num_prompt_tokens
        if room < 1:
            message = (
                f"{num_prompt_tokens} tokens leave no room for an answer; prompt and answer have {longest} together, "
                "and one token is always generated"
            )
            raise bad_request(prompt.field, message, "context_length_exceeded")
        if asked_tokens is not None and asked_tokens > room:
            message = f"{shown(asked_tokens)} is more than the {room} that {num_prompt_tokens} prompt tokens leave of {longest}"
            raise bad_request(field, message, "context_length_exceeded")
        if asked_tokens is not None:
            return asked_tokens
        room_now = (self._shell.max_total_tokens_now or longest) - num_prompt_tokens
        return room_now if room_now >= 1 else room  # no more than needs no node that has gone


def _check_resubmission(body: CompletionBody | ChatBody, num_prompts: int) -> None:
    if not body.generated_token_ids:
        return
    if num_prompts > 1 or body.n > 1:
        raise bad_request("generated_token_ids", "need one prompt and n = 1: they belong to one choice")
    if isinstance(body, CompletionBody) and body.echo:
        raise bad_request("generated_token_ids", "cannot be given with echo: the text between would be missing")


def _check_prompt_logprobs(sampling: Sampling, num_tokens: int, n: int) -> None:
    number = num_tokens * (1 + (sampling.num_logprobs or 0)) * n
    if sampling.wants_prompt_logprobs and number > MAX_PROMPT_LOGPROBS:
        told = f"{number} of {num_tokens} prompt tokens with echo, at most {MAX_PROMPT_LOGPROBS} are told"
        raise bad_request("logprobs", told)


def _known_end(request: GenerationRequest, text: ChoiceText) -> str | None:
    """The finish reason of a resubmission to which nothing is left to generate."""
    given, sampling = request.generated_token_ids, request.sampling
    if text.is_stopped or given[-1] in sampling.stop_token_ids:
        return "stop"
    return "length" if len(given) == sampling.max_tokens else None


def _sampling(
    body: CompletionBody | ChatBody,
    max_tokens: int,
    stop_token_ids: tuple[int, ...],
    logit_bias: tuple[tuple[int, float], ...],
    grammar: Grammar | None,
) -> Sampling:
    """The parameters as nodes take them: what asks for nothing is 0."""
    if body.min_tokens > max_tokens:
        raise bad_request("min_tokens", f"must be at most max_tokens, {max_tokens}, not {shown(body.min_tokens)}")
    return Sampling(
        temperature=body.temperature,
        max_tokens=max_tokens,
        stop_token_ids=stop_token_ids,
        top_k=min(max(body.top_k, 0), 2**31 - 1),
        top_p=0.0 if body.top_p == 1 else max(body.top_p, _LEAST_SHARE),
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=0.0 if body.repetition_penalty == 1 else max(body.repetition_penalty, _LEAST_SHARE),
        min_tokens=body.min_tokens,
        logit_bias=logit_bias,
        num_logprobs=body.num_logprobs,
        wants_prompt_logprobs=isinstance(body, CompletionBody) and body.echo and body.logprobs is not None,
        grammar=grammar,
    )


def _too_long(field: str, text: TextTooLong, most_tokens: int | None) -> ApiError:
    message = (
        f"{text} characters are more than the {most_tokens} tokens that a prompt may have here, whichever they are"
    )
    return bad_request(field, message, "context_length_exceeded")


def size_of_chat(num_bytes: int, messages: Sequence[Message]) -> int:
    """Bytes of a prompt that take as long as these messages, which came in so many."""
    return max(num_bytes, _TURN_COST * sum(1 + len(each.tool_calls) for each in messages))


async def off_loop(size: int, function: Callable[[*Ts], R], *arguments: *Ts, takes: int = 0) -> R:
    """Call the function, in a thread if its input is large: the loop has other clients, and memory is not for all at once.

    `takes`: bytes of JSON that are read in as long as this input, of so many bytes, where that lets other threads run.
    """
    if max(size, takes) < LARGE:
        return function(*arguments)
    return await _turns.call(size, functools.partial(function, *arguments))
