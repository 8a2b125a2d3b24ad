"""Real processes that are killed, hang, pause and come back: what their clients get, what the others keep, and what is left.

A request on a lost node goes on elsewhere, or when the node is back; its tokens are those of the run without the fault. Bounds are
ten times what the design allows. Each fault is checked to have fired: a kill by its exit code, a stop by the kernel's word.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

import httpx
import pytest

from runtime.registry_server import TTL_S
from tests.e2e.fault_clients import Stream, ask, body, checked_error, tokens_of
from tests.e2e.role_by_role import BOUND_S, RoleByRole, started_role_by_role, wait_until

NUM_THREADS: Final = 8  # requests at once
NUM_WAITING: Final = 3  # long prompts at a prefill node
PAUSE_S: Final = 0.7  # well below the silence that breaks a session
LONG: Final = 4000  # tokens: more than are generated before a fault is found
CHUNK_TOKENS: Final = 8
# A long prompt takes seconds.
SLOW_PREFILL: Final = ("--max-num-seqs", "8", "--max-num-batched-tokens", str(CHUNK_TOKENS))
USUAL_GRACE: Final = ("--session-grace-s", "2")  # of who is to be found by its silence
NO_PATIENCE: Final = ("--no-nodes-grace-s", "0")  # what has not begun is not kept waiting for a node to come back
LONG_LEASES: Final = ("--lease-life-s", "120")  # a lease that ends within the bound was released, it did not expire


@pytest.fixture(scope="module")
def shared_cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RoleByRole]:
    """One of each role."""
    alone = ("--local-prefill", "off")  # what a lost prefill node means where nobody stands in for it
    flags = {"router": NO_PATIENCE, "prefill-0": (*SLOW_PREFILL, *LONG_LEASES), "decode-0": (*LONG_LEASES, *alone)}
    flags = {name: (*USUAL_GRACE, *words) for name, words in flags.items()}
    with started_role_by_role(tiny_model, tmp_path_factory.mktemp("faults"), flags) as running:
        yield running


@pytest.fixture
def cluster(shared_cluster: RoleByRole) -> RoleByRole:
    """The shared one, with whatever the last test's fault has left put right."""
    shared_cluster.restore()
    return shared_cluster


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    """Where clients run."""
    with ThreadPoolExecutor(NUM_THREADS) as running:
        yield running


def assert_is_503(response: httpx.Response, code: str) -> None:
    """Nothing was generated: come back later."""
    assert response.status_code == 503, response.text
    assert checked_error(response.json())["code"] == code
    assert int(response.headers["Retry-After"]) >= 1


def assert_no_load_is_left(cluster: RoleByRole) -> None:
    """The router counts no work, on no node."""
    for name in ("queued_requests", "live_requests", "node_prefilling", "node_branches"):
        assert cluster.metric(name) == 0, name


@pytest.mark.covers("R09", "R10", "A08", "C05", "P08", "R15")
def test_a_killed_decode_nodes_requests_go_on_at_another_and_no_token_differs(
    tiny_model: Path, tmp_path: Path, threads: ThreadPoolExecutor, fresh_seed: int
) -> None:
    """Four requests on each of two decode nodes, half of them streamed; one node dies in the middle of all."""
    rng = random.Random(fresh_seed)
    flags: dict[str, tuple[str, ...]] = {"router": (), "prefill-0": (), "decode-0": (), "decode-1": ()}
    with started_role_by_role(tiny_model, tmp_path, flags) as cluster:
        fields = [body(rng, 40, 300) for _ in range(NUM_THREADS)]
        streams: dict[int, Stream] = {}
        plain: dict[int, Future[httpx.Response]] = {}
        with cluster.slow_steps(0.08):
            for i, each in enumerate(fields):
                if i % 4 < 2:
                    streams[i] = Stream(cluster, threads, each)
                else:
                    plain[i] = threads.submit(ask, cluster, each)
                # One by one, so that they are placed in turn.
                wait_until("it is placed", lambda i=i: cluster.metric("node_branches") == i + 1)  # type: ignore[misc]
            for stream in streams.values():
                stream.take_tokens(5)
            wait_until("every prefill has ended", lambda: cluster.metric("node_prefilling") == 0)
            assert cluster.metric("live_requests") == NUM_THREADS
            cluster.kill("decode-0")

        for stream in streams.values():
            stream.take_all()
            assert stream.last == "[DONE]"
        answers = {i: future.result() for i, future in plain.items()}
        assert cluster.metric("retries_total", "NODE_LOST") == NUM_THREADS / 2, "those of one node, and only those"

        assert cluster.missing() == []
        assert all(cluster.exit_code(name) is None for name in ("router", "prefill-0", "decode-1"))
        cluster.wait_until_nothing_is_held("prefill-0", "decode-1")
        assert_no_load_is_left(cluster)
        undisturbed = list(threads.map(lambda each: tokens_of(ask(cluster, each)), fields))
    for i, whole in enumerate(undisturbed):
        assert whole == (streams[i].token_ids if i in streams else tokens_of(answers[i]))


