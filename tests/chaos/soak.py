"""Random chaos from a seed: a schedule of faults played on a fleet under load, and what must hold in the end."""

from __future__ import annotations

import heapq
import re
import sys
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.fleet import HELD, Fleet, wait_until
from bench.namespaces import Network, network, why_not
from tests.chaos.faults import Injector
from tests.chaos.load import Load, Tally
from tests.chaos.schedule import REGISTRY, Fault, draw_schedule
from tests.registry.redis_server import RedisServer, started_redis

NAMES: Final = ("router", "router-1", "prefill-0", "prefill-1", "decode-0", "decode-1", "mixed-0")
SIZES: Final = ("--block-size", "8", "--max-num-seqs", "24", "--max-num-batched-tokens", "32", "--max-model-len", "512")
# Of some: what runs there gives way again and again.
FEW_BLOCKS: Final = {
    "decode-1": ("--num-blocks", "128", "--reserve-policy", "none"),
    "mixed-0": ("--num-blocks", "160"),
}
END_BOUND_S: Final = 120.0  # for the last answers and for everything to be given back
SAY_EVERY_S: Final = 10.0
_EVENT: Final = re.compile(r"^\S+ \w+ \S+ (attempt_ended|drain_over|session_lost|session_up) (.*)$", re.MULTILINE)
FENCE_BOUND_S: Final = 120.0  # fences outlive their attempts by a minute at most


@dataclass(frozen=True, slots=True)
class Plan:
    """What happens."""

    seed: int
    duration_s: float
    gap_s: float  # from fault to fault, on average
    num_clients: int
    has_redis: bool  # whether the processes share a registry there; else each router has its own

    @property
    def names(self) -> tuple[str, ...]:
        """Whom something may happen to."""
        return (*NAMES, REGISTRY) if self.has_redis else NAMES


