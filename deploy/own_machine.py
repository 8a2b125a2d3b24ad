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
from datetime import UTC, datetime, timedelta
from importlib import metadata
from pathlib import Path
from typing import Final

from kernels.cpu_build import BUILD_DIR, COMPILERS, compiled_variant, is_left_uncompiled, usable_variants
from runtime.cores import usable_cores
from runtime.process import why_not_listening
from runtime.version import versions

OK, WARNING, WRONG = "ok", "warning", "wrong"
OLDEST_PYTHON: Final = (3, 11)
NEEDED: Final = ("torch", "numpy", "fastapi", "uvicorn", "grpc", "zmq", "tokenizers", "safetensors", "xxhash", "redis")
LEAST_FILES: Final = 256  # a node's links, sessions and pages
GOOD_FILES: Final = 4096
GOOD_SHM_BYTES: Final = 64 << 20
GOOD_CERTIFICATE_DAYS: Final = 30  # time enough to make others, and to hand them round


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence about one thing."""

    level: str  # OK, WARNING, WRONG
    what: str
    sentence: str


def look_at_this_machine(port: int | None, tls_dir: Path | None = None) -> Iterator[Finding]:
    """`port`: which a router is to have here; None: one runs somewhere already. `tls_dir`: of this host's certificates."""
    yield _python()
    yield _packages()
    yield _kernels()
    yield _shared_memory()
    yield _open_files()
    if port is not None:
        yield _port(port)
    if tls_dir is not None:
        yield _certificates(tls_dir)
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
    compiled, usable = compiled_variant(), usable_variants()
    if compiled is not None and not is_left_uncompiled():
        return Finding(OK, "kernels", f"compiled for this CPU: {compiled.name}")
    hint = "make setup, or python -m kernels.cpu_build --here, compiles them"
    if compiled is not None:
        told = f"{compiled.name} is compiled, and not what this CPU runs best, {usable[0].name}: {hint}"
        return Finding(WARNING, "kernels", told)
    if not usable:
        return Finding(WARNING, "kernels", "there are none for this kind of CPU: nodes compute several times slower")
    if not any(map(shutil.which, COMPILERS)):
        hint = "there is no C++ compiler either"
    others = any(BUILD_DIR.glob("*.so"))
    what = "what is there is compiled for other sources, or for another CPU" if others else "none are compiled"
    return Finding(WARNING, "kernels", f"{what}: nodes compute several times slower; {hint}")


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
        return Finding(WRONG, "port", why_not_listening(error, "--port", "127.0.0.1", port))


def _certificates(directory: Path) -> Finding:
    """Of a host; an operator's directory may have the authority's alone."""
    from runtime.certificates import CertificateError, ends_at  # heavy: only who has certificates pays for it

    ends = {}
    try:
        for name in ("ca.crt", "tls.crt"):
            if name == "ca.crt" or (directory / name).exists():
                ends[name] = ends_at((directory / name).read_bytes(), name)
    except OSError as error:
        return Finding(WRONG, "certificates", f"{error.filename}: cannot be read: {error.strerror}")
    except CertificateError as error:
        return Finding(WRONG, "certificates", f"{directory}: {error}")
    name = min(ends, key=lambda each: ends[each])
    left = ends[name] - datetime.now(UTC)
    at = f"{ends[name]:%Y-%m-%d %H:%M} UTC"
    if left < timedelta():
        return Finding(WRONG, "certificates", f"{directory / name} has ended at {at}")
    if left < timedelta(GOOD_CERTIFICATE_DAYS):
        return Finding(WARNING, "certificates", f"{directory / name} ends in {left.days} days, at {at}: make new ones")
    return Finding(OK, "certificates", f"{directory / name} is good until {at}")
