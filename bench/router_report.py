"""`python -m bench.router_report PAGE.md FILE.json…`: puts bench.router's figures into a page, each file's behind its command.

The text of the page is written by hand; what stands between its marks is made of the files alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench.result_files import read_result
from runtime.process import fatal

_Facts = Mapping[str, Any]
_Table = tuple[Sequence[str], list[list[str]]]  # headings, rows

BEGIN: Final = "<!-- from bench: python -m bench.router_report -->\n"
END: Final = "<!-- end of bench -->\n"
_TARGET_US: Final = 30  # of a token, beyond uvicorn; docs/design.md, section 10
_COSTS: Final = (
    "CPU, µs",
    "branches a message",
    "a token",
    f"beyond uvicorn (≤ {_TARGET_US})",
    "a request",
    "beyond uvicorn",
    "tokens/s at most",
    "of a core",
    "client, a token",
)
_DELAYS: Final = (
    "delay of a token, ms",
    "branches a message",
    "streams",
    "busy",
    "waited",
    "p50",
    "p99",
    "p99 beyond direct (≤ 2)",
    "first token p50",
    "p99",
)


_LOSSES: Final = (
    "a decode node is lost",
    "streams",
    "a node that joins, µs",
    "turn that hears of it, ms",
    "longest turn behind it, ms",
    "all, ms",
    "turns",
)


def tables(facts: _Facts) -> Iterator[_Table]:
    """Costs, delays and, where it was measured, placement."""
    sides = facts["sides"]
    by_name = {side["side"]: side for side in sides}
    yield _COSTS, [_costs_of(side, by_name["uvicorn"]) for side in sides]
    yield _DELAYS, [_delays_of(side, by_name["direct"]) for side in sides if side["load"] is not None]
    if facts["placement"]:
        numbers = sorted({each["nodes"] for each in facts["placement"]})
        costs = {(each["policy"], each["nodes"]): each["decision_us"] for each in facts["placement"]}
        headings = ("CPU of a placement, µs", *(f"{number:,} node{'s' if number > 1 else ''}" for number in numbers))
        policies = dict.fromkeys(policy for policy, _ in costs)
        yield headings, [[name, *(f"{costs[name, number]:.0f}" for number in numbers)] for name in policies]
    if losses := facts.get("losses"):  # older results have none
        yield _LOSSES, [_losses_of(each) for each in losses]


def _losses_of(each: _Facts) -> list[str]:
    times = (f"{each[name]:.1f}" for name in ("first_turn_ms", "longest_turn_ms", "all_turns_ms"))
    return [f"of {each['nodes']:,} nodes", str(each["streams"]), f"{each['join_us']:.0f}", *times, str(each["turns"])]


def _costs_of(side: _Facts, floor: _Facts) -> list[str]:
    return [
        side["side"],
        str(side["branches"] or ""),
        f"{side['token_us']:.1f}",
        f"{side['token_us'] - floor['token_us']:.1f}",
        f"{side['request_us']:.0f}",
        f"{side['request_us'] - floor['request_us']:.0f}",
        f"{side['tokens_per_s']:,.0f}",
        f"{side['busy_at_saturation']:.0%}",
        f"{side['client_us']:.1f}",
    ]


def _delays_of(side: _Facts, direct: _Facts) -> list[str]:
    """What the client and whoever speaks are late by themselves is in `direct` as in all others."""
    names = ("delay_p50_s", "delay_p99_s")
    p99, floor = side["delay_p99_s"], direct["delay_p99_s"]
    beyond = None if p99 is None or floor is None else p99 - floor
    return [
        side["side"],
        str(side["branches"] or ""),
        str(side["streams"]),
        _share(side["load"]),
        f"{_share(side['wait'])}, client {_share(side['client_wait'])}",
        *(_ms(each) for each in (*(side[name] for name in names), beyond, *(side[f"first_{name}"] for name in names))),
    ]


def _share(share: float | None) -> str:
    """A dash where no window was whole enough to say."""
    return "–" if share is None else f"{share:.0%}"


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1000 * seconds:.2f}"


def markdown(facts: _Facts) -> str:
    """One file's figures: command, date and machine, tables."""
    machine = facts["machine"]
    where = f"{machine['cpu_model']}, {machine['system']}, Python {machine['python']}"
    parts = [
        f"    {facts['command']}\n",
        f"{facts['date'][:10]}, {where}; medians of {facts['settings']['rounds']} rounds.\n",
    ]
    for headings, rows in tables(facts):
        lines = [headings, ["---"] * len(headings), *rows]
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n")
    return "\n".join(parts)


def with_figures(page: str, files: Sequence[_Facts]) -> str:
    """The page with these figures between its marks. ValueError: it has none."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError("the page has no marks for figures to stand between")
    figures = "\n".join(map(markdown, files))
    return f"{before}{begin}\n{figures}\n{end}{after}"


def main(argv: Sequence[str]) -> int:
    """Put the figures of these files into the page; 2 for a page that has no place for them."""
    parser = argparse.ArgumentParser(
        "python -m bench.router_report", description="Puts bench.router's figures into a page."
    )
    parser.add_argument("page", type=Path, metavar="PAGE.md", help="what stands between its marks is written anew")
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT.json", help="what bench.router has written")
    asked = parser.parse_args(argv)
    page, told = asked.page, [read_result("bench.router_report", path, {"router"}) for path in asked.results]
    try:
        page.write_text(with_figures(page.read_text(encoding="utf-8"), told), encoding="utf-8")
    except (OSError, ValueError) as error:
        fatal(f"python -m bench.router_report: {page}: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
