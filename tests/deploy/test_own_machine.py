"""What `baton doctor` says of this machine: limits as nodes and routers will have them, kernels that run, certificates, a port."""

from __future__ import annotations

import datetime
import resource
import shutil
import socket
from pathlib import Path

import pytest

from deploy import own_machine
from deploy.own_machine import OK, WARNING, WRONG, Finding, look_at_this_machine
from kernels import cpu_build
from kernels.cpu_build import X86_VARIANTS
from tests.security.strangers import make_certificates, sign_anew


def finding(what: str, port: int | None = None, tls_dir: Path | None = None) -> Finding:
    """The one about this."""
    (found,) = [each for each in look_at_this_machine(port, tls_dir) if each.what == what]
    return found


@pytest.mark.covers("O06")
@pytest.mark.parametrize(
    ("soft", "hard", "level"),
    [
        (1024, 1 << 20, OK),  # as most systems have it: nodes and routers raise theirs
        (64, resource.RLIM_INFINITY, OK),
        (1024, 1024, WARNING),
        (64, 255, WRONG),
    ],
)
def test_open_files_are_judged_by_the_limit_that_nodes_and_routers_raise_theirs_to(
    soft: int, hard: int, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    found = finding("open files")
    assert found.level == level
    assert (str(hard) in found.sentence) == (hard != resource.RLIM_INFINITY)


@pytest.mark.covers("O06")
@pytest.mark.parametrize(
    ("built", "has_compiler", "level", "said"),
    [
        (["avx512", "avx2"], True, OK, "compiled for this CPU: avx512"),
        (["avx2"], True, WARNING, "avx2 is compiled, and not what this CPU runs best, avx512: make setup"),
        (["avx2"], False, OK, "compiled for this CPU: avx2"),
        (
            ["avx512bf16"],
            True,
            WARNING,
            "for other sources, or for another CPU: nodes compute several times slower; make setup",
        ),
        ([], True, WARNING, "none are compiled: nodes compute several times slower; make setup, or python -m kernels"),
        ([], False, WARNING, "none are compiled: nodes compute several times slower; there is no C++ compiler either"),
    ],
)
def test_kernels_are_those_that_nodes_here_will_load_not_any_file_that_was_built(
    built: list[str], has_compiler: bool, level: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_build, "BUILD_DIR", tmp_path)
    monkeypatch.setattr(own_machine, "BUILD_DIR", tmp_path)
    usable = X86_VARIANTS[2:]
    monkeypatch.setattr(cpu_build, "usable_variants", lambda: usable)
    monkeypatch.setattr(own_machine, "usable_variants", lambda: usable)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}" if has_compiler else None)
    for variant in X86_VARIANTS:
        if variant.name in built:
            cpu_build.library_path(variant).touch()
    found = finding("kernels")
    assert (found.level, said in found.sentence) == (level, True), found.sentence


def test_a_port_that_is_taken_is_said_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        sentence = f"--port {port}: cannot listen on 127.0.0.1: Address already in use; give another one"
        assert finding("port", port) == Finding(WRONG, "port", sentence)


@pytest.mark.parametrize(("days", "level"), [(60, OK), (29, WARNING), (-1, WRONG)])
def test_certificates_are_told_of_a_month_before_they_end(days: int, level: str, tmp_path: Path) -> None:
    directory = make_certificates(tmp_path / "certs")
    begin, end = -datetime.timedelta(90), datetime.timedelta(days, hours=1)
    sign_anew(directory, tmp_path / "certs", begin, end)
    found = finding("certificates", tls_dir=directory)
    assert found.level == level and str(directory / "tls.crt") in found.sentence
    (directory / "tls.crt").unlink()
    assert finding("certificates", tls_dir=directory).level == OK, "an operator has the authority's alone"
    (directory / "ca.crt").write_bytes(b"none")
    assert finding("certificates", tls_dir=directory).level == WRONG
    (directory / "ca.crt").unlink()
    assert finding("certificates", tls_dir=directory).level == WRONG