@pytest.mark.covers("A04", "A06", "R13")
def test_a_killed_prefill_nodes_half_written_leases_are_released_and_its_clients_told(
    cluster: RoleByRole, threads: ThreadPoolExecutor, fresh_seed: int
) -> None:
    """The router tells the decode node long before a lease would end. The node comes back."""
    rng = random.Random(fresh_seed)
    before = cluster.state("decode-0")
    futures = [threads.submit(ask, cluster, body(rng, LONG, 8) | {"stream": i % 2 == 0}) for i in range(4)]

    def is_half_written() -> bool:
        state = cluster.state("decode-0")
        num_bytes = sum(state["kv_bytes_received"].values()) - sum(before["kv_bytes_received"].values())
        return num_bytes > 0 and "RESERVED" in state["attempts"]["leases_by_state"]

    wait_until("a lease is half written", is_half_written)
    assert cluster.state("decode-0")["blocks"]["leased"] > 0
    cluster.kill("prefill-0")
    cluster.wait_until_nothing_is_held("decode-0")
    for future in futures:
        assert_is_503(future.result(), "NO_NODES")
    after = cluster.state("decode-0")
    assert after["leases"] == 0
    assert after["counters"]["leases_expired"] == before["counters"]["leases_expired"]
    assert cluster.missing() == ["no prefill node can take work"]
    assert_no_load_is_left(cluster)
    cluster.start("prefill-0")
    cluster.wait_until_ready()
    assert len(tokens_of(ask(cluster, body(rng, 40, 8)))) == 8


@pytest.mark.covers("A06", "A12", "C10", "R13")
def test_a_hung_decode_node_is_found_by_silence_and_taken_back_without_its_old_work(
    cluster: RoleByRole, threads: ThreadPoolExecutor, fresh_seed: int
) -> None:
    """Its port still takes connections: the kernel does that for it."""
    rng = random.Random(fresh_seed)
    fields = body(rng, 40, 300)  # far more than it says before it is frozen
    with cluster.slow_steps(0.06):
        stream = Stream(cluster, threads, fields)
        stream.take_tokens(5)
        incarnation = cluster.state("decode-0")["incarnation"]
        num_lost = cluster.metric("nodes_lost_total")
        cluster.freeze("decode-0")
    wait_until("it is missed", lambda: cluster.missing() == ["no decode node can take work"])
    wait_until("its session is lost", lambda: cluster.metric("nodes_lost_total") > num_lost)
    assert_is_503(ask(cluster, body(rng, 40, 8)), "NO_NODES")
    cluster.thaw("decode-0")
    stream.take_all()
    assert stream.last == "[DONE]" and stream.token_ids == tokens_of(ask(cluster, fields))
    assert cluster.state("decode-0")["incarnation"] == incarnation
    cluster.wait_until_nothing_is_held("decode-0", "prefill-0")
    assert_no_load_is_left(cluster)
    old, new = cluster.outcomes("decode-0", stream.request_id)
    assert old in ("router lost", "cancelled") and new == "finished", "it ran on to its end"


