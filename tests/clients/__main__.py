"""Run other people's clients against a cluster that is started for them: `make clients`, ONLY=openai,vllm for some.

Each gets an environment of its own under .venv/clients, which is taken away behind it (--keep: not), so that no more than the
largest is there at a time: 3.4 GB. Exit code 1 where a client got something else than plain HTTP, or could not be installed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from deploy.up_config import DEMO_MODEL, DEMO_NAME
from tests.clients.catalog import CLIENTS, Client, Served
from tests.clients.environments import CannotInstallError, environment
from tests.clients.tool_template import with_tools
from tests.e2e.cluster import started_cluster

KNOWN = {client.name: client for client in CLIENTS}


def main() -> int:
    """Run them."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument("names", nargs="?", default=",".join(KNOWN), help=f"of {', '.join(KNOWN)}; default: all")
    parser.add_argument("--model", type=lambda word: Path(word).resolve(), required=True, help="the model's folder")
    parser.add_argument("--keep", action="store_true", help="leave the environments there for the next time")
    options = parser.parse_args()
    names = options.names.split(",")
    if unknown := [name for name in names if name not in KNOWN]:
        parser.error(f"{', '.join(unknown)}: there is no such client; there are {', '.join(KNOWN)}")
    failed: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory(prefix="baton-clients-") as scratch:
        say("a cluster is started")
        model = DEMO_NAME if options.model == DEMO_MODEL else options.model.name
        flags = ("--prefill", "1", "--decode", "1", "--served-model-name", model)
        with started_cluster(with_tools(options.model, Path(scratch) / "model"), Path(scratch), *flags) as cluster:
            for name in names:
                own = Path(scratch) / name
                own.mkdir()
                failed[name] = problems(KNOWN[name], Served(cluster.url, model, options.model, own), options.keep)
    num_good = sum(not found for found in failed.values())
    say(f"{num_good} of {len(names)} clients got what plain HTTP gets")
    return 0 if num_good == len(names) else 1


def problems(client: Client, served: Served, keep: bool) -> list[str]:
    """Of one client; said as soon as they are known."""
    begun = time.monotonic()
    say(f"{client.name}: installing {' '.join((client.needs.without_torch, *client.needs.packages)).strip()}")
    try:
        with environment(client.name, client.needs, keep) as programs:
            say(f"{client.name}: runs ({time.monotonic() - begun:.0f} s)")
            found = client.problems(programs, served)
    except CannotInstallError as error:
        found = [f"cannot be installed here: {error}"]
    except subprocess.TimeoutExpired as error:
        found = [f"it took longer than {error.timeout:.0f} s"]
    for problem in found:
        say(f"{client.name}: {problem}")
    say(f"{client.name}: {'FAILED' if found else 'ok'} ({time.monotonic() - begun:.0f} s)")
    return found


def say(line: str) -> None:
    """A line of progress."""
    sys.stdout.write(f"clients: {line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
