"""What of a regular expression would be left out by xgrammar, or multiplies. Pure.

xgrammar 0.2 drops what looks around without a word, so that a text may come out which the expression does not match: refused by
name. Counts within counted groups multiply ((a{1,99}){1,99} has 9,801 ways to be repeated), and so they are counted.

Not here: syntax, which the compiler refuses, and how long texts take to follow (engine/grammars.py).
"""

from __future__ import annotations

import re
from typing import Final

_LOOKS_AROUND: Final = ("(?=", "(?!", "(?<=", "(?<!")
_COUNT: Final = re.compile(r"\{(\d*)(?:,(\d*))?\}")
_LARGEST: Final = 1 << 40  # more is not told apart


class RegexRefusal(ValueError):
    """Why it is not taken: the end of a sentence that begins with its name."""


def num_repeats(pattern: str) -> int:
    """All counts of an expression together, those within a counted group times its count; raises RegexRefusal."""
    open_groups: list[int] = []  # of each group that is open: what was counted before it
    total = last = 0  # last: what the piece before a count has in it, 0 where it is no group
    position, end = 0, len(pattern)
    while position < end:
        letter = pattern[position]
        if letter == "\\":
            if pattern[position + 1 : position + 2] in ("b", "B"):
                raise RegexRefusal(f"\\{pattern[position + 1]} is not supported")
            position, last = position + 2, 0
        elif letter == "[":
            position, last = _behind_class(pattern, position), 0
        elif letter == "(":
            for looked in _LOOKS_AROUND:
                if pattern.startswith(looked, position):
                    raise RegexRefusal(f"{looked}…) is not supported")
            open_groups.append(total)
            position, total, last = position + 1, 0, 0
        elif letter == ")" and open_groups:
            last = total
            total += open_groups.pop()
            position += 1
        elif letter == "{" and (found := _COUNT.match(pattern, position)) is not None:
            count = sum(min(int(number[:9]), _LARGEST) for number in found.groups() if number)
            total = min(total + count + last * max(count - 1, 0), _LARGEST)
            position, last = found.end(), 0
        else:
            position, last = position + 1, 0
    return sum(open_groups) + total


def _behind_class(pattern: str, position: int) -> int:
    """Where a [class] that begins here has ended."""
    position += 1
    while position < len(pattern) and pattern[position] != "]":
        position += 2 if pattern[position] == "\\" else 1
    return position + 1
