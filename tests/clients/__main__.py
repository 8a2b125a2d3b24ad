"""Run other people's clients against a cluster that is started for them: `make clients`, ONLY=openai,vllm for some.

Each gets an environment of its own under .venv/clients, which is taken away behind it (--keep: not), so that no more than the
largest is there at a time: 3.5 GB. What a client's installation and the client itself write lies beside it, in NAME.log. Exit
code 1 where a client got something else than plain HTTP, or could not be installed; 2 for wrong words; 130 behind Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Final

from deploy.up_config import DEMO_MODEL, DEMO_NAME
from tests.clients.catalog import CLIENTS, Client
from tests.clients.environments import (
    FOLDER,
    CannotInstallError,
    NoIndexError,
    alone,
    environment,
    is_installed,
    log_of,
)
from tests.clients.programs import FailedError, Programs
from tests.clients.served import Served
from tests.clients.tool_template import with_tools
from tests.e2e.cluster import started_cluster

KNOWN: Final = {client.name: client for client in CLIENTS}


def main(words: Sequence[str] | None = None) -> int:
    """Run them."""
    options = read(words)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # not under nohup
            signal.signal(number, _interrupt)
    try:
        with ExitStack() as stack:
            try:
                stack.enter_context(alone(FOLDER))
            except BlockingIOError:
                say(f"another `make clients` is at work in {FOLDER}")
                return 1
            return run_all(options.clients, options.model, options.keep, stack)
    except KeyboardInterrupt:
        say("stopped; the cluster, the client and what was half installed are gone")
        return 130


def read(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line; wrong words end the program with one sentence."""
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__, formatter_class=about)
    parser.add_argument("clients", nargs="*", metavar="NAME,NAME", help=f"of {', '.join(KNOWN)}; default: all")
    parser.add_argument(
        "--model", type=lambda word: Path(word).resolve(), default=DEMO_MODEL, help="the model's folder"
    )
    parser.add_argument("--keep", action="store_true", help="leave the environments there for the next time")
    options = parser.parse_args(words)
    names = [name for word in options.clients for name in word.split(",") if name] or list(KNOWN)
    if unknown := [name for name in names if name not in KNOWN]:
        parser.error(f"no such client: {', '.join(unknown)}; there are {', '.join(KNOWN)}")
    if not (options.model / "tokenizer_config.json").is_file():
        parser.error(f"--model: {options.model} is no model's folder: it has no tokenizer_config.json")
    options.clients = [KNOWN[name] for name in dict.fromkeys(names)]
    return options


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def run_all(clients: Sequence[Client], model: Path, keep: bool, stack: ExitStack) -> int:
    """One after the other."""
    begun = time.monotonic()
    scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-clients-")))
    name = DEMO_NAME if model == DEMO_MODEL else model.name
    say("a cluster is started")
    flags = ("--prefill", "1", "--decode", "1", "--served-model-name", name)
    cluster = stack.enter_context(started_cluster(with_tools(model, scratch / "model"), scratch, *flags))
    served = Served(cluster.url, name, model, stack.enter_context(cluster.client()))
    num_good, has_index = 0, True
    for client in clients:
        if not has_index and not is_installed(FOLDER / client.name, client.needs):
            say(f"{client.name}: not tried, for want of an index")
            continue
        own = scratch / client.name
        own.mkdir()
        try:
            found = problems(client, served, own, keep)
        except NoIndexError as error:
            has_index, found = False, [str(error)]
        num_good += not found
        for problem in found:
            say(f"{client.name}: {problem}")
        log = os.path.relpath(log_of(FOLDER / client.name))
        say(f"{client.name}: {f'FAILED; all that was written lies in {log}' if found else 'ok'}")
    say(f"{num_good} of {len(clients)} clients got what plain HTTP gets ({time.monotonic() - begun:.0f} s)")
    return 0 if num_good == len(clients) else 1


def problems(client: Client, served: Served, scratch: Path, keep: bool) -> list[str]:
    """Of one client. Raises NoIndexError."""
    begun = time.monotonic()
    is_there = is_installed(FOLDER / client.name, client.needs)
    wanted = " ".join((client.needs.without_torch, *client.needs.packages)).strip()
    say(f"{client.name}: {'is there already' if is_there else f'installing {wanted}'}")

    def waiting(line: str) -> None:
        say(f"{client.name}: still installing after {time.monotonic() - begun:.0f} s: {line.strip()[:100]}")

    try:
        with environment(FOLDER / client.name, client.needs, keep, waiting) as made:
            if not is_there:
                cost = f"{made.downloaded_mb:.0f} MB downloaded, {made.disk_mb():.0f} MB on disk"
                say(f"{client.name}: installed in {time.monotonic() - begun:.0f} s: {cost}")
            installed = time.monotonic()
            found = client.problems(Programs(made.programs, made.log, scratch), served)
            say(f"{client.name}: ran {time.monotonic() - installed:.0f} s")
    except NoIndexError:
        raise
    except CannotInstallError as error:
        found = [f"cannot be installed: {error}", *(f"| {line}" for line in error.last_lines())]
    except FailedError as error:
        found = [str(error), *(f"| {line}" for line in error.last_lines())]
    except Exception as error:  # of reading what a client wrote, or of our own requests: the next client still runs
        found = [f"{type(error).__name__}: {error}", *(f"| {line}" for line in traceback.format_exc().splitlines())]
    return found


def say(line: str) -> None:
    """A line of progress."""
    sys.stdout.write(f"clients: {line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
