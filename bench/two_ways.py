"""A cluster for bench.local_prefill: a prefill and a decode node, known to two routers, of which each sends all prompts one way.

    router "handoff"  --every prompt-->  prefill node  --KV-->  decode node
    router "local"    --every prompt---------------------------->  decode node

Both see the same nodes, so that requests of both ways can take turns on them. Not here: load.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.fleet import Fleet

WAYS: Final[Mapping[str, int]] = {"handoff": 0, "local": 1 << 20}  # -> the router's --local-prefill-max-tokens
_PATIENT: Final = ("--session-grace-s", "60")  # on a machine that others use too a node may be silent for seconds


@dataclass(frozen=True, slots=True)
class TwoWays:
    """A ready cluster."""

    fleet: Fleet

    @property
    def urls(self) -> dict[str, str]:
        """Of each way's router."""
        return {way: self.fleet.url_of(f"router-{way}") for way in WAYS}

    def num_local(self) -> int:
        """Prompts that the decode node has computed, or begun to, for itself."""
        return int(self.fleet.state("decode-0")["counters"]["local_prefills"])


@contextmanager
def started_two_ways(model: Path, chunk: int, sizes: Mapping[str, int]) -> Iterator[TwoWays]:
    """Start it, end it. `sizes`: knobs of both nodes. ClusterProblem if it does not come up."""
    of_nodes = [*_PATIENT, *(word for key, value in sizes.items() for word in (f"--{key}", str(value)))]
    flags = {f"router-{way}": [*_PATIENT, "--local-prefill-max-tokens", str(most)] for way, most in WAYS.items()}
    flags |= {"prefill-0": of_nodes, "decode-0": [*of_nodes, "--local-prefill-chunk", str(chunk)]}
    with (
        tempfile.TemporaryDirectory(prefix="baton-bench-", ignore_cleanup_errors=True) as folder,
        Fleet.started(model.absolute(), Path(folder), flags) as fleet,
    ):
        yield TwoWays(fleet)
