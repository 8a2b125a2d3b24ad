"""One knob of a config: how a flag, a variable and a TOML key spell its value, and which values it takes.

Not here: where values come from, and which of them wins (config.py).
"""

from __future__ import annotations

import dataclasses
import math
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

REQUIRED: Final = dataclasses.MISSING
ENVIRONMENT_PREFIX: Final = "BATON_"
LARGEST: Final[Mapping[Any, float]] = {
    int: (1 << 63) - 1,
    float: sys.float_info.max,
}  # seeds and counts have 64 bits at most
NO_KNOBS: Final = ("config", "given")  # --config is every room's

_KINDS: Final[Mapping[Any, tuple[str, str]]] = {  # type -> (metavar, what a value must be)
    int: ("N", "a whole number"),
    float: ("X", "a number"),
    str: ("TEXT", "a text"),
    bool: ("on|off", "on or off"),
    Path: ("PATH", "a path"),
    tuple: ("A,B,…", "a list of texts"),
}


class ConfigError(ValueError):
    """The user's input cannot be used; the message is one line that names where it stood, the value and the bound."""


@dataclass(frozen=True, slots=True)
class Knob:
    """A config field with what `knob` and its annotation say about it."""

    name: str
    kind: Any  # a key of _KINDS
    is_optional: bool
    default: Any
    help: str
    low: float | None
    high: float | None
    choices: tuple[Any, ...]
    metavar: str
    variable: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def default_variable(self) -> str:
        """By which an image says another default."""
        return f"{ENVIRONMENT_PREFIX}DEFAULT_{self.variable.removeprefix(ENVIRONMENT_PREFIX)}"

    @property
    def has_own_variable(self) -> bool:
        return self.variable != ENVIRONMENT_PREFIX + self.name.upper()

    def place(self, name: str, between: str, value: str) -> str:
        """Where a value stands, and which it is; not which text, that may be a secret."""
        return name if self.kind is str and not self.choices else f"{name}{between}{value}"

    def from_text(self, text: str, where: str) -> Any:
        """The value that a flag or a variable spells; `where` opens the error message."""
        if self.is_optional and text == "none" and "none" not in self.choices:
            return None
        if self.choices:
            for choice in self.choices:
                if text == str(choice):
                    return choice
            raise self._wrong(where)
        try:
            if self.kind is int:
                return self._bounded(int(text), where)
            if self.kind is float:
                return self._bounded(float(text), where)
        except ConfigError:
            raise
        except ValueError:
            raise self._wrong(where) from None
        if self.kind is bool:
            if text not in ("on", "off"):
                raise self._wrong(where)
            return text == "on"
        self._check_characters(text, where)
        if self.kind is tuple:
            return tuple(part.strip() for part in text.split(",") if part.strip())
        if self.kind is Path and not text:  # it would be the current directory
            raise self._wrong(where.rstrip())
        return Path(text) if self.kind is Path else text

    def from_toml(self, value: object, where: str) -> Any:
        """The value that a TOML key holds: as text for texts, otherwise of its own type."""
        if self.kind is tuple and isinstance(value, list) and all(isinstance(item, str) for item in value):
            for item in value:
                self._check_characters(item, where)
            return tuple(value)
        if isinstance(value, bool):
            if self.kind is bool:
                return value
        elif self.choices and value in self.choices:
            return value
        elif isinstance(value, int) and self.kind is int and not self.choices:
            return self._bounded(value, where)
        elif isinstance(value, (int, float)) and self.kind is float and not self.choices:
            return float(self._bounded(value, where))
        elif isinstance(value, str) and (self.kind not in (int, float) or value == "none"):
            return self.from_text(value, where)
        raise self._wrong(where)

    def shown_default(self) -> str:
        """The default as a user would type it."""
        if self.default is REQUIRED:
            return "required"
        if isinstance(self.default, bool):
            return "default on" if self.default else "default off"
        if isinstance(self.default, tuple):
            return "default " + (",".join(map(str, self.default)) or "empty")
        return "default " + ("none" if self.default is None else str(self.default) or "empty")

    def _bounded(self, value: float, where: str) -> float:
        if (self.low is not None and value < self.low) or (self.high is not None and value > self.high):
            raise self._wrong(where)
        if isinstance(value, int) and abs(value) > LARGEST[self.kind]:
            raise ConfigError(f"{where}: is too large a number")
        if not math.isfinite(value):
            raise self._wrong(where)
        return value

    def _check_characters(self, text: str, where: str) -> None:
        if "\0" in text:  # which TOML can spell: no path, no name of a host, no argument of a process has any
            raise ConfigError(f"{where}: must be without NUL")
        if self.kind is not Path and not is_unicode(text):  # an argument may be any bytes, and go out as JSON, say
            raise ConfigError(f"{where}: must be text in UTF-8")

    def _wrong(self, where: str) -> ConfigError:
        if self.choices:
            must = "one of " + ", ".join(str(choice) for choice in self.choices)
        else:
            must = _KINDS[self.kind][1]
            if self.low is not None and self.high is not None:
                must += f" between {self.low} and {self.high}"
            elif self.low is not None:
                must += f", at least {self.low}"
            elif self.high is not None:
                must += f", at most {self.high}"
        return ConfigError(f"{where}: must be {must}" + (", or none" if self.is_optional else ""))


def knobs_of(config_type: type[DataclassInstance]) -> list[Knob]:
    """The knobs of a config in their order, without what `load` fills in by itself. TypeError: one that no flag can spell."""
    hints = get_type_hints(config_type)
    return [_knob_of(each, hints[each.name]) for each in dataclasses.fields(config_type) if each.name not in NO_KNOBS]


def _knob_of(each: dataclasses.Field[Any], annotation: Any) -> Knob:
    choices = tuple(each.metadata["choices"] or ())
    members = [annotation]
    if get_origin(annotation) in (Union, types.UnionType):
        members = [member for member in get_args(annotation) if member is not type(None)]
    kind = members[0]
    if get_origin(kind) is Literal:
        choices = choices or get_args(kind)
        kind = type(choices[0])
    elif get_origin(kind) is tuple:
        kind = tuple
    if len(members) > 1 or kind not in _KINDS:
        raise TypeError(f"knob {each.name} has the type {annotation}, which no flag can spell")
    return Knob(
        name=each.name,
        kind=kind,
        is_optional=type(None) in get_args(annotation),
        default=each.default,
        help=each.metadata["help"],
        low=each.metadata["low"],
        high=each.metadata["high"],
        choices=choices,
        metavar=each.metadata["metavar"] or ("|".join(map(str, choices)) if choices else _KINDS[kind][0]),
        variable=each.metadata["variable"] or ENVIRONMENT_PREFIX + each.name.upper(),
    )


def is_unicode(text: str) -> bool:
    """Whether it can be told to others; what is not UTF-8 comes as halves of surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
