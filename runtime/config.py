"""Knobs: one frozen dataclass per room, filled from flags, then the environment, then a TOML file, then defaults.

A room writes

    @dataclass(frozen=True, slots=True)
    class RouterConfig:
        model: Path = knob(help="model directory", metavar="DIR")                # no default: required
        port: int = knob(8000, "HTTP port; 0 takes a free one", low=0, high=65535)

and `load(RouterConfig, "baton router", "…")` gives it, or ends the process with one line and exit code 2. Field `block_size`
is the flag `--block-size`, the variable `BATON_BLOCK_SIZE`, unless the knob names another, and the TOML key `block_size`. Field
types: int, float, str, bool (`on` or `off`), Path, Literal, tuple[str, ...] (comma separated), and `X | None` (`none`).

A TOML file may serve several rooms: top-level keys are for every room that reads it, the keys of a table `[router]`,
`[prefill]`, `[decode]` or `[up]` for that room, which is the last word of `prog`; the table wins.

An image has defaults of its own, as variables: `BATON_DEFAULT_BLOCK_SIZE`. They stand in for the default alone, so the user's file
wins over them.

This is the only file that reads the environment. Not here: any knob; which values it takes (knobs.py); what they mean (a room
checks itself in `__post_init__`, with a ValueError of one sentence).
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import logging
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from runtime.knobs import ENVIRONMENT_PREFIX, NO_KNOBS, REQUIRED, Knob, knobs_of
from runtime.knobs import ConfigError as ConfigError
from runtime.logs import log_event
from runtime.process import fatal
from runtime.variables import is_unread, unread_variables

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
_LOG: Final = logging.getLogger(__name__)

ROOM_TABLES: Final = ("router", "prefill", "decode", "mixed", "up")
_NO_VALUE: Final = re.compile("argument (--.*): expected one argument")  # argparse's own words
GRPC_POLLS_ITSELF: Final = "-event_engine_client,-event_engine_listener"  # known to the gRPC that constraints.txt names
SPIN_COUNT: Final = (
    "2000"  # idle OpenMP threads sleep soon: passive waiting costs 25-45 %, endless spinning starves the neighbours
)


def knob(
    default: Any = REQUIRED,
    help: str = "",
    *,
    low: float | None = None,
    high: float | None = None,
    choices: Sequence[Any] | None = None,
    metavar: str | None = None,
    variable: str | None = None,
) -> Any:
    """Declare a field of a room's config; without a default it must be given.

    `help` says what it is, its unit and why this default. `low` and `high` are inclusive. `variable`: BATON_COMMAND_FIELD,
    where BATON_FIELD is what other commands read, and means something else there. The field is keyword-only, so that required
    knobs may stand anywhere.
    """
    details = {
        "help": help, "low": low, "high": high, "choices": choices, "metavar": metavar, "variable": variable,
    }  # fmt: skip
    return dataclasses.field(default=default, kw_only=True, metadata=details)


def load(
    config_type: type[T], prog: str, description: str, argv: Sequence[str] | None = None, elsewhere: str = ""
) -> T:
    """Fill a config from `argv` (default: the process's), the environment and the file that `--config` or BATON_CONFIG names.

    Ends the process: `--help` with 0; a wrong value, an unknown flag or key, a missing value with one line and 2.
    If the config itself has a field `config`, it gets the file's path; a field `given`, the names of what was said anywhere.
    `elsewhere`: whose an unknown flag may be, if not this command's; {variable} in it is that flag's.
    """
    try:
        return parse(config_type, prog, description, argv, os.environ, elsewhere)
    except ConfigError as error:
        fatal(f"{prog}: {error}")


def parse(
    config_type: type[T],
    prog: str,
    description: str,
    argv: Sequence[str] | None,
    environment: Mapping[str, str],
    elsewhere: str = "",
) -> T:
    """As `load`, but raise ConfigError instead of ending the process (`--help` still does)."""
    knobs = knobs_of(config_type)
    flags = _parse_flags(knobs, prog, description, argv, elsewhere)
    config_path = flags.pop("config", None)
    if config_path == "":
        raise ConfigError("--config: must be a path")
    is_for_us = config_path is not None
    config_path = config_path or environment.get(ENVIRONMENT_PREFIX + "CONFIG") or None
    file_values = _read_file(Path(config_path), prog.split()[-1], knobs, is_for_us) if config_path else {}

    values: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    for each in knobs:
        if each.name in flags:
            text = flags[each.name]
            values[each.name] = each.from_text(text, each.place(each.flag, " ", text))
        elif text := environment.get(each.variable, ""):  # empty is unset
            values[each.name] = each.from_text(text, each.place(each.variable, "=", text))
        elif each.name in file_values:
            value = file_values[each.name]
            values[each.name] = each.from_toml(value, each.place(f"{config_path}: {each.name}", " = ", _spelled(value)))
        elif text := environment.get(each.default_variable, ""):
            defaults[each.name] = each.from_text(text, each.place(each.default_variable, "=", text))
        elif each.default is REQUIRED:
            raise ConfigError(f"{each.flag} is missing (or {each.variable}, or {each.name} in a --config file)")
    own = {each.name for each in dataclasses.fields(config_type)}.intersection(NO_KNOBS)
    if "given" in own:
        values["given"] = frozenset(values)
    if config_path and "config" in own:
        values["config"] = Path(config_path)
    values = defaults | values
    try:
        return config_type(**values)
    except ConfigError:
        raise
    except ValueError as error:  # the room's own check of values that must fit together
        raise ConfigError(str(error)) from error
    except OSError as error:  # the same, which looks at paths: Path.is_file is False only where nothing is there
        raise ConfigError(f"{_closed_path(error, knobs, values)}: {error.strerror}") from error


def to_json(config: DataclassInstance) -> str:
    """Every value of a config, for a process of ours that is to have the very same."""
    values = {each.name: getattr(config, each.name) for each in dataclasses.fields(config)}
    return json.dumps({name: str(value) if isinstance(value, Path) else value for name, value in values.items()})


def from_json(config_type: type[T], text: str) -> T:
    """What `to_json` was given. Of another version's knobs, those that there are here; one that it did not have has its default."""
    known = {each.name for each in dataclasses.fields(config_type)}
    values: dict[str, Any] = {name: value for name, value in json.loads(text).items() if name in known}
    made = {Path: Path, tuple: tuple}
    for each in knobs_of(config_type):
        if values.get(each.name) is not None and each.kind in made:
            values[each.name] = made[each.kind](values[each.name])
    return config_type(**values)


def tables_in(path: Path) -> dict[str, dict[str, Any]]:
    """The tables of the TOML file at `path`, by room; raises ConfigError if it cannot be read."""
    return {key: value for key, value in _toml(path).items() if isinstance(value, dict)}


def values_in(path: Path, room: str) -> dict[str, Any]:
    """What the TOML file at `path` says to a room, by key; raises ConfigError if it cannot be read, or has tables of no room."""
    content = _toml(path)
    tables = {name: content.pop(name) for name in list(content) if isinstance(content[name], dict)}
    for name in tables:
        if name not in ROOM_TABLES:
            raise ConfigError(f"{path}: [{name}]: unknown table{_suggest(name, ROOM_TABLES)}")
    values: dict[str, Any] = content | tables.get(room, {})
    return values


def own_environment() -> dict[str, str]:
    """This process's, for who looks at another one that has the same."""
    return dict(os.environ)


def log_unread_variables(*, lacks_keys: bool = False) -> None:
    """Log each variable that was meant for us and is read by no command; `lacks_keys` as `unread_variables` has it."""
    for fields in unread_variables(os.environ, lacks_keys=lacks_keys):
        log_event(_LOG, logging.WARNING, "unknown_variable", **fields)


def thread_environment(threads: int) -> dict[str, str]:
    """What a process that computes with `threads` threads must have in its environment before torch loads."""
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": SPIN_COUNT}


def set_thread_environment(threads: int) -> None:
    """Put `thread_environment` into this process's environment; of use only before the first import of torch."""
    os.environ.update(thread_environment(threads))


def set_grpc_environment() -> None:
    """Tell gRPC's core how we want it, and tokenizers', unless their variables say otherwise; before gRPC's first import.

    No lines of its own on stderr: what it has to say reaches us as exceptions and statuses, and is logged as one line by whoever
    meets them. And its sockets read by the thread that waits for what comes of it, as before gRPC had an engine of its own for
    that, which hands each message through two threads more (bench.token_path).
    No threads of tokenizers' own: we encode one text at a time, and if they cannot be started with the first, none is ever encoded.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.environ.setdefault("GRPC_EXPERIMENTS", GRPC_POLLS_ITSELF)


def child_environment(threads: int | None = None) -> dict[str, str]:
    """This process's environment for a child of ours.

    Without BATON_CONFIG, which was meant for the launcher; without what nobody reads, of which it has told already.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if name != ENVIRONMENT_PREFIX + "CONFIG" and not is_unread(name)
    }
    return environment if threads is None else environment | thread_environment(threads)


