"""What a chat is: its messages, its commands, what a line means, and what an answer's events say. Pure: instants are arguments.

    line --Typing--> text --meaning_of--> a message, or a command        events --Answer--> text, tokens, times

Not here: the terminal (chat.py), the server (chat_server.py).
"""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

Message = dict[str, str]

COMMANDS: Final[Mapping[str, str]] = {
    "/help": "this list",
    "/reset": "forget what was said; the system prompt stays",
    "/system": "/system TEXT sets the system prompt and begins anew; alone it shows it",
    "/save": "/save FILE writes the chat as JSON",
    "/stats": "tokens and times of this chat",
    "/quit": "end; so does Ctrl-D",
}
HELP: Final = "\n".join(
    [
        *(f"  {name:<8} {told}" for name, told in COMMANDS.items()),
        '  A line that ends in \\ goes on in the next one; so does everything between two lines of """.',
        "  // in front sends a message that begins with /. Ctrl-C stops an answer.",
    ]
)
CUT_SHORT: Final = "cut short: the cluster lost too many nodes under it; ask again"
_SHORTEST_S: Final = 0.01  # that a rate can be told of
_FENCE: Final = '"""'
_SHOWN_CONTROLS: Final = "\n\t"


@dataclass(frozen=True, slots=True)
class Say:
    """Send this to the model."""

    text: str


@dataclass(frozen=True, slots=True)
class Command:
    """One of COMMANDS, and what stands behind it."""

    name: str
    argument: str


@dataclass(frozen=True, slots=True)
class Unknown:
    """A command that there is none of; the message is for the user."""

    message: str


def meaning_of(text: str) -> Say | Command | Unknown | None:
    """What the user wants; None: nothing at all."""
    stripped = text.strip()
    if not stripped:
        return None
    if stripped.startswith("//"):
        return Say(stripped[1:])
    if not stripped.startswith("/") or "\n" in stripped:
        return Say(text)
    name, _, argument = stripped.partition(" ")
    if name in COMMANDS:
        return Command(name, argument.strip())
    close = difflib.get_close_matches(name, COMMANDS, n=1)
    return Unknown(f"{name}: unknown command; " + (f"did you mean {close[0]}?" if close else "/help lists them"))


