"""A systemd unit as far as ours go: sections, settings in order, specifiers; enough to start what it says without systemd."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

UNITS: Final = Path(__file__).resolve().parents[2] / "deploy" / "systemd"


@dataclass(frozen=True, slots=True)
class Unit:
    """Its settings, as (section, key, value) in the file's order."""

    settings: tuple[tuple[str, str, str], ...]

    @classmethod
    def parse(cls, text: str) -> Unit:
        """Raise ValueError for a line that is none."""
        section, settings = "", []
        for line in text.splitlines():
            if not line or line.startswith(("#", ";")):
                continue
            if match := re.fullmatch(r"\[(\w+)\]", line):
                section = match[1]
            elif section and (match := re.fullmatch(r"(\w+)=(.*)", line)):
                settings.append((section, match[1], match[2]))
            else:
                raise ValueError(line)
        return cls(tuple(settings))

    def all(self, key: str) -> list[str]:
        """Every value of it, in order."""
        return [value for _, name, value in self.settings if name == key]

    def one(self, key: str) -> str:
        """The value of what stands there once."""
        (value,) = self.all(key)
        return value

    def command(self) -> list[str]:
        """What it starts."""
        return shlex.split(self.one("ExecStart"))

    def environment(self, host: str, instance: str, read: Callable[[str], str | None]) -> dict[str, str]:
        """What it sets: its files, which `read` gives by their paths, over its own settings (systemd.exec(5))."""
        found: dict[str, str] = {}
        for value in self.all("Environment"):
            found |= dict(word.split("=", 1) for word in shlex.split(specified(value, host, instance)))
        for value in self.all("EnvironmentFile"):
            text = read(specified(value.removeprefix("-"), host, instance))
            if text is None:
                if not value.startswith("-"):
                    raise FileNotFoundError(value)
                continue
            lines = [line for line in text.splitlines() if line and not line.startswith("#")]
            found |= dict(line.split("=", 1) for line in lines)
        return found


def specified(value: str, host: str, instance: str) -> str:
    """Its specifiers replaced."""
    known = {"%H": host, "%i": instance, "%%": "%"}
    return re.sub(r"%.", lambda match: known[match[0]], value)


def file_of(unit: str) -> tuple[str, str]:
    """The file's name, and the instance, of `baton-decode@0`."""
    name, at, instance = unit.partition("@")
    return f"{name}{at}.service", instance