class Soak:
    """One run."""

    def __init__(self, model: Path, folder: Path, plan: Plan) -> None:
        self._model = model
        self._folder = folder
        self._plan = plan
        self._started_at = time.monotonic()

    def run(self) -> int:
        """0 if all went well."""
        plan = self._plan
        with ExitStack() as stack:
            net = None if why_not() else stack.enter_context(network(plan.names))
            redis = self._start_redis(stack, net) if plan.has_redis else None
            alone = self._folder / "alone"
            alone.mkdir(exist_ok=True)
            reference = {"router": (), "mixed-0": SIZES}
            oracle = stack.enter_context(Fleet.started(self._model, alone, reference))
            # A request whose nodes died twice is given up, since it might be what kills them: here it is not.
            patient = ("--preempt-retry-count", "100", "--max-nodes-lost", "100")
            pool = ("--kv-pool", f"file://{self._folder.absolute()}/kv")
            flags = {
                name: patient if name.startswith("router") else (*SIZES, *pool, *FEW_BLOCKS.get(name, ()))
                for name in NAMES
            }
            registry = None if redis is None else redis.url
            fleet = stack.enter_context(Fleet.started(self._model, self._folder, flags, net, registry))
            injector = Injector(fleet, net, redis, self._say)
            routers = {name: fleet.url_of(name) for name in fleet.routers}
            load = Load(plan.seed, oracle.url, routers, injector.was_touched, plan.num_clients)
            load.start()
            self._play(injector, load, net is not None)
            tally = load.stop(END_BOUND_S)
            self._check_end(fleet)
            self._report(tally, injector, fleet)
            return 1 if tally.bad or not tally.answered else 0

    def _start_redis(self, stack: ExitStack, net: Network | None) -> RedisServer:
        if net is None:
            return stack.enter_context(started_redis(self._folder))
        with net.entered(REGISTRY):
            host = net.address(REGISTRY)
            return stack.enter_context(started_redis(self._folder, "--protected-mode", "no", host=host))

    def _play(self, injector: Injector, load: Load, has_network: bool) -> None:
        """Begin and end each fault at its instant; late where starting a process takes long, always in order."""
        self._started_at = time.monotonic()
        events: list[tuple[float, int, str, Fault | None]] = [(self._plan.duration_s, 0, "stop", None)]
        plan = self._plan
        schedule = draw_schedule(plan.seed, plan.names, plan.duration_s, plan.gap_s, has_network)
        for number, planned in enumerate(schedule, 1):
            events.append((planned.at_s, number, "begin", planned.fault))
            events.append((planned.at_s + planned.fault.for_s, number, "end", planned.fault))
        heapq.heapify(events)
        said_at, standing, is_bad = time.monotonic(), set[int](), False
        while events:
            at_s, number, what, fault = heapq.heappop(events)
            while not is_bad and (wait_s := self._started_at + at_s - time.monotonic()) > 0:
                time.sleep(min(wait_s, 1.0))
                if time.monotonic() - said_at > SAY_EVERY_S:
                    said_at = time.monotonic()
                    self._say_how_it_goes(load.tally(), injector)
            if fault is not None and what == "end" and number in standing:
                injector.end(fault)
            elif fault is not None and what == "begin" and not is_bad:
                standing.add(number)
                injector.begin(fault)
            if load.tally().bad and not is_bad:
                is_bad = True
                self._say("an answer was wrong: no more faults")

    def _check_end(self, fleet: Fleet) -> None:
        """Nothing is held, nothing is left, no table goes on growing."""
        fleet.restore()
        for router in fleet.routers:
            for name in ("queued_requests", "live_requests", "node_prefilling", "node_branches"):
                wait_until(f"{router}: {name} is 0", lambda n=name, r=router: fleet.metric(n, router=r) == 0)  # type: ignore[misc]
        for node in fleet.nodes:
            wait_until(f"{node} forgets its fences", lambda n=node: _fences(fleet, n) == 0, FENCE_BOUND_S)  # type: ignore[misc]
            state = fleet.state(node)
            held = {name: state["blocks"][name] for name in HELD} | {"leases": state["leases"]}
            assert not any(held.values()), (node, held)
            self._say(f"{node} holds {', '.join(f'{number} {name}' for name, number in held.items())}")

    def _report(self, tally: Tally, injector: Injector, fleet: Fleet) -> None:
        for each in tally.bad[:5]:
            self._say(f"bad: {each}")
        for kind in sorted({kind for kind, _ in injector.fired}):
            of_kind = {of: number for (each, of), number in sorted(injector.fired.items()) if each == kind}
            self._say(
                f"{kind}: {sum(of_kind.values())} ({', '.join(f'{number} {of}' for of, number in of_kind.items())})"
            )
        given_way = {node: int(fleet.node_metric(node, "preemptions_total")) for node in fleet.nodes}
        self._say(f"gave way: {', '.join(f'{number} at {node}' for node, number in given_way.items())} since its start")
        for event, number in sorted(_logged(fleet).items()):
            self._say(f"logged: {event}: {number}")
        self._say_how_it_goes(tally, injector)

    def _say_how_it_goes(self, tally: Tally, injector: Injector) -> None:
        verdicts = ", ".join(f"{number} {kind}" for kind, number in sorted(tally.verdicts.items()))
        self._say(
            f"{injector.num_fired} faults; {tally.streams} streams and {tally.wholes} whole answers equal, {tally.tokens} tokens; "
            f"{verdicts}; longest pause {tally.longest_pause_s:.1f} s"
        )

    def _say(self, line: str) -> None:
        sys.stdout.write(f"{time.monotonic() - self._started_at:7.1f} s  {line}\n")
        sys.stdout.flush()


def _fences(fleet: Fleet, node: str) -> int:
    fences: int = fleet.state(node)["attempts"]["fences"]
    return fences


def _logged(fleet: Fleet) -> Counter[str]:
    """What became of attempts, drains and sessions, as all processes of all names have logged it."""
    found: Counter[str] = Counter()
    for name in (*fleet.routers, *fleet.nodes):
        for what, rest in _EVENT.findall(fleet.log_text(name)):
            found.update(f"{what} {word}" for word in rest.split() if word.startswith(("outcome=", "was_cut", "is_")))
            found.update([f"{what} of {name.partition('-')[0]}s"] if what == "session_lost" else [])
    return found