@pytest.mark.covers("R10", "R19", "C10")
def test_a_stream_whose_decode_nodes_hang_one_after_another_has_not_killed_them_and_goes_on(
    tiny_model: Path, tmp_path: Path, threads: ThreadPoolExecutor, fresh_seed: int
) -> None:
    """As often as there are retries."""
    flags = dict.fromkeys(("router", "prefill-0", "decode-0", "decode-1"), USUAL_GRACE)
    with started_role_by_role(tiny_model, tmp_path, flags) as cluster:
        fields = body(random.Random(fresh_seed), 40, 400)
        with cluster.slow_steps(0.15):
            stream = Stream(cluster, threads, fields)
            stream.take_tokens(5)
            for num_lost in range(3):
                wait_until("it runs somewhere", lambda: cluster.metric("node_branches") == 1)
                holder = max(("decode-0", "decode-1"), key=lambda name: cluster.metric("node_branches", name))
                cluster.freeze(holder)
                wait_until("it is lost", lambda n=num_lost: cluster.metric("retries_total", "NODE_LOST") == n + 1)  # type: ignore[misc]
                cluster.thaw(holder)
                wait_until("both are there", lambda: cluster.metric("node_up", 'role="decode"') == 2)
        stream.take_all()
        assert stream.last == "[DONE]" and stream.token_ids == tokens_of(ask(cluster, fields))


@pytest.fixture(scope="module")
def patient_cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RoleByRole]:
    """Sessions that survive a long silence, on any machine."""
    grace = ("--session-grace-s", str(3 * BOUND_S))
    flags = {"router": grace, "prefill-0": (*grace, *SLOW_PREFILL), "decode-0": grace}
    with started_role_by_role(tiny_model, tmp_path_factory.mktemp("patient"), flags) as running:
        yield running


@pytest.mark.covers("R12")
@pytest.mark.parametrize("noticed_by", ["the client", "the router"])
def test_a_stop_shorter_than_the_grace_is_a_pause_without_gap_repeat_or_prefill(
    patient_cluster: RoleByRole, threads: ThreadPoolExecutor, fresh_seed: int, noticed_by: str
) -> None:
    """A short one delays the stream; a longer one breaks the session, which is resumed."""
    cluster = patient_cluster
    fields = body(random.Random(fresh_seed), 40, 500)
    undisturbed = tokens_of(ask(cluster, fields))
    num_dispatches = cluster.metric("dispatches_total")
    with cluster.slow_steps():
        stream = Stream(cluster, threads, fields)
        stream.take_tokens(50)
        cluster.freeze("decode-0")
    if noticed_by == "the router":
        wait_until("the session is broken", lambda: cluster.metric("node_up", 'role="decode"') == 0)
        assert cluster.missing() == ["no decode node can take work"]
    stream.take_until_quiet(PAUSE_S)
    num_before = len(stream.token_ids)
    cluster.thaw("decode-0")
    stream.take_all()
    assert stream.last == "[DONE]"
    assert num_before < len(undisturbed), "it had ended before it was stopped"
    assert stream.token_ids == undisturbed
    assert cluster.metric("dispatches_total") == num_dispatches + 1
    if noticed_by == "the router":
        assert cluster.state("decode-0")["sessions"]["resumes"] >= 1
    cluster.wait_until_ready()
    cluster.wait_until_nothing_is_held("decode-0", "prefill-0")


@pytest.mark.covers("P05")
def test_while_a_decode_node_does_not_answer_reserve_the_prompt_is_computed_and_the_first_token_told(
    patient_cluster: RoleByRole, threads: ThreadPoolExecutor, fresh_seed: int
) -> None:
    """It is stopped before it is asked, and asked with the first of many chunks; two seconds later that is given up.

    On a busy machine nothing may have been told by then: then once more."""
    cluster, rng = patient_cluster, random.Random(fresh_seed)
    deadline = time.monotonic() + 120
    is_told_before = False
    while not is_told_before:
        assert time.monotonic() < deadline, "never told before it answered"
        fields = body(rng, 20 * CHUNK_TOKENS, 40)
        before = cluster.state("prefill-0")["counters"]["tokens_computed"]["prefill"]
        cluster.freeze("decode-0")
        try:
            stream = Stream(cluster, threads, fields)
            give_up_at = time.monotonic() + 2
            while not is_told_before and time.monotonic() < give_up_at:
                has_token = bool(stream.heard_at)
                state = cluster.state("prefill-0")
                is_asked = state["attempts"]["reserves_unanswered"] == 1
                is_computed = state["counters"]["tokens_computed"]["prefill"] - before == 20 * CHUNK_TOKENS
                is_told_before = has_token and is_asked and is_computed
        finally:
            cluster.thaw("decode-0")
        stream.take_all()
        assert stream.last == "[DONE]" and len(stream.token_ids) == 40
        assert stream.token_ids == tokens_of(ask(cluster, fields))
        cluster.wait_until_ready()
    assert cluster.outcomes("decode-0", stream.request_id) == ["finished"], "the one lease that was asked for"


