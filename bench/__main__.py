"""`python -m bench`: thirteen benchmarks with short settings, one behind the other, into one table; also `make bench`.

    benchmarks (suite_entries.py) --> bench/results/suite/NAME.json, .md, .png, .log --> bench/results/suite.md --> README's table

Each is a process like any user's, with a bound on its time; twenty minutes in all on two quiet cores. One that fails is a line of
the table, and the others go on; then the exit code is 1. What stands in the table are ratios, against a limit, a peer or the other
way in the same run. With --envs, where other servers are installed (bench.peers), they are measured too. The full runs behind the
pages of bench/results are apart: their commands stand there.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

from bench.cluster import BATON, environment_of_a_cluster
from bench.frame import can_plot
from bench.machine import machine, utc_date
from bench.page import PAGES, write_page
from bench.progress import StepProgress
from bench.suite_entries import ENTRIES, PEERS, Entry
from bench.suite_table import only_asked, outcome_of, page, with_table
from runtime.config import knob, load
from runtime.process import fatal

PROG: Final = "python -m bench"
INTERRUPTED: Final = 130


@dataclass(frozen=True, slots=True)
class SuiteConfig:
    """One run."""

    only: str = knob(
        ",".join(entry.name for entry in ENTRIES),
        f"benchmarks to run ({PEERS} where there are --envs); the others' last results stay in the table",
        metavar="NAME,…",
    )
    envs: Path | None = knob(
        None, "folder with the peers' environments: `python -m bench.peers --install on` makes it", metavar="DIR"
    )
    models: Path = knob(Path("models"), "where model directories are, and are made if they are not", metavar="DIR")
    results: Path = knob(Path("bench/results"), "where suite.md and the folder suite go", metavar="DIR")
    readme: Path | None = knob(Path("README.md"), "file whose table is written anew, between its marks", metavar="FILE")

    def __post_init__(self) -> None:
        known = [entry.name for entry in ENTRIES]
        if unknown := [name for name in self.only.split(",") if name not in known]:
            raise ValueError(f"--only {unknown[0]}: is none of {', '.join(known)}")
        if not self.results.is_dir():
            raise ValueError(f"--results {self.results}: is no directory; run it from the repository, or name one")
        if self.envs is not None and not self.envs.is_dir():
            raise ValueError(
                f"--envs {self.envs}: is no directory; `python -m bench.peers --install on --envs DIR` makes one"
            )

    def chosen(self) -> list[Entry]:
        """What to run."""
        names = self.only.split(",")
        return [entry for entry in ENTRIES if entry.name in names and (entry.name != PEERS or self.envs is not None)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run them; 0, 1 if one failed, 2 for what the user can mend, 130 after Ctrl-C."""
    config = load(SuiteConfig, PROG, "Run thirteen benchmarks briefly and write one table of ratios.", argv)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    folder, chosen = config.results / "suite", config.chosen()
    folder.mkdir(exist_ok=True)
    try:
        for name in dict.fromkeys(entry.model for entry in chosen if entry.model is not None):
            _make_model(config.models / name, name, console)
        ran = _run_all(chosen, config, folder, console)
    except KeyboardInterrupt:
        sys.stderr.write(f"{PROG}: interrupted; what had ended is in {folder}\n")
        return INTERRUPTED
    paths = {entry: folder / f"{entry.name}.json" for entry in ENTRIES}
    # The peers are for who has installed them: nobody else misses their line.
    known = [entry for entry in ENTRIES if entry.name != PEERS or entry.name in ran or paths[entry].is_file()]
    outcomes = [outcome_of(entry, paths[entry], ran.get(entry.name)) for entry in known]
    command = f"{PROG} {shlex.join(sys.argv[1:] if argv is None else argv)}".rstrip()
    date, where = utc_date(), machine()
    (config.results / "suite.md").write_text(page(outcomes, command, date, where), encoding="utf-8")
    console.print(f"written: {config.results / 'suite.md'}")
    if config.readme is not None and config.readme.is_file():
        table = page(only_asked(outcomes), command, date, where)
        config.readme.write_text(with_table(config.readme.read_text(encoding="utf-8"), table), encoding="utf-8")
        console.print(f"written: {config.readme}")
    return int(any(code for code in ran.values()))


def _run_all(chosen: Sequence[Entry], config: SuiteConfig, folder: Path, console: Console) -> dict[str, int]:
    """Each one's exit code, or 124 if its time was over."""
    codes: dict[str, int] = {}
    began_at = time.monotonic()
    with StepProgress(console, "benchmarks", len(chosen)) as progress:
        for entry in chosen:
            started_at = time.monotonic()
            codes[entry.name] = _run(entry, config, folder)
            if not codes[entry.name] and entry.module in PAGES:
                write_page(folder / f"{entry.name}.json")
            took_s = time.monotonic() - started_at
            how = "" if not codes[entry.name] else f", exit code {codes[entry.name]}: {folder / entry.name}.log"
            console.print(f"{entry.name}: {took_s:.0f} s{how}")
            progress.advance(entry.name)
    console.print(f"all of them: {time.monotonic() - began_at:.0f} s")
    return codes


def _run(entry: Entry, config: SuiteConfig, folder: Path) -> int:
    output = folder / f"{entry.name}.json"
    output.unlink(missing_ok=True)
    command = [sys.executable, "-m", f"bench.{entry.module}", *shlex.split(entry.flags), "--output", str(output)]
    if entry.model is not None:
        command += ["--model", str(config.models / entry.model)]
    if entry.name == PEERS:
        command += ["--envs", str(config.envs)]
    if entry.has_plot and can_plot():
        command += ["--plot", str(folder / f"{entry.name}.png")]
    with (folder / f"{entry.name}.log").open("w", encoding="utf-8") as log:
        try:
            return subprocess.run(
                command, stdout=log, stderr=log, timeout=entry.bound_s, env=environment_of_a_cluster(), check=False
            ).returncode
        except subprocess.TimeoutExpired:
            return 124


def _make_model(directory: Path, like: str, console: Console) -> None:
    if (directory / "config.json").is_file():
        return
    console.print(f"making {directory}")
    made = subprocess.run(
        [BATON, "model", "make", "--like", like, "--out", str(directory)], capture_output=True, text=True, check=False
    )
    if made.returncode:
        fatal(f"{PROG}: {made.stderr.strip() or 'baton model make failed'}")


if __name__ == "__main__":
    sys.exit(main())
