"""`baton doctor [URL]`: what is wrong with this machine's set-up, and with a running cluster, in sentences.

Without a URL it looks at this machine. With one also at the cluster: the router, each node, whether they are the same release and
the same model, how far their clocks are apart (of two processes under one name the one that began later is the successor), which
transports they have; and it has a canary's KV sent
from every prefill node to every decode node. Exit code 1 if anything is wrong; a warning is not.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Final

import httpx
from rich.console import Console
from rich.text import Text

from deploy.own_machine import OK, WARNING, WRONG, Finding, look_at_this_machine
from deploy.router_pages import NoAnswer, Pages, check_asked, with_url
from runtime.config import knob, load

CANARY_TIMEOUT_S: Final = 45.0  # the router's own bound is 30
CLOCKS_APART_S: Final = 2.0  # an HTTP Date counts seconds
DESCRIPTION: Final = """\
Check this machine's set-up, and with a URL the cluster behind that router: versions, models, sessions, circuits, clocks,
transports, and whether KV crosses between every two nodes as it should.

  baton doctor                          this machine
  baton doctor http://127.0.0.1:8000    and the cluster
  baton doctor URL --json               for programs

Exit code 1 if something is wrong."""


@dataclass(frozen=True, slots=True)
class DoctorConfig:
    """What the operator says."""

    url: str | None = knob(None, "a router; also without the flag; none: this machine alone", metavar="URL")
    api_key: str | None = knob(
        None,
        "key to show, where the router asks for one; better in the variable, where ps does not show it",
        metavar="KEY",
    )
    tls_dir: Path | None = knob(
        None,
        "directory with the ca.crt that has signed the certificates, and this host's own, if it has one",
        metavar="DIR",
    )
    port: int = knob(8000, "port that a router here is to have: is it free?", low=1, high=65535)
    json: bool = knob(False, "one JSON object instead of lines")

    def __post_init__(self) -> None:
        if self.url is not None:
            check_asked(self.url, self.api_key, self.tls_dir)


def main(argv: Sequence[str] | None = None) -> int:
    """Say what was found; 1 if anything is wrong."""
    words = list(sys.argv[1:] if argv is None else argv)
    config = load(DoctorConfig, "baton doctor", DESCRIPTION, with_url(words))
    findings = list(look_at_this_machine(None if config.url is not None else config.port, config.tls_dir))
    if config.url is not None:
        try:
            with Pages(config.url, config.api_key, config.tls_dir) as pages, pages.as_we_know_them():
                findings += look_at_cluster(pages)
        except NoAnswer as error:
            findings.append(Finding(WRONG, "router", str(error)))
    num_wrong = sum(each.level == WRONG for each in findings)
    if config.json:
        sys.stdout.write(json.dumps({"ok": not num_wrong, "findings": [asdict(each) for each in findings]}) + "\n")
    else:
        _print(findings, num_wrong)
    return 1 if num_wrong else 0


def _print(findings: Iterable[Finding], num_wrong: int) -> None:
    console = Console(highlight=False, soft_wrap=True)
    styles = {OK: "green", WARNING: "yellow", WRONG: "red"}
    for each in findings:
        console.print(Text.assemble((f"{each.level:<8}", styles[each.level]), f"{each.what}: {each.sentence}"))
    console.print(f"baton doctor: {num_wrong} wrong" if num_wrong else "baton doctor: nothing is wrong")


def look_at_cluster(pages: Pages) -> Iterator[Finding]:
    """The router, its nodes, and the way between every two of them. Raises NoAnswer if the router cannot be asked."""
    state = pages.state()
    lacks = "; ".join(state["missing"])
    yield (
        Finding(WRONG, "router", f"is not ready: {lacks}") if lacks else Finding(OK, "router", f"{pages.url} is ready")
    )
    yield from (Finding(WARNING, "router", f"works without: {sentence}") for sentence in state["degraded"])
    yield from _send_canaries(pages)  # before a node that hangs has been asked in vain, and the router has forgotten it
    nodes: list[dict[str, Any]] = state["nodes"]
    told: dict[str, dict[str, Any]] = {}
    for node in nodes:
        yield from _look_at_node(pages, node, told)
    versions = {"router": state["versions"]} | {name: each["versions"] for name, each in told.items()}
    yield from _compare_versions(versions)
    yield from _compare_models(nodes)
    yield from _look_at_transports(told)


def _look_at_node(pages: Pages, node: Mapping[str, Any], told: dict[str, dict[str, Any]]) -> Iterator[Finding]:
    """As the router sees it, and as it says itself: that is put into `told`."""
    name = str(node["name"])
    troubles = [] if node["session"] == "up" else [f"its session with the router is {node['session']}"]
    if node.get("left_out"):
        troubles = [
            "its tokenizer is not the router's, which gives it no work: start both with the same model directory"
        ]
    troubles += (
        [] if node["circuit"] == "closed" else [f"it is left alone for its failures (circuit {node['circuit']})"]
    )
    if node["draining"]:
        yield Finding(WARNING, name, "drains: it takes no new work and is about to end")
    yield from (Finding(WRONG, name, trouble) for trouble in troubles)
    try:
        state, answer = pages.node_state(node["http"])
    except NoAnswer as error:
        yield Finding(WRONG, name, f"its HTTP port cannot be asked from here: {error}")
        return
    told[name] = state
    if not state["bit_exact"]:
        yield Finding(
            WARNING, name, "a row's bits depend on its batch here: a retried stream may differ (bit_exact false)"
        )
    if not troubles:
        yield Finding(
            OK, name, f"{node['role']}, {node['num_blocks']} blocks, kernels {node['fingerprint']['kernels']}"
        )
    yield from _compare_clocks(name, answer)


def _compare_clocks(name: str, answer: httpx.Response) -> Iterator[Finding]:
    """Reported only: durations are all that counts, but for which of two processes under one name began later."""
    date = answer.headers.get("date")
    if date is not None:
        # Told in whole seconds, at some time from the request's beginning to now.
        told_at, now = parsedate_to_datetime(date).timestamp(), time.time()
        apart_s = max(told_at - now, now - answer.elapsed.total_seconds() - 1 - told_at, 0.0)
        if apart_s > CLOCKS_APART_S:
            yield Finding(WARNING, name, f"its clock is {apart_s:.0f} s from this machine's: logs will not line up")


def _compare_versions(versions: Mapping[str, Mapping[str, str]]) -> Iterator[Finding]:
    for package in sorted({name for each in versions.values() for name in each}):
        by_version: dict[str, list[str]] = {}
        for process, each in versions.items():
            if package in each:
                by_version.setdefault(each[package], []).append(process)
        shown = "; ".join(f"{version} at {', '.join(where)}" for version, where in by_version.items())
        if len(by_version) > 1:
            yield Finding(WRONG if package == "baton" else WARNING, "versions", f"{package} differs: {shown}")
        else:
            yield Finding(OK, "versions", f"{package} {next(iter(by_version))} everywhere")


def _compare_models(nodes: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Nodes that differ in a field are never paired."""
    fields = sorted({field for node in nodes for field in node["fingerprint"]})
    differing = [field for field in fields if len({node["fingerprint"].get(field) for node in nodes}) > 1]
    for field in differing:
        shown = ", ".join(f"{node['fingerprint'].get(field)} at {node['name']}" for node in nodes)
        yield Finding(WRONG, "models", f"{field} differs, so these nodes never hand over to each other: {shown}")
    if nodes and not differing:
        yield Finding(OK, "models", f"{len(nodes)} nodes have the same model, block size and kernels")


