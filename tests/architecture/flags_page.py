"""docs/flags.md: every flag of every command, and the module of their variables, from their configs: `make docs`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from bench.plan_measure import MeasureConfig
from bench.planner import PlanConfig
from bench.serve_config import BenchConfig
from deploy.certs import CertsConfig
from deploy.chat import ChatConfig
from deploy.doctor import DoctorConfig
from deploy.drain import DrainConfig
from deploy.role import RoleConfig
from deploy.status import StatusConfig
from deploy.up_config import UpConfig
from node.config import NodeConfig
from router.config import RouterConfig
from runtime.knobs import Knob, knobs_of

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "flags.md"
_HEAD: Final = """\
# Every flag

Written by `make docs` from the code, which `baton COMMAND --help` shows, too; a test fails where this page is stale.

Each flag is also an environment variable and a key of a TOML file: `--block-size`, `BATON_BLOCK_SIZE`, `block_size`. Where the
table names a variable, `BATON_` and the flag would be what a process or another command reads, and means something else. A flag
wins over the variable, the variable over the file, the file over the default. A file (`--config FILE`) has keys at its top for
every process that reads it, and tables `[router]`, `[prefill]`, `[decode]`, `[mixed]`, `[up]` for one kind. Of a file that
`BATON_CONFIG` names, all but these five take what they know. An image says defaults of its own in variables (`BATON_DEFAULT_PORT`),
over which all of that wins. A wrong value is one line that names it and its bound, and exit code 2. A variable `BATON_…` that no
command reads is told of at start (`unknown_variable`, with what it was probably to be). `none` is a value where the table says so.
"""
VARIABLES: Final = PAGE.parents[1] / "runtime" / "known_variables.py"
VARIABLES_MODULE: Final = '''\
"""Every variable that a command of Baton reads. Written by `make docs`, from the knobs of all commands."""

from __future__ import annotations

from typing import Final

KNOWN_VARIABLES: Final = frozenset(
    (
{names}    )
)
'''
COMMANDS: Final = (
    ("baton up", UpConfig),
    ("baton router", RouterConfig),
    ("baton prefill, baton decode, baton mixed", NodeConfig),
    ("baton status", StatusConfig),
    ("baton doctor", DoctorConfig),
    ("baton chat", ChatConfig),
    ("baton bench", BenchConfig),
    ("baton drain", DrainConfig),
    ("baton role", RoleConfig),
    ("baton certs make", CertsConfig),
    ("baton plan", PlanConfig),
    ("baton plan measure", MeasureConfig),
)


def page() -> str:
    """The whole page."""
    return _HEAD + "".join(f"\n## {command}\n\n{''.join(_table(config))}" for command, config in COMMANDS)


def _table(config: type) -> Iterator[str]:
    yield "| flag | values | default | what it says |\n|---|---|---|---|\n"
    for knob in knobs_of(config):
        default = knob.shown_default().removeprefix("default ")
        told = knob.help + (f" (its variable: `{knob.variable}`)" if knob.has_own_variable else "")
        yield f"| `{knob.flag}` | {_cell(_values(knob))} | {_cell(default)} | {_cell(told)} |\n"


def _values(knob: Knob) -> str:
    low, high = knob.low, knob.high
    if low is not None and high is not None:
        bounds = f", {low:,} to {high:,}"
    else:
        bounds = (f", at least {low:,}" if low is not None else "") + (
            f", at most {high:,}" if high is not None else ""
        )
    return f"`{knob.metavar}`{bounds}" + (" or `none`" if knob.is_optional else "")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def variables_module() -> str:
    """The whole module that names them, for processes that do not import every command."""
    names = sorted({"BATON_CONFIG", *(each.variable for _, config in COMMANDS for each in knobs_of(config))})
    return VARIABLES_MODULE.format(names="".join(f'        "{name}",\n' for name in names))


def main() -> int:
    """Write the page, and the module."""
    PAGE.write_text(page(), encoding="utf-8")
    VARIABLES.write_text(variables_module(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
