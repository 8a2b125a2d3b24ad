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

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Final

from connector.fence import MAX_REST_S
from connector.memory_transport import MemoryHub
from engine.sequence import Phase
from proto import baton_pb2 as pb
from router.entrance import RouterCoreConfig
from runtime.registry_client import BACKOFF_MAX_S, BACKOFF_MIN_S, PERIOD_S
from tests.sim.calls import Calls
from tests.sim.clients import Client, new_client
from tests.sim.faults import NEVER, Faults
from tests.sim.invariants import check_idle_node, check_idle_router, check_process
from tests.sim.kernel import FOREVER, Kernel, Process
from tests.sim.links import Links
from tests.sim.network import Network
from tests.sim.nodes import SimNode, Surroundings
from tests.sim.routers import SimRouter
from tests.sim.scenario import MANY_ATTEMPTS, NO_LIMIT, ClientPlan, Scenario
from tests.sim.stream import ListenerSide, Stream, Wire
from tests.sim.trace import Trace

_REGISTER_TIMEOUT_S: Final = 0.5  # of one call, as in runtime/registry_client.py
_ENDS_WITHIN_S: Final = 60.0  # of world time, once no fault is felt any more: what runs then has ended
_NOTICED_S: Final = 3.0  # after a fault: a session's grace, by any clock
_WHOLE_WITHIN_S: Final = 10.0
_SERVED_WITHIN_S: Final = 20.0
GIVES_UP_WITHIN_S: Final = 3.0  # a session's grace and the way there, by any clock
_MAX_EVENTS: Final = 400_000  # a run that has more goes round in circles


