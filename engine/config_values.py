"""Values of a model directory's JSON files, checked as they are taken.

Not here: which keys there are and what they mean. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

MAX_COUNT: Final = (1 << 31) - 1
NUMBERS: Final = (1e-30, 1e15)  # what is computed from a few of them is a number, too


class ModelError(ValueError):
    """The model directory cannot be used; the message is one sentence for the person who named it."""


class Settings:
    """One JSON object of settings. A null counts as absent."""

    def __init__(self, where: str, values: Mapping[str, object]) -> None:
        self.where = where  # what errors call the object: its file, or file and key
        self.values = values

    def count(self, key: str, default: int | None = None, most: int = MAX_COUNT) -> int:
        """Take a positive integer, `most` at most."""
        value = self._take(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{self.where}: {key} is {value!r}, not a positive integer")
        if value > most:
            raise ModelError(f"{self.where}: {key} is {value}, more than {most}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Take a positive number."""
        value, (least, most) = self._take(key, default), NUMBERS
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
            raise ModelError(f"{self.where}: {key} is {value!r}, not a positive number from {least:g} to {most:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Take true or false."""
        value = self._take(key, default)
        if not isinstance(value, bool):
            raise ModelError(f"{self.where}: {key} is {value!r}, not true or false")
        return value

    def _take(self, key: str, default: float | None) -> object:
        value = self.values.get(key)
        return default if value is None else value


def read_settings(path: Path) -> Settings:
    """Read a file that holds one JSON object. Raises ModelError."""
    try:
        parsed = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist: a model directory has one") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ModelError(f"{path} is not a JSON object")
    return Settings(path.name, parsed)
