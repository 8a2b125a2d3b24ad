"""A whole cluster in one thread: R routers, P prefill and D decode nodes, their registries and clients, and a network in between.

All that decides is production code: the cores, schedulers, pools, leases, handoff tables, fences, listings, the in-memory
transport, and a session's end on both sides. Here are only shells without asyncio, a fake runner that is honest about KV, and a
clock.

    scenario --> kernel (events in order) --> processes --> network --> processes …
                    every event: invariants          every token: the right answer

A run has four parts: load and faults; what is left must end; new requests of every kind must be served by a cluster that is whole
again; then the routers go, and nothing may be left anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from connector.fence import MAX_REST_S
from connector.memory_transport import MemoryHub
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey, BranchKey
from router.entrance import RouterCoreConfig
from router.events import NodeRef
from tests.sim.calls import Calls
from tests.sim.clients import Client, new_client, resubmission_of
from tests.sim.ends import Circumstances, problem
from tests.sim.faults import Faults
from tests.sim.invariants import check_idle_node, check_idle_router, check_process
from tests.sim.kernel import FOREVER, Kernel
from tests.sim.kv_pool import SimKvPool
from tests.sim.links import Links
from tests.sim.lives import Lives
from tests.sim.models import models_of
from tests.sim.network import Network
from tests.sim.nodes import Surroundings
from tests.sim.routers import SimRouter
from tests.sim.scenario import MANY_ATTEMPTS, NO_LIMIT, ClientPlan, Scenario
from tests.sim.trace import Trace

_ENDS_WITHIN_S: Final = 60.0  # of world time, once no fault is felt any more: what runs then has ended
_NOTICED_S: Final = 3.0  # after a fault: a session's grace, by any clock
_WHOLE_WITHIN_S: Final = 10.0
_SERVED_WITHIN_S: Final = 20.0
_FOLLOWED_WITHIN_S: Final = 30.0  # until a router has heard all that a node's cache holds, a block at a time
_MAX_EVENTS: Final = 400_000  # a run that has more goes round in circles


class World:
    """One run of a scenario."""

    def __init__(self, scenario: Scenario, trace: Trace | None = None) -> None:
        self.scenario = scenario
        self.kernel = Kernel(scenario.seed, trace, check_process)
        self.network = Network(self.kernel, scenario.knobs.network)
        self.calls = Calls(self.kernel, self.network)
        self.hub = MemoryHub(is_one_sided=scenario.knobs.is_one_sided)
        self.clients: list[Client] = []
        self._rng = self.kernel.rng("world")
        self.faults = Faults(self, scenario.faults)
        self.links = Links(self.kernel, self.network, self.hub, self.faults.struck)
        self._around = Surroundings(
            self.kernel,
            self.hub,
            self.calls,
            SimKvPool(self.kernel, scenario.knobs),
            scenario.knobs,
            self._moment,
            self.links.look,
            self.faults,
            self._computes,
        )
        self._computed: dict[tuple[BranchKey, int], int] = {}  # by branch and position: in which attempt
        self._asked: dict[str, Client] = {}  # by request
        self._num_to_come = len(scenario.clients)  # requests that nobody has asked for yet
        self.lives = Lives(scenario, self._around, self.network, self.links)
        self.lives.start_all()
        for plan in scenario.clients:
            self.kernel.at(plan.at, partial(self._submit, plan))

    def _moment(self, what: str, host: str) -> None:
        self.faults.moment(what, host)

    def _computes(self, key: AttemptKey, position: int) -> None:
        """Nothing is computed again while nothing has failed: not because of a move, nor of a refusal."""
        before = self._computed.setdefault((key.branch, position), key.attempt)
        if before == key.attempt:
            return
        self._computed[key.branch, position] = key.attempt
        client = self._asked[key.request_id]
        assert client.is_over or client.trials[key.choice].may_compute_again, (
            f"position {position} of {key.request_id}/{key.choice} is computed in attempts {before} and {key.attempt}"
        )

    # ---------------------------------------------------------------- clients

    def _submit(self, plan: ClientPlan) -> Client:
        """Ask the router of the plan, or the next one that listens."""
        num_routers = self.scenario.knobs.num_routers
        self._num_to_come -= 1
        for offset in range(num_routers):
            router = self.network.find(f"router-{(plan.router + offset) % num_routers}")
            if isinstance(router, SimRouter):
                client = self._ask(router, plan)
                break
        else:
            client = new_client(plan, "nobody", self.kernel.now, FOREVER)
            client.close("no router", self.kernel.now)
        self.clients.append(client)
        return client

    def _ask(self, router: SimRouter, plan: ClientPlan) -> Client:
        now = self.kernel.now
        client = new_client(
            plan,
            router.label,
            now,
            max(now, router.paused_until) + router.seconds(plan.timeout_s),
            models_of(self.scenario),
        )
        client.on_end = self._resubmit
        self._asked[plan.name] = client
        self.kernel.tell(router.label, "is asked", f"{plan.name}: {plan}")
        router.clients[plan.name] = client
        self.kernel.run_on(router, lambda: router.submit(client) if not client.is_over else None)
        if plan.aborts_after_s is not None:
            self.kernel.after(plan.aborts_after_s, lambda: self._abort(router, client), router)
        return client

    def _resubmit(self, client: Client) -> None:
        """A client that is told pd_reschedule asks for the rest, a little later."""
        for number, choice in enumerate(client.choices):
            if choice.finish_reason == "pd_reschedule":
                self._num_to_come += 1
                self.kernel.count("resubmitted")
                at = self.kernel.now + self._rng.uniform(0.01, 2.0)
                self.kernel.at(at, partial(self._submit, resubmission_of(client, number, at)))

    def _abort(self, router: SimRouter, client: Client) -> None:
        if not client.is_over:
            self.kernel.tell(router.label, "client leaves", client.plan.name)
            self.kernel.count("abort")
            router.abort(client)

    # ---------------------------------------------------------------- the run

    def run(self) -> None:
        """From the start to the check that nothing is left; raises whatever is wrong."""
        self._run_until(lambda: self._is_load_over() and all(client.is_over for client in self.clients))
        self._check_ends(self.clients)
        self.links.disarm()
        for node in self.lives.nodes:
            node.runner.breaks_next_row = False
        self._run_until(self._is_whole, _WHOLE_WITHIN_S, "the cluster is not whole again")
        for plan in self._probes():
            self._num_to_come += 1
            probe = self._submit(plan)
            within_s = _SERVED_WITHIN_S + self._patience_s
            self._run_until(partial(getattr, probe, "is_over"), within_s, f"{plan.name} does not end")
            # Choices may give way to each other, which costs a part of a retry.
            may_give_way = plan.num_choices > 1 and self.scenario.knobs.retries == 0
            ends = ("finished", "pd_reschedule") if may_give_way else ("finished",)
            assert probe.end in ends, f"{plan.name} failed in a whole cluster: {probe.end} {probe.error}"
        self._run_until(
            lambda: not any(router.core.snapshot()["requests"] for router in self.lives.routers), 5.0, "requests"
        )
        for router in self.lives.routers:
            check_idle_router(router)
        self._run_until(self._do_indices_agree, _FOLLOWED_WITHIN_S, "a router knows other blocks than a node holds")
        self._run_down()

    @property
    def _patience_s(self) -> float:
        """One slot may have to do all the work; a full table of fences turns work away until the oldest have had their rest."""
        knobs = self.scenario.knobs
        work = sum(len(plan.prompt) + plan.num_choices * plan.max_tokens for plan in self.scenario.clients)
        patience_s = work * knobs.step_s
        if (
            knobs.max_attempts < MANY_ATTEMPTS
        ):  # whoever is refused asks again so much later, and holds up those behind it
            num_branches = sum(plan.num_choices for plan in self.scenario.clients)
            patience_s += num_branches * RouterCoreConfig().max_refusal_wait_s
        if knobs.max_fences != NO_LIMIT:
            patience_s += 2 * MAX_REST_S
        return patience_s

    def _is_load_over(self) -> bool:
        faults = self.faults
        is_struck = (
            faults.num_pending == 0 and faults.ends_at + _NOTICED_S <= self.kernel.now and self.lives.num_ending == 0
        )
        return is_struck and self._num_to_come == 0

    def _run_until(self, is_true: Callable[[], bool], within_s: float | None = None, otherwise: str = "") -> None:
        limit = FOREVER if within_s is None else self.kernel.now + within_s
        while not is_true():
            if within_s is None and self._is_load_over():
                within_s, otherwise = _ENDS_WITHIN_S + self._patience_s, "requests do not end"
                limit = self.kernel.now + within_s
            if self.kernel.next_at > limit:
                still = [client.plan.name for client in self.clients if not client.is_over]
                raise AssertionError(f"{otherwise} within {within_s:g} s; open are {still}")
            self.kernel.step()
            assert self.kernel.num_events < _MAX_EVENTS, "the run goes round in circles"

    def _check_ends(self, clients: list[Client]) -> None:
        """A request that failed had a reason to."""
        for client in clients:
            end = client.end or ""
            self.kernel.count(f"client:{end}")
            span = (client.submitted_at, client.ended_at)
            met = Circumstances(
                plan=client.plan,
                trials=client.trials,
                is_unscored=client.plan.wants_prompt_logprobs
                and any(choice.finish_reason is None and not choice.is_prompt_scored for choice in client.choices),
                has_tokens=any(len(choice.received) > len(client.plan.generated) for choice in client.choices),
                patience_s=self._patience_s,
                felt_s=self.faults.felt_s(*span),
                had_no_pair=client.had_no_pair,
                had_no_heirs=any(choice.had_no_heirs for choice in client.choices),
            )
            flaw = problem(end, client.error, self.scenario.knobs, met)
            assert flaw is None, f"{client.plan.name} at {client.router} ended with {end} {client.error}: {flaw}"

    def _is_whole(self) -> bool:
        """Every router has a session with every node process, and with no other."""
        names = {f"{node.identity.name}@{node.identity.incarnation}" for node in self.lives.nodes}
        for router in self.lives.routers:
            nodes = router.core.snapshot()["nodes"]
            assert isinstance(nodes, dict)
            if nodes.keys() != names or not all(each["session"] == "up" and each["listed"] for each in nodes.values()):
                return False
        return len(names) == len(self.scenario.hosts) - self.scenario.knobs.num_routers

    def _do_indices_agree(self) -> bool:
        """Every router that follows caches knows exactly the blocks that the nodes that prefill hold (R02)."""
        followed = [router.caches for router in self.lives.routers if router.caches is not None]
        for node in self.lives.nodes if followed else ():
            if node.role == pb.ROLE_DECODE:
                continue
            keys, _ = node.pool.keys_from(0, node.pool.num_blocks)
            held = {int.from_bytes(key[:8], "little") for key in keys}
            ref = NodeRef(node.identity.name, node.identity.incarnation)
            for caches in followed:
                if not caches.is_whole(ref) or caches.keys_of(ref) != held:
                    return False
                self.kernel.count("index agrees", len(held))
        return True

    def _probes(self) -> list[ClientPlan]:
        rng = self.kernel.rng("probes")
        plans = []
        for number in range(self.scenario.knobs.num_routers):
            for kind in range(2):
                prompt = tuple(rng.randrange(11) for _ in range(rng.randint(1, 20)))
                plan = ClientPlan(f"p{number}{kind}", self.kernel.now, number, prompt, 8, rng.getrandbits(53))
                plans.append(plan if kind else ClientPlan(plan.name, plan.at, number, prompt, 8, 1, num_choices=3))
        return plans

    def _run_down(self) -> None:
        """The routers go; the nodes free everything, without anybody asking them to."""
        for node in self.lives.nodes:
            node.is_registering = False
        for router in self.lives.routers:
            self.kernel.run_on(router, router.dialer.hang_up_all)
            router.is_alive = False
            self.network.end(router)
        while self.kernel.next_at < FOREVER:
            self.kernel.step()
            assert self.kernel.num_events < _MAX_EVENTS, "the run goes round in circles"
        for node in self.lives.nodes:
            check_idle_node(node)