class World:
    """One run of a scenario."""

    def __init__(self, scenario: Scenario, trace: Trace | None = None) -> None:
        self.scenario = scenario
        self.kernel = Kernel(scenario.seed, trace, check_process)
        self.network = Network(self.kernel, scenario.knobs.network)
        self.calls = Calls(self.kernel, self.network)
        self.hub = MemoryHub(is_one_sided=scenario.knobs.is_one_sided)
        self.links = Links(self.kernel, self.network, self.hub)
        self.clients: list[Client] = []
        self._rng = self.kernel.rng("world")
        self._generations: Counter[str] = Counter()
        self._around = Surroundings(self.kernel, self.hub, self.calls, scenario.knobs, self._moment, self.links.look)
        self._wire = Wire(self.kernel, self.network, _listener_of)
        self.faults = Faults(self, scenario.faults)
        self._num_ending = 0  # processes that are down and will be started again
        self._may_restart = True
        for host in scenario.hosts:
            self._start(host)
        for plan in scenario.clients:
            self.kernel.at(plan.at, partial(self._submit, plan))

    def _moment(self, what: str, host: str) -> None:
        self.faults.moment(what, host)

    # ---------------------------------------------------------------- processes

    @property
    def routers(self) -> list[SimRouter]:
        """Those that run."""
        found = [self.network.find(host) for host in self.scenario.hosts]
        return [process for process in found if isinstance(process, SimRouter)]

    @property
    def nodes(self) -> list[SimNode]:
        """Those that run."""
        found = [self.network.find(host) for host in self.scenario.hosts]
        return [process for process in found if isinstance(process, SimNode)]

    def _start(self, host: str) -> None:
        self._generations[host] += 1
        generation, knobs = self._generations[host], self.scenario.knobs
        rate = 1 + self.kernel.rng(f"rate {host}").uniform(-1, 1) * knobs.clock_spread
        process: Process
        if host.startswith("router"):
            process = SimRouter(self._around, self._wire, host, generation, rate)
        else:
            port = 7000 if knobs.keeps_addresses else 7000 + generation
            process = node = SimNode(self._around, host, generation, f"{host}:{port}", rate)
            self.links.add(node)
        self._tell(process, "starts", "")
        self.network.start(process)
        if isinstance(process, SimNode):
            for number in range(knobs.num_routers):
                self._register(process, f"router-{number}", BACKOFF_MIN_S)
        process.rearm()

    def _tell(self, process: Process, what: str, why: str) -> None:
        self.kernel.tell(process.label, what, why)

    def _register(self, node: SimNode, router: str, backoff_s: float) -> None:
        """As runtime/registry_client.py."""
        if not node.is_registering:
            return

        def outcome(reply: pb.RegisterReply | None) -> None:
            is_welcome = (
                reply is None or not reply.refused or not node.is_registering
            )  # else it has said goodbye meanwhile
            assert is_welcome, f"{node.label} is alive and refused: {reply}"
            wait_s, next_s = backoff_s, min(2 * backoff_s, BACKOFF_MAX_S)
            if reply is not None:
                wait_s, next_s = PERIOD_S, BACKOFF_MIN_S
            self.kernel.after(node.seconds(wait_s), lambda: self._register(node, router, next_s), node)

        serve = SimRouter.serve_register
        self.calls.call(node, router, node.entry(), serve, outcome, timeout_s=_REGISTER_TIMEOUT_S)

    def end(self, process: Process, kind: str, down_s: float, number: int) -> None:
        """A process ends: "crash", "power off" or in order ("stop"); another one follows on its host."""
        if kind == "stop" and process.paused_until <= self.kernel.now:
            self._say_goodbye(process)
            self.kernel.after(0.02, lambda: self._die(process, False, 0.0, down_s))
        else:
            self._die(process, kind == "power off", number / 3, down_s)

    def _say_goodbye(self, process: Process) -> None:
        self._tell(process, "stops", "")
        if isinstance(process, SimRouter):
            for client in process.clients.values():
                if not client.is_over:
                    client.close("router lost", self.kernel.now)
                    self.kernel.run_on(process, lambda c=client: process.stop_serving(c))  # type: ignore[misc]
            self.kernel.after(0.01, process.dialer.hang_up_all, process)
        elif isinstance(process, SimNode):
            process.is_registering = False
            goodbye = process.identity.to_proto()
            for each in range(self.scenario.knobs.num_routers):
                serve = SimRouter.serve_deregister
                self.calls.call(process, f"router-{each}", goodbye, serve, lambda reply: None, timeout_s=0.5)
            self.kernel.after(0.01, process.listener.hang_up_all, process)

    def _die(self, process: Process, is_silent: bool, share_lost: float, down_s: float) -> None:
        if not process.is_alive:
            return
        self._tell(process, "dies", "and its host is silent" if is_silent else "")
        process.is_alive = False
        self.network.end(process, down_s if is_silent else 0.0)
        for stream in self._streams_of(process):
            stream.end_died(process, not is_silent, share_lost)
        if is_silent:
            self.calls.forget_all(process)
        else:
            self.calls.fail_all(process)
        if isinstance(process, SimNode):
            for key in self.hub.links():
                if key.sender == process.transport.address:
                    self.hub.cut(key, round((1 - share_lost) * 3))
            process.transport.stop()
            self.links.look()
        elif isinstance(process, SimRouter):
            for client in process.clients.values():
                if not client.is_over:
                    client.close("router lost", self.kernel.now)
            self.kernel.after(GIVES_UP_WITHIN_S, lambda: self._check_abandoned(process))
        self._num_ending += 1
        self.kernel.after(down_s, lambda: self._restart(process.host))

    def _check_abandoned(self, router: SimRouter) -> None:
        """C09: a grace after a router's death no node computes for it any more, unless the node was stopped meanwhile."""
        for node in self.nodes:
            if node.paused_until > self.kernel.now - GIVES_UP_WITHIN_S:
                continue
            phases = node.scheduler.snapshot()["phases"]
            assert isinstance(phases, dict)
            self.kernel.count("work of dead routers looked for")
            left = [
                key for key, phase in phases.items() if phase is not Phase.FINISHED and key.request_id in router.clients
            ]
            assert not left, f"{node.label} still computes {left} for {router.label}, which is dead"

    def _restart(self, host: str) -> None:
        self._num_ending -= 1
        self._start(host)

    def _streams_of(self, process: Process) -> list[Stream]:
        streams: dict[Stream, None] = {}
        for router in self.routers if isinstance(process, SimNode) else [process]:
            assert isinstance(router, SimRouter)
            streams |= dict.fromkeys(each for each in router.dialer.streams() if process in (each.node, each.router))
        for node in self.nodes if isinstance(process, SimRouter) else [process]:
            assert isinstance(node, SimNode)
            streams |= dict.fromkeys(each for each in node.listener.streams() if process in (each.node, each.router))
        return list(streams)

    def streams_between(self, router: str, node: str) -> list[Stream]:
        """Every stream between two hosts."""
        process = self.network.find(router)
        return [] if process is None else [each for each in self._streams_of(process) if each.host == node]

    # ---------------------------------------------------------------- clients

    def _submit(self, plan: ClientPlan) -> Client:
        """Ask the router of the plan, or the next one that listens."""
        num_routers = self.scenario.knobs.num_routers
        for offset in range(num_routers):
            router = self.network.find(f"router-{(plan.router + offset) % num_routers}")
            if isinstance(router, SimRouter):
                client = self._ask(router, plan)
                break
        else:
            client = new_client(plan, "nobody", f"router-{plan.router}", self.kernel.now, FOREVER)
            client.close("no router", self.kernel.now)
        self.clients.append(client)
        return client

    def _ask(self, router: SimRouter, plan: ClientPlan) -> Client:
        now = self.kernel.now
        client = new_client(
            plan, router.label, router.host, now, max(now, router.paused_until) + router.seconds(plan.timeout_s)
        )
        self._tell(router, "is asked", f"{plan.name}: {plan}")
        router.clients[plan.name] = client
        self.kernel.run_on(router, lambda: router.submit(client) if not client.is_over else None)
        if plan.aborts_after_s is not None:
            self.kernel.after(plan.aborts_after_s, lambda: self._abort(router, client), router)
        return client

    def _abort(self, router: SimRouter, client: Client) -> None:
        if not client.is_over:
            self._tell(router, "client leaves", client.plan.name)
            self.kernel.count("abort")
            router.abort(client)

    # ---------------------------------------------------------------- the run

    def run(self) -> None:
        """From the start to the check that nothing is left; raises whatever is wrong."""
        self._run_until(lambda: self._is_load_over() and all(client.is_over for client in self.clients))
        self._check_ends(self.clients)
        self.links.disarm()
        for node in self.nodes:
            node.runner.breaks_next_row = False
        self._run_until(self._is_whole, _WHOLE_WITHIN_S, "the cluster is not whole again")
        for plan in self._probes():
            probe = self._submit(plan)
            within_s = _SERVED_WITHIN_S + self._patience_s
            self._run_until(partial(getattr, probe, "is_over"), within_s, f"{plan.name} does not end")
            assert probe.end == "finished", f"{plan.name} failed in a whole cluster: {probe.error}"
        self._run_until(lambda: not any(router.core.snapshot()["requests"] for router in self.routers), 5.0, "requests")
        for router in self.routers:
            check_idle_router(router)
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
        is_struck = faults.num_pending == 0 and faults.ends_at + _NOTICED_S <= self.kernel.now and self._num_ending == 0
        return is_struck and len(self.clients) == len(self.scenario.clients)

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
        knobs = self.scenario.knobs
        for client in clients:
            name, end = client.plan.name, client.end
            self.kernel.count(f"client:{end}")
            if end in ("finished", "aborted"):
                continue
            text = f"{name} at {client.router} ended with {end} {client.error}"
            assert end not in NEVER, text
            if end == "DEADLINE" and client.plan.timeout_s < 600:
                continue
            if end == "OVERLOADED" and knobs.max_queue < 1024:
                continue
            if end == "pd_reschedule" and knobs.retries == 0 and self.kernel.counters["preempted"]:
                continue
            hosts = frozenset(client.hosts) if end not in ("NO_NODES", "no router") else frozenset(self.scenario.hosts)
            assert self.faults.excuses(end or "", hosts, client.submitted_at, client.ended_at), (
                f"{text}; nothing had struck it"
            )
            if end == "INTERNAL":
                assert "no numbers" in client.error and self.kernel.counters["broken row"], text

    def _is_whole(self) -> bool:
        """Every router has a session with every node process, and with no other."""
        names = {f"{node.identity.name}@{node.identity.incarnation}" for node in self.nodes}
        for router in self.routers:
            nodes = router.core.snapshot()["nodes"]
            assert isinstance(nodes, dict)
            if nodes.keys() != names or not all(each["session"] == "up" and each["listed"] for each in nodes.values()):
                return False
        return len(names) == len(self.scenario.hosts) - self.scenario.knobs.num_routers

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
        for node in self.nodes:
            node.is_registering = False
        for router in self.routers:
            self.kernel.run_on(router, router.dialer.hang_up_all)
            router.is_alive = False
            self.network.end(router)
        while self.kernel.next_at < FOREVER:
            self.kernel.step()
            assert self.kernel.num_events < _MAX_EVENTS, "the run goes round in circles"
        for node in self.nodes:
            check_idle_node(node)


def _listener_of(process: Process) -> ListenerSide:
    assert isinstance(process, SimNode)
    return process.listener
