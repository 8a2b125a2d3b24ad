"""deploy/systemd: units that systemd takes, and that fit what the processes do."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from node.config import NodeConfig
from router.config import RouterConfig
from tests.by_hand.unit import UNITS, Unit

ROLES = ("prefill", "decode", "mixed")
NAMES = ("baton-router.service", *(f"baton-{role}@.service" for role in ROLES))
PAGE = (UNITS.parents[1] / "docs" / "by_hand.md").read_text(encoding="utf-8")
DRAIN_S = 25.0
WHERE_BATON_IS = "/opt/baton/.venv/bin/baton"


needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="no systemd-analyze (Debian: the package systemd)"
)


def unit(name: str) -> Unit:
    return Unit.parse((UNITS / name).read_text(encoding="utf-8"))


def test_there_is_a_unit_for_each_role_and_nodes_differ_in_their_role_alone() -> None:
    assert sorted(path.name for path in UNITS.iterdir()) == sorted(NAMES)
    texts = {role: (UNITS / f"baton-{role}@.service").read_text().replace("KillMode=mixed\n", "") for role in ROLES}
    assert len({text.replace(role, "ROLE") for role, text in texts.items()}) == 1


def complaints(folder: Path, name: str, text: str) -> str:
    """What systemd has to say of it, for a machine that has a `baton`."""
    (folder / name).write_text(text.replace(WHERE_BATON_IS, shutil.which("true") or ""))
    command = ["systemd-analyze", "verify", "--man=no", str(folder / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr


@needs_systemd
@pytest.mark.parametrize("name", NAMES)
def test_systemd_finds_nothing_wrong(name: str, tmp_path: Path) -> None:
    text = (UNITS / name).read_text()
    assert complaints(tmp_path, name, text) == ""
    assert "Unknown" in complaints(tmp_path, name, text.replace("TimeoutStopSec", "TimeoutStopSecs"))


@pytest.mark.parametrize("name", NAMES)
def test_a_unit_starts_behind_names_clocks_and_mounts_of_the_network(name: str) -> None:
    """A model that is not there yet is a wrong setting (2), and would stay one."""
    assert {"network-online.target", "nss-lookup.target", "time-sync.target", "remote-fs.target"} <= {
        word for value in unit(name).all("After") for word in value.split()
    }


@needs_systemd
def test_what_the_page_has_for_other_mounts_is_for_every_unit(tmp_path: Path) -> None:
    (setting, path) = re.findall(r"`(RequiresMountsFor=\S+)` under `\[Unit\]` in `/etc/systemd/system/(\S+)`", PAGE)[0]
    drop_in = tmp_path / path
    drop_in.parent.mkdir()
    for name in NAMES:
        text = (UNITS / name).read_text().replace(WHERE_BATON_IS, shutil.which("true") or "")
        (tmp_path / name).write_text(text)
        drop_in.write_text(f"[Unit]\n{setting}\n")
        assert told_of(tmp_path, name) == ""
        drop_in.write_text(f"[Unit]\nMisspelt{setting}\n")
        assert "MisspeltRequiresMountsFor" in told_of(tmp_path, name), "it is not read"


def told_of(folder: Path, name: str) -> str:
    """What systemd says of a unit with all that belongs to it."""
    command = ["systemd-analyze", "verify", "--man=no", name.replace("@.", "@0.")]
    variables = {"PATH": os.environ["PATH"], "SYSTEMD_UNIT_PATH": f"{folder}:"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=variables)
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_every_variable_of_units_and_page_is_a_knob(name: str) -> None:
    config = RouterConfig if "router" in name else NodeConfig
    knobs = {f"BATON_{field.name.upper()}" for field in dataclasses.fields(config)}
    own = {word for value in unit(name).all("Environment") for word in re.findall(r"BATON_\w+", value)}
    assert own <= knobs
    everybodys = {
        f"BATON_{field.name.upper()}" for each in (RouterConfig, NodeConfig) for field in dataclasses.fields(each)
    }
    (env_file,) = re.findall(r"^```\n((?:BATON_\w+=.*\n)+)```", PAGE, re.MULTILINE)
    in_page = set(re.findall(r"\bBATON_[A-Z_]+[A-Z]\b", env_file))
    assert in_page and in_page <= everybodys
    assert set(re.findall(r"\bBATON_[A-Z_]+[A-Z]\b", PAGE)) <= everybodys | {"BATON_API_KEY"}


@pytest.mark.parametrize("name", NAMES)
def test_a_unit_lets_its_process_drain_and_stops_what_only_an_operator_can_mend(name: str) -> None:
    found = unit(name)
    for config in (RouterConfig, NodeConfig):
        assert next(field.default for field in dataclasses.fields(config) if field.name == "drain_timeout_s") == DRAIN_S
    assert float(found.one("TimeoutStopSec")) >= DRAIN_S + 20  # as the page says
    assert (found.one("KillSignal"), found.one("KillMode")) == ("SIGTERM", "mixed")
    assert (found.one("Restart"), found.one("RestartPreventExitStatus")) == ("on-failure", "2")
    if "router" in name:  # the only one that is reloaded
        assert found.one("ExecReload") == "/bin/kill -HUP $MAINPID" and found.one("RestartForceExitStatus") == "SIGHUP"
    assert found.one("User") == "baton" and found.command()[0] == WHERE_BATON_IS
    # What a node cannot live with.
    broken = {"MemoryDenyWriteExecute", "PrivateNetwork", "PrivateUsers", "PrivateIPC", "DynamicUser", "RootDirectory"}
    broken |= set() if "router" in name else {"PrivateDevices", "DevicePolicy", "DeviceAllow", "ProtectClock"}
    assert broken & {key for _, key, _ in found.settings} == set()
    assert found.one("CapabilityBoundingSet") == "", "else nobody keeps it from the clock"
