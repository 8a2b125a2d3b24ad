"""A model's text taken apart into what it says and the tools it calls. Pure: a function of the text so far, however it was cut.

    text ──> content
         ├─> a call begins: its name      once the text can be nothing else
         └─> its arguments, in pieces     as the model writes them

What may still become a call, or its end, is held back, and so is white space, which is dropped next to a call. Text that looked
like a call and is none is content, all of it. Of a call that has begun the client knows; so whatever stands where its arguments
should go on is taken for arguments, up to the call's end, and the client finds that they are no JSON, as it does when max_tokens
cuts them off. How calls are written: tool_syntax.py.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final

from router.json_scan import CallScan
from router.tool_syntax import ToolSyntax

_BLANKS: Final = re.compile(r"\s*+")
_NAME_BEFORE: Final = re.compile(r"\s*([A-Za-z0-9_.:/-]{1,128})(\[CALL_ID\][A-Za-z0-9]{1,64})?(\[ARGS\])?\s*(?=\{)")
# Possessive, since blanks in front and behind can be shared out in as many ways as there are blanks, and each would be tried.
_MAY_BE_NAME: Final = re.compile(r"\s*+[A-Za-z0-9_.:/-]{0,128}+(\[[A-Za-z0-9_\[\]]{0,90}+)?+\s*+")


@dataclass(frozen=True, slots=True)
class Said:
    """Text that is no call."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Text that comes before what is said (thought_text.py)."""

    text: str


@dataclass(frozen=True, slots=True)
class Called:
    """The beginning of a call, or what follows of it."""

    index: int
    name: str | None  # with the beginning
    arguments: str


Told = Said | Called | Thought


