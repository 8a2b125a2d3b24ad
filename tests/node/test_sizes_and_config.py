"""Sizes fit together before anything is allocated; a wrong one is one sentence."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from node.config import NodeConfig
from node.metrics import CODED_COUNTERS, PLAIN_COUNTERS, Counters
from node.sizes import engine_sizes
from runtime.config import ConfigError, parse

ROOT = Path(__file__).parents[2]


def config(*flags: str) -> NodeConfig:
    return parse(NodeConfig, "baton prefill", "", ["--model", "m", "--router", "127.0.0.1:1", *flags], {})


def test_an_unsized_pool_holds_max_num_seqs_full_sequences() -> None:
    sizes = engine_sizes(config("--max-num-seqs", "8"), 2048, bytes_per_block=1024, free_memory_bytes=1 << 40)
    assert (sizes.max_model_len, sizes.num_blocks) == (2048, 8 * 128)


def test_an_unsized_pool_takes_a_quarter_of_the_free_memory_at_most() -> None:
    assert engine_sizes(config(), 2048, bytes_per_block=1024, free_memory_bytes=4 * 1024 * 300).num_blocks == 300


def test_max_model_len_defaults_to_the_model_up_to_4096() -> None:
    assert engine_sizes(config(), 131_072, bytes_per_block=1, free_memory_bytes=1 << 40).max_model_len == 4096


def test_a_pool_below_one_full_sequence_is_refused_and_exactly_one_is_enough() -> None:
    def sizes(num_blocks: int) -> int:
        flags = ("--max-model-len", "100", "--num-blocks", str(num_blocks))
        return engine_sizes(config(*flags), 2048, bytes_per_block=1, free_memory_bytes=0).num_blocks

    assert sizes(7) == 7
    with pytest.raises(ValueError, match=r"--num-blocks 6: 96 tokens cannot hold .* 100, which needs 7 blocks"):
        sizes(6)


def test_a_model_len_beyond_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match="--max-model-len 100: the model was made for 64"):
        engine_sizes(config("--max-model-len", "100"), 64, bytes_per_block=1, free_memory_bytes=1 << 40)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--router", "nowhere"), "--router nowhere"),
        (("--router", "127.0.0.1:0"), "--router 127.0.0.1:0"),
        (("--router", "127.0.0.1:65536"), "--router 127.0.0.1:65536"),
        (("--router", ""), "--router"),
        (("--node-id", "a b"), "--node-id a b"),
        (("--max-num-seqs", "64", "--max-num-batched-tokens", "32"), "--max-num-batched-tokens 32"),
        (("--host", ""), "--host: must be"),
        (("--host", "0.0.0.0", "--advertise", "::"), "--advertise ::: must be one host's address"),
        (("--kv-pool", "file://relative"), "--kv-pool file://relative"),
        (("--kv-pool", "s3://bucket"), "file:///PATH, memory://, redis://HOST:PORT/DB"),
        (("--kv-pool-max-mib", "10"), "--kv-pool-max-mib 10: there is no KV pool without --kv-pool"),
        (("--kv-pool-ttl-s", "10"), "--kv-pool-ttl-s 10: there is no KV pool"),
        (("--kv-pool-staging-mib", "10"), "--kv-pool-staging-mib 10: there is no KV pool"),
        (("--kv-pool-secret-file", "s"), "--kv-pool-secret-file s: there is no KV pool"),
        (("--save-preempted-kv", "on"), "--save-preempted-kv on: there is no KV pool"),
        (("--save-finished-kv", "on"), "--save-finished-kv on: there is no KV pool"),
        (("--kv-pool", "memory://", "--save-preempted-kv", "off"), "--kv-pool memory://: nothing is saved there"),
    ],
)
def test_what_does_not_fit_together_is_one_sentence(flags: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(*flags)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.covers("W01", "W04")
@pytest.mark.parametrize(
    ("flags", "saved"),
    [
        ((), (False, False)),
        (("--save-preempted-kv", "off"), (False, False)),
        (("--kv-pool", "file:///p"), (True, False)),
        (("--kv-pool", "file:///p", "--save-preempted-kv", "off"), (False, False)),
        (("--kv-pool", "file:///p", "--save-preempted-kv", "on", "--save-finished-kv", "on"), (True, True)),
    ],
)
def test_who_gives_way_is_saved_where_there_is_a_pool_and_who_is_done_where_it_is_asked_for(
    flags: tuple[str, ...], saved: tuple[bool, bool]
) -> None:
    told = config(*flags)
    assert (told.saves_preempted, told.saves_finished) == saved


def test_a_password_in_the_url_of_the_kv_pool_is_not_in_the_sentence() -> None:
    with pytest.raises(ConfigError) as error:
        config("--kv-pool", "redis://:hunter2@host:port/0")
    assert "hunter2" not in str(error.value) and "--kv-pool" in str(error.value)


def test_every_name_that_a_core_counts_is_a_counter() -> None:
    counted: set[str] = set()
    for path in [*ROOT.glob("prefill_node/*.py"), *ROOT.glob("decode_node/*.py"), *ROOT.glob("node/*.py")]:
        for call in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(call, ast.Call) and ast.unparse(call.func) in ("Count", "ev.Count")):
                continue
            name = call.args[0]
            if isinstance(name, ast.Constant):
                counted.add(str(name.value))
            else:  # f"{cause}_{code}"
                assert isinstance(name, ast.JoinedStr) and isinstance(name.values[0], ast.Constant)
                assert str(name.values[0].value).rstrip("_") in CODED_COUNTERS
    assert counted
    assert counted <= set(PLAIN_COUNTERS)


def test_a_count_of_an_unknown_name_is_a_bug_and_a_known_one_adds_up() -> None:
    counters = Counters()
    counters.count("stale_refused")
    counters.count("stale_refused", 2)
    assert counters.counts()["stale_refused"] == 3
    counters.count("reserve_refused_no_blocks")
    assert counters.counts_by_code()["reserve_refused"] == {"NO_BLOCKS": 1}
    with pytest.raises(KeyError):
        counters.count("no_such_thing")
