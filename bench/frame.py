"""What every benchmark's command does around its measurement: checks of paths, errors in one line, the result's file and picture.

    config --measure--> result --show--> table        result --to_json--> JSON, with command, date, machine and settings
                                                      result --plot--> picture

A benchmark is its config (a dataclass of knobs) and a Bench. Not here: any measurement; progress (progress.py).
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from rich.console import Console

from bench.cluster import ClusterProblem
from bench.machine import machine, utc_date
from kernels.cpu_build import is_left_uncompiled
from runtime.process import fatal, write_atomically

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SUFFIXES: Final = (".png", ".svg", ".pdf")
INTERRUPTED: Final = 130
PIPE_WIDTH: Final = 160  # of a table that goes to a file

C = TypeVar("C", bound="DataclassInstance")
R = TypeVar("R")


def can_plot() -> bool:
    """Whether matplotlib is there."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def check_files(output: Path | None, plot: Path | None = None) -> None:
    """ValueError, in one sentence, if a result cannot be written there."""
    for flag, path in (("--output", output), ("--plot", plot)):
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"{flag} {path}: its folder does not exist")
        if path is not None and path.is_dir():
            raise ValueError(f"{flag} {path}: is a folder; name a file in it")
        if path is not None and (path.is_symlink() or (path.exists() and not path.is_file())):
            raise ValueError(f"{flag} {path}: is a link or a device, which the result would replace; name a file")
        if path is not None and not os.access(path.absolute().parent, os.W_OK):
            raise ValueError(f"{flag} {path}: its folder cannot be written to")
    if plot is not None and plot.suffix not in SUFFIXES:
        raise ValueError(f"--plot {plot}: must end in {', '.join(SUFFIXES)}")
    if plot is not None and not can_plot():
        raise ValueError("--plot: matplotlib is missing; install it with: pip install -c constraints.txt -e '.[bench]'")


def check_model(model: Path) -> None:
    """ValueError, in one sentence, if it is no model directory."""
    if not (model / "config.json").is_file():
        raise ValueError(f"--model {model}: has no config.json; make one with: baton model make")
    check_kernels()


def check_kernels() -> None:
    """ValueError, in one sentence, if kernels/cpu was changed and not compiled: nodes would fall back to others."""
    if is_left_uncompiled():
        raise ValueError(
            "kernels/cpu is not compiled as it is now, and others would be measured: run `make setup` first"
        )


def whole_numbers(flag: str, text: str, high: int = 1 << 20, *, may_be_empty: bool = False) -> list[int]:
    """The numbers of a list, each from 1 to `high`. ValueError: they are none."""
    parts = [part for part in text.split(",") if part]
    if not all(part.isdecimal() and 0 < int(part) <= high for part in parts) or not (parts or may_be_empty):
        raise ValueError(f"{flag} {text}: must be whole numbers from 1 to {high} with commas between")
    return [int(part) for part in parts]


@dataclass(frozen=True, slots=True)
class Bench(Generic[C, R]):
    """A benchmark's parts. `measure` raises ValueError, OSError or ClusterProblem for what the user can mend."""

    prog: str
    measure: Callable[[C, Console], R]
    show: Callable[[Console, R], None]
    to_json: Callable[[R], dict[str, Any]]
    plot: Callable[[R, Path], None] | None = None
    complaints: Callable[[R], Sequence[str]] = lambda result: ()  # what broke a promise, or the measurement

    def run(self, config: C, argv: Sequence[str] | None) -> int:
        """Measure and tell; 0, 1 after complaints, 2 for what the user can mend, 130 after Ctrl-C.

        Of the config the fields `output` and `plot` are read, where it has them.
        """
        console = Console(highlight=False, markup=False, soft_wrap=True)
        if not console.is_terminal:
            console.width = PIPE_WIDTH
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # or a cluster would outlive the benchmark
        try:
            result = self.measure(config, console)
        except (ClusterProblem, ValueError, OSError) as error:
            fatal(f"{self.prog}: {error}")
        except KeyboardInterrupt:
            sys.stderr.write(f"{self.prog}: interrupted; nothing was written\n")
            return INTERRUPTED
        self.show(console, result)
        complaints = self.complaints(result)
        for complaint in complaints:
            console.print(f"broken: {complaint}")
        output: Path | None = getattr(config, "output", None)
        if output is not None:
            write_result(self.prog, output, facts(self.prog, config, argv) | self.to_json(result))
            console.print(f"written: {output}")
        plot_path: Path | None = getattr(config, "plot", None)
        if self.plot is not None and plot_path is not None:
            with writing(self.prog, "--plot", plot_path):
                self.plot(result, plot_path)
            console.print(f"written: {plot_path}")
        return 1 if complaints else 0


@contextmanager
def writing(prog: str, flag: str, path: Path) -> Iterator[None]:
    """A full disk, say, ends the command in one sentence: the table was shown before."""
    try:
        yield
    except OSError as error:
        fatal(f"{prog}: {flag} {path}: cannot be written: {error.strerror}")


def write_result(prog: str, output: Path, content: Mapping[str, Any]) -> None:
    """The whole file, or none, and one sentence that ends the command."""
    with writing(prog, "--output", output):
        write_atomically(output, content)


def facts(prog: str, config: DataclassInstance, argv: Sequence[str] | None) -> dict[str, Any]:
    """What a result's reader must know: the command, the date, the machine, the settings; JSON-able. Results are shared: no key."""
    key = getattr(config, "api_key", None)
    words = sys.argv[1:] if argv is None else argv
    told = [word.replace(key, "…") if key else word for word in words]
    command = f"{prog} {shlex.join(told)}".rstrip()
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(config).items()}
    if key:
        settings["api_key"] = None
    return {"command": command, "date": utc_date(), "machine": machine(), "settings": settings}
