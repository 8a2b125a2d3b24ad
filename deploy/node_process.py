"""A node's process: `python -m deploy.node_process prefill|decode|mixed [flags]`; the only file that knows all roles.

A role is imported when it is chosen, so that a prefill node never loads the decode role; a mixed node is given both. Not here:
anything a node does.
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
    if role == "mixed":
        from decode_node.entry import make_core as make_decode_core
        from mixed_node.entry import run as run_mixed_node
        from prefill_node.entry import make_core as make_prefill_core

        return run_mixed_node(argv[1:], make_prefill_core, make_decode_core)
    fatal(f"baton: {role or 'no role'}: must be prefill, decode or mixed")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
