"""From a failing scenario to a short one that fails in the same way: delta debugging (Zeller, Hildebrandt 2002).

First clients and faults are left out, as many at a time as can be; then what is left is made simpler, one value at a time, as long
as the run still ends with the same kind of error. Chance is named after what it decides about (kernel.py), so most of what stays
goes on happening as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Final

from tests.sim.outcome import Outcome, run_scenario
from tests.sim.scenario import ClientPlan, Fault, Knobs, Scenario

MAX_RUNS: Final = 400
Part = ClientPlan | Fault


class Shrinker:
    """Shrinks one failure; `run` is how a scenario is tried."""

    def __init__(
        self, failed: Outcome, run: Callable[[Scenario], Outcome] = run_scenario, max_runs: int = MAX_RUNS
    ) -> None:
        assert failed.error is not None, "only what fails is shrunk"
        self._kind = failed.kind
        self._run = run
        self._runs_left = max_runs
        self._best = failed.scenario

    def shrink(self) -> Scenario:
        """The smallest scenario found that fails in the same way."""
        is_smaller = True
        while is_smaller and self._runs_left > 0:
            is_smaller = self._leave_out() | self._simplify()
        return self._best

    def _try(self, scenario: Scenario) -> bool:
        """Keep it if it fails in the same way."""
        if self._runs_left <= 0 or scenario == self._best:
            return False
        self._runs_left -= 1
        if self._run(scenario).kind != self._kind:
            return False
        self._best = scenario
        return True

    def _leave_out(self) -> bool:
        parts: list[Part] = [*self._best.faults, *self._best.clients]
        chunk = max(1, len(parts) // 2)
        before = len(parts)
        while True:
            begin = 0
            while begin < len(parts):
                kept = parts[:begin] + parts[begin + chunk :]
                if self._try(_with_parts(self._best, kept)):
                    parts = kept
                else:
                    begin += chunk
            if chunk == 1:
                return len(parts) < before
            chunk //= 2

    def _simplify(self) -> bool:
        is_simpler = False
        for index in range(len(self._best.clients)):
            for client in _simpler_clients(self._best.clients[index]):
                is_simpler |= self._try(_with_client(self._best, index, client))
        for index in range(len(self._best.faults)):
            for fault in _simpler_faults(self._best.faults[index]):
                is_simpler |= self._try(_with_fault(self._best, index, fault))
        for knobs in _simpler_knobs(self._best.knobs):
            is_simpler |= self._try_knobs(knobs)
        return is_simpler

    def _try_knobs(self, wanted: dict[str, object]) -> bool:
        knobs = replace(self._best.knobs, **wanted)  # type: ignore[arg-type]
        smaller = replace(self._best, knobs=knobs)
        named = {host for fault in smaller.faults for host in (fault.who, fault.other) if host}
        if not named <= set(smaller.hosts):
            return False
        clients = tuple(replace(plan, router=plan.router % knobs.num_routers) for plan in smaller.clients)
        return self._try(replace(smaller, clients=clients))


def _with_parts(scenario: Scenario, parts: list[Part]) -> Scenario:
    clients = tuple(part for part in parts if isinstance(part, ClientPlan))
    faults = tuple(part for part in parts if isinstance(part, Fault))
    return replace(scenario, clients=clients, faults=faults)


def _with_client(scenario: Scenario, index: int, plan: ClientPlan) -> Scenario:
    return replace(scenario, clients=(*scenario.clients[:index], plan, *scenario.clients[index + 1 :]))


def _with_fault(scenario: Scenario, index: int, fault: Fault) -> Scenario:
    return replace(scenario, faults=(*scenario.faults[:index], fault, *scenario.faults[index + 1 :]))


_PLAIN: Final = ClientPlan("", 0.0, 0, (), 0, 0)


def _simpler_clients(plan: ClientPlan) -> Iterator[ClientPlan]:
    """One thing less at a time; later ones include none of the earlier."""
    plain = {
        name: getattr(_PLAIN, name)
        for name in (
            "temperature",
            "stop_token_ids",
            "num_choices",
            "num_logprobs",
            "wants_prompt_logprobs",
            "presence_penalty",
            "min_tokens",
            "timeout_s",
            "aborts_after_s",
            "stops",
        )
    }
    for name, value in plain.items():
        if getattr(plan, name) != value:
            yield replace(plan, **{name: value})
    if len(plan.prompt) > 5:
        yield replace(plan, prompt=plan.prompt[:5])
    if plan.max_tokens > 2:
        yield replace(plan, max_tokens=2, min_tokens=0, stops=tuple((c, min(n, 2)) for c, n in plan.stops))


def _simpler_faults(fault: Fault) -> Iterator[Fault]:
    if fault.moment:
        yield replace(fault, moment="")
    if fault.seconds > 1:
        yield replace(fault, seconds=1.0)
    if fault.number:
        yield replace(fault, number=0)


def _simpler_knobs(knobs: Knobs) -> Iterator[dict[str, object]]:
    """Each knob at its default."""
    plain = Knobs()
    for each in fields(Knobs):
        if getattr(knobs, each.name) != (value := getattr(plain, each.name)):
            yield {each.name: value}
