"""Which requests were fast enough, and at what rate: goodput. Pure.

The words are DistServe's (OSDI'24): a request counts if it meets both limits, on TTFT and on TPOT; attainment is the share of the
requests sent that do, and a system's goodput the highest rate at which attainment is still, say, 90 %. A failed request, or one
that was given up, counts as one that does not; one without a second token has no TPOT, and meets any limit on it. Whose
tokens nobody counted has none either, but may be as slow as it likes: it meets none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


class Answered(Protocol):
    """What is asked of a request's record; seconds."""

    @property
    def is_ok(self) -> bool:
        """Whether it was answered completely."""

    @property
    def ttft_s(self) -> float | None:
        """To the first token."""

    @property
    def tpot_s(self) -> float | None:
        """Per token behind it."""

    @property
    def output_tokens(self) -> int | None:
        """As the server counts them, if it does."""


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits, in seconds; None: any time will do."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def is_met(self, record: Answered) -> bool:
        """By one request. Without its first token's instant (not streamed) it meets no limit on TTFT, uncounted none on TPOT."""
        if not record.is_ok:
            return False
        if self.ttft_s is not None and (record.ttft_s is None or record.ttft_s > self.ttft_s):
            return False
        if self.tpot_s is None:
            return True
        return record.output_tokens is not None and (record.tpot_s is None or record.tpot_s <= self.tpot_s)


@dataclass(frozen=True, slots=True)
class Goodput:
    """Of one run; the fields are keys of the JSON result."""

    num_met: int
    attainment: float  # of all requests that were due, 0 to 1
    requests_per_s: float  # those that met the limits, over the run's whole time


def goodput_of(records: Iterable[Answered], slo: Slo, duration_s: float) -> Goodput:
    """Count who met the limits."""
    met = [slo.is_met(record) for record in records]
    number = sum(met)
    return Goodput(number, number / len(met) if met else 0.0, number / duration_s if duration_s > 0 else 0.0)
