"""The board's panels of parts: what is stacked is as high as the mean that the panel's title promises."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Final

import pytest

from deploy.grafana_dashboard import dashboard
from router.events import Noted
from router.metrics import RouterMetrics
from router.timeline import Record
from router.timelines import Timelines

IDLE: Final = {
    "queued": 0,
    "completion_tokens": 0,
    "live_requests": 0,
    "nodes": {},
    "circuits": {},
    "degraded": [],
    "ready": False,
    "caches": {},
}
QUERY: Final = re.compile(  # a rate, of what began with the process, is what it has come to
    r'sum by \(part\) \(rate\((?P<sum>\w+)\[[^]]*\]\)\) / scalar\(sum\(rate\((?P<number>\w+)\{part="(?P<part>\w+)"\}\[[^]]*\]\)\)\)'
)


def served(timelines: Timelines, index: int, *, is_retried: bool) -> tuple[float, float]:
    """One request to its second token, a node lost in between or not; what it took to the first, and from there."""
    request, at = f"{index:024x}", index * 10.0
    timelines.begin(Record(request, None, 10, 1, at, at + 0.001))
    timelines.noted(Noted(request, 0, "dispatched", 0, ("p", "d"), "handoff"), at + 0.002)
    timelines.emitted(request, 0, 1, at + 0.030)
    now = at + 0.035
    if is_retried:
        timelines.noted(Noted(request, 0, "failed", 0, ("d",), "NODE_LOST"), at + 2.030)
        timelines.noted(Noted(request, 0, "dispatched", 1, ("p", "e"), "handoff"), at + 2.040)
        now = at + 2.070
    timelines.emitted(request, 0, 1, now)
    timelines.finished(request, 0, "length", now)
    return 0.030, now - at - 0.030


def height_of(title: str, page: str) -> float:
    """The stack of a panel, once a Prometheus has all of this page."""
    (panel,) = [each for each in dashboard()["panels"] if each["title"] == title]
    (target,) = panel["targets"]
    query = QUERY.fullmatch(target["expr"])
    assert query is not None, f"divided by something else than the number of requests: {target['expr']}"
    samples: dict[str, dict[str, float]] = defaultdict(dict)
    for name, part, value in re.findall(r'^(\w+)\{part="(\w+)"\} (\S+)$', page, re.M):
        samples[name][part] = float(value)
    return sum(samples[query["sum"]].values()) / samples[query["number"]][query["part"]]


def test_parts_that_few_requests_have_do_not_raise_the_mean_of_all() -> None:
    metrics, timelines = RouterMetrics(lambda: IDLE), Timelines(200)
    took = []
    for index in range(100):
        took.append(served(timelines, index, is_retried=index == 50))
        ended = timelines.ended(f"{index:024x}", "length", 2, index * 10.0 + 5)
        assert ended is not None
        metrics.request_parted(*ended.parts())
    page = metrics.render().decode()
    to_first, to_second = (sum(each) / len(took) for each in zip(*took, strict=True))
    assert height_of("Mean time to first token, by part", page) == pytest.approx(to_first)
    assert height_of("Mean time from there to the second, by part", page) == pytest.approx(to_second)
