"""Structured outputs over real processes: a node dies in the middle of a bound stream, and its text is that of a quiet run."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from operator import sub
from pathlib import Path
from typing import Any, Final

import httpx
import jsonschema_rs
import pytest

from node.grammar_book import STALL_S
from tests.e2e.fault_clients import Stream, ask, body, tokens_of
from tests.e2e.role_by_role import RoleByRole, started_role_by_role, wait_until

SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["red", "green"]},
        "names": {"type": "array", "items": {"type": "string", "minLength": 8, "maxLength": 12}, "minItems": 16},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["kind", "names", "age"],
}
SCHEMA["properties"]["names"]["maxItems"] = 18
# Read in one way for a hundred letters, and in very many behind: nothing that is tried before it begins can tell.
SLOW_LATER: Final = "[a-z]{100}([a-z]{1,99}){1,99}"


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RoleByRole]:
    flags: dict[str, tuple[str, ...]] = {"router": (), "prefill-0": (), "decode-0": (), "decode-1": ()}
    with started_role_by_role(tiny_model, tmp_path_factory.mktemp("structured"), flags) as running:
        yield running


def bound(rng: random.Random) -> dict[str, Any]:
    """About two hundred and fifty tokens of JSON."""
    outputs = {"json": SCHEMA, "disable_any_whitespace": True}
    return body(rng, 40, 2000) | {"ignore_eos": False, "structured_outputs": outputs}


@pytest.mark.covers("A14")
def test_what_cannot_be_followed_is_answered_400_and_nothing_is_computed(cluster: RoleByRole) -> None:
    fields = body(random.Random(1), 40, 20) | {"ignore_eos": False}
    answer = ask(cluster, fields | {"structured_outputs": {"regex": "[a-f"}})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "structured_outputs.regex"
    assert "Unclosed" in answer.json()["error"]["message"]
    assert "PD Error" not in answer.json()["error"]["message"]
    begun = ask(cluster, fields | {"structured_outputs": {"regex": "[a-f]{9}"}, "generated_token_ids": [*b"abz"]})
    assert begun.status_code == 400
    assert "not the beginning" in begun.json()["error"]["message"]
    # By the gate in front of its core (tests/node/test_grammar_gate.py): no step, no lease.
    assert cluster.metric("pd_errors_total", "INVALID") == 2
    assert not any(cluster.state("prefill-0")["kv_bytes_sent"].values())


@pytest.mark.covers("A14", "A01")
def test_a_chat_bound_by_response_format_is_json_streamed_or_not(cluster: RoleByRole) -> None:
    schema = {"type": "array", "items": {"enum": ["x", 1, None]}, "minItems": 2, "maxItems": 2}
    fields = {"model": "llama-tiny", "messages": [{"role": "user", "content": "hi"}], "seed": 5, "n": 2}
    fields |= {"response_format": {"type": "json_schema", "json_schema": {"name": "pair", "schema": schema}}}
    fields |= {"max_tokens": 400, "logit_bias": {str(byte): -100 for byte in b" \n\r"}, "temperature": 1.5}
    answer = httpx.post(f"{cluster.url}/v1/chat/completions", json=fields, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    for choice in answer.json()["choices"]:
        assert choice["finish_reason"] == "stop"
        jsonschema_rs.validate(schema, json.loads(choice["message"]["content"]))


def children(pid: int) -> set[int]:
    """Of all its threads, those that have ended and nobody has reaped included."""
    lists = [task / "children" for task in Path(f"/proc/{pid}/task").iterdir()]
    return {int(child) for each in lists for child in each.read_text(encoding="ascii").split()}


@pytest.mark.covers("A14")
def test_a_grammar_that_is_slow_in_mid_stream_ends_its_own_stream_and_no_other_notices(
    cluster: RoleByRole, fresh_seed: int
) -> None:
    rng = random.Random(fresh_seed)
    fields = [body(rng, 40, 700), body(rng, 30, 300) | {"temperature": 1.0}]
    fields += [bound(rng) | {"temperature": temperature, "max_tokens": 200} for temperature in (0.0, 1.0)]
    hostile = body(rng, 40, 900) | {"min_tokens": 900, "ignore_eos": False, "temperature": 1.0}
    hostile |= {"structured_outputs": {"regex": SLOW_LATER}}

    def followers() -> set[int]:
        """The decode nodes' processes of grammars."""
        forkers = (child for node in ("decode-0", "decode-1") for child in children(cluster.pid(node)))
        return {pid for forker in forkers for pid in children(forker)}

    with ThreadPoolExecutor(1 + len(fields)) as threads:
        quiet = list(threads.map(lambda each: tokens_of(ask(cluster, each)), fields))
        with cluster.slow_steps():  # or they were at their ends before it is slow
            beside = [Stream(cluster, threads, each) for each in fields]
            for stream in beside:
                stream.take_tokens(5)
            before = followers()
            slow = Stream(cluster, threads, hostile)
            slow.take_tokens(20)
            of_slow = followers() - before  # with what a process that loads may start for a moment
            assert of_slow
            error = slow.take_the_error()
        assert "too many ways" in error["message"], error
        assert 100 < len(slow.token_ids) < 400, "little by little, from its hundredth letter on"
        assert slow.heard_at[-1] - slow.heard_at[-2] < 5 * STALL_S
        for stream in beside:
            stream.take_all()
            assert stream.last == "[DONE]"
    assert any(each.heard_at[-1] > slow.heard_at[-1] for each in beside), "nothing was beside it when it was slow"
    assert [stream.token_ids for stream in beside] == quiet
    assert all(max(map(sub, each.heard_at[1:], each.heard_at)) < 5 * STALL_S for each in beside)
    wait_until("its process is gone, and reaped", lambda: of_slow - followers() != set())
    cluster.wait_until_nothing_is_held(*cluster.nodes)


@pytest.mark.covers("A14", "R09", "R10")
def test_a_bound_streams_text_is_that_of_a_quiet_run_though_its_node_dies_in_the_middle(
    cluster: RoleByRole, fresh_seed: int
) -> None:
    rng = random.Random(fresh_seed)
    fields = [bound(rng) | {"temperature": temperature} for temperature in (0.0, 1.0, 1.0, 1.0)]
    with ThreadPoolExecutor(len(fields)) as threads:
        streams: list[Stream] = []
        with cluster.slow_steps(0.08):
            for each in fields:
                streams.append(Stream(cluster, threads, each))
                # One by one, so that they are placed in turn.
                wait_until("it is placed", lambda: cluster.metric("node_branches") == len(streams))
            for stream in streams:
                stream.take_tokens(5)
            cluster.kill("decode-0")
        for stream in streams:
            stream.take_all()
            assert stream.last == "[DONE]"
        assert all(cluster.exit_code(name) is None for name in ("router", "prefill-0", "decode-1"))
        assert cluster.metric("retries_total", "NODE_LOST") >= len(fields) / 2, "those of one node at least"
        quiet = list(threads.map(lambda each: tokens_of(ask(cluster, each)), fields))
    for stream, whole in zip(streams, quiet, strict=True):
        assert stream.token_ids == whole
        jsonschema_rs.validate(SCHEMA, json.loads(bytes(whole[:-1]).decode()))
