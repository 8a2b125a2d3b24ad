"""`baton status URL`: a cluster at a glance, again and again: its nodes, their blocks, and the newest requests.

Everything shown is what the router knows (`/state`, `/v1/requests`), so one address is enough.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from deploy.router_pages import NoAnswer, Pages, check_asked, with_url
from runtime.config import knob, load

DESCRIPTION = """\
Show a router's nodes, their KV blocks by state, and the newest requests, until Ctrl-C.

  baton status                               the router at http://127.0.0.1:8000
  baton status http://10.0.0.5:8000 --once   once, as text
  baton status http://10.0.0.5:8000 --json   once, for programs"""

PIPE_WIDTH: Final = 240  # columns
_ANY_WIDTH: Final = 1 << 16
LEFT_OUT: Final = (  # where there is no room for all columns: what is least asked for goes first
    *("tp", "prefilling", "waiting", "leased", "role", "cached", "quarantined"),
    *("attempts", "prompt", "first token", "nodes"),
)


@dataclass(frozen=True, slots=True)
class StatusConfig:
    """What the operator says."""

    url: str = knob("http://127.0.0.1:8000", "a router; also without the flag", metavar="URL")
    api_key: str | None = knob(
        None,
        "key to show, where the router asks for one; better in the variable, where ps does not show it",
        metavar="KEY",
    )
    tls_dir: Path | None = knob(
        None, "directory with the ca.crt that has signed the router's certificate", metavar="DIR"
    )
    once: bool = knob(False, "show it once and end")
    json: bool = knob(False, "once, as one JSON object")
    interval_s: float = knob(1.0, "seconds between two looks", low=0.1, high=3600)
    requests: int = knob(10, "newest requests to show", low=0, high=1000)

    def __post_init__(self) -> None:
        check_asked(self.url, self.api_key, self.tls_dir)