# ---------------------------------------------------------------- sources


class _Parser(argparse.ArgumentParser):
    """argparse, but an error is an exception rather than a usage dump."""

    def error(self, message: str) -> NoReturn:
        flag = _NO_VALUE.fullmatch(message)
        raise ConfigError(message if flag is None else f"{flag[1]}: its value is missing")


def _parse_flags(
    knobs: Sequence[Knob], prog: str, description: str, argv: Sequence[str] | None, elsewhere: str
) -> dict[str, str]:
    needed = [each for each in knobs if each.default is REQUIRED] or knobs[:1]
    example = " ".join(f"{each.flag} {each.metavar}" for each in needed)
    first = needed[0]
    usage = example if first.default in (REQUIRED, "") else f"[{example}]"  # "": asked for once all is read
    spelled = f"{first.variable}={first.metavar}, or in FILE {first.name} = {_toml_form(first)}"
    parser = _Parser(
        prog=prog,
        usage=f"{prog} [--config FILE] {usage} [flags]",
        description=description,
        epilog=f"A flag wins over its environment variable, that over the TOML file, that over the default.\n"
        f"Example: {prog} {example}\nThe same by other means: {spelled}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help=f"TOML file with these keys [{ENVIRONMENT_PREFIX}CONFIG]")
    for each in knobs:
        told = f"{each.help} ({each.shown_default()}) [{each.variable}, {each.name}]"
        parser.add_argument(each.flag, dest=each.name, metavar=each.metavar, help=told.replace("%", "%%"))
    found, unknown = parser.parse_known_args(argv)
    if unknown:
        name = unknown[0].split("=")[0]
        if not name.startswith("-"):
            raise ConfigError(f"{name}: unexpected argument; every setting is a flag, see {prog} --help")
        hint = _suggest(name, ["--config", *(each.flag for each in knobs)])
        variable = ENVIRONMENT_PREFIX + name.strip("-").replace("-", "_").upper()
        raise ConfigError(f"{name}: unknown flag{hint}{elsewhere.format(variable=variable)}")
    return vars(found)


def _toml_form(each: Knob) -> str:
    return each.metavar if each.kind in (int, float) else f'"{each.metavar}"'


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config {path}: is not TOML: it is no UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--config {path}: is not TOML: {error}") from error
    except ValueError as error:  # of Python's int
        raise ConfigError(f"--config {path}: cannot be read: a number in it has too many digits") from error
    except RecursionError as error:
        raise ConfigError(f"--config {path}: cannot be read: it is nested too deeply") from error


def _spelled(value: object) -> str:
    try:
        return repr(value)
    except (ValueError, RecursionError):  # more digits, or deeper, than Python writes
        return "…"


def _read_file(path: Path, room: str, knobs: Sequence[Knob], is_for_us: bool) -> dict[str, Any]:
    """Values by field name. Without `is_for_us` an operator's command takes what is its own out of a file that is a process's."""
    values = values_in(path, room)
    if not is_for_us and room not in ROOM_TABLES:  # the process itself has refused what is misspelt
        own = {each.name for each in knobs if not each.has_own_variable}
        return {name: value for name, value in values.items() if name in own}
    known = [each.name for each in knobs]
    for name in values:
        if name not in known:
            raise ConfigError(f"{path}: {name}: unknown key of {room}{_suggest(name, known)}")
    return values


def _closed_path(error: OSError, knobs: Sequence[Knob], values: Mapping[str, Any]) -> str:
    """The path that nobody may look at, or that is too long for one, with the flag that leads there."""
    closed = Path(str(error.filename))
    for each in knobs:
        path = values.get(each.name, each.default)
        if isinstance(path, Path) and (path in (closed, *closed.parents) or closed in path.absolute().parents):
            return f"{each.flag} {path}"
    return str(closed)


def _suggest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""
