"""The chart's values: the schema, the file with the defaults, the templates and the page that tells of them name the same ones."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any, Final

import pytest
import yaml

from node.config import NodeConfig
from router.config import RouterConfig
from tests.deploy.chart_cases import Values
from tests.deploy.chart_schema import CHART, OF_THE_CHART, SCHEMA_FILE, make_schema
from tests.deploy.installs import ROOT

TEMPLATES: Final = {path.name: path.read_text() for path in sorted((CHART / "templates").iterdir())}
PAGES: Final = (ROOT / "docs" / "kubernetes.md", CHART / "README.md")
# What a template reaches by a name of its own: the values of a role, or a part of them.
ROLE_NAMES: Final = r"(?:\$part|\.part)"

HANDED_ON: Final = ("config", "resources", "podSecurityContext", "securityContext", "issuerRef")  # as they are


@pytest.fixture(scope="module")
def values() -> Values:
    """The file."""
    found: Values = yaml.safe_load((CHART / "values.yaml").read_text())
    return found


def has(values: Any, path: str) -> bool:
    """Whether there is such a value; what stands in a mapping without one of its own names is the user's."""
    for name in path.split("."):
        if values == {} or name == "config":
            return True
        if not isinstance(values, dict) or name not in values:
            return False
        values = values[name]
    return True


def test_the_schema_is_what_the_knobs_say() -> None:
    assert json.loads(SCHEMA_FILE.read_text()) == make_schema(), "make docs"
    knobs = {field.name for config in (NodeConfig, RouterConfig) for field in dataclasses.fields(config)}
    assert knobs >= OF_THE_CHART, "the chart keeps knobs to itself that nobody has"
    every = set(make_schema()["properties"]["config"]["properties"])
    assert every == knobs - OF_THE_CHART


def test_every_value_of_the_schema_has_its_default_in_the_file() -> None:
    values: Values = yaml.safe_load((CHART / "values.yaml").read_text())

    def missing(schema: dict[str, Any], found: Any, where: str) -> list[str]:
        schema = make_schema()["definitions"]["node"] if "$ref" in schema else schema
        if "properties" not in schema or where.endswith(".config") or where == ".config":
            return []
        return [
            each
            for name, inner in schema["properties"].items()
            for each in (
                [f"{where}.{name}"]
                if name not in found and name not in ("global", "requests", "limits", "claims")
                else missing(inner, found.get(name, {}), f"{where}.{name}")
            )
        ]

    assert missing(make_schema(), values, "") == []


def test_templates_read_only_values_that_there_are(values: Values) -> None:
    """What there is not is nothing to Helm, and the line would say so without a word."""
    roles = [values["router"], values["prefill"]]
    num_read = 0
    for name, text in TEMPLATES.items():
        for path in re.findall(r"\.Values\.([A-Za-z.]+[A-Za-z])", text):
            assert has(values, path), f"{name}: .Values.{path}"
            num_read += 1
        for path in re.findall(ROLE_NAMES + r"\.([A-Za-z.]+[A-Za-z])", text):
            assert any(has(role, path) for role in roles), f"{name}: {path} of a role"
            num_read += 1
    assert num_read > 100, "the patterns find nothing"


def test_every_value_is_read(values: Values) -> None:
    read = set(re.findall(r"\.([A-Za-z]+)\b", "\n".join(TEMPLATES.values())))
    read |= {"prefill", "decode", "mixed"}  # by `index`

    def unread(found: Values) -> list[str]:
        names = [key for key in found if key not in read]
        for key, value in found.items():
            if isinstance(value, dict) and key in read and key not in HANDED_ON:
                names += unread(value)
        return names

    assert unread(values) == []
    assert unread({"router": {"replicsa": 2}}) == ["replicsa"], "the check notices nothing"


def test_pages_name_values_that_there_are(values: Values) -> None:
    named = set()
    for page in PAGES:
        text = page.read_text()
        for flag in re.findall(r"--set ([^\s`]+)", text):
            named |= {each.partition("=")[0] for each in flag.split(",")}
        roots = "|".join(values)
        named |= set(re.findall(rf"`((?:{roots})\.[A-Za-z_.]+[A-Za-z])`", text))
    assert len(named) > 15, named
    knobs = {field.name for config in (NodeConfig, RouterConfig) for field in dataclasses.fields(config)}
    for path in named - {"tls.crt", "tls.key"}:  # files
        assert has(values, path), path
        assert "config." not in path or path.partition("config.")[2] in knobs, path
