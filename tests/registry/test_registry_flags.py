"""`--registry` and what goes with it: what contradicts itself is one sentence, and shows no password."""

from __future__ import annotations

import pytest

from node.config import NodeConfig
from router.config import RouterConfig
from runtime.config import ConfigError, parse

URL = "redis://:hunter2@host:6379/0"


def of_router(*flags: str) -> RouterConfig:
    return parse(RouterConfig, "baton router", "", ["--model", "m", *flags], {})


def of_node(*flags: str, **variables: str) -> NodeConfig:
    return parse(NodeConfig, "baton decode", "", ["--model", "m", *flags], variables)


def test_without_flags_a_router_embeds_its_registry_and_a_node_needs_a_router() -> None:
    assert of_router().registry == of_node("--router", "127.0.0.1:1").registry == "embedded"
    with pytest.raises(ConfigError, match=r"--router: at least one HOST:PORT is needed, or --registry redis://"):
        of_node()


def test_with_a_redis_neither_needs_an_address_of_the_other() -> None:
    assert of_router("--registry", URL, "--registry-namespace", "green").registry_namespace == "green"
    assert of_node("--registry", URL).router == ()
    assert of_node(BATON_REGISTRY=URL).registry == URL


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--registry", URL, "--registry-port", "8001"), "--registry-port 8001"),
        (
            ("--registry", URL, "--registry-host", "10.0.0.5"),
            "--registry-host 10.0.0.5: nodes announce themselves in Redis",
        ),
        (("--registry-host", ""), "--registry-host: must be an address of this machine, or none"),
        (("--registry-namespace", "green"), "--registry-namespace green"),
        (("--registry", "redis://:hunter2@host:x"), "--registry redis://…: must be embedded, redis://"),
    ],
)
def test_contradictions_of_a_router(flags: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        of_router(*flags)
    assert says in str(raised.value)
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--registry", URL, "--router", "127.0.0.1:1"), "--router 127.0.0.1:1: routers look into Redis"),
        (("--router", "127.0.0.1:1", "--registry-namespace", "green"), "--registry-namespace green"),
        (("--registry", "redis.example:6379"), "--registry …: must be embedded, redis://"),
    ],
)
def test_contradictions_of_a_node(flags: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        of_node(*flags)
    assert says in str(raised.value)
    assert "hunter2" not in str(raised.value)
