"""Variables that were meant for Baton and are read by no command: each is told of once, with what it was probably to be."""

from __future__ import annotations

import pytest

from runtime.config import child_environment
from runtime.variables import unread_variables


def test_a_misspelt_variable_is_named_with_the_likeliest_one_and_an_images_default_too() -> None:
    environment = {
        "BATON_NUM_BLOCK": "9", "BATON_NUM_BLOCKS": "9", "BATON_CONFIG": "f", "BATON_DEFAULT_PORTS": "1", "BATON_DEFAULT_PORT": "1",
        "BATON_QQQ": "x", "BATON_EMPTY": "", "MY_BATON_NUM_BLOCK": "1",
    }  # fmt: skip
    assert [*unread_variables(environment)] == [
        {"name": "BATON_DEFAULT_PORTS", "did_you_mean": "BATON_DEFAULT_PORT"},
        {"name": "BATON_NUM_BLOCK", "did_you_mean": "BATON_NUM_BLOCKS"},
        {"name": "BATON_QQQ"},
    ]


def test_the_key_that_operators_show_is_told_of_where_a_router_asks_for_none() -> None:
    environment = {"BATON_API_KEY": "sk"}
    assert [*unread_variables(environment)] == []
    meant = {"name": "BATON_API_KEY", "did_you_mean": "BATON_API_KEYS"}
    assert [*unread_variables(environment, lacks_keys=True)] == [meant]


def test_a_child_is_not_told_what_its_parent_has_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_NUM_BLOCK", "9")
    monkeypatch.setenv("BATON_NUM_BLOCKS", "9")
    assert "BATON_NUM_BLOCKS" in child_environment() and "BATON_NUM_BLOCK" not in child_environment()
