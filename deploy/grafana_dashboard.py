"""`python -m deploy.grafana_dashboard > deploy/grafana/dashboards/baton.json`: the dashboard that compose.yaml's Grafana shows.

Rows follow a request: what clients see, where its time goes, who has room, what went wrong, what was not computed twice.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Final, NamedTuple

_DATASOURCE: Final = {"type": "prometheus", "uid": "prometheus"}
_WIDTH, _HEIGHT = 8, 7  # of a panel; a row has 24 columns
_RATE: Final = "[$__rate_interval]"


class _Panel(NamedTuple):
    title: str
    unit: str  # Grafana's name: s, percentunit, reqps, short, Bps
    queries: tuple[tuple[str, str], ...]  # PromQL, legend
    is_stacked: bool = False


def _quantiles(histogram: str) -> tuple[tuple[str, str], ...]:
    return tuple(
        (f"histogram_quantile({share}, sum by (le) (rate({histogram}_bucket{_RATE})))", name)
        for share, name in ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))
    )


def _mean_by(histogram: str, label: str) -> tuple[tuple[str, str], ...]:
    total, number = (f"sum by ({label}) (rate({histogram}_{each}{_RATE}))" for each in ("sum", "count"))
    return ((f"{total} / {number}", f"{{{{{label}}}}}"),)


def _mean_part(histogram: str, always: str) -> tuple[tuple[str, str], ...]:
    """Each part's share of the mean, so that the stack is as high as that: by the number of requests, which `always` has all of."""
    number = f'scalar(sum(rate({histogram}_count{{part="{always}"}}{_RATE})))'  # a retry's parts have few
    return ((f"sum by (part) (rate({histogram}_sum{_RATE})) / {number}", "{{part}}"),)


def _rate_by(counter: str, label: str) -> tuple[tuple[str, str], ...]:
    return ((f"sum by ({label}) (rate({counter}{_RATE}))", f"{{{{{label}}}}}"),)


_ROWS: Final[dict[str, tuple[_Panel, ...]]] = {
    "What clients see": (
        _Panel("Requests ended", "reqps", _rate_by("baton_router_requests_total", "outcome"), is_stacked=True),
        _Panel("Time to first token", "s", _quantiles("baton_router_time_to_first_token_seconds")),
        _Panel("Time per output token", "s", _quantiles("baton_router_time_per_output_token_seconds")),
        _Panel("Tokens a second", "short", _rate_by("baton_router_tokens_total", "kind")),
        _Panel(
            "Requests open, and those that wait for room",
            "short",
            (("sum(baton_router_live_requests)", "open"), ("sum(baton_router_queued_requests)", "waiting")),
        ),
        _Panel("Refused before any node heard of it", "reqps", _rate_by("baton_router_turned_away_total", "reason")),
    ),
    "Where the time goes": (
        _Panel(
            "Mean time to first token, by part",
            "s",
            _mean_part("baton_router_time_to_first_token_part_seconds", "route"),
            is_stacked=True,
        ),
        _Panel(
            "Mean time from there to the second, by part",
            "s",
            _mean_part("baton_router_second_token_part_seconds", "transfer"),
            is_stacked=True,
        ),
        _Panel(
            "KV sent",
            "Bps",
            (
                (  # "other" leaps by all that a forgotten peer ever got
                    'sum by (job) (rate(baton_node_transfer_bytes_total{direction="sent",peer!="other"}[$__rate_interval]))',
                    "sent",
                ),
            ),
        ),
        _Panel(
            "How busy each runner is",
            "percentunit",
            (("sum by (instance) (rate(baton_node_step_seconds_sum[$__rate_interval]))", "{{instance}}"),),
        ),
        _Panel("Mean wait for a decode node's blocks", "s", _mean_by("baton_node_reserve_seconds", "instance")),
        _Panel("Mean transfer", "s", _mean_by("baton_node_transfer_seconds", "instance")),
    ),
    "Who has room": (
        _Panel("Nodes up", "short", (("max by (node) (baton_router_node_up)", "{{node}}"),), is_stacked=True),
        _Panel(
            "Blocks of nodes that decode, by state",
            "short",
            (  # as they say themselves: roles change
                ("sum by (state) (baton_node_blocks and on (job, instance) (baton_node_decodes == 1))", "{{state}}"),
            ),
            is_stacked=True,
        ),
        _Panel("Sequences that run", "short", (("sum by (instance) (baton_node_sequences_running)", "{{instance}}"),)),
    ),
    "What went wrong, and was mended": (
        _Panel("Retries, by cause", "reqps", _rate_by("baton_router_retries_total", "code"), is_stacked=True),
        _Panel("Preemptions", "reqps", _rate_by("baton_node_preemptions_total", "instance")),
        _Panel("Moves between decode nodes", "reqps", _rate_by("baton_router_moves_total", "what")),
    ),
    "What was not computed twice": (
        _Panel(
            "Share of prompt tokens computed",
            "percentunit",
            (
                (
                    'sum(rate(baton_node_tokens_computed_total{phase="prefill"}[$__rate_interval])) '
                    '/ sum(rate(baton_router_tokens_total{kind="prompt"}[$__rate_interval]))',
                    "computed",
                ),
            ),
        ),
        _Panel("KV pool: saved", "short", _rate_by("baton_node_kv_pool_saves_total", "outcome"), is_stacked=True),
        _Panel("KV pool: read", "short", _rate_by("baton_node_kv_pool_reads_total", "outcome"), is_stacked=True),
    ),
}


def dashboard() -> dict[str, Any]:
    """Grafana's JSON model, schema version 41 (https://grafana.com/docs/grafana/latest/dashboards/build-dashboards/view-dashboard-json-model/)."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in _ROWS.items():
        panels.append(
            {
                "type": "row",
                "id": len(panels) + 1,
                "title": title,
                "collapsed": False,
                "panels": [],
                "gridPos": _at(0, y, 24, 1),
            }
        )
        y += 1
        for i, panel in enumerate(row):
            place = _at(i % 3 * _WIDTH, y + i // 3 * _HEIGHT, _WIDTH, _HEIGHT)
            panels.append(_timeseries(panel, len(panels) + 1, place))
        y += -(-len(row) // 3) * _HEIGHT
    return {
        "uid": "baton-cluster",
        "title": "Baton",
        "schemaVersion": 41,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "templating": {"list": []},
        "annotations": {"list": []},
        "panels": panels,
    }


def _timeseries(panel: _Panel, panel_id: int, place: dict[str, int]) -> dict[str, Any]:
    stacking = {"mode": "normal" if panel.is_stacked else "none", "group": "A"}
    custom = {"stacking": stacking, "fillOpacity": 30 if panel.is_stacked else 0, "showPoints": "never"}
    targets = [
        {"refId": chr(ord("A") + i), "datasource": _DATASOURCE, "expr": query, "legendFormat": legend}
        for i, (query, legend) in enumerate(panel.queries)
    ]
    return {
        "type": "timeseries",
        "id": panel_id,
        "title": panel.title,
        "datasource": _DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {"tooltip": {"mode": "multi"}, "legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": targets,
    }


def _at(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(dashboard(), indent=1) + "\n")