class ToolReader:
    """Reads one completion."""

    def __init__(self, syntax: ToolSyntax, offered: Collection[str]) -> None:
        """`offered`: names of the functions that there are; a call without a mark of its own must be to one of them."""
        self._syntax = syntax
        self._offered = offered
        self._rest = ""  # what is not decided yet, once a push is over
        self._at = 0  # until then: where that begins; cut once, or each mark would copy all that follows it
        self._blanks: list[
            str
        ] = []  # behind it, where more of them decides nothing: not looked through with each that comes
        self._held = ""  # of what looks like a call, all that the rest has lost
        self._mark_length = 0  # of that, what can only be content
        self._may_be_bare = bool(syntax.bare)  # at the very beginning, and behind a call
        self._is_behind_call = False
        self._is_in_list = False
        self._scan = CallScan(syntax.argument_keys)
        self._read: Callable[[], bool] = self._read_content
        self._read_next: Callable[[], bool] = self._read_tail  # behind a call's arguments
        self._told: list[Told] = []
        self.num_calls = 0  # that have begun

    def push(self, text: str) -> list[Told]:
        """What can be told now."""
        if text.isspace() and self._rest.isspace() and self._read != self._read_spilled:
            self._blanks.append(text)
            return []
        self._take_blanks()
        self._rest += text
        while self._read():
            pass
        self._rest, self._at = self._rest[self._at :], 0
        return self._taken()

    def finish(self) -> list[Told]:
        """What was held back, since no text follows."""
        self._take_blanks()
        while self._read in (self._read_head, self._read_item, self._read_name) or (
            self._read == self._read_call and not self._scan.is_begun
        ):
            self._fall_back()
            while self._read():
                pass
        rest, self._rest, self._at = self._rest[self._at :], "", 0
        if self._read == self._read_content and not (self._is_behind_call and rest.isspace()):
            self._say(rest)
        elif self._read == self._read_spilled:
            self._told.append(Called(self.num_calls - 1, None, rest))
        return self._taken()

    def _take_blanks(self) -> None:
        self._rest += "".join(self._blanks)
        self._blanks.clear()

    def _taken(self) -> list[Told]:
        told, self._told = self._told, []
        return _joined(told)

    def _say(self, text: str) -> None:
        if text:
            self._told.append(Said(text))
            self._is_behind_call = False

    # ---------------------------------------------------------------- ways to read; each says whether there is more to be done

    def _read_content(self) -> bool:
        if self._may_be_bare:
            rest, mark = self._rest[self._at :].lstrip(), self._syntax.mark
            if not rest or mark.startswith(rest):
                return False
            self._may_be_bare = False
            if rest[0] == self._syntax.bare:
                self._hold(self._at)
                self._read = self._read_head
                return True
        mark = self._syntax.mark  # no mark ends as one begins: none is begun in front of where content begins
        at = self._rest.find(mark, self._at) if mark else -1
        until = at if at >= 0 else len(self._rest) - begun(mark, self._rest)
        shown = self._rest[self._at : until].rstrip()
        self._say(shown)
        self._at += len(shown)
        if at < 0:
            return False
        self._hold(at + len(mark))
        self._mark_length = len(self._held)
        self._read = self._read_head
        return True

    def _read_head(self) -> bool:
        """The first call, behind its mark."""
        at = self._behind_blanks()
        first = self._rest[at : at + 1]
        if not first:
            return False
        self._is_in_list = self._syntax.is_list and first == "["
        if self._is_in_list:
            self._hold(at + 1, adds=True)
            self._read = self._read_item
        elif first == "{" and not self._syntax.is_list:
            self._read = self._read_item
        elif self._syntax.is_named:
            self._read = self._read_name
        else:
            self._fall_back()
        return True

    def _read_name(self) -> bool:
        """A name that stands before its arguments."""
        found = _NAME_BEFORE.match(self._rest, self._at)
        if found is None:
            if _MAY_BE_NAME.fullmatch(self._rest, self._at):
                return False
            self._fall_back()
            return True
        self._at = found.end()
        self._scan = CallScan(("arguments",))
        for character in f'{{"name":"{found[1]}","arguments":':
            self._scan.push(character)
        self._read, self._read_next = self._read_call, self._read_behind
        return True

    def _read_item(self) -> bool:
        """The object of a call, at its beginning."""
        at = self._behind_blanks()
        first = self._rest[at : at + 1]
        if not first:
            return False
        if first == "{":
            self._hold(at, adds=True)
            self._scan = CallScan(self._syntax.argument_keys)
            self._read, self._read_next = self._read_call, self._read_tail
        else:
            self._fall_back()
        return True

    def _read_call(self) -> bool:
        """The object, up to its arguments' end."""
        scan, at = self._scan, self._at
        while at < len(self._rest) and not scan.has_all_arguments:
            was_begun = scan.is_begun
            scan.push(self._rest[at])
            if scan.is_broken and was_begun:
                break
            if scan.is_broken or (scan.is_begun and not self._is_offered(scan)):
                self._fall_back()
                return True
            at = scan.push_run(self._rest, at + 1)
            if scan.is_begun and not was_begun:
                self._told.append(Called(self.num_calls, scan.name, ""))
                self.num_calls += 1
        self._hold(at, adds=True)
        if not scan.is_begun:
            return False
        self._told.append(Called(self.num_calls - 1, None, scan.take()))
        self._held = ""
        if scan.is_broken or scan.has_all_arguments:
            self._read = self._read_spilled if scan.is_broken else self._read_next
            return True
        return False

    def _read_spilled(self) -> bool:
        """What stands where arguments should: to the call's end."""
        marks = [mark for mark in (self._syntax.mark, self._syntax.closes) if mark]
        end = -1
        for mark in marks:  # the second in front of the first only: it may be far away, and each call would look for it
            found = self._rest.find(mark, self._at, len(self._rest) if end < 0 else end + len(mark) - 1)
            end = found if found >= 0 else end
        length = max([begun(mark, self._rest, self._at) for mark in marks], default=0)
        until = end if end >= 0 else len(self._rest) - length
        self._told.append(Called(self.num_calls - 1, None, self._rest[self._at : until]))
        self._at = until
        if end >= 0:
            self._read = self._read_behind
        return end >= 0

    def _read_tail(self) -> bool:
        """What the object has behind its arguments: nothing that counts."""
        scan, at = self._scan, self._at
        while at < len(self._rest) and not scan.is_whole:
            scan.push(self._rest[at])
            if scan.is_broken:
                self._give_back(len(self._held))
                self._held, self._read = "", self._read_behind
                return True
            at = scan.push_run(self._rest, at + 1)
        self._hold(at, adds=True)
        if scan.is_whole:
            self._held, self._read = "", self._read_behind
        return scan.is_whole

    def _read_behind(self) -> bool:
        """What stands between two calls, or behind the last."""
        self._is_behind_call = True
        closes = self._syntax.closes or ("]" if self._is_in_list else "")
        at = self._behind_blanks()
        rest = self._rest[at : at + max(len(closes), 1)]
        if not rest or (len(rest) < len(closes) and closes.startswith(rest)):
            return False
        if rest == closes:
            self._at = at + len(closes)
            self._is_in_list = False
            self._read = self._read_content
        elif (self._is_in_list and rest[0] == ",") or (self._syntax.bare == "{" and rest[0] in ";{"):
            self._hold(at + (rest[0] != "{"))
            self._read = self._read_item
        else:
            self._is_in_list = False
            self._read = self._read_content
        return True

    def _behind_blanks(self) -> int:
        """Where in the rest something else follows, or its end."""
        found = _BLANKS.match(self._rest, self._at)
        return self._at if found is None else found.end()

    # ---------------------------------------------------------------- what is held back

    def _hold(self, until: int, adds: bool = False) -> None:
        """The rest's beginning is what looks like a call, or more of it."""
        self._held = (self._held if adds else "") + self._rest[self._at : until]
        self._at = until
        if not adds:
            self._mark_length = 0

    def _give_back(self, length: int) -> None:
        """The end of what is held is rest again; what earlier pushes brought of it has been cut off, and comes in front."""
        if length <= self._at:
            self._at -= length
        else:
            self._rest, self._at = self._held[len(self._held) - length :] + self._rest[self._at :], 0

    def _fall_back(self) -> None:
        """It is no call: its mark is content, and behind that there may be a call."""
        self._say(self._held[: self._mark_length])
        self._give_back(len(self._held) - self._mark_length)
        self._held, self._mark_length, self._is_in_list = "", 0, False
        self._read = self._read_content

    def _is_offered(self, scan: CallScan) -> bool:
        return not self._syntax.bare or scan.name in self._offered


def begun(mark: str, text: str, start: int = 0) -> int:
    """The length of the text's longest end, from `start` on, that begins the mark and is not all of it."""
    longest = min(len(mark) - 1, len(text) - start)
    return next((length for length in range(longest, 0, -1) if text.endswith(mark[:length])), 0)


def _joined(told: Iterable[Told]) -> list[Told]:
    """The same in as few parts as it can be, none empty but for a call's beginning."""
    joined: list[Told] = []
    for index, group in itertools.groupby(told, lambda each: each.index if isinstance(each, Called) else None):
        parts = list(group)
        text = "".join([each.arguments if isinstance(each, Called) else each.text for each in parts])
        name = parts[0].name if isinstance(parts[0], Called) else None
        if index is None:
            joined.append(Said(text))
        elif name is not None or text:
            joined.append(Called(index, name, text))
    return joined
