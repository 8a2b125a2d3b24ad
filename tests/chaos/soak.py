"""Random chaos from a seed: a schedule of faults played on a fleet under load, and what must hold in the end."""

from __future__ import annotations

import heapq
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from bench.fleet import Fleet, wait_until
from bench.namespaces import network, why_not
from tests.chaos.faults import Injector
from tests.chaos.load import Load, Tally
from tests.chaos.schedule import Fault, draw_schedule

NAMES: Final = ("router", "router-1", "prefill-0", "prefill-1", "decode-0", "decode-1", "mixed-0")
SIZES: Final = ("--block-size", "8", "--max-num-seqs", "24", "--max-num-batched-tokens", "32", "--max-model-len", "512")
END_BOUND_S: Final = 120.0  # for the last answers and for everything to be given back
SAY_EVERY_S: Final = 10.0
FENCE_BOUND_S: Final = 120.0  # fences outlive their attempts by a minute at most


class Soak:
    """One run."""

    def __init__(self, model: Path, folder: Path, seed: int, duration_s: float, gap_s: float, num_clients: int) -> None:
        self._model = model
        self._folder = folder
        self._seed = seed
        self._duration_s = duration_s
        self._gap_s = gap_s
        self._num_clients = num_clients
        self._started_at = time.monotonic()

    def run(self) -> int:
        """0 if all went well."""
        with ExitStack() as stack:
            net = None if why_not() else stack.enter_context(network(NAMES))
            alone = self._folder / "alone"
            alone.mkdir(exist_ok=True)
            reference = {"router": (), "mixed-0": SIZES}
            oracle = stack.enter_context(Fleet.started(self._model, alone, reference))
            # A request whose nodes died twice is given up, since it might be what kills them: here it is not.
            patient = ("--preempt-retry-count", "100", "--max-nodes-lost", "100")
            flags = {name: patient if name.startswith("router") else SIZES for name in NAMES}
            fleet = stack.enter_context(Fleet.started(self._model, self._folder, flags, net))
            injector = Injector(fleet, net, self._say)
            routers = {name: fleet.url_of(name) for name in fleet.routers}
            load = Load(self._seed, oracle.url, routers, injector.was_touched, self._num_clients)
            load.start()
            self._play(injector, load, net is not None)
            tally = load.stop(END_BOUND_S)
            self._check_end(fleet)
            self._report(tally, injector)
            return 1 if tally.bad or not tally.answered else 0

    def _play(self, injector: Injector, load: Load, has_network: bool) -> None:
        """Begin and end each fault at its instant; late where starting a process takes long, always in order."""
        self._started_at = time.monotonic()
        events: list[tuple[float, int, str, Fault | None]] = [(self._duration_s, 0, "stop", None)]
        plan = draw_schedule(self._seed, NAMES, self._duration_s, self._gap_s, has_network)
        for number, planned in enumerate(plan, 1):
            events.append((planned.at_s, number, "begin", planned.fault))
            events.append((planned.at_s + planned.fault.for_s, number, "end", planned.fault))
        heapq.heapify(events)
        said_at = time.monotonic()
        while events:
            at_s, _, what, fault = heapq.heappop(events)
            while (wait_s := self._started_at + at_s - time.monotonic()) > 0:
                time.sleep(min(wait_s, 1.0))
                if time.monotonic() - said_at > SAY_EVERY_S:
                    said_at = time.monotonic()
                    self._say_how_it_goes(load.tally(), injector)
            if fault is not None:
                (injector.begin if what == "begin" else injector.end)(fault)
            if load.tally().bad:
                self._say("an answer was wrong: no more faults")
                return

    def _check_end(self, fleet: Fleet) -> None:
        """Nothing is held, nothing is left, no table goes on growing."""
        fleet.restore()
        for router in fleet.routers:
            for name in ("queued_requests", "live_requests", "node_prefilling", "node_branches"):
                wait_until(f"{router}: {name} is 0", lambda n=name, r=router: fleet.metric(n, router=r) == 0)  # type: ignore[misc]
        for node in fleet.nodes:
            assert fleet.state(node)["leases"] == 0, node
            wait_until(f"{node} forgets its fences", lambda n=node: _fences(fleet, n) == 0, FENCE_BOUND_S)  # type: ignore[misc]

    def _report(self, tally: Tally, injector: Injector) -> None:
        for each in tally.bad[:5]:
            self._say(f"bad: {each}")
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