class Typing:
    """Puts lines together until a text is complete."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._is_fenced = False

    @property
    def is_open(self) -> bool:
        """Whether the next line belongs to what was typed before."""
        return self._is_fenced or bool(self._lines)

    def take(self, line: str) -> str | None:
        """The whole text, once this was its last line."""
        if line.strip() == _FENCE:
            self._is_fenced = not self._is_fenced
            return None if self._is_fenced else self._end()
        if self._is_fenced:
            self._lines.append(line)
            return None
        if line.endswith("\\"):
            self._lines.append(line[:-1])
            return None
        self._lines.append(line)
        return self._end()

    def drop(self) -> None:
        """Forget what was typed."""
        self._lines, self._is_fenced = [], False

    def _end(self) -> str:
        text = "\n".join(self._lines)
        self._lines = []
        return text


def _text(told: str | None) -> str:
    """Half a surrogate pair is JSON, and no text."""
    return (told or "").encode("utf-8", "replace").decode()


@dataclass(slots=True)
class Answer:
    """One answer while it comes. Instants in seconds, of one clock."""

    begun_at: float
    text: str = ""
    first_at: float | None = None
    last_at: float | None = None
    completion_tokens: int | None = None  # as the server counts them
    prompt_tokens: int | None = None
    finish_reason: str | None = None
    thought: str = ""  # what the model thought before, where the server tells that apart

    def take(self, event: Mapping[str, Any], now: float) -> str:
        """What an event adds to the text. Raises KeyError, TypeError, ValueError or AttributeError if it is none of a chat."""
        piece = thought = ""
        for choice in event["choices"][:1]:
            piece, thought = _text(choice["delta"].get("content")), _text(choice["delta"].get("reasoning_content"))
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if piece or thought:
            self.first_at = now if self.first_at is None else self.first_at
            self.last_at = now
            self.text += piece
            self.thought += thought
        if usage := event.get("usage"):
            self.prompt_tokens, self.completion_tokens = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
        return piece

    @property
    def ttft_s(self) -> float | None:
        """To the first text."""
        return None if self.first_at is None else self.first_at - self.begun_at

    @property
    def tokens_per_s(self) -> float | None:
        """Behind the first token; None if there is only that one, nobody has counted, or all came at once."""
        if self.first_at is None or self.last_at is None or not self.completion_tokens:
            return None
        seconds = self.last_at - self.first_at
        return (self.completion_tokens - 1) / seconds if self.completion_tokens > 1 and seconds >= _SHORTEST_S else None

    @property
    def is_cut_short(self) -> bool:
        """Whether the cluster gave it up (docs/api.md, "When a choice is handed up")."""
        return self.finish_reason == "pd_reschedule"

    def in_words(self) -> str:
        """One line below the answer; the parts that are known."""
        parts = []
        if self.completion_tokens is not None:
            parts.append(f"{self.completion_tokens} tokens")
        if (rate := self.tokens_per_s) is not None:
            parts.append(f"{rate:.1f} tokens/s")
        if (ttft_s := self.ttft_s) is not None:
            parts.append(f"first after {1000 * ttft_s:.0f} ms")
        if self.is_cut_short:
            parts.append(CUT_SHORT)
        elif self.finish_reason not in (None, "stop"):
            parts.append(f"ended by {self.finish_reason}")
        return " · ".join(parts)


@dataclass(slots=True)
class Talk:
    """A chat: what was said, and what it cost."""

    model: str
    system: str | None = None
    said: list[Message] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    def messages(self, question: str) -> list[Message]:
        """What the server is sent with the next question."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.said, {"role": "user", "content": question}]

    def answered(self, question: str, answer: Answer) -> None:
        """It is part of the chat from now on, also where it was stopped; without any text both are forgotten."""
        self.answers.append(answer)
        if answer.text:
            self.said += [{"role": "user", "content": question}, {"role": "assistant", "content": answer.text}]

    def reset(self) -> None:
        """Forget what was said; figures stay."""
        self.said = []

    def to_json(self) -> dict[str, Any]:
        """What /save writes: messages in the API's own shape."""
        return {"model": self.model, "messages": self.messages("")[:-1]}

    def in_words(self) -> str:
        """What /stats says."""
        tokens = _total(each.completion_tokens for each in self.answers)
        prompts = _total(each.prompt_tokens for each in self.answers)
        firsts = sorted(each for answer in self.answers if (each := answer.ttft_s) is not None)
        rates = sorted(each for answer in self.answers if (each := answer.tokens_per_s) is not None)
        parts = [
            f"{len(self.answers)} answers, {len(self.said)} messages kept",
            f"{prompts} tokens of prompts, {tokens} of answers",
        ]
        if firsts:
            parts.append(f"first token: median {1000 * _median(firsts):.0f} ms, worst {1000 * firsts[-1]:.0f} ms")
        if rates:
            parts.append(f"tokens/s: median {_median(rates):.1f}, worst {rates[0]:.1f}")
        return "\n".join(f"  {part}" for part in parts)


def shown(text: str) -> str:
    """What a terminal may be given: a model can say escape sequences, too, which would move its cursor, or worse."""
    return "".join(
        each if each in _SHOWN_CONTROLS or unicodedata.category(each) not in ("Cc", "Cs") else "\ufffd" for each in text
    )


def wait_s(status: int, retry_after: str | None, waited_s: float, patience_s: float) -> float | None:
    """Seconds until it is worth to ask again: only where the server says so, and only as long as the user's patience lasts."""
    if status not in (429, 503) or retry_after is None or not retry_after.isdecimal():
        return None
    seconds = max(float(retry_after), 0.1)
    return seconds if waited_s + seconds <= patience_s else None


def _total(numbers: Iterable[int | None]) -> int:
    return sum(number or 0 for number in numbers)


def _median(ordered: Sequence[float]) -> float:
    return ordered[len(ordered) // 2]