def test_a_router_that_was_held_up_serves_at_once_as_if_nothing_had_been(
    patient_cluster: RoleByRole, threads: ThreadPoolExecutor, fresh_seed: int
) -> None:
    """What it did not hear meanwhile is not held against the nodes, for they did not stop saying it."""
    cluster = patient_cluster
    fields = body(random.Random(fresh_seed), 40, 500)
    undisturbed = tokens_of(ask(cluster, fields))
    with cluster.slow_steps():
        stream = Stream(cluster, threads, fields)
        stream.take_tokens(50)
        cluster.freeze("router")
    stream.take_until_quiet(2 * TTL_S)
    cluster.thaw("router")
    assert tokens_of(ask(cluster, fields)) == undisturbed
    stream.take_all()
    assert stream.last == "[DONE]" and stream.token_ids == undisturbed


@pytest.mark.covers("C06", "R13")
def test_a_killed_decode_node_is_gone_at_once_and_back_as_a_new_incarnation_at_its_address(
    cluster: RoleByRole, threads: ThreadPoolExecutor, fresh_seed: int
) -> None:
    rng = random.Random(fresh_seed)
    fields = body(rng, 40, 50)
    tokens = tokens_of(ask(cluster, fields))
    old = cluster.state("decode-0")
    long_fields = body(rng, 40, 300)
    with cluster.slow_steps(0.06):
        stream = Stream(cluster, threads, long_fields)
        stream.take_tokens(5)
        half_written = threads.submit(ask, cluster, body(rng, 1500, 8))
        wait_until("it holds a lease", lambda: cluster.state("decode-0")["leases"] > 0)
        cluster.kill("decode-0")
    wait_until("it is missed", lambda: cluster.missing() == ["no decode node can take work"])
    assert_is_503(ask(cluster, fields), "NO_NODES")
    cluster.start("decode-0")
    wait_until("it is taken back", lambda: cluster.missing() == [])
    assert tokens_of(ask(cluster, fields)) == tokens, "the prefill node has found it, too"
    new = cluster.state("decode-0")
    assert new["node_id"] == old["node_id"] and new["incarnation"] != old["incarnation"]
    assert half_written.result().status_code in (200, 503), "run again, or turned away while nobody was there"
    stream.take_all()
    assert stream.last == "[DONE]" and stream.token_ids == tokens_of(ask(cluster, long_fields))
    cluster.wait_until_ready()  # and the dead one is not counted any more
    cluster.wait_until_nothing_is_held("decode-0", "prefill-0")
    assert cluster.outcomes("decode-0", stream.request_id) == ["finished"], "once, by the new one"


@pytest.mark.covers("C06", "R13")
def test_a_hung_process_that_was_replaced_under_its_name_ends_when_it_wakes_and_disturbs_nobody(
    cluster: RoleByRole, threads: ThreadPoolExecutor, fresh_seed: int
) -> None:
    """The successor has other addresses; the old one wakes with the work of its last life."""
    rng = random.Random(fresh_seed)
    fields = body(rng, 40, 300)
    undisturbed = tokens_of(ask(cluster, fields))
    old = cluster.state("decode-0")
    first = body(rng, 40, 300)  # not at its end before its node hangs, however slowly this process reads
    with cluster.slow_steps(0.06):
        stream = Stream(cluster, threads, first)
        stream.take_tokens(5)
        cluster.freeze("decode-0")
        old_process = cluster.disown("decode-0")
    assert stream.is_running, "it was over before its node hung"
    cluster.start("decode-0")
    stream.take_all()
    cluster.wait_until_ready()
    assert stream.last == "[DONE]" and stream.token_ids == tokens_of(ask(cluster, first))
    assert cluster.state("decode-0")["incarnation"] != old["incarnation"]
    with cluster.slow_steps(0.04):
        new_stream = Stream(cluster, threads, fields)
        new_stream.take_tokens(5)
        old_process.send_signal(signal.SIGCONT)
        assert old_process.wait(BOUND_S) == 2, "it had to find another name"
        assert new_stream.is_running, "it was over before the old one woke"
    new_stream.take_all()
    assert new_stream.last == "[DONE]" and new_stream.token_ids == undisturbed
    assert cluster.missing() == []
    cluster.wait_until_nothing_is_held("decode-0", "prefill-0")


