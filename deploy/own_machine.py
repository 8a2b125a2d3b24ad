"""What `baton doctor` says of the machine that it runs on: whether nodes and routers can start and work well here."""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from runtime.cores import usable_cores
from runtime.version import versions

OK, WARNING, WRONG = "ok", "warning", "wrong"
OLDEST_PYTHON: Final = (3, 11)
NEEDED: Final = ("torch", "numpy", "fastapi", "uvicorn", "grpc", "zmq", "tokenizers", "safetensors", "xxhash", "redis")
LEAST_FILES: Final = 256  # a node's links, sessions and pages
GOOD_FILES: Final = 4096
GOOD_SHM_BYTES: Final = 64 << 20
KERNELS: Final = Path(__file__).resolve().parent.parent / "kernels" / "cpu" / "built"


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence about one thing."""

    level: str  # OK, WARNING, WRONG
    what: str
    sentence: str


def look_at_this_machine(port: int | None) -> Iterator[Finding]:
    """`port`: which a router is to have here; None: one runs somewhere already."""
    yield _python()
    yield _packages()
    yield _kernels()
    yield _shared_memory()
    yield _open_files()
    if port is not None:
        yield _port(port)
    yield _cores()


def _python() -> Finding:
    shown = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < OLDEST_PYTHON:
        return Finding(WRONG, "python", f"{shown} is older than {'.'.join(map(str, OLDEST_PYTHON))}")
    return Finding(OK, "python", shown)


def _packages() -> Finding:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return Finding(WRONG, "packages", f"not installed: {', '.join(missing)}; make setup installs everything")
    torch = versions().get("torch", "?")
    required = next((each for each in metadata.requires("baton") or () if each.startswith("torch")), "torch")
    oldest = required.partition(">=")[2].partition(",")[0]
    if oldest and torch.split(".")[:2] != oldest.split(".")[:2]:
        return Finding(WARNING, "packages", f"torch {torch}: its bits were checked with {oldest} alone")
    return Finding(OK, "packages", f"torch {torch} and all others are there")


def _kernels() -> Finding:
    built = sorted(KERNELS.glob("*.so"))
    if built:
        return Finding(OK, "kernels", f"{len(built)} compiled")
    compiler = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    hint = "make setup compiles them" if compiler else "there is no C++ compiler either"
    return Finding(WARNING, "kernels", f"none are compiled, nodes compute half as fast: {hint}")


def _cores() -> Finding:
    usable, all_cores = usable_cores(), len(os.sched_getaffinity(0))
    limit = "" if usable == all_cores else f": its control group may use no more of its {all_cores}"
    return Finding(OK, "cores", f"{usable} for this process{limit}")


def _shared_memory() -> Finding:
    try:
        found = os.statvfs("/dev/shm")
    except OSError as error:
        return Finding(WARNING, "/dev/shm", f"{error.strerror}: libraries that share memory by files may fail")
    free = found.f_bavail * found.f_frsize
    if free < GOOD_SHM_BYTES:
        return Finding(
            WARNING, "/dev/shm", f"{free >> 20} MiB free, less than {GOOD_SHM_BYTES >> 20}: docker has --shm-size"
        )
    return Finding(OK, "/dev/shm", f"{free >> 20} MiB free")


def _open_files() -> Finding:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # to which nodes and routers raise their own
    if most == resource.RLIM_INFINITY:
        return Finding(OK, "open files", "as many as there can be")
    hint = f"raise the hard limit (ulimit -Hn) to {GOOD_FILES}"
    if most < LEAST_FILES:
        return Finding(WRONG, "open files", f"{most} at most, less than the {LEAST_FILES} that a node needs: {hint}")
    if most < GOOD_FILES:
        return Finding(WARNING, "open files", f"{most} at most, so few clients of a router: {hint}")
    return Finding(OK, "open files", f"{most} at most")


def _port(port: int) -> Finding:
    try:
        with socket.create_server(("127.0.0.1", port)):
            return Finding(OK, "port", f"{port} is free")
    except OSError as error:
        return Finding(
            WRONG, "port", f"{port} cannot be had on 127.0.0.1: {error.strerror}; give the router another --port"
        )
