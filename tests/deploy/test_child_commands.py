"""What a `baton up` tells its processes, and what they make of it: nothing that the user said gets lost on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import pytest

from deploy.child_commands import HANDED_ON, TAKES_NONE, TO_ROUTERS, environment_of, node_command, router_command
from deploy.up_config import UpConfig
from node.config import NodeConfig
from router.config import RouterConfig
from runtime.config import load, parse
from runtime.knobs import knobs_of


def test_baton_up_hands_on_what_it_says_that_it_hands_on_and_a_node_knows_it() -> None:
    """But for what a command line must not show, which goes by variable, and what is worked out."""
    said = {each.name for each in fields(UpConfig) if "handed on to every node" in each.metadata.get("help", "")}
    assert said - {"kv_pool", "threads"} == {*HANDED_ON}
    assert said <= {each.name for each in fields(NodeConfig)}
    takers = {each.name for each in (*knobs_of(NodeConfig), *knobs_of(RouterConfig)) if each.is_optional}
    assert takers.intersection((*HANDED_ON, *TO_ROUTERS)) == TAKES_NONE


def children_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str], *flags: str
) -> tuple[RouterConfig, NodeConfig]:
    """What a router and a decode node of a `baton up` make of its commands; `folder` holds a baton.toml, perhaps."""
    (folder / "config.json").touch()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    toml = folder / "baton.toml"
    words = ["--model", str(folder), *(("--config", str(toml)) if toml.exists() else ()), *flags]
    config = load(UpConfig, "baton up", "", words)
    environment = environment_of(config, 1)
    _, *router = router_command(config, 0)
    role, *node = node_command(config, "decode", "decode-0", "127.0.0.1:1")
    return (
        parse(RouterConfig, "baton router", "", router, environment),
        parse(NodeConfig, f"baton {role}", "", [*node, "--threads", "1"], environment),
    )


@pytest.mark.parametrize(
    ("name", "choice"),
    [(each.name, choice) for each in knobs_of(UpConfig) if each.name in HANDED_ON for choice in each.choices],
)
def test_every_choice_of_the_nodes_arrives_by_flag_and_by_variable_be_it_none(
    name: str, choice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = ("--kv-pool", "file:///pool")  # without one there is nothing to be saved in
    means = {"on": (True, "on"), "off": (False, "off")}.get(choice, (choice,))
    _, by_flag = children_of(tmp_path, monkeypatch, {}, *pool, "--" + name.replace("_", "-"), choice)
    _, by_variable = children_of(tmp_path, monkeypatch, {f"BATON_{name.upper()}": choice}, *pool)
    assert getattr(by_flag, name) in means and getattr(by_variable, name) in means


def test_what_baton_up_was_told_wins_at_its_children_over_their_variables_be_it_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {
        "WORKERS": "4", "API_KEYS": "/keys", "TLS_DIR": "/tls", "NUM_BLOCKS": "7", "BLOCK_SIZE": "2", "KV_POOL": "file:///pool",
        "SERVED_MODEL_NAME": "other", "PLACEMENT_PREFILL": "random", "TP": "2",
    }  # fmt: skip
    variables = {f"BATON_{name}": value for name, value in said.items()}
    router, node = children_of(tmp_path, monkeypatch, variables)
    assert (router.workers, router.api_keys, router.served_model_name) == (4, Path("/keys"), "other")
    assert (node.num_blocks, node.block_size, node.kv_pool, node.tp) == (7, 2, "file:///pool", 2)
    unsaid = [word for name in said if name != "WORKERS" for word in ("--" + name.lower().replace("_", "-"), "none")]
    router, node = children_of(tmp_path, monkeypatch, variables, "--workers", "1", *unsaid)
    assert (router.workers, router.api_keys, router.tls_dir, router.served_model_name) == (1, None, None, None)
    assert router.placement_prefill == "cache_aware", "the router's own default"
    assert (node.num_blocks, node.block_size, node.tls_dir, node.kv_pool, node.tp) == (None, 16, None, None, 1)


def test_what_baton_up_was_told_wins_at_its_children_over_the_file_and_the_rest_is_their_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "baton.toml").write_text(
        '[router]\nworkers = 4\nmax_queue = 9\n[decode]\nnum_blocks = 7\nkv_pool = "file:///pool"\n'
    )
    router, node = children_of(tmp_path, monkeypatch, {})
    assert (router.workers, router.max_queue, node.num_blocks, node.kv_pool) == (4, 9, 7, "file:///pool")
    flags = ("--workers", "1", "--num-blocks", "none", "--kv-pool", "none")
    router, node = children_of(tmp_path, monkeypatch, {}, *flags)
    assert (router.workers, router.max_queue, node.num_blocks, node.kv_pool) == (1, 9, None, None)


@pytest.mark.parametrize(
    ("room", "key", "said"),
    [("router", key, "say it under [up], or by --") for key in ("api_keys", "tls_dir", "host", "port", "registry")]
    + [("decode", key, "say it under [up], or by --") for key in ("threads", "tls_dir", "model")]
    + [("prefill", key, "chooses that itself") for key in ("host", "kv_port", "advertise", "node_id")],
)
def test_what_baton_up_must_know_is_said_to_it_and_not_to_its_children(
    room: str, key: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "baton.toml").write_text(f"[{room}]\n{key} = 1\n")
    with pytest.raises(SystemExit) as ended:
        children_of(tmp_path, monkeypatch, {})
    told = capsys.readouterr().err
    assert ended.value.code == 2 and f"[{room}] {key}: baton up " in told and said in told


@pytest.mark.parametrize("room", ["router", "decode"])
def test_what_baton_up_always_tells_a_process_is_refused_in_its_table(
    room: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table's word would be overruled, and nobody told."""
    (tmp_path / "config.json").touch()
    config = load(UpConfig, "baton up", "", ["--model", str(tmp_path)])
    command = router_command(config, 0) if room == "router" else node_command(config, room, "decode-0", "127.0.0.1:1")
    told = [word.removeprefix("--").replace("-", "_") for word in command if word.startswith("--")]
    assert {"model", "host"} < {*told}
    for key in told:
        with pytest.raises(SystemExit):
            (tmp_path / "baton.toml").write_text(f"[{room}]\n{key} = 1\n")
            children_of(tmp_path, monkeypatch, {})
        assert f"[{room}] {key}: baton up " in capsys.readouterr().err


