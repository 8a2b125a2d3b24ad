"""deploy/compose.yaml and what it mounts: valid for compose v2 by the specification's schema, and it names what is there.

That v1 takes it, and that it works, `make compose-test` shows.
Schema: https://github.com/compose-spec/compose-spec (Apache-2.0), schema/compose-spec.json, as of June 2026.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, Final

import jsonschema_rs
import pytest
import yaml

from node.config import NodeConfig
from router.config import RouterConfig

DEPLOY: Final = Path(__file__).resolve().parents[2] / "deploy"
SCHEMA: Final = Path(__file__).parent / "schemas" / "compose-spec.json"
ROUTER_PORT, NODE_PORT = 8000, 8002  # ENV of the Dockerfile
# What compose.yaml itself reads, and how its head spells "any".
NO_KNOBS: Final = {"BATON_IMAGE", "BATON_ENV", "BATON_NAME"}


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    """The file, its anchors merged, its variables as they are written."""
    content: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return content


def test_compose_v2_would_take_the_file(compose: dict[str, Any]) -> None:
    validator = jsonschema_rs.validator_for(json.loads(SCHEMA.read_text()))
    assert [str(error) for error in validator.iter_errors(compose)] == []
    compose["services"]["redis"]["imgae"] = "redis"
    assert not validator.is_valid(compose), "the schema notices nothing"
    del compose["services"]["redis"]["imgae"]


@pytest.mark.parametrize("name", ["compose.yaml", "baton.env", "Dockerfile", "container_entry", "container_health"])
def test_every_variable_is_one_that_some_role_reads(name: str) -> None:
    knobs = {
        f"BATON_{field.name.upper()}" for config in (NodeConfig, RouterConfig) for field in dataclasses.fields(config)
    }
    assert set(re.findall(r"\bBATON_[A-Z0-9_]+\b", (DEPLOY / name).read_text())) <= knobs | NO_KNOBS


def test_the_ports_of_the_image_are_the_ports_that_others_are_told(compose: dict[str, Any]) -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    assert f"BATON_PORT={ROUTER_PORT} " in dockerfile and f"BATON_HTTP_PORT={NODE_PORT} " in dockerfile
    roles = {name: service["command"][0] for name, service in compose["services"].items() if "-" in name}
    addresses = {f"{name}:{ROUTER_PORT if role == 'router' else NODE_PORT}" for name, role in roles.items()}

    scraped: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    groups = [group for job in scraped["scrape_configs"] for group in job["static_configs"]]
    assert {target for group in groups for target in group["targets"]} == addresses
    for group in groups:
        for target in group["targets"]:
            assert group.get("labels", {}).get("role", "router") == roles[target.partition(":")[0]]

    served = re.findall(r"^\s*server (\S+) (\S+)$", (DEPLOY / "haproxy.cfg").read_text(), flags=re.M)
    assert {address for _, address in served} == {each for each in addresses if each.startswith("router-")}


def test_a_container_has_longer_to_stop_than_a_drain_takes(compose: dict[str, Any]) -> None:
    drain_s: Any = next(field.default for field in dataclasses.fields(NodeConfig) if field.name == "drain_timeout_s")
    for name, service in compose["services"].items():
        if "-" in name:
            assert float(service["stop_grace_period"].removesuffix("s")) >= drain_s + 5, name
