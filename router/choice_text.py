"""One choice's tokens on their way to text: characters whole, stop strings cut off, stop tokens silent. Pure.

Everything happens token by token, so that text, stop and counts are equal however tokens were grouped into messages, and for
a stream and a whole answer. The first `min_tokens` tokens are shown without being looked at for stop strings, as the nodes do
not sample a stop token among them.

What has been shown is a function of the prompt's tokens and the completion's, and of nothing else. So a completion can be broken
off behind any token and go on elsewhere: what is held back there is shown by neither side twice, and by the second once it is
decided.

    first half     given_ids ──> shown │ held back: an incomplete character, what may begin a stop string
    resubmission                       └ shown or cut off here, with what follows
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from router.detokenizer import IncrementalDetokenizer
from router.stop_strings import NO_STOPS, StopMatcher, Stops


@dataclass(frozen=True, slots=True)
class TextRules:
    """What decides about a completion's text."""

    silent_ids: Collection[int]  # stop tokens: they end the text and are not in it
    stops: Stops = NO_STOPS
    min_tokens: int = 0
    spelled: Mapping[int, str] = field(default_factory=dict)  # special tokens that are text here, and which


class TextPart(NamedTuple):
    """What some tokens gave; made for every message, so a tuple."""

    text: str
    offsets: list[int]  # for each token taken: the completion's characters before it, those held back included
    is_stopped: bool  # the last token taken completes a stop string; what was behind it is not taken


class ChoiceText:
    """Text of one completion; `given_ids` are its tokens so far: what they let be shown, somebody else has shown."""

    def __init__(self, detokenizer: IncrementalDetokenizer, rules: TextRules, given_ids: Sequence[int] = ()) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(rules.stops) if rules.stops else None
        self._rules = rules
        self.num_tokens = 0  # the given ones included
        self._num_characters = 0
        self.is_stopped = False  # nothing follows; from the start if the given ids are a whole completion
        shown = self.push(given_ids).text
        self._num_characters -= len(shown)
        self.text_before = shown

    def push(self, token_ids: Sequence[int]) -> TextPart:
        """The text that can be shown now; may be empty."""
        parts: list[str] = []
        offsets: list[int] = []
        for token_id in token_ids:
            offsets.append(self._num_characters)
            self.num_tokens += 1
            part = self._text_of(token_id)
            self._num_characters += len(part)
            if self._matcher is not None and self.num_tokens > self._rules.min_tokens:
                part, is_stopped = self._matcher.push(part)
                if is_stopped:
                    self.is_stopped = True
                    return TextPart("".join([*parts, part]), offsets, True)
            parts.append(part)
        return TextPart("".join(parts), offsets, False)

    def _text_of(self, token_id: int) -> str:
        if token_id in self._rules.silent_ids:
            return ""
        if token_id in self._rules.spelled:
            return self._detokenizer.finish() + self._rules.spelled[token_id]
        return self._detokenizer.push_one(token_id)

    def finish(self) -> TextPart:
        """What was held back, since no token follows: an incomplete character, the beginning of a stop string."""
        if self.is_stopped:
            return TextPart("", [], True)
        rest = self._detokenizer.finish()
        if self._matcher is None or self.num_tokens <= self._rules.min_tokens:
            return TextPart(rest, [], False)
        shown, is_stopped = self._matcher.push(rest)
        return TextPart(shown if is_stopped else shown + self._matcher.flush(), [], is_stopped)
