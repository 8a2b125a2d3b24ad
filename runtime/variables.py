"""Which variables of the environment were meant for Baton and are read by none of its commands: a misspelt one would be ignored.

Not here: their list (known_variables.py, written by `make docs`), and what a known one may say (knobs.py).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Final

from runtime.knobs import ENVIRONMENT_PREFIX
from runtime.known_variables import KNOWN_VARIABLES

DEFAULT_PREFIX: Final = ENVIRONMENT_PREFIX + "DEFAULT_"  # an image's
_SHOWN_KEY: Final = ENVIRONMENT_PREFIX + "API_KEY"  # one that operators' commands show
_ASKED_KEYS: Final = ENVIRONMENT_PREFIX + "API_KEYS"  # the file of those that routers ask for


def is_unread(name: str) -> bool:
    """Whether a variable has our prefix and means nothing to any command."""
    return name.startswith(ENVIRONMENT_PREFIX) and _meant(name) not in KNOWN_VARIABLES


def unread_variables(environment: Mapping[str, str], *, lacks_keys: bool = False) -> Iterator[dict[str, str]]:
    """Each with the likeliest that it was meant for, as fields of a log line.

    `lacks_keys`: it is asked for a router that asks for no keys, to which the one that operators' commands show means nothing.
    """
    for name in sorted(environment):
        if not environment[name]:  # empty is unset
            continue
        if is_unread(name):
            yield {"name": name} | _hint(name)
        elif lacks_keys and name == _SHOWN_KEY:
            yield {"name": name, "did_you_mean": _ASKED_KEYS}


def _hint(name: str) -> dict[str, str]:
    known = [each.removeprefix(ENVIRONMENT_PREFIX) for each in sorted(KNOWN_VARIABLES)]
    close = difflib.get_close_matches(_meant(name).removeprefix(ENVIRONMENT_PREFIX), known, n=1)
    prefix = DEFAULT_PREFIX if name.startswith(DEFAULT_PREFIX) else ENVIRONMENT_PREFIX
    return {"did_you_mean": prefix + close[0]} if close else {}


def _meant(name: str) -> str:
    """Of a default's variable the one whose default it says."""
    if not name.startswith(DEFAULT_PREFIX):
        return name
    return ENVIRONMENT_PREFIX + name.removeprefix(DEFAULT_PREFIX)
