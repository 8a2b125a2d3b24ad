"""`python -m decode_node`: one decode node process; also `baton decode`."""

from __future__ import annotations

from collections.abc import Sequence

from decode_node.entry import run
from runtime.process import end_process


def main(argv: Sequence[str] | None = None) -> int:
    """Run until a signal; 0 after one, 2 for what the user can mend."""
    return run(argv)


if __name__ == "__main__":
    end_process(main)
