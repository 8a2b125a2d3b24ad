"""deploy/compose.yaml and what it mounts: valid for compose v2 by the specification's schema, and it names what is there.

That v1 takes it, and that it works, `make compose-test` shows.
Schemas, both of June 2026 and Apache-2.0: https://github.com/compose-spec/compose-spec, schema/compose-spec.json;
https://github.com/grafana/grafana-foundation-sdk, jsonschema/dashboard.jsonschema.json.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, Final

import jsonschema_rs
import pytest
import yaml

from deploy.grafana_dashboard import dashboard
from node.config import NodeConfig
from router.config import RouterConfig

DEPLOY: Final = Path(__file__).resolve().parents[2] / "deploy"
SCHEMAS: Final = Path(__file__).parent / "schemas"
DOCS: Final = DEPLOY.parent / "docs"
ROUTER_PORT, NODE_PORT = 8000, 8002  # ENV of the Dockerfile
# What compose.yaml itself reads, and how its head spells "any".
NO_KNOBS: Final = {"BATON_IMAGE", "BATON_ENV", "BATON_NAME", "BATON_CONFIG"}


def validator_of(schema: str) -> jsonschema_rs.Validator:
    return jsonschema_rs.validator_for(json.loads((SCHEMAS / schema).read_text()))


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    """The file, its anchors merged, its variables as they are written."""
    content: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return content


def test_compose_v2_would_take_the_file(compose: dict[str, Any]) -> None:
    validator = validator_of("compose-spec.json")
    assert [str(error) for error in validator.iter_errors(compose)] == []
    compose["services"]["redis"]["imgae"] = "redis"
    assert not validator.is_valid(compose), "the schema notices nothing"
    del compose["services"]["redis"]["imgae"]


@pytest.mark.covers("A14")
@pytest.mark.parametrize("extra", ["structured", "trace", "nixl"])
def test_what_an_image_leaves_out_can_be_asked_for_and_the_page_says_so(compose: dict[str, Any], extra: str) -> None:
    """Without `structured` a container answers 400 to each schema, which `make up` serves."""
    extras = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extra in extras
    assert compose["services"]["router-0"]["build"]["args"]["EXTRAS"] == "${EXTRAS:-}"
    head = (DEPLOY / "Dockerfile").read_text().partition("\nFROM ")[0]
    assert f"{extra} (" in head and "ARG EXTRAS" in (DEPLOY / "Dockerfile").read_text()
    assert f"`{extra}`" in (DOCS / "containers.md").read_text()


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("is_built", [True, False])
def test_an_image_for_cpus_without_kernels_of_ours_has_numba_instead(
    tmp_path: Path, machine: str, is_built: bool
) -> None:
    """For the others the build ends where nothing was compiled: every node would be slow."""
    (chosen,) = re.findall(r"(if \.venv/bin/python .*?; fi) ", (DEPLOY / "Dockerfile").read_text(), re.DOTALL)
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    code = f"import platform, sys; platform.machine = lambda: {machine!r}; exec(sys.argv[1])"
    (programs / "python").write_text(
        f'#!/bin/sh\nPYTHONPATH="{DEPLOY.parent}" exec "{sys.executable}" -c "{code}" "$2"\n'
    )
    (programs / "pip").write_text('#!/bin/sh\necho "$@" > installed\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    if is_built:
        (tmp_path / "kernels" / "cpu" / "built").mkdir(parents=True)
        (tmp_path / "kernels" / "cpu" / "built" / "baton.so").touch()
    done = subprocess.run(["sh", "-c", chosen], cwd=tmp_path, check=False, capture_output=True)
    assert (done.returncode == 0) == (is_built or machine == "aarch64")
    assert (tmp_path / "installed").exists() == (machine == "aarch64")
    if machine == "aarch64":
        assert "-e .[numba]" in (tmp_path / "installed").read_text()
        # Where numba would keep what it compiles nothing can be written, and then torch would compute.
        assert re.search("^ENV .*XDG_CACHE_HOME=/tmp$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", ["compose.yaml", "compose.tls.yaml", "baton.env", "Dockerfile", "container_entry"])
def test_every_variable_is_one_that_some_role_reads(name: str) -> None:
    knobs = {
        f"BATON_{field.name.upper()}" for config in (NodeConfig, RouterConfig) for field in dataclasses.fields(config)
    }
    named = re.findall(r"\bBATON_(?:DEFAULT_)?([A-Z0-9_]+)\b", (DEPLOY / name).read_text())
    assert {f"BATON_{each}" for each in named} <= knobs | NO_KNOBS


def test_the_ports_of_the_image_are_the_ports_that_others_are_told(compose: dict[str, Any]) -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    assert f"BATON_DEFAULT_PORT={ROUTER_PORT} " in dockerfile and f"BATON_DEFAULT_HTTP_PORT={NODE_PORT} " in dockerfile
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


def test_with_certificates_every_process_has_its_own_and_the_rest_is_as_without(compose: dict[str, Any]) -> None:
    """The second file says nothing but that; what it mounts differs from what it replaces in words of TLS alone."""
    over: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.tls.yaml").read_text())
    assert [str(error) for error in validator_of("compose-spec.json").iter_errors(over)] == []
    assert set(over["services"]) == set(compose["services"]) - {"grafana"}
    for name, service in over["services"].items():
        assert set(service) <= {"environment", "volumes", "command"}
        if "-" in name:
            told = service["environment"]
            assert told["BATON_TLS_DIR"] == "/tls" and told["BATON_REGISTRY"].startswith("rediss://redis:6379/0?")
            assert told.get("BATON_ADVERTISE", name) == name and ("BATON_ADVERTISE" in told) == ("router" not in name)
            (mounted,) = (each for each in service["volumes"] if each.endswith(":/tls:ro"))
            assert re.fullmatch(rf"\$\{{CERTS_DIR[^}}]*\}}/{name}:/tls:ro", mounted)
    mounted_twice = {
        each.split(":")[1] for name in ("front", "prometheus") for each in over["services"][name]["volumes"]
    }
    assert mounted_twice >= {"/etc/baton/haproxy.cfg", "/etc/baton/prometheus.yml"}
    for plain, secure, words in (
        (
            "haproxy.cfg",
            "haproxy.tls.cfg",
            r"    ssl-load.*\n| ssl(?= crt| verify)| (crt|verify|ca-file|sni|check-sni|verifyhost) [\w/.()-]+",
        ),
        ("prometheus.yml", "prometheus.tls.yml", r"    (scheme|tls_config): .*\n"),
    ):
        one, other = ((DEPLOY / each).read_text().split("\n", 1)[1] for each in (plain, secure))
        assert other != one and re.sub(words, "", other) == one


def test_a_container_has_longer_to_stop_than_a_drain_takes(compose: dict[str, Any]) -> None:
    drain_s: Any = next(field.default for field in dataclasses.fields(NodeConfig) if field.name == "drain_timeout_s")
    for name, service in compose["services"].items():
        if "-" in name:
            assert float(service["stop_grace_period"].removesuffix("s")) >= drain_s + 5, name


def test_grafana_would_take_the_dashboard_and_the_file_is_what_the_code_makes() -> None:
    made = dashboard()
    assert json.loads((DEPLOY / "grafana" / "dashboards" / "baton.json").read_text()) == made, (
        "python -m deploy.grafana_dashboard"
    )
    validator = validator_of("grafana-dashboard.json")
    assert [str(error) for error in validator.iter_errors(made)] == []
    assert not validator.is_valid(made | {"tilte": "Baton"}), "the schema notices nothing"
    places = [panel["gridPos"] for panel in made["panels"]]
    covered = [
        (place["x"] + i, place["y"] + j) for place in places for i in range(place["w"]) for j in range(place["h"])
    ]
    assert len(covered) == len(set(covered)), "panels lie upon each other"
    datasources = yaml.safe_load((DEPLOY / "grafana" / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert {panel["datasource"]["uid"] for panel in made["panels"] if "datasource" in panel} == {
        each["uid"] for each in datasources
    }


def labels_documented() -> dict[str, set[str]]:
    """By metric, the labels that its process gives it."""
    router = re.findall(r"^\| `(baton_router_[a-z_]+)` \| \w+ \|([^|]*)\|", (DOCS / "metrics.md").read_text(), re.M)
    nodes = re.findall(r"^\| `([a-z_]+)` \|([^|]*)\|", (DOCS / "metrics_nodes.md").read_text(), re.M)
    found = {name: set(re.findall(r"\w+", labels)) for name, labels in router}
    return found | {f"baton_node_{name}": set(re.findall(r"`(\w+)`", labels)) for name, labels in nodes}


def test_the_dashboard_asks_for_labels_that_a_process_gives_or_every_prometheus() -> None:
    """One that somebody's scrape configuration gives may not be there, and does not change with what it tells of."""
    documented = labels_documented()
    num_asked = 0
    for panel in dashboard()["panels"]:
        for query in (target["expr"] for target in panel.get("targets", ())):
            names = set(re.findall(r"baton_[a-z_]+", query))
            given = {label for name in names for label in documented[re.sub(r"_(bucket|sum|count)$", "", name)]}
            chosen = re.findall(r"(\w+)(?:!=|=~|=)\"", query)
            grouped = [
                word for words in re.findall(r"(?:by|on) \(([^)]*)\)", query) for word in re.findall(r"\w+", words)
            ]
            num_asked += len(chosen) + len(grouped)
            assert {*chosen, *grouped} <= given | {"instance", "job", "le"}, query
    assert num_asked > 20


def test_every_metric_of_the_dashboard_is_documented() -> None:
    documented = set(re.findall(r"`(baton_router_[a-z_]+)`", (DOCS / "metrics.md").read_text()))
    documented |= {
        f"baton_node_{name}"
        for name in re.findall(r"^\| `([a-z_]+)`", (DOCS / "metrics_nodes.md").read_text(), flags=re.M)
    }
    queries = " ".join(target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ()))
    used = set(re.findall(r"baton_[a-z_]+", queries))
    assert used and {name for name in used if re.sub(r"_(bucket|sum|count)$", "", name) not in documented} == set()
