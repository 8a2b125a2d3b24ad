"""The processes of a run: how each starts, registers, drains, ends and is followed by another one on its host."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Final

from engine.sequence import Phase
from node import events as ev
from node.drain import CORE_LATE_S, DELIVERY_S, ROLE_LATE_S
from node.roles import find_leftover
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey
from runtime.registry_client import BACKOFF_MAX_S, BACKOFF_MIN_S, PERIOD_S
from tests.sim.engines import ROLES, Life, role_of
from tests.sim.kernel import Process
from tests.sim.links import Links
from tests.sim.models import model_on
from tests.sim.network import Network
from tests.sim.nodes import SimNode, Surroundings
from tests.sim.routers import SimRouter
from tests.sim.scenario import Scenario
from tests.sim.stream import ListenerSide, Stream, Wire
from tests.sim.targets import REASONS

_REGISTER_TIMEOUT_S: Final = 0.5  # of one call, as in runtime/registry_client.py
GIVES_UP_WITHIN_S: Final = 3.0  # a session's grace and the way there, by any clock
DRAIN_TIMEOUT_S: Final = 25.0
_LOOKS_EVERY_S: Final = 0.02  # whether a node has drained
_MOVES_ON_WITHIN_S: Final = 2.0  # what runs on a draining node is asked for again, if nobody had room


class Lives:
    """Every process, by host."""

    def __init__(self, scenario: Scenario, around: Surroundings, network: Network, links: Links) -> None:
        self._scenario = scenario
        self._around = around
        self._kernel = around.kernel
        self._network = network
        self._links = links
        self._generations: Counter[str] = Counter()
        self._wire = Wire(around.kernel, network, _listener_of)
        self.num_ending = 0  # processes that are down, or about to be, and will be started again

    def start_all(self) -> None:
        """The first process of every host."""
        for host in self._scenario.hosts:
            self._start(host)

    @property
    def routers(self) -> list[SimRouter]:
        """Those that run."""
        found = [self._network.find(host) for host in self._scenario.hosts]
        return [process for process in found if isinstance(process, SimRouter)]

    @property
    def nodes(self) -> list[SimNode]:
        """Those that run."""
        found = [self._network.find(host) for host in self._scenario.hosts]
        return [process for process in found if isinstance(process, SimNode)]

    def _start(self, host: str, before: SimNode | None = None, role: str = "") -> None:
        """A new process, or `before` in another role."""
        self._generations[host] += 1
        generation, knobs = self._generations[host], self._scenario.knobs
        rate = 1 + self._kernel.rng(f"rate {host}").uniform(-1, 1) * knobs.clock_spread
        process: Process
        if host.startswith("router"):
            process = SimRouter(self._around, self._wire, host, generation, rate)
        else:
            port = 7000 if knobs.keeps_addresses else 7000 + generation
            name = host if knobs.keeps_names else f"{host}.{generation}"
            address, life = f"{host}:{port}", Life(name, role_of(host), model_on(self._scenario, host, generation))
            if before is not None:
                address, life = before.address, Life(before.identity.name, ROLES[role], before.model, before.parts)
                self._kernel.count(f"role: {pb.Role.Name(before.role)[5:]} to {role}".lower())
            process = node = SimNode(self._around, host, generation, address, rate, life)
            self._links.add(node)
        self._tell(process, "starts", "")
        self._network.start(process)
        if isinstance(process, SimNode):
            for number in range(knobs.num_routers):
                self._register(process, f"router-{number}", BACKOFF_MIN_S)
        process.rearm()

    def _tell(self, process: Process, what: str, why: str) -> None:
        self._kernel.tell(process.label, what, why)

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
            self._kernel.after(node.seconds(wait_s), lambda: self._register(node, router, next_s), node)

        serve = SimRouter.serve_register
        self._around.calls.call(node, router, node.entry(), serve, outcome, timeout_s=_REGISTER_TIMEOUT_S)

    def end(self, process: Process, kind: str, down_s: float, number: int) -> None:
        """A process ends: "crash", "power off" or in order ("stop"); another one follows on its host."""
        if kind == "stop" and process.paused_until <= self._kernel.now:
            self._say_goodbye(process)
            self._kernel.after(0.02, lambda: self._die(process, False, 0.0, down_s))
        else:
            self._die(process, kind == "power off", number / 3, down_s)

    def drain(self, node: SimNode, down_s: float, role: str = "") -> None:
        """As node/ending.py: the routers are told, the core is asked, its last words arrive, then it ends; another one follows.

        With a role the process goes on in it, under its name and address, and with what nobody touches any more.
        """
        if node.is_draining or ROLES.get(role) == node.role:
            return
        self._tell(node, "drains", role and f"to be a {role} node")
        node.is_draining = True
        self.num_ending += 1
        self._kernel.count("drains")
        for number in range(self._scenario.knobs.num_routers):
            serve, entry = SimRouter.serve_register, node.entry()
            self._around.calls.call(
                node, f"router-{number}", entry, serve, lambda reply: None, timeout_s=_REGISTER_TIMEOUT_S
            )
        deadline = node.clock() + DRAIN_TIMEOUT_S
        self._kernel.after(_REGISTER_TIMEOUT_S, lambda: node.post(ev.DrainAsked(deadline)), node)
        self._kernel.after(_REGISTER_TIMEOUT_S, partial(self._look_at_drain, node, deadline, down_s, role), node)
        until_watched_s = node.seconds(DRAIN_TIMEOUT_S - _MOVES_ON_WITHIN_S - CORE_LATE_S)
        self._kernel.after(until_watched_s, partial(self._watch_drain, node), node)

    def _watch_drain(self, node: SimNode) -> None:
        """A drain that takes so long has a reason: nobody has room for what runs, it has moved enough, or something is struck."""
        before, counters = _running(node), self._kernel.counters
        reasons = [f"{reason} {node.host} runs" for reason in REASONS]
        num_refused = sum(counters[each] for each in reasons)

        def look() -> None:
            has_asked = sum(counters[each] for each in reasons) > num_refused
            left = before & _running(node)
            assert not left or has_asked or self._is_struck(), f"{node.label} drains, and does not move {sorted(left)}"

        self._kernel.after(node.seconds(_MOVES_ON_WITHIN_S), look, node)

    def _is_struck(self) -> bool:
        """Whether any fault is felt, wherever it struck."""
        return self._around.blames.excuses(frozenset(self._scenario.hosts))

    def _look_at_drain(self, node: SimNode, deadline: float, down_s: float, role: str) -> None:
        now = node.clock()
        left = find_leftover(node.scheduler, node.pool, node.core.snapshot()) if role else ""
        if (not node.has_drained or left) and now < deadline + (ROLE_LATE_S if role else CORE_LATE_S):
            self._kernel.after(_LOOKS_EVERY_S, partial(self._look_at_drain, node, deadline, down_s, role), node)
            return
        assert (node.has_drained and not left) or not role or self._is_struck(), (
            f"{node.label} keeps {left}, and no role"
        )
        if not node.has_drained or now >= deadline:
            self._kernel.count("drains cut short")
            is_busy = any(node.reading.values()) or not node.runner.is_idle
            assert node.has_drained or is_busy or self._is_struck(), f"{node.label} has nothing left and does not drain"
        else:
            self._kernel.count("drained")
            self._kernel.count(f"drained: {node.host.partition('-')[0]}")
        self._deliver(node, now + DELIVERY_S, down_s, "" if left or not node.has_drained else role)

    def _deliver(self, node: SimNode, until: float, down_s: float, role: str) -> None:
        if node.listener.num_unacknowledged and node.clock() < until:
            self._kernel.after(_LOOKS_EVERY_S, partial(self._deliver, node, until, down_s, role), node)
            return
        self._around.blames.struck(frozenset((node.host,)))
        self._say_goodbye(node)
        self._kernel.after(0.02, lambda: self._die(node, False, 0.0, down_s, role))

    def _say_goodbye(self, process: Process) -> None:
        self._tell(process, "stops", "")
        if isinstance(process, SimRouter):
            for client in process.clients.values():
                if not client.is_over:
                    client.close("router lost", self._kernel.now)
                    self._kernel.run_on(process, lambda c=client: process.stop_serving(c))  # type: ignore[misc]
            self._kernel.after(0.01, process.dialer.hang_up_all, process)
        elif isinstance(process, SimNode):
            process.is_registering = False
            goodbye = process.identity.to_proto()
            for each in range(self._scenario.knobs.num_routers):
                serve = SimRouter.serve_deregister
                self._around.calls.call(process, f"router-{each}", goodbye, serve, lambda reply: None, timeout_s=0.5)
            self._kernel.after(0.01, process.listener.hang_up_all, process)

    def _die(self, process: Process, is_silent: bool, share_lost: float, down_s: float, role: str = "") -> None:
        if not process.is_alive:
            return
        self._tell(process, "dies", "and its host is silent" if is_silent else "")
        process.is_alive = False
        if isinstance(process, SimNode) and process.is_draining:
            self.num_ending -= 1
        self._network.end(process, down_s if is_silent else 0.0)
        for stream in self._streams_of(process):
            stream.end_died(process, not is_silent, share_lost)
        if is_silent:
            self._around.calls.forget_all(process)
        else:
            self._around.calls.fail_all(process)
        if isinstance(process, SimNode):
            for key in self._around.hub.links():
                if key.sender == process.transport.address:
                    self._around.hub.cut(key, round((1 - share_lost) * 3))
            process.transport.stop()
            self._links.look()
        elif isinstance(process, SimRouter):
            for client in process.clients.values():
                if not client.is_over:
                    client.close("router lost", self._kernel.now)
            self._kernel.after(GIVES_UP_WITHIN_S, lambda: self._check_abandoned(process))
        self.num_ending += 1
        before = process if isinstance(process, SimNode) and role else None
        self._kernel.after(down_s, lambda: self._restart(process.host, before, role))

    def _check_abandoned(self, router: SimRouter) -> None:
        """C09: a grace after a router's death no node computes for it any more, unless the node was stopped meanwhile."""
        for node in self.nodes:
            if node.paused_until > self._kernel.now - GIVES_UP_WITHIN_S:
                continue
            phases = node.scheduler.snapshot()["phases"]
            assert isinstance(phases, dict)
            self._kernel.count("work of dead routers looked for")
            left = [
                key for key, phase in phases.items() if phase is not Phase.FINISHED and key.request_id in router.clients
            ]
            assert not left, f"{node.label} still computes {left} for {router.label}, which is dead"

    def _restart(self, host: str, before: SimNode | None, role: str) -> None:
        self.num_ending -= 1
        self._start(host, before, role)

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
        process = self._network.find(router)
        return [] if process is None else [each for each in self._streams_of(process) if each.host == node]


def _listener_of(process: Process) -> ListenerSide:
    assert isinstance(process, SimNode)
    return process.listener


def _running(node: SimNode) -> frozenset[AttemptKey]:
    """What decodes there, or is stopped on its way to another node."""
    phases = node.scheduler.snapshot()["phases"]
    assert isinstance(phases, dict)
    return frozenset(key for key, phase in phases.items() if phase in (Phase.RUNNING_DECODE, Phase.PAUSED))
