"""The drawings of docs/concepts.md: what one request's processes say to each other, from the log of a simulated run.

The simulation runs the cores that the cluster runs (docs/simulation.md), so an arrow is a message that was really sent, in the
order in which it was. `make docs` writes the drawings; a test fails where one is stale. Not here: what an arrow means
(docs/protocol.md).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

from tests.sim.outcome import run_scenario
from tests.sim.scenario import ClientPlan, Fault, Knobs, Scenario
from tests.sim.sequence_svg import Arrow, Lane, Mark, sequence_svg

PICTURES: Final = Path(__file__).resolve().parents[2] / "docs" / "pictures"
_CLIENT: Final = "client"
_LANES: Final = (
    Lane(_CLIENT, "client"),
    Lane("router-0", "router"),
    Lane("prefill-0", "prefill node"),
    Lane("decode-0", "decode node 0"),
    Lane("decode-1", "decode node 1"),
)
_KNOBS: Final = Knobs(num_prefill=1, num_decode=2, max_batched_tokens=8, step_s=0.02)
_SLOWLY: Final = replace(_KNOBS, step_s=0.15)  # who drains waits until every router knows of it, half a second
_PROMPT: Final = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2, 3, 4, 5, 6, 7, 8, 9, 3, 4, 5)
_LINE: Final = re.compile(r"^ *\S+  (\S+) +(.+?)(?: {2,}(.*))?$")


class _Told(NamedTuple):
    """A line of the log."""

    who: str
    what: str
    why: str


@dataclass(frozen=True, slots=True)
class Drawing:
    """A run to be drawn, and what its picture is for those who cannot see it."""

    scenario: Scenario
    about: str


def _run(max_tokens: int, *faults: Fault, knobs: Knobs = _KNOBS) -> Scenario:
    return Scenario(3, knobs, (ClientPlan("a", 0.2, 0, _PROMPT, max_tokens, seed=7),), faults)


DRAWINGS: Final[Mapping[str, Drawing]] = {
    "handoff.svg": Drawing(
        _run(4),
        "A request: its prompt is computed in three chunks by the prefill node, written into blocks that the decode node has "
        "reserved, committed, and decoded there",
    ),
    "killed.svg": Drawing(
        _run(6, Fault(0.31, "crash", "decode-0", seconds=30.0)),
        "The same request, and its decode node is killed: the router sends prompt and tokens to the prefill node as attempt 1, "
        "and the other decode node goes on with the next token",
    ),
    "drained.svg": Drawing(
        _run(9, Fault(0.22, "drain", "decode-0", seconds=30.0), knobs=_SLOWLY),
        "The same request, and its decode node is drained: it writes the sequence's blocks to the other decode node while it "
        "goes on decoding, then hands over",
    ),
}


def draw(name: str) -> str:
    """The picture of that name, as SVG."""
    drawing = DRAWINGS[name]
    outcome = run_scenario(drawing.scenario, is_traced=True)
    assert outcome.error is None, outcome.error
    assert outcome.trace is not None
    rows = list(_rows([_told(line) for line in outcome.trace.lines]))
    used = {name for row in rows for name in ((row.source, row.target) if isinstance(row, Arrow) else (row.lane,))}
    return sequence_svg(drawing.about, [lane for lane in _LANES if lane.name in used], rows)


def _told(line: str) -> _Told:
    found = _LINE.match(line)
    assert found is not None, line
    return _Told(found[1].rpartition(".")[0] or found[1], found[2], found[3] or "")


def _rows(told: list[_Told]) -> Iterator[Arrow | Mark]:
    """What is to be seen of the request, in order; what the simulation does before it and after it is not."""
    num_heard = 0
    asked_of: dict[str, str] = {}  # who answers Reserve -> who asked
    for line in told:
        if line.who == "FAULT":
            if line.what in _FAULTS:
                yield Mark(line.why.split()[1], _FAULTS[line.what], is_bad=True)
            continue
        if line.what == "asks" and (found := re.match(r"Reserve \S+ of ([\w-]+):", line.why)):
            asked_of[found[1]] = line.who
            yield Arrow(line.who, found[1], "Reserve")
        elif line.what == "answers" and (found := re.match(r"Reserve: a lease of (\d+) blocks", line.why)):
            yield Arrow(line.who, asked_of[line.who], f"a lease of {found[1]} blocks")
        elif line.what == "takes" and (tokens := _tokens(line.why)) is not None:
            sender, first, end = tokens
            is_new = end > num_heard
            yield Arrow(sender, line.who, _token_text(first, end) + ("" if is_new else ": known"), is_token=True)
            if is_new:
                yield Arrow(line.who, _CLIENT, _token_text(max(first, num_heard), end), is_token=True)
            num_heard = max(num_heard, end)
        elif line.what == "finishes":
            yield Arrow(line.who, _CLIENT, "finished")
            return
        else:
            yield from _single(line)


_FAULTS: Final = {"crash": "killed"}


def _tokens(why: str) -> tuple[str, int, int] | None:
    found = re.match(r"tokens as \w+ a/0#\d+\[(\d+):(\d+)\].* from ([\w-]+)$", why)
    return (found[3], int(found[1]), int(found[2])) if found else None


def _token_text(first: int, end: int) -> str:
    return f"token {first}" if end == first + 1 else f"tokens {first} to {end - 1}"


def _block_text(indices: list[int]) -> str:
    return f"KV of block {indices[0]}" if len(indices) == 1 else f"KV of blocks {indices[0]} to {indices[-1]}"


def _single(line: _Told) -> Iterator[Arrow | Mark]:
    """Lines that mean the same whatever came before."""
    for what, pattern, make in _RULES:
        if line.what == what and (found := re.match(pattern, line.why)):
            yield make(line.who, found)


_Rule = tuple[str, str, Callable[[str, re.Match[str]], Arrow | Mark]]
_RULES: Final[tuple[_Rule, ...]] = (
    ("is asked", r"a: (\d+) prompt", lambda who, m: Arrow(_CLIENT, who, f"prompt of {m[1]} tokens")),
    (
        "says",
        r"Dispatch a/0#(\d+)(?: behind (\d+) tokens)? for ([\w-]+) to ([\w-]+)",
        lambda who, m: Arrow(who, m[4], f"Dispatch, attempt {m[1]}" + (f", {m[2]} tokens" if m[2] else "")),
    ),
    (
        "says",
        r"Move a/0#\d+ as #(\d+) to ([\w-]+) to ([\w-]+)",
        lambda who, m: Arrow(who, m[3], f"Move, as attempt {m[1]}"),
    ),
    ("says", r"WantsMove a/0#\d+ (\w+)", lambda who, m: Arrow(who, "router-0", "WantsMove")),
    ("launches", r"\d+: 0 decodes, chunks of \[(\d+)\]", lambda who, m: Mark(who, f"chunk of {m[1]} tokens")),
    (
        "writes",
        r"blocks \[(.*)\] of the lease on ([\w-]+)@",
        lambda who, m: Arrow(who, m[2], _block_text([int(index) for index in m[1].split(", ")]), is_data=True),
    ),
    ("acknowledges", r"Commit a/0#", lambda who, m: Mark(who, "Commit taken: decodes")),
    ("takes", "the wish that it drains", lambda who, m: Mark(who, "drains")),
    ("attempt ended", r"a/0#\d+: moved", lambda who, m: Mark(who, "has handed over")),
    ("session lost", r"with ([\w-]+): hung up", lambda who, m: Mark(who, f"{m[1]} has ended")),
    ("session lost", r"with ([\w-]+): (?!hung up)", lambda who, m: Mark(who, f"{m[1]} is lost", is_bad=True)),
)


def main() -> int:
    """Write every drawing."""
    PICTURES.mkdir(exist_ok=True)
    for name in DRAWINGS:
        (PICTURES / name).write_text(draw(name), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
