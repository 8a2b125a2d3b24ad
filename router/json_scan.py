"""A JSON object followed character by character, and what of it is a tool call's name and arguments. Pure.

JSON as RFC 8259 has it, but for control characters within strings, which models write: they are taken, and written on escaped.
What is said of an object is a function of its characters so far; how they came in pieces has no part in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from enum import Enum, auto
from typing import Final

MAX_DEPTH: Final = 128
MAX_OWN: Final = 1000  # characters of a key or a name of the call's own, and of a number: no call has more
_SPACE: Final = " \t\n\r"
_NUMBER: Final = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_LITERALS: Final = {"t": "rue", "f": "alse", "n": "ull"}
_ESCAPES: Final = '"\\/bfnrt'
_FUNCTION_NAME: Final = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_PLAIN: Final = re.compile(r'[^"\\\x00-\x1f]*+')  # of a string, what is as it is written
_BLANKS: Final = re.compile(rf"[{_SPACE}]*+")


class Want(Enum):
    """What comes next."""

    VALUE = auto()
    FIRST_ITEM = auto()  # a value, or the array's end
    KEY = auto()
    FIRST_KEY = auto()  # a key, or the object's end
    COLON = auto()
    MORE = auto()  # a comma, or the end of what it is in
    STRING = auto()  # within one, as the ones below
    ESCAPED = auto()
    HEX = auto()
    NUMBER = auto()
    LITERAL = auto()
    NOTHING = auto()  # it is whole


class JsonScan:
    """Follows one JSON value."""

    __slots__ = ("_is_key", "_part", "_stack", "want")

    def __init__(self) -> None:
        self.want = Want.VALUE
        self._stack = ""  # what is open, outermost first
        self._is_key = False  # the string that is open
        self._part = ""  # digits of a number or an escape, what is left of a literal

    @property
    def depth(self) -> int:
        """Objects and arrays that are open."""
        return len(self._stack)

    def push(self, character: str) -> bool:
        """Take it; False if that is no JSON, and then nothing may be pushed any more."""
        match self.want:
            case Want.STRING | Want.ESCAPED | Want.HEX:
                return self._within_string(character)
            case Want.NUMBER if character in "0123456789+-.eE":
                self._part += character
                return len(self._part) <= MAX_OWN
            case Want.NUMBER:
                if not _NUMBER.fullmatch(self._part):
                    return False
                self._ended()
                return self.push(character)
            case Want.LITERAL:
                is_right, self._part = self._part[0] == character, self._part[1:]
                if not self._part:
                    self._ended()
                return is_right
        return character in _SPACE or self._between(character)

    def run_end(self, text: str, start: int) -> int:
        """Where what begins at `start` ends that would all be taken and change nothing: a string's plain text, or white space."""
        if self.want in (Want.ESCAPED, Want.HEX, Want.NUMBER, Want.LITERAL):
            return start
        run = (_PLAIN if self.want is Want.STRING else _BLANKS).match(text, start)
        return start if run is None else run.end()

    def _between(self, character: str) -> bool:
        """What is no white space, outside of strings, numbers and literals."""
        match self.want:
            case Want.FIRST_KEY | Want.FIRST_ITEM | Want.MORE if character in "]}":
                return self._close(character)
            case Want.FIRST_KEY | Want.KEY if character == '"':
                self.want, self._is_key = Want.STRING, True
            case Want.COLON if character == ":":
                self.want = Want.VALUE
            case Want.MORE if character == ",":
                self.want = Want.KEY if self._stack[-1] == "{" else Want.VALUE
            case Want.VALUE | Want.FIRST_ITEM:
                return self._begin(character)
            case _:
                return False
        return True

    def _begin(self, character: str) -> bool:
        """A value's first character."""
        if character in "{[" and len(self._stack) < MAX_DEPTH:
            self._stack += character
            self.want = Want.FIRST_KEY if character == "{" else Want.FIRST_ITEM
        elif character == '"':
            self.want, self._is_key = Want.STRING, False
        elif character in "-0123456789":
            self.want, self._part = Want.NUMBER, character
        elif character in _LITERALS:
            self.want, self._part = Want.LITERAL, _LITERALS[character]
        else:
            return False
        return True

    def _close(self, character: str) -> bool:
        if self._stack[-1:] + character not in ("{}", "[]"):
            return False
        self._stack = self._stack[:-1]
        self._ended()
        return True

    def _within_string(self, character: str) -> bool:
        match self.want:
            case Want.STRING if character == '"':
                self.want = Want.COLON if self._is_key else self._behind_value()
            case Want.STRING if character == "\\":
                self.want = Want.ESCAPED
            case Want.ESCAPED if character == "u":
                self.want, self._part = Want.HEX, ""
            case Want.ESCAPED:
                self.want = Want.STRING
                return character in _ESCAPES
            case Want.HEX:
                self._part += character
                if len(self._part) == 4:
                    self.want = Want.STRING
                return character in "0123456789abcdefABCDEF"
        return True

    def _ended(self) -> None:
        self.want = self._behind_value()

    def _behind_value(self) -> Want:
        return Want.MORE if self._stack else Want.NOTHING


