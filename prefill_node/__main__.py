"""`python -m prefill_node`: one prefill node process; also `baton prefill`."""

from __future__ import annotations

from collections.abc import Sequence

from prefill_node.entry import run
from runtime.process import end_process


def main(argv: Sequence[str] | None = None) -> int:
    """Run until a signal; 0 after one, 2 for what the user can mend."""
    return run(argv)


if __name__ == "__main__":
    end_process(main)
