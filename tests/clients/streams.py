"""Whether streams were streams, by the clock of who read them.

One stream proves little on a busy machine: a reader that is held up finds everything there. All of a client's together do.
A server that keeps its tokens back until the last one leaves a reader only the time that it needs to read them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

MIN_PIECES: Final = 4  # several tokens may come as one
MIN_SHARE: Final = 0.3  # of the whole time, between first and last piece: 0.6 to 0.95 of ours, below 0.2 of kept ones


def problems_of_streams(streams: Iterable[tuple[str, float, float, int]]) -> list[str]:
    """Of name, seconds from the request to the first piece and to the last one, and how many pieces."""
    found, span_s, whole_s = [], 0.0, 0.0
    for name, first_s, last_s, num_pieces in streams:
        span_s, whole_s = span_s + last_s - first_s, whole_s + last_s
        if num_pieces < MIN_PIECES or not 0 < first_s < last_s:
            found.append(f"{name}: it was no stream: {num_pieces} pieces from {first_s:.3f} s to {last_s:.3f} s")
    if span_s < MIN_SHARE * whole_s or whole_s == 0:
        found.append(f"streams: of {whole_s:.3f} s only {span_s:.3f} s lie between first and last pieces")
    return found