class CallScan:
    """Follows one call's object, `{"name": …, "arguments": {…}}`: its keys in either order, others are passed over."""

    def __init__(self, argument_keys: Collection[str]) -> None:
        """`argument_keys`: what the arguments may be called."""
        self._argument_keys = argument_keys
        self._scan = JsonScan()
        self._text = ""  # of the key, or of the name, that is being read
        self._is_in_key = False  # that it is a key's
        self._key = ""
        self._arguments: list[str] = []  # those that have not been taken
        self._is_in_arguments = False
        self._has_arguments = False
        self.name: str | None = None
        self.is_broken = False  # it is no such call; nothing may be pushed any more

    @property
    def is_begun(self) -> bool:
        """The name is known, and the arguments' beginning."""
        return self.name is not None and self._has_arguments

    @property
    def has_all_arguments(self) -> bool:
        """There may be more, but no arguments."""
        return self.is_begun and not self._is_in_arguments

    @property
    def is_whole(self) -> bool:
        """The object is closed, and it is a call."""
        return self._scan.want is Want.NOTHING and not self.is_broken

    def take(self) -> str:
        """The arguments that are new, as they were written, but for control characters within strings: JSON, or its beginning."""
        taken, self._arguments = "".join(self._arguments), []
        return taken

    def push(self, character: str) -> None:
        """The next character; one that the object cannot have breaks it, and is no part of it."""
        scan = self._scan
        was, was_depth = scan.want, scan.depth
        self.is_broken = not (scan.push(character) and (was_depth or character == "{"))
        if self.is_broken:
            return
        if self._is_in_arguments:
            is_control = was is Want.STRING and character < " "
            self._arguments.append(json.dumps(character)[1:-1] if is_control else character)
            self._is_in_arguments = scan.depth > 1
        elif was_depth == 1:
            self._take_own(was, character)
        if scan.want is Want.NOTHING and not self.is_begun:
            self.is_broken = True

    def push_run(self, text: str, start: int) -> int:
        """Push at once what begins at `start` and only makes the arguments longer, or what nobody asks for; where it ends."""
        if self._scan.depth < 2:
            return start
        end = self._scan.run_end(text, start)
        if self._is_in_arguments:
            self._arguments.append(text[start:end])
        return end

    def _take_own(self, was: Want, character: str) -> None:
        """One of the call's own keys and values."""
        now = self._scan.want
        if was in (Want.KEY, Want.FIRST_KEY):
            self._text, self._is_in_key = character.strip(), True
        elif was is Want.VALUE and now is not Want.VALUE:
            self._begin_value(character)
        elif was in (Want.STRING, Want.ESCAPED, Want.HEX):
            if self._is_in_key or self._key == "name":  # of other values nobody asks
                self._text += character
            if len(self._text) > MAX_OWN:
                self.is_broken = True
            elif now is Want.COLON:
                self._key = str(json.loads(self._text, strict=False))
            elif now is Want.MORE and self._key == "name":
                name = str(json.loads(self._text, strict=False))
                self.is_broken = self.name is not None or _FUNCTION_NAME.fullmatch(name) is None
                self.name = self.name or name

    def _begin_value(self, character: str) -> None:
        self._text, self._is_in_key = character, False
        if self._key in self._argument_keys:
            self.is_broken = character != "{" or self._has_arguments
            self._has_arguments = self._is_in_arguments = not self.is_broken
            self._arguments += character if self._is_in_arguments else ""
        elif self._key == "name":
            self.is_broken = character != '"'