def _look_at_transports(told: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    by_node = {name: set(state["transport"]["transports"]) for name, state in told.items()}
    if len(by_node) < 2:
        return
    common = set.intersection(*by_node.values())
    shown = "; ".join(f"{name} {', '.join(sorted(each))}" for name, each in by_node.items())
    if common:
        yield Finding(OK, "transports", f"all nodes have {', '.join(sorted(common))}")
    else:
        yield Finding(WRONG, "transports", f"there is none that all nodes have: {shown}")


def _send_canaries(pages: Pages) -> Iterator[Finding]:
    answer = pages.get("/ready?deep=1", CANARY_TIMEOUT_S)
    if answer.status_code == httpx.codes.TOO_MANY_REQUESTS:
        yield Finding(WARNING, "canary", "another deep look is under way; ask again in a moment")
        return
    try:
        content = answer.json()
        pairs, num_left_out = content["pairs"], content.get("pairs_left_out", 0)
    except (ValueError, KeyError, TypeError, RecursionError):  # of whoever stands before the router
        raise NoAnswer(f"{pages.url}/ready?deep=1: is answered {answer.status_code}, not as a router does") from None
    for pair in pairs:
        way = f"{pair['prefill']} to {pair['decode']}"
        well = f"its KV crossed in {pair['seconds'] * 1000:.0f} ms, tokens equal"
        yield Finding(OK, way, well) if pair["ok"] else Finding(WRONG, way, pair["problem"])
    if num_left_out:
        yield Finding(WARNING, "canary", f"{num_left_out} more pairs of nodes were not tried, there are too many")
    if not pairs:
        yield Finding(WARNING, "canary", "no two nodes that hand over to each other are there")


if __name__ == "__main__":
    sys.exit(main())
