"""Requests with every parameter drawn at random, and what the small model's engine must be asked for each of their choices.

Numbers are multiples of 1/64, which cross the wire as they are: the engine alone then computes with the very same.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Final

from engine.byte_tokenizer import BEGIN_OF_TEXT, END_OF_TEXT, MESSAGE_END, MESSAGE_START, NUM_BYTES, SPECIAL_TOKENS
from engine.plan import Grammar, SamplingParams
from engine.sequence import SequenceSpec
from router.seeds import branch_seed

MODEL: Final = "llama-tiny"
MAX_TOKENS: Final = 24
STOP_TOKEN_IDS: Final = (END_OF_TEXT, MESSAGE_END)  # of the model's generation_config.json
PIECES: Final = ("the ", "x", "STOP", "€", "é", "😀", "世界", " ", "\n", "Grüße ", "0", "a\u0301")
MULTI_BYTE: Final = "é€"  # what may come of bytes drawn at random
REGEXES: Final = ("[a-f€é]{3,14}", "(yes|no)!*", ".{9}")
READABLE: Final = range(32, 127)  # the bytes that the small model likes


@dataclass(frozen=True)
class Expected:
    """One choice as the engine alone is asked for it."""

    prompt_ids: tuple[int, ...]
    prompt_text: str
    seed: int
    sampling: SamplingParams
    max_tokens: int

    def spec(self, sequence_id: object) -> SequenceSpec:
        """The sequence to run."""
        return SequenceSpec(
            sequence_id=sequence_id,
            token_ids=self.prompt_ids,
            num_generated=0,
            sampling=self.sampling,
            max_new_tokens=max(1, self.max_tokens),
            stop_token_ids=self.sampling.stop_token_ids,
            block_keys=(),
        )


def drawn_body(rng: random.Random, is_chat: bool) -> dict[str, Any]:
    """A request of either endpoint; each parameter of the API is there in some of them."""
    body: dict[str, Any] = {
        "model": MODEL,
        "seed": rng.getrandbits(64) - 2**63,
        "max_tokens": rng.randint(1, MAX_TOKENS),
        "n": rng.choice([1, 1, 2, 3]),
        "temperature": rng.choice([0, _exact(rng, 0, 2)]),
        "top_p": rng.choice([1, _exact(rng, 0.25, 1)]),
        "top_k": rng.choice([-1, 0, 1, rng.randint(2, 50)]),
        "min_p": rng.choice([0, _exact(rng, 0, 0.5)]),
        "presence_penalty": rng.choice([0, _exact(rng, -2, 2)]),
        "frequency_penalty": rng.choice([0, _exact(rng, -2, 2)]),
        "repetition_penalty": rng.choice([1, _exact(rng, 0.5, 2)]),
        "logit_bias": _drawn_bias(rng),
        "stop": rng.choice([None, "e", ["never said", "t"], [*"aio€", "th"]]),
        "stop_token_ids": rng.choice([[], rng.sample(READABLE, 8)]),
        "ignore_eos": rng.random() < 0.3,
        "return_token_ids": True,
        "user": "somebody",
        "metadata": {"whose": "mine"},
        "prompt_cache_key": "mine",
        "safety_identifier": "somebody",
        "timeout_s": 300,
    }
    is_bound = rng.random() < 0.2 and not body["ignore_eos"]
    body["structured_outputs"] = {"regex": rng.choice(REGEXES)} if is_bound else None
    body["min_tokens"] = rng.choice([0, 0, rng.randint(0, body["max_tokens"])])
    if rng.random() < 0.3:
        body["request_id"] = f"mine-{rng.getrandbits(32)}"
    if is_chat:
        body["messages"] = [
            {"role": role, "content": _drawn_text(rng)} for role in ("system", "user")[rng.randint(0, 1) :]
        ]
        body["continue_final_message"] = rng.random() < 0.3
        body["add_generation_prompt"] = rng.choice(
            [None, False] if body["continue_final_message"] else [None, False, True]
        )
        if body["continue_final_message"]:
            body["messages"].append({"role": "assistant", "content": _drawn_text(rng)})
        body["logprobs"] = rng.random() < 0.5
        body["top_logprobs"] = rng.randint(0, 4) if body["logprobs"] else 0
        if rng.random() < 0.5:
            body["max_completion_tokens"] = body.pop("max_tokens")
        return body
    text = _drawn_text(rng)
    body["prompt"] = rng.choice([text, list(text.encode()), [text, text + "x"], [list(text.encode()), [1]]])
    body["logprobs"] = rng.choice([None, 0, 3])
    body["echo"] = rng.random() < 0.5
    body["best_of"] = rng.choice([None, body["n"]])
    if body["echo"] and rng.random() < 0.5:
        body["max_tokens"] = body["min_tokens"] = 0
    return body


def expected_choices(body: dict[str, Any]) -> list[Expected]:
    """The choices of a body, numbered as the answer numbers them."""
    max_tokens: int = body["max_tokens"] if "max_tokens" in body else body["max_completion_tokens"]
    prompts = [_chat_prompt(body)] if "messages" in body else _completion_prompts(body["prompt"])
    wants_logprobs = body["logprobs"] is not None and body["logprobs"] is not False
    choices = []
    for (prompt_ids, text), choice in [(prompt, choice) for prompt in prompts for choice in range(body["n"])]:
        seed = branch_seed(body["seed"] + (2**63 if body["seed"] < 0 else 0), choice)
        sampling = SamplingParams(
            temperature=body["temperature"],
            seed=seed,
            top_k=max(0, body["top_k"]),
            top_p=body["top_p"],
            min_p=body["min_p"],
            presence_penalty=body["presence_penalty"],
            frequency_penalty=body["frequency_penalty"],
            repetition_penalty=body["repetition_penalty"],
            min_tokens=body["min_tokens"],
            stop_token_ids=frozenset([*body["stop_token_ids"], *([] if body["ignore_eos"] else STOP_TOKEN_IDS)]),
            logit_bias=tuple((int(token_id), bias) for token_id, bias in body["logit_bias"].items()),
            num_logprobs=body.get("top_logprobs", body["logprobs"]) if wants_logprobs else None,
            prompt_logprobs=bool(body.get("echo")) and wants_logprobs,
            grammar=_grammar(body["structured_outputs"]),
        )
        choices.append(Expected(tuple(prompt_ids), text, seed, sampling, max_tokens))
    return choices


def _grammar(outputs: dict[str, str] | None) -> Grammar | None:
    return None if outputs is None else Grammar("regex", outputs["regex"], False, STOP_TOKEN_IDS)


def name_of(token_id: int) -> str:
    """How logprobs of completions call a token of the small model."""
    if token_id >= NUM_BYTES:
        return SPECIAL_TOKENS[token_id - NUM_BYTES]
    return chr(token_id) if token_id < 128 else f"bytes:\\x{token_id:02x}"


def _completion_prompts(prompt: Any) -> list[tuple[list[int], str]]:
    is_list = isinstance(prompt, list) and not isinstance(prompt[0], int)
    return [
        ([BEGIN_OF_TEXT, *each.encode()], each) if isinstance(each, str) else (each, bytes(each).decode())
        for each in (prompt if is_list else [prompt])
    ]


def _chat_prompt(body: dict[str, Any]) -> tuple[list[int], str]:
    """As the model's chat template writes it."""
    token_ids = [BEGIN_OF_TEXT]
    for message in body["messages"]:
        said = f"{message['role']}\n{message['content']}"
        token_ids += [MESSAGE_START, *said.encode(), MESSAGE_END, *b"\n"]
    if body["continue_final_message"]:
        return token_ids[:-2], ""
    begins = body["add_generation_prompt"] is not False
    return token_ids + ([MESSAGE_START, *b"assistant\n"] if begins else []), ""


def _drawn_text(rng: random.Random) -> str:
    return "".join(rng.choices(PIECES, k=rng.randint(1, 12)))


def _drawn_bias(rng: random.Random) -> dict[str, float]:
    """Nothing; a token made certain, likelier or impossible; bytes of one character, in any order; ends."""
    match rng.randrange(4):
        case 0:
            return {}
        case 1:
            return {str(rng.choice(READABLE)): rng.choice([-100, 3, 100])}
        case 2:
            return {str(byte): 20 + _exact(rng, 0, 3) for byte in rng.choice(MULTI_BYTE).encode()}
    return {str(token_id): 4.5 for token_id in STOP_TOKEN_IDS}


def _exact(rng: random.Random, low: float, high: float) -> float:
    return rng.randint(int(low * 64), int(high * 64)) / 64
