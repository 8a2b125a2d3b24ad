"""What a node counts. Not here: deciding what counts (the core emits `Count`), durations (measures.py), showing it (view.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from proto import baton_pb2 as pb

# The names that `Count` may carry, with what each unit of it is.
PLAIN_COUNTERS: Final[Mapping[str, str]] = {
    "commits_refused": "Commits that named no lease here, or contradicted theirs",
    "kv_pool_no_room": "Prompts not fetched from the KV pool because no blocks could be spared to read into",
    "kv_pool_not_worth": "Prompts computed here because that is faster than fetching from the KV pool, or looking there",
    "kv_pool_probes": "Looks into the KV pool that no prompt waits for, to see whether fetching is worth it by now",
    "kv_pool_too_late": "Prompts computed here because the KV pool took longer than that, or is late with an earlier answer",
    "leases_expired": "Leases that ended because neither a write nor a renewal came",
    "local_prefills": "Attempts whose prompt a node that decodes computes for itself: nothing is handed over",
    "malformed_messages": "Messages of other processes that failed a check and were dropped or refused",
    "moves_begun": "Reserves sent to hand a running sequence over",
    "moves_done": "Running sequences that another node took over, KV and all",
    "moves_failed": "Moves that ended behind the lease: withdrawn, broken, refused or unanswered",
    "moves_refused": "Moves that got no lease",
    "refused_grpc": "Connections to the gRPC port that were refused: no call came over them, for want of a certificate or of TLS",
    "role_changes": "Roles that this process has taken after its first",
    "stale_refused": "Messages of ended or fenced attempts, refused",
    "unexpected_events": "Messages that this role or state has no use for",
    "wrong_incarnation": "Handoff calls meant for an earlier process at this address",
}
# These are counted by cause: the name goes on with `_` and an error code in lower case.
CODED_COUNTERS: Final[Mapping[str, str]] = {
    "reserve_refused": "Reserve calls answered with a PD Error, by its code",
    "writes_refused": "Writes that touched nothing or did not match their checksum, by cause",
}


class Counters:
    """What happened here since the process began."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(PLAIN_COUNTERS, 0)
        self._coded = {
            f"{name}_{code.lower()}": (name, code)
            for name in CODED_COUNTERS
            for code in pb.ErrorCode.DESCRIPTOR.values_by_name
        }
        self._by_code: dict[str, dict[str, int]] = {name: {} for name in CODED_COUNTERS}

    def count(self, name: str, amount: int = 1) -> None:
        """Raise the counter `name`; KeyError: there is none, which is a bug."""
        if name in self._coded:
            name, code = self._coded[name]
            self._by_code[name][code] = self._by_code[name].get(code, 0) + amount
        else:
            self._counts[name] += amount

    def counts(self) -> dict[str, int]:
        """Every plain counter by name."""
        return dict(self._counts)

    def counts_by_code(self) -> dict[str, dict[str, int]]:
        """Every coded counter by name, then by the error codes that were counted."""
        return {name: dict(counts) for name, counts in self._by_code.items()}
