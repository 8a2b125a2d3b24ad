"""A command's words that need no flag's name: `baton chat URL "question" --seed 1`, wherever among the flags they stand.

All settings are flags with one value each (config.py). Not here: which words a command takes without a name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

# Other words may begin with a dash, too: a number, or a question.
_FLAG: Final = re.compile(r"--?[A-Za-z][\w-]*(=|$)")


def as_flags(
    words: Sequence[str],
    free: Sequence[str],
    bare: Sequence[str] = (),
    fits: Callable[[str, str], bool] = lambda flag, word: True,
) -> list[str]:
    """A command's words as flags only, wherever among its flags they stand.

    `free`: the flags that need no name, in the order of their words; one that is given by name is not waited for. `bare`: those
    that may stand alone, for `on`. `fits`: whether a word can be a free flag's. Other words the parser refuses.
    """
    left = [flag for flag in free if not any(word == flag or word.startswith(f"{flag}=") for word in words)]
    spelled: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not _FLAG.match(word):
            flag = next((each for each in left if fits(each, word)), None)
            spelled.append(word if flag is None else f"{flag}={word}")
            left = [each for each in left if each != flag]
        elif word in bare:
            spelled += [word, rest.pop(0) if rest[:1] in (["on"], ["off"]) else "on"]
        else:
            spelled.append(word)
            if rest and "=" not in word and word not in ("-h", "--help") and not _FLAG.match(rest[0]):
                spelled.append(rest.pop(0))
    return spelled
