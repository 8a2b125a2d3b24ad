"""A node's process: `python -m deploy.node_process prefill|decode [flags]`; the only file that knows both roles.

A role is imported when it is chosen, so that a prefill node never loads the decode role. Not here: anything a node does.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from runtime.process import fatal


def main(argv: Sequence[str]) -> int:
    """Run the role that the first argument names; its exit code."""
    role = argv[0] if argv else ""
    if role == "prefill":
        from prefill_node.__main__ import main as run_prefill_node

        return run_prefill_node(argv[1:])
    if role == "decode":
        from decode_node.__main__ import main as run_decode_node

        return run_decode_node(argv[1:])
    fatal(f"baton: {role or 'no role'}: must be prefill or decode")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