@pytest.mark.covers("P08")
def test_a_killed_routers_work_is_freed_on_both_nodes_which_serve_it_again_when_it_is_back(
    tiny_model: Path, tmp_path: Path, threads: ThreadPoolExecutor, fresh_seed: int
) -> None:
    """With nothing asked of the nodes meanwhile but their state."""
    grace = ("--session-grace-s", "4")  # longer than this machine leaves a process without time
    flags = {"router": (), "prefill-0": (*SLOW_PREFILL, *LONG_LEASES, *grace), "decode-0": (*LONG_LEASES, *grace)}
    with started_role_by_role(tiny_model, tmp_path, flags) as cluster:
        rng = random.Random(fresh_seed)
        with cluster.slow_steps():
            streams = [Stream(cluster, threads, body(rng, 40, LONG - 40)) for _ in range(2)]
            for stream in streams:
                stream.take_tokens(5)
            prompts = [threads.submit(ask, cluster, body(rng, LONG - 8, 8)) for _ in range(NUM_THREADS - 2)]
            wait_until("long prompts wait", lambda: cluster.state("prefill-0")["attempts"]["attempts"] >= NUM_WAITING)
            assert cluster.state("decode-0")["running"] >= 2
            num_ended = len(cluster.outcomes("prefill-0"))
            cluster.kill("router")
            for stream in streams:
                with pytest.raises(httpx.TransportError):
                    stream.take_all()
                assert len(stream.token_ids) < LONG - 40
            assert all(isinstance(prompt.exception(), httpx.TransportError) for prompt in prompts)
            cluster.wait_until_nothing_is_held("prefill-0", "decode-0")
        ended = cluster.outcomes("prefill-0")[num_ended:]
        assert len(ended) >= NUM_WAITING - 1 and "cancelled" in ended, "it computed on for nobody"
        for stream in streams:
            assert cluster.outcomes("decode-0", stream.request_id) == ["router lost"]
        cluster.start("router")
        cluster.wait_until_ready()
        assert len(tokens_of(ask(cluster, body(rng, 40, 8)))) == 8


@pytest.mark.covers("D01")
def test_a_decode_node_with_room_for_one_sequence_serves_many_one_after_the_other(
    tiny_model: Path, tmp_path: Path, threads: ThreadPoolExecutor, fresh_seed: int
) -> None:
    """Each needs exactly the whole pool; the others are refused, wait, and use no retry."""
    rng = random.Random(fresh_seed)
    num_requests, pool_tokens = 5, 128
    tight = ("--block-size", "16", "--num-blocks", str(pool_tokens // 16), "--max-model-len", str(pool_tokens))
    impatient = ("--block-size", "16", "--reserve-wait-s", "0")
    flags = {"router": (), "prefill-0": impatient, "decode-0": (*tight, "--reserve-policy", "full")}
    with started_role_by_role(tiny_model, tmp_path, flags) as cluster:
        fields = [body(rng, 40, pool_tokens - 40) for _ in range(num_requests)]
        together = [tokens_of(answer) for answer in threads.map(lambda each: ask(cluster, each), fields)]
        refusals = cluster.state("decode-0")["counters"]["reserve_refused"]
        assert set(refusals) == {"NO_BLOCKS"}, refusals
        assert cluster.metric("pd_errors_total", "NO_BLOCKS") == cluster.metric("pd_errors_total") > 0
        assert cluster.metric("dispatches_total") == num_requests + refusals["NO_BLOCKS"]
        assert cluster.metric("retries_total") == 0
        cluster.wait_until_nothing_is_held("decode-0", "prefill-0")
        assert_no_load_is_left(cluster)
        alone = [tokens_of(ask(cluster, each)) for each in fields]
        assert cluster.state("decode-0")["counters"]["reserve_refused"] == refusals, "one by one there is room"
    assert together == alone
