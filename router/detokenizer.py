"""Token ids to text, one by one, so that a stream and a whole answer read the same. Pure; the tokenizer is given.

A token's text depends on its neighbours: a character may be split over up to four tokens, and many tokenizers put a space
before a word only if something precedes it. So each token is decoded together with those of the last piece given out
(`context`), and what it adds is given out once it cannot change any more: while the text ends in U+FFFD, the replacement of
an incomplete character, it is held back.

    … given out │ context │ fresh ...   text = decode(context + fresh)
                            └ held back while it ends in U+FFFD

A completion's first context is the end of its prompt, as in vLLM: SentencePiece models' decoders strip the first blank of what
they are given, and a completion's `▁time` is " time" unless no text precedes it.

Tokens are taken strictly one at a time, so the text does not depend on how they were grouped on the way. A model may also
produce bytes that never become a character; then what is held back would grow, so a long run is cut where both parts decode to
the same as the whole. Of a long run without any text the last tokens are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import product
from typing import Final

REPLACEMENT: Final = "\ufffd"
_LONG_RUN: Final = 8  # tokens held back; an incomplete character has three at most
_LONGEST_RUN: Final = 64  # then it is given out as it is
_CHARACTER_TAIL: Final = 3  # tokens that may still be an incomplete character
_PROMPT_TAIL: Final = 32  # a prompt's last tokens that are looked at

Decode = Callable[[Sequence[int]], str]


class IncrementalDetokenizer:
    """Turns one completion's tokens into the text that they are behind its prompt's; `skipped_ids` (special tokens) have none."""

    __slots__ = ("_context", "_context_text", "_decode", "_fresh", "_skipped_ids", "_whole")

    def __init__(
        self,
        decode: Decode,
        skipped_ids: Collection[int],
        prompt_ids: Sequence[int] = (),
        whole: Mapping[int, str] | None = None,
    ) -> None:
        """`whole`: where no token's text depends on its neighbours, that of each that is whole characters, and "" of others."""
        self._decode = decode
        self._skipped_ids = skipped_ids
        self._whole = whole
        self._context = self._end_of(prompt_ids)
        self._context_text = decode(self._context) if self._context else ""
        self._fresh: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; may be empty."""
        return "".join([self.push_one(token_id) for token_id in token_ids])

    def finish(self) -> str:
        """What is still held back: an incomplete character at the very end reads U+FFFD."""
        if not self._fresh:
            return ""
        text = self._fresh_text()
        self._fresh = []
        return text

    def push_one(self, token_id: int) -> str:
        """The same for one token."""
        if token_id in self._skipped_ids:
            return ""
        if self._whole is not None and not self._fresh and (text := self._whole[token_id]):
            return text  # any context, then, is as good as the newest
        self._fresh.append(token_id)
        text = self._fresh_text()
        if text.endswith(REPLACEMENT):
            return self._cut_long_run(text) if len(self._fresh) > _LONG_RUN else ""
        if text:  # an empty text stays in front of what follows: it may be a mark that joins its neighbours
            self._give_out(len(self._fresh))
        elif len(self._fresh) > _LONGEST_RUN:  # ids that no text belongs to, say: a vocabulary may be padded with them
            del self._fresh[:-_LONG_RUN]
        return text

    def _end_of(self, prompt_ids: Sequence[int]) -> list[int]:
        """The prompt's last token that has text, and those without any behind it, which may be blanks that a decoder strips.

        Parts of characters are left out: a prompt that ends in one has given it out as U+FFFD, and what completes it is none. Where
        there is nothing else, as in a script that a vocabulary lacks, the whole characters among them are taken.
        """
        tail = [token_id for token_id in prompt_ids[-_PROMPT_TAIL:] if token_id not in self._skipped_ids]
        found: list[int] = []
        for token_id in reversed(tail):
            text = self._decode([token_id])
            if REPLACEMENT not in text:
                found.insert(0, token_id)
                if text:
                    return found
        for num_behind, num_before in product(range(_CHARACTER_TAIL + 1), repeat=2):
            if characters := tail[num_before : len(tail) - num_behind]:
                text = self._decode(characters)
                if text and REPLACEMENT not in text:
                    return characters
        return found

    def _fresh_text(self) -> str:
        """What `fresh` adds to the context."""
        text = self._decode(self._context + self._fresh)
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        self._context, self._context_text = [], ""  # the context would read differently now; it has been given out
        return self._decode(self._fresh)

    def _give_out(self, num_tokens: int) -> None:
        """The first `num_tokens` of fresh become the context."""
        self._context, self._fresh = self._fresh[:num_tokens], self._fresh[num_tokens:]
        self._context_text = self._decode(self._context)

    def _cut_long_run(self, text: str) -> str:
        whole = self._decode(self._fresh)
        for num_behind in range(1, _CHARACTER_TAIL + 1):
            # A decoder of byte tokens makes nothing of a whole run that ends within a character: what is before it is good alone.
            before, behind = self._fresh[:-num_behind], self._fresh[-num_behind:]
            if len(whole) > len(self._decode(before)) + len(self._decode(behind)):
                self._fresh = before
                head = self._fresh_text()
                self._give_out(len(before))
                self._fresh = behind
                return head
        for num_tokens in range(len(self._fresh) - _CHARACTER_TAIL, 0, -1):
            rest = self._decode(self._fresh[num_tokens:])
            head = text.removesuffix(rest)
            if self._decode(self._fresh[:num_tokens]) + rest == whole:
                self._give_out(num_tokens)
                return head
        if len(self._fresh) < _LONGEST_RUN:
            return ""
        self._give_out(len(self._fresh))
        return text
