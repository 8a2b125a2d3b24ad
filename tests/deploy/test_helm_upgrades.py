"""What `helm upgrade` does to what runs: which pods it takes, how many it leaves, and what is waited for, how long.

Not here: what an install looks like (test_helm_chart.py).
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Final

import pytest

from tests.deploy.chart_cases import MIXED_ONLY, SWITCHES, TINY, together
from tests.deploy.installs import ROOT, Engine, Upgrade, run_helm
from tests.deploy.pods import NODE_ROLES

PAGE: Final = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
# It knows two StatefulSets, of which one may hang, or none.
KUBECTL: Final = """\
#!/bin/sh
case "$*" in
  "-n inference get statefulset -l app.kubernetes.io/instance=baton -o name")
    test -z "$NOBODY" && printf 'statefulset.apps/%s\\n' baton-decode baton-prefill ;;
  "-n inference rollout status --timeout 15m statefulset.apps/"*)
    echo "$*" >> asked; case "$*" in *"$HANGS") exit 1 ;; esac ;;
  *) exit 1 ;;
esac
"""


@pytest.fixture(scope="module")
def engine() -> Engine:
    """A few installs and upgrades."""
    scaling = together(TINY, SWITCHES["autoscaling"])
    slow = {"decode": {"startupSeconds": 3600}, "mixed": {"startupSeconds": 7200}}
    cases = {
        "defaults": TINY,
        "slow": together(TINY, slow),
        "turned on": TINY,
        "mixed nodes only": together(TINY, MIXED_ONLY),
        "scaled": scaling,
    }
    return run_helm(cases, {"turned on": Upgrade(5, scaling), "scaled": Upgrade(6, scaling)})


def test_an_upgrade_takes_one_node_of_a_role_at_a_time(engine: Engine) -> None:
    for outcome in engine.good():
        sets = [pods.manifest["spec"] for pods in outcome.install.pods() if pods.role in NODE_ROLES]
        assert sets
        for each in sets:
            assert each["updateStrategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}}
            assert each["podManagementPolicy"] == "Parallel", "it cannot be changed: helm upgrade would fail"


@pytest.mark.parametrize(
    ("trouble", "is_upgraded"), [({}, True), ({"HANGS": "prefill"}, False), ({"NOBODY": "1"}, False)]
)
def test_the_line_of_the_page_upgrades_once_every_node_is_ready(
    tmp_path: Path, trouble: dict[str, str], is_upgraded: bool
) -> None:
    (line,) = re.findall(r"^ *(kubectl .* && helm upgrade) …$", PAGE, re.MULTILINE)
    for name, script in {"kubectl": KUBECTL, "helm": "#!/bin/sh\ntouch upgraded\n"}.items():
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.defpath}", "HANGS": "nothing", "NOBODY": ""} | trouble
    subprocess.run(["sh", "-c", line], cwd=tmp_path, env=variables, check=False, capture_output=True)
    assert (tmp_path / "upgraded").exists() == is_upgraded
    if not trouble:
        assert (tmp_path / "asked").read_text().count("statefulset.apps/") == 2


def test_the_lines_label_is_that_of_every_nodes_set_of_the_release(engine: Engine) -> None:
    install = engine.outcomes["defaults"].install
    for manifest in install.of("StatefulSet"):
        assert manifest["metadata"]["labels"]["app.kubernetes.io/instance"] == "baton"


def test_routers_are_given_up_no_sooner_than_the_slowest_node_that_they_wait_for(engine: Engine) -> None:
    """`kubectl rollout status`, which the notes name, fails then; by itself Kubernetes allows 600 seconds."""
    for case, longest in {"defaults": 900, "mixed nodes only": 900, "slow": 3600}.items():
        install = engine.outcomes[case].install
        starts = [pods.container["startupProbe"] for pods in install.pods() if pods.is_ours]
        assert max(each["periodSeconds"] * each["failureThreshold"] for each in starts) == longest
        (routers,) = install.of("Deployment")
        assert routers["spec"]["progressDeadlineSeconds"] == longest + 600


def test_an_upgrade_leaves_as_many_routers_as_the_scaler_has_made(engine: Engine) -> None:
    """Also the one that turns it on: a number that is in no template any more Helm takes away, and Kubernetes makes 1 of that."""
    for case, number in {"turned on": 5, "scaled": 6}.items():
        outcome = engine.outcomes[case]
        (routers,) = outcome.install.of("Deployment")
        assert (outcome.error, routers["spec"].get("replicas")) == ("", number), case
        assert outcome.install.of("HorizontalPodAutoscaler")
