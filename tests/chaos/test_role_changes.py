"""Nodes that change their roles under load: nobody notices, and the same processes serve on with the model that they have."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from bench.cluster import BATON
from bench.fleet import wait_until
from tests.chaos.conftest import SIZES, Broken, started_town
from tests.chaos.test_draining import DRAIN_BOUND_S, Losses, steady_clients

NAMES: Final = ("router", "router-1", "prefill-0", "prefill-1", "mixed-0")
# All six changes. Meanwhile the two others can serve; a new decode node finds a prefill node beside it, which must hand over.
CHANGES: Final = (
    ("prefill-0", "decode"),
    ("prefill-0", "prefill"),
    ("prefill-0", "mixed"),
    ("mixed-0", "decode"),
    ("mixed-0", "mixed"),
    ("prefill-0", "prefill"),
)
# A decode node that computes short prompts itself has no slot left for what is handed over, for as long as they last.
BY_TURNS: Final = ("--placement-prefill", "round_robin", "--local-prefill-max-tokens", "0")
MAX_TOKENS: Final = 60  # requests come and go within a node's turn in its role, also where this host has little time
FEW_SLOTS: Final = (*SIZES, "--max-num-seqs", "3")  # or the mixed node would keep all that it prefills


def change(town: Broken, node: str, role: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """`baton role`."""
    command = [BATON, "role", node, role, "--router", town.fleet.registry_of("router"), "--timeout-s", "30", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=DRAIN_BOUND_S, check=False)


def has_worked(state: dict[str, Any]) -> bool:
    """Whether this incarnation has done what its role is for: KV has crossed, to it or from it, but for a mixed node."""
    sent, received = (sum(state[f"kv_bytes_{way}"].values()) for way in ("sent", "received"))
    by_role = {"prefill": sent, "decode": received, "mixed": sent + received + state["running"]}
    return bool(by_role[state["role"]])


@pytest.mark.covers("C11", "D08", "H15", "R19", "C06")
def test_every_change_of_role_under_load_fails_no_request_and_loads_nothing_again(
    tiny_model: Path, tmp_path: Path, fresh_seed: int
) -> None:
    model = shutil.copytree(tiny_model, tmp_path / tiny_model.name)
    seen = set()
    with started_town(model, tmp_path, NAMES, BY_TURNS, FEW_SLOTS) as town:
        fleet = town.fleet
        for weights in model.glob("*.safetensors*"):
            weights.unlink()  # nobody can load them again
        losses = Losses(town)
        pids = {node: fleet.pid(node) for node in fleet.nodes}
        with (
            fleet.slow_steps(0.02),
            steady_clients(town, fresh_seed, *fleet.routers, max_tokens=MAX_TOKENS) as clients,
        ):
            for node, role in CHANGES:
                wait_until(f"{node} has work", lambda node=node: has_worked(fleet.state(node)))  # type: ignore[misc]
                losses.assert_none()
                losses.begin(node)
                before, num_told = fleet.state(node), len(clients.told)
                done = change(town, node, role)
                assert (done.returncode, done.stderr) == (0, ""), done.stderr
                assert done.stdout.splitlines()[-1] == f"baton role: {node} is a {role} node"
                state = fleet.state(node)
                assert (state["role"], state["stage"]) == (role, "serving")
                assert state["incarnation"] != before["incarnation"] and state["pid"] == before["pid"] == pids[node]
                seen.add((before["role"], role))
                wait_until(f"{node} is used as {role}", lambda node=node: has_worked(fleet.state(node)))  # type: ignore[misc]
                wait_until("somebody is served", lambda at=num_told: len(clients.told) > at)  # type: ignore[misc]
        assert len(seen) == len(CHANGES), seen
        assert sum(fleet.node_metric(node, "role_changes_total") for node in fleet.nodes) == len(CHANGES)
        assert not any("was_cut_short=True" in fleet.log_text(node) for node in fleet.nodes)
        losses.assert_none()
        town.mend()
        bodies, told = [body for body, _ in clients.told], [each for _, each in clients.told]
        verdicts = town.verdicts(told, bodies)
        assert {verdict.kind for verdict in verdicts} == {"equal"}, [each for each in verdicts if each.kind != "equal"]
