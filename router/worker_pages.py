"""The pages of a router with several workers: what one worker says on each, and what all of them together do.

    metrics          samples of all, each with a label of its worker (worker_metrics.py); metrics/clients: also those of clients
    state            sums, and of each node the worst that any worker says of it; `workers` has each one's part
    requests/LIMIT   the newest of all
    timeline/NAME    that of the worker which has it
    dashboard        state, newest requests and counts in one (dashboard_state.py)

Not here: how the question reaches the others (worker_end.py, workers.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from router.dashboard_state import part
from router.openai_types import ApiError
from router.shell import RouterShell
from router.sight import Sight
from router.wrong_values import shown

METRICS: Final = "metrics"
METRICS_OF_CLIENTS: Final = "metrics/clients"  # for who has shown a key
STATE: Final = "state"
REQUESTS: Final = "requests/"
TIMELINE: Final = "timeline/"
DASHBOARD: Final = "dashboard"
_OF_A_WORKER: Final = ("router", "pid", "ready", "missing", "degraded", "is_draining", "queued", "live_requests")
_ADDED_UP: Final = frozenset({"prefilling", "sequences"})  # of a node, as far as the page has it
_WELL: Final = {"session": "up", "circuit": "closed"}  # of a node


def own_page(shell: RouterShell, page: str) -> str:
    """This worker's part of it; nothing where it has none."""
    sight = Sight(shell)
    if page in (METRICS, METRICS_OF_CLIENTS):
        return shell.metrics.render(names_clients=page == METRICS_OF_CLIENTS).decode()
    if page == STATE:
        return json.dumps(sight.state())
    if page.startswith(REQUESTS):
        return json.dumps(sight.requests(int(page.removeprefix(REQUESTS))))
    if page.startswith(TIMELINE):
        found = sight.timeline(page.removeprefix(TIMELINE))
        return "" if found is None else json.dumps(found)
    if page == DASHBOARD:
        return json.dumps(own_part(shell))
    raise ValueError(page)


def own_part(shell: RouterShell) -> dict[str, Any]:
    """This worker's part of what the dashboard shows, not yet written."""
    return part(Sight(shell).glance(), shell.timelines, shell.live_tokens(), shell.num_generated, shell.now())


def whole_state(texts: Mapping[int, str], asked: int) -> dict[str, Any]:
    """Of all workers, as the one that was asked would say it."""
    return joined_state({worker: json.loads(text) for worker, text in texts.items()}, asked)


def joined_state(told: Mapping[int, dict[str, Any]], asked: int) -> dict[str, Any]:
    """The same of states that have been read."""
    states = dict(sorted(told.items()))
    whole = states[asked]
    whole["workers"] = [{"worker": worker} | {key: states[worker][key] for key in _OF_A_WORKER} for worker in states]
    whole["ready"] = all(state["ready"] for state in states.values())
    for key in ("missing", "degraded"):
        whole[key] = _each_once(sentence for state in states.values() for sentence in state[key])
    for key in ("queued", "live_requests"):
        whole[key] = sum(state[key] for state in states.values())
    nodes: dict[tuple[str, str], dict[str, Any]] = {}
    for state in (whole, *(states[worker] for worker in states if worker != asked)):
        for node in state["nodes"]:
            known = nodes.setdefault((node["name"], node["incarnation"]), node)
            if known is not node:
                _add(known, node)
    whole["nodes"] = list(nodes.values())
    return whole


def whole_requests(texts: Mapping[int, str], limit: int) -> dict[str, Any]:
    """The newest of all workers, the newest first."""
    return {"object": "list", "data": joined_requests([json.loads(text)["data"] for text in texts.values()])[:limit]}


def joined_requests(told: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Lists of several workers as one, the newest first."""
    return sorted((each for one in told for each in one), key=lambda each: float(each["age_s"]))


def found_timeline(texts: Mapping[int, str]) -> dict[str, Any] | None:
    """That of the worker which has it; of several (a client's own id, used again) the newest."""
    found: list[dict[str, Any]] = [json.loads(text) for text in texts.values() if text]
    return min(found, key=lambda each: float(each["age_s"]), default=None)


def no_timeline(name: str, num_answered: int, num_workers: int) -> ApiError:
    """That nobody who has answered has it: who looks again and again need not, once it is gone for good."""
    if num_answered < num_workers:
        told = f"{num_answered} of {num_workers} workers have answered, and have no timeline of {shown(name)}."
        return ApiError(503, told, code="not_all_workers", retry_after_s=1.0)
    told = f"There is no timeline of {shown(name)} (any more); the newest are at /v1/requests."
    return ApiError(404, told, code="not_found")


def _add(known: dict[str, Any], node: Mapping[str, Any]) -> None:
    """What another worker says of a node."""
    for key in _ADDED_UP & known.keys():
        known[key] += node[key]
    for key, well in _WELL.items():
        if known[key] == well:
            known[key] = node[key]
    if "listed" in known:
        known["listed"] = known["listed"] and node["listed"]
    known["draining"] = known["draining"] or node["draining"]


def _each_once(sentences: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(sentences))