def main(argv: Sequence[str] | None = None) -> int:
    """Show it; 0, or 1 if the router cannot be asked."""
    words = list(sys.argv[1:] if argv is None else argv)
    config = load(StatusConfig, "baton status", DESCRIPTION, with_url(words))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or the terminal would stay as a table left it
    try:
        with Pages(config.url, config.api_key, config.tls_dir) as pages, pages.as_we_know_them():
            _show(config, pages)
    except NoAnswer as error:
        sys.stderr.write(f"baton status: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 0
    return 0


def _show(config: StatusConfig, pages: Pages) -> None:
    state, requests = _look(config, pages)
    if config.json:
        sys.stdout.write(json.dumps({**state, "requests": requests}) + "\n")
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PIPE_WIDTH)  # for grep and for files: no name is cut short
    if config.once or not console.is_terminal or console.is_dumb_terminal:  # which cannot be drawn anew
        console.print(rendered(pages.url, state, requests, console.width))
        return
    shown = rendered(pages.url, state, requests, console.width, console.height)
    with Live(shown, console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(config.interval_s)
            try:
                with pages.as_we_know_them():
                    looked = _look(config, pages)
                live.update(rendered(pages.url, *looked, console.width, console.height), refresh=True)
            except NoAnswer as error:  # it may come back
                live.update(Text(f"baton status: {error}", style="red"), refresh=True)


def _look(config: StatusConfig, pages: Pages) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    state = pages.state()
    requests: list[dict[str, Any]] = pages.json(f"/v1/requests?limit={config.requests}")["data"]
    return state, requests


def rendered(
    url: str,
    state: Mapping[str, Any],
    requests: Sequence[Mapping[str, Any]],
    width: int = PIPE_WIDTH,
    height: int | None = None,
) -> RenderableType:
    """The whole picture; of a table that does not fit, without the columns that are least asked for.

    `height`: so many lines it may have: nodes that are well are left out then, and the older requests.
    """
    ready = Text("ready", "green") if state["ready"] else Text(f"not ready: {'; '.join(state['missing'])}", "red")
    head = Text.assemble(f"{url}  ", ready, f"  {state['live_requests']} requests live, {state['queued']} queued")
    parts = [head, *(Text(f"without: {sentence}", "yellow") for sentence in state["degraded"])]
    nodes = sorted(state["nodes"], key=lambda each: (str(each["role"]), str(each["name"])))
    more: list[Text] = []
    if height is not None:
        lines = Console(width=width).render_lines(Group(*parts), pad=False)  # long ones take several
        num_nodes, num_requests = fit(height - len(lines), len(nodes), len(requests))
        requests = requests[:num_requests]
        if num_nodes < len(nodes):
            more = [Text(f"… and {len(nodes) - num_nodes} more node{'s' if len(nodes) - num_nodes > 1 else ''}")]
            nodes = sorted(nodes, key=lambda each: _health(each)[1])[:num_nodes]
    table, *others = _tables(nodes, requests, width)
    return Group(*parts, table, *more, *others)


def fit(num_lines: int, num_nodes: int, num_requests: int) -> tuple[int, int]:
    """How many nodes and requests are shown on so many lines, which have headings, too, and one for the nodes that are not shown.

    Requests have a third of them, and what nodes leave; neither is without a line, however few there are.
    """
    room = num_lines - 1 - (num_requests > 0)
    for_requests = min(num_requests, max(room // 3, room - num_nodes, 1))
    for_nodes = max(room - for_requests, 1)
    return num_nodes if num_nodes <= for_nodes else for_nodes - 1, for_requests


def _tables(nodes: Sequence[Mapping[str, Any]], requests: Sequence[Mapping[str, Any]], width: int) -> Iterator[Table]:
    """Each row is one line, however narrow it is; one column too many would cut short what is in the others."""
    unbounded = Console(width=_ANY_WIDTH, force_terminal=False)  # of a dumb terminal rich takes 80 for granted
    for table in (_nodes(nodes), *([_requests(requests)] if requests else [])):
        for column in table.columns:
            column.no_wrap = True
        for header in LEFT_OUT:
            if unbounded.measure(table).maximum > width:
                table = _without(header, table)
        yield table


def _without(header: str, table: Table) -> Table:
    rest = Table(*(each for each in table.columns if each.header != header), box=None, pad_edge=False)
    rest.rows = table.rows
    return rest


def _nodes(nodes: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("node", "role", "session", box=None, pad_edge=False)
    for name in ("tp", "running", "waiting", "prefilling", "free", "cached", "used", "leased", "quarantined", "of"):
        table.add_column(name, justify="right")
    for node in nodes:
        told, is_well = _health(node)
        numbers = [node[name] for name in ("tp", "running", "waiting", "prefilling")]
        numbers += [*node["blocks"].values(), node["num_blocks"]]
        session = Text(told, "green" if is_well else "yellow")
        table.add_row(Text(node["name"]), Text(node["role"]), session, *map(str, numbers))
    return table


def _health(node: Mapping[str, Any]) -> tuple[str, bool]:
    """How it is, in a word or some, and whether it is well."""
    if node.get("left_out"):  # it is never dialed
        return "left out (tokenizer)", False
    told = [node["session"]] + [word for word in ("draining",) if node[word]]
    told += [] if node["circuit"] == "closed" else [f"circuit {node['circuit']}"]
    return ", ".join(told), told == ["up"]


def _requests(requests: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("request", "outcome", "nodes", box=None, pad_edge=False)
    for name in ("seconds", "first token", "prompt", "tokens", "attempts"):
        table.add_column(name, justify="right")
    for each in requests:
        first = each["first_token_s"]
        numbers = (each["prompt_tokens"], each["completion_tokens"], each["num_attempts"])
        table.add_row(
            Text(each["id"]),
            Text(each["outcome"] or "…"),
            Text(" ".join(each["nodes"])),
            f"{each['seconds']:.2f}",
            "" if first is None else f"{first * 1000:.1f} ms",
            *("" if number is None else str(number) for number in numbers),
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
