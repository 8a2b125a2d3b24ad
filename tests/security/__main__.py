"""`python -m tests.security [TARGET …] [--seconds N]`: fuzz by coverage with atheris, each target in turn. `make fuzz` calls it.

What it finds it shows with the bytes that did it, in a file that `--replay FILE TARGET` reads.
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from tests.security.messages import sample

ROOMS: Final = ["proto", "connector", "node", "router", "runtime", "decode_node", "engine"]
_SEEDS: Final = 64  # inputs to begin with, for each target


def main() -> int:
    """Fuzz; 0 if nothing was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.security", description=__doc__)
    parser.add_argument("targets", nargs="*", help="names of tests/security/targets.py; none: all")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--replay", type=Path, help="file with the bytes to run one target on")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # the process of one target
    asked = parser.parse_args()
    if asked.one:
        return _fuzz(asked.one, asked.seconds)
    from tests.security.targets import TARGETS

    if unknown := [name for name in asked.targets if name not in TARGETS]:
        parser.error(f"{unknown[0]}: must be one of {', '.join(TARGETS)}")
    if asked.replay is not None:
        for name in asked.targets:
            TARGETS[name](asked.replay.read_bytes())
        return 0
    failed = []
    for name in asked.targets or TARGETS:
        command = [sys.executable, "-m", "tests.security", "--one", name, "--seconds", str(asked.seconds)]
        sys.stdout.write(f"fuzz: {name}, {asked.seconds} s\n")
        sys.stdout.flush()
        if subprocess.run(command).returncode != 0:
            failed.append(name)
    sys.stdout.write(f"fuzz: {', '.join(failed)} failed\n" if failed else "fuzz: nothing was found\n")
    return 1 if failed else 0


def _fuzz(name: str, seconds: int) -> int:
    import atheris  # heavy, and of no use to who only replays

    logging.disable(logging.CRITICAL)
    with atheris.instrument_imports(include=ROOMS):
        from tests.security.targets import TARGETS
    corpus = Path(tempfile.mkdtemp(prefix=f"fuzz-{name}-"))
    for seed in range(_SEEDS):
        (corpus / str(seed)).write_bytes(sample(name, seed))
    flags = [f"-max_total_time={seconds}", "-max_len=4096", "-rss_limit_mb=2048", "-timeout=20", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *flags, f"-artifact_prefix={Path.cwd()}/fuzz-{name}-", str(corpus)], TARGETS[name])
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