def test_variables_of_one_process_reach_no_node_of_baton_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container has them, for the one process that it is meant for."""
    alone = {"KV_PORT": "1", "HTTP_PORT": "2", "GRPC_PORT": "3", "ADVERTISE": "elsewhere", "ROUTER": "there:5"}
    variables = {f"BATON_{name}": value for name, value in alone.items()}
    _, node = children_of(tmp_path, monkeypatch, variables)
    assert (node.kv_port, node.http_port, node.grpc_port, node.advertise) == (0, 0, 0, None)
    assert node.router == ("127.0.0.1:1",)
    _, node = children_of(tmp_path, monkeypatch, variables, "--registry", "redis://127.0.0.1:1/0")
    assert node.router == ()


def test_routers_that_all_machines_reach_have_a_registry_that_none_of_them_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever announces a node is sent prompts."""
    variables = {"BATON_REGISTRY_HOST": "0.0.0.0"}
    router, _ = children_of(tmp_path, monkeypatch, variables, "--host", "0.0.0.0")
    assert (router.host, router.registry_address) == ("0.0.0.0", "127.0.0.1")
    router, _ = children_of(tmp_path, monkeypatch, variables, "--registry", "redis://127.0.0.1:1/0")
    assert router.registry_host is None


def test_what_other_machines_can_do_is_said_of_keys_and_of_encryption_each_for_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()

    def said(host: str, *flags: str) -> str:
        config = load(UpConfig, "baton up", "", ["--model", str(tmp_path), "--host", host, *flags])
        return "; ".join(config.what_is_open())

    keys, tls = ("--api-keys", "keys"), ("--tls-dir", "certs")
    assert "nobody is asked for a key" in said("0.0.0.0") and "prompts and answers travel unencrypted" in said("::")
    assert said("0.0.0.0", *keys) == (
        "0.0.0.0 can be reached from other machines, and prompts, answers and keys travel unencrypted (--tls-dir)"
    )
    assert "nobody is asked" in said("::", *tls) and "unencrypted" not in said("::", *tls)
    assert said("::", *tls, *keys) == said("127.0.0.1") == ""


@pytest.mark.covers("H14")
def test_baton_up_gives_each_role_its_number_of_ranks(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()

    def told(*flags: str) -> list[int | None]:
        config = load(UpConfig, "baton up", "", ["--model", str(tmp_path), *flags])
        return [config.tp_of(role) for role in ("prefill", "decode", "mixed")]

    assert told() == [None, None, None]
    assert told("--tp", "2") == [2, 2, 2]
    assert told("--tp", "2", "--decode-tp", "1") == [2, 1, 2]
    assert told("--prefill-tp", "4") == [4, None, None]

    def threads(num_cores: int, *flags: str) -> dict[str, int]:
        return load(UpConfig, "baton up", "", ["--model", str(tmp_path), *flags]).threads_by_role(num_cores)

    assert threads(8) == {"prefill": 4, "decode": 4}
    assert threads(8, "--decode-tp", "3") == {"prefill": 2, "decode": 6}
    assert threads(2, "--mixed", "2", "--tp", "2") == {"prefill": 2, "decode": 2, "mixed": 2}
    assert threads(8, "--tp", "2", "--threads", "1") == {"prefill": 1, "decode": 1}
