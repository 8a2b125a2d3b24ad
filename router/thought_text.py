"""What a model thinks, told apart from what it says. Pure: a function of the text so far, however it was cut.

    <think> a thought </think> what it says        Qwen3: or nothing but what it says
            a thought </think> what it says        behind a prompt that ends in <think>: DeepSeek-R1, Qwen3-Thinking

White space next to a tag is dropped, but for more than 64 characters in front of one. A thought that never ends is all a thought.
What may still become a tag is held back. A tag within what is said is text.

Sources: the models' own chat templates; the parsers of vLLM (docs/features/reasoning_outputs.md).
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final, NamedTuple

from router.tool_text import begun

OPENS: Final = "<think>"
CLOSES: Final = "</think>"
TAGS: Final = (OPENS, CLOSES)
_MAX_BLANKS: Final = 64  # held back, since a tag may follow


class Thinking(Enum):
    """Where a completion begins."""

    MAYBE = auto()  # it may think first
    BEGUN = auto()  # the prompt has begun a thought


class Parted(NamedTuple):
    """What can be told now."""

    thought: str
    said: str


class ThoughtReader:
    """Reads one completion."""

    def __init__(self, thinking: Thinking) -> None:
        self.is_thinking = thinking is Thinking.BEGUN
        self.is_over = False  # all that follows is said, as it is
        self.end: int | None = None  # once a thought has ended: the text's characters up to there
        self._is_opening = thinking is Thinking.MAYBE
        self._is_bare = True  # nothing has been told since a tag
        self._spills = False  # white space was told that was too much to be held back; more of it is told as it comes
        self._held = ""
        self.num_read = 0  # characters

    def push(self, text: str) -> Parted:
        """What more text lets be told."""
        self.num_read += len(text)
        rest, self._held = self._held + text, ""
        if self._is_opening:
            opening = rest.lstrip()
            is_near = len(rest) - len(opening) <= _MAX_BLANKS
            if is_near and len(opening) < len(OPENS) and OPENS.startswith(opening):
                self._held = rest
                return Parted("", "")
            self._is_opening, self.is_thinking = False, is_near and opening.startswith(OPENS)
            self.is_over = not self.is_thinking
            rest = opening.removeprefix(OPENS) if self.is_thinking else rest
        if self.is_over:
            return Parted("", rest)
        return self._read(rest)

    def _read(self, rest: str) -> Parted:
        thought = ""
        if self.is_thinking:
            thought, behind = self._thought(rest)
            if behind is None:
                return Parted(thought, "")
            rest = behind
        said = rest.lstrip()
        self.is_over = bool(said)
        return Parted(thought, said)

    def _thought(self, rest: str) -> tuple[str, str | None]:
        """What can be told of a thought, and what stands behind it, where it has ended."""
        if self._is_bare:
            rest = rest.lstrip()
            self._is_bare = not rest
        at = rest.find(CLOSES)
        until = at if at >= 0 else len(rest) - begun(CLOSES, rest)
        shown = rest[: max(len(rest[:until].rstrip()), min(until, len(rest) - len(rest.lstrip())) * self._spills)]
        if until - len(shown) > _MAX_BLANKS:
            shown = rest[:until]
        if shown:
            self._spills = shown[-1].isspace()
        if at < 0:
            self._held = rest[len(shown) :]
            return shown, None
        self.is_thinking = False
        behind = rest[at + len(CLOSES) :]
        self.end = self.num_read - len(behind)
        return shown, behind

    def finish(self) -> Parted:
        """What was held back, since none follows."""
        held, self._held = self._held, ""
        return Parted(held.rstrip(), "") if self.is_thinking else Parted("", held)
