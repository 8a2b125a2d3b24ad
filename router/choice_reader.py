"""One choice's text, from what it thinks to what it says and calls: the readers of both, one behind the other. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from router.answer import Asked
from router.seeds import branch_seed
from router.thought_text import ThoughtReader
from router.tool_calls import Call, ChoiceCalls
from router.tool_text import Said, Thought, Told


class ChoiceReader:
    """Reads one choice, behind `text_before`, which somebody else has told."""

    def __init__(self, calls: ChoiceCalls | None, thoughts: ThoughtReader | None, text_before: str = "") -> None:
        self._calls = calls
        self._thoughts = thoughts
        self._num_before = len(text_before)
        self._undecided: list[int] = []  # where tokens begin that may be of a thought
        self._is_counted = False  # none that follows is
        self.num_thought_tokens = 0  # the tags' included
        self.push(text_before)

    @property
    def calls(self) -> Sequence[Call]:
        """Those that have begun, by index."""
        return () if self._calls is None else self._calls.calls

    @property
    def is_plain(self) -> bool:
        """Whether all that follows is said as it is."""
        return self._calls is None and (self._thoughts is None or self._thoughts.is_over)

    def push(self, text: str, offsets: Sequence[int] = ()) -> list[Told]:
        """What more text lets be told, and where in all of it tokens begin (answer.py's Piece)."""
        if self._thoughts is None:
            return self._told("", text)
        told = self._told(*self._thoughts.push(text))
        self._count(self._thoughts, offsets)
        return told

    def finish(self) -> list[Told]:
        """What is left, since none follows."""
        told = [] if self._thoughts is None else self._told(*self._thoughts.finish())
        if self._thoughts is not None and self._thoughts.is_thinking:
            self.num_thought_tokens += len(self._undecided)
        return told if self._calls is None else [*told, *self._calls.finish()]

    def finish_reason(self, reason: str | None) -> str | None:
        """The choice's own reason, or that it calls tools."""
        return reason if self._calls is None else self._calls.finish_reason(reason)

    def _told(self, thought: str, said: str) -> list[Told]:
        told: list[Told] = [Thought(thought)] if thought else []
        if self._calls is not None:
            return [*told, *self._calls.push(said)]
        return [*told, Said(said)] if said else told

    def _count(self, thoughts: ThoughtReader, offsets: Sequence[int]) -> None:
        """A token is of the thought if it begins in it; one whose text is held back is counted when that comes."""
        if self._is_counted:
            return
        self._undecided += offsets
        if thoughts.is_thinking or thoughts.end is not None:
            until = (thoughts.num_read if thoughts.end is None else thoughts.end) - self._num_before
            self.num_thought_tokens += sum(each < until for each in self._undecided)
            self._undecided = [each for each in self._undecided if each >= until]
        self._is_counted = thoughts.is_over or thoughts.end is not None


def reader_of(asked: Asked, choice: int) -> ChoiceReader | None:
    """Of one of a prompt's choices; None: all its text is said as it is."""
    if asked.tools is None and asked.thinking is None:
        return None
    calls = None
    if asked.tools is not None:
        calls = ChoiceCalls(asked.tools, branch_seed(asked.request.seed, choice), asked.request.prompt_token_ids)
    thoughts = None if asked.thinking is None else ThoughtReader(asked.thinking)
    return ChoiceReader(calls, thoughts, asked.texts[choice].text_before)
