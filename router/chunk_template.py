"""A stream's usual chunk, cut out of the JSON that it would be: nearly all chunks differ in their text and token ids alone. Pure.

    data: {"id":…,"choices":[{"index":0,"text": │ text │ ,"logprobs":null,…,"completion_token_ids": │ ids │ }]}
                                            head                      middle                          tail

Made from a chunk written in the ordinary way with marks in these two places, so there is one place that knows the shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from json.encoder import encode_basestring
from typing import Final

from router.json_parts import in_one_line

MARK_TEXT: Final = "\0"  # what no model's text is, and where one is it stands before: the last one is cut at
MARK_IDS: Final = [-1]
_TEXT: Final = encode_basestring(MARK_TEXT)
_IDS: Final = '"completion_token_ids":[-1]'


class ChunkTemplate:
    """Writes chunks that are equal to `written` but for text and token ids."""

    __slots__ = ("_head", "_middle", "_tail")

    def __init__(self, written: str) -> None:
        """`written`: the JSON of a chunk with MARK_TEXT as its text, and MARK_IDS where it tells token ids."""
        self._head, _, rest = written.rpartition(_TEXT)
        before, found, after = rest.rpartition(_IDS)
        self._middle = f"{before}{_IDS[: -len('-1]')]}" if found else rest
        self._tail = f"]{after}" if found else None

    def event(self, text: str, token_ids: Sequence[int]) -> bytes:
        """One server-sent event; half a surrogate pair in the text raises UnicodeEncodeError, as anywhere."""
        shown = in_one_line(encode_basestring(text))
        if self._tail is None:
            return f"data: {self._head}{shown}{self._middle}\n\n".encode()
        return f"data: {self._head}{shown}{self._middle}{','.join(map(str, token_ids))}{self._tail}\n\n".encode()
