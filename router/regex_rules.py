"""What of a regular expression would be left out by xgrammar, or multiplies. Pure.

xgrammar 0.2 drops what looks around without a word, and `^` and `$` wherever they stand, so that a text may come out which the
expression does not match: refused by name, but for anchors where a text begins and ends anyway. Counts within counted groups
multiply ((a{1,99}){1,99} has 9,801 ways to be repeated), and so they are counted.

Within JSON's quotes xgrammar takes an expression for one of what is written there, while a schema means what that says: the two
differ in what JSON escapes, which is spelled out here. From a class with other members it takes such characters out, as long as all
of the expression is ASCII; so that is spelled out, too. What would be the letter itself, as \\A, is refused.

Not here: syntax, which the compiler refuses, and how long texts take to follow (engine/grammars.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

_LOOKS_AROUND: Final = ("(?=", "(?!", "(?<=", "(?<!")
_GROUP_BEGIN: Final = re.compile(r"\((?:\?(?::|P?<\w+>))?")
_COUNT: Final = re.compile(r"\{(\d*)(?:,(\d*))?\}")
_ESCAPES: Final = frozenset("dDwWsSnrtfvxuc0")  # of letters and digits, those that xgrammar knows
_NUMBERED: Final = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,6})\})")
_CONTROLS: Final = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
_LARGEST: Final = 1 << 40  # more is not told apart


class RegexRefusal(ValueError):
    """Why it is not taken: the end of a sentence that begins with its name."""


@dataclass(frozen=True, slots=True)
class _Place:
    """What can be before the next piece of an expression."""

    is_begin: bool  # nothing yet
    is_end: bool = False  # a $


class _OpenGroup(NamedTuple):
    total: int  # what was counted before it
    begin: _Place
    is_end: bool = False  # a $ ends one of its alternatives so far
    is_anchored: bool = False  # there is a ^ or $ in it


def num_repeats(pattern: str) -> int:
    """All counts of an expression together, those within a counted group times its count; raises RegexRefusal."""
    groups = [_OpenGroup(0, _Place(is_begin=True))]
    place = groups[0].begin
    total = last = 0  # last: what the piece before a count has in it, 0 where it is no group
    is_anchored = False  # whether that piece is a group with an anchor
    position, end = 0, len(pattern)
    while position < end:
        letter = pattern[position]
        was_anchored, is_anchored = is_anchored, False
        if letter == "(":
            for looked in _LOOKS_AROUND:
                if pattern.startswith(looked, position):
                    raise RegexRefusal(f"{looked}…) is not supported")
            found = _GROUP_BEGIN.match(pattern, position)
            position = position + 1 if found is None else found.end()
            groups.append(_OpenGroup(total, place))
            total, last = 0, 0
        elif letter == "|":
            groups[-1] = groups[-1]._replace(is_end=groups[-1].is_end or place.is_end)
            place, position, last = groups[-1].begin, position + 1, 0
        elif letter == ")" and len(groups) > 1:
            group = groups.pop()
            last, total, is_anchored = total, total + group.total, group.is_anchored
            groups[-1] = groups[-1]._replace(is_anchored=groups[-1].is_anchored or is_anchored)
            place, position = _Place(is_begin=False, is_end=group.is_end or place.is_end), position + 1
        elif letter in "*+{" and was_anchored:
            raise RegexRefusal("^ and $ are not supported in what is repeated")
        elif letter == "{" and (found := _COUNT.match(pattern, position)) is not None:
            count = sum(min(int(number[:9]), _LARGEST) for number in found.groups() if number)
            total = min(total + count + last * max(count - 1, 0), _LARGEST)
            position, last = found.end(), 0
        elif letter in "*+?":
            position, last = position + 1, 0
        elif letter in "^$":
            if letter == "^" and not place.is_begin:
                raise RegexRefusal("^ is not supported behind anything")
            place = replace(place, is_end=place.is_end or letter == "$")
            groups[-1] = groups[-1]._replace(is_anchored=True)
            position, last = position + 1, 0
        else:
            if place.is_end:
                raise RegexRefusal("$ is not supported before anything")
            place, last = _Place(is_begin=False), 0
            position = _behind_one(pattern, position)
    return sum(group.total for group in groups) + total


def within_quotes(pattern: str) -> str:
    """The expression of what stands between JSON's quotes, where that says what the pattern matches; ASCII.

    Raises RegexRefusal for a class of nothing but what JSON escapes.
    """
    parts: list[str] = []
    position = 0
    while position < len(pattern):
        behind = _behind_one(pattern, position)
        piece = pattern[position:behind]
        position = behind
        if piece.startswith("["):
            members = list(_members(piece))
            if not piece.startswith("[^") and members and all(map(_is_escaped, members)):
                raise RegexRefusal(
                    f"{_ascii(piece[:60])} has only characters that JSON escapes, which is not supported"
                )
        elif _is_escaped(piece):
            written = json.dumps(_first_of(piece))[1:-1]
            parts.append(f"(?:{written.replace(chr(92), chr(92) * 2)})")
            continue
        parts.append(_ascii(piece))
    return "".join(parts)


def _ascii(piece: str) -> str:
    """The same in ASCII that can be printed."""
    return "".join(
        c if " " <= c <= "~" else f"\\u{ord(c):04x}" if ord(c) <= 0xFFFF else f"\\u{{{ord(c):x}}}" for c in piece
    )


def _behind_one(pattern: str, position: int) -> int:
    """Where the character, escape or [class] that begins here has ended; raises RegexRefusal for an escape that is not known."""
    if pattern[position] != "[":
        return _behind_member(pattern, position)
    end = _behind_class(pattern, position)
    inner = position + 1
    while inner < end:
        inner = _behind_member(pattern, inner)
    return end


def _behind_class(pattern: str, position: int) -> int:
    position += 1
    while position < len(pattern) and pattern[position] != "]":
        position += 2 if pattern[position] == "\\" else 1
    return min(position + 1, len(pattern))


def _members(piece: str) -> Iterator[str]:
    """Of a [class]: each character, escape, or range as it is written."""
    position, end = 1, len(piece) - 1
    while position < end:
        behind = _behind_member(piece, position)
        if piece[behind : behind + 1] == "-" and behind + 1 < end:
            behind = _behind_member(piece, behind + 1)
        yield piece[position:behind]
        position = behind


def _behind_member(pattern: str, position: int) -> int:
    """Where a character or an escape has ended."""
    if pattern[position] != "\\":
        return position + 1
    letter = pattern[position + 1 : position + 2]
    if letter.isascii() and letter.isalnum() and letter not in _ESCAPES:
        raise RegexRefusal(f"\\{letter} is not supported")
    numbered = _NUMBERED.match(pattern, position)
    if numbered is not None:
        return numbered.end()
    return position + (3 if letter == "c" else 2)


def _is_escaped(piece: str) -> bool:
    """Whether JSON escapes all that a character, an escape or a range stands for."""
    first = _first_of(piece)
    if first is None:
        return False
    behind = _behind_member(piece, 0)
    if piece[behind : behind + 1] == "-" and behind + 1 < len(piece):
        last = _first_of(piece[behind + 1 :])
        return last is not None and (last < " " or first == last in ('"', "\\"))
    return first < " " or first in ('"', "\\")


def _first_of(piece: str) -> str | None:
    """The character that is written first, or none: a kind of characters, as \\d is."""
    if not piece.startswith("\\"):
        return piece[0]
    numbered = _NUMBERED.match(piece)
    if numbered is not None:
        return chr(min(int(next(filter(None, numbered.groups())), 16), 0x10FFFF))
    letter = piece[1:2]
    if letter == "c" and len(piece) > 2:
        return chr(ord(piece[2]) % 32)
    if letter in _CONTROLS:
        return _CONTROLS[letter]
    return letter if letter and not letter.isalnum() else None
