"""A node's process: `python -m deploy.node_process prefill|decode|mixed [flags]`; the only file that knows all roles.

A process that is started here can take any of them later (`baton role`), so it has them all; `python -m prefill_node` and
`python -m decode_node` have their own alone. Not here: anything a node does.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from runtime.process import end_process, end_while_loading, fatal, hold_standard_streams


def load() -> None:
    """Import what every node does, torch among it, but for what cannot be forked: gRPC, which has threads."""
    import decode_node.entry  # noqa: F401
    import mixed_node.entry  # noqa: F401
    import node.assembly  # noqa: F401
    import prefill_node.entry  # noqa: F401


def main(argv: Sequence[str]) -> int:
    """Run the role that the first argument names; its exit code."""
    hold_standard_streams()
    end_while_loading()
    from decode_node import entry as decode_node  # heavy: who stops that would be shown a traceback
    from mixed_node import entry as mixed_node
    from prefill_node import entry as prefill_node

    role = argv[0] if argv else ""
    make_prefill_core, make_decode_core = prefill_node.make_core, decode_node.make_core
    make_mixed_core = mixed_node.core_maker(make_prefill_core, make_decode_core)
    if role == "prefill":
        return prefill_node.run(argv[1:], {"decode": make_decode_core, "mixed": make_mixed_core})
    if role == "decode":
        return decode_node.run(argv[1:], {"prefill": make_prefill_core, "mixed": make_mixed_core})
    if role == "mixed":
        return mixed_node.run(
            argv[1:], {"prefill": make_prefill_core, "decode": make_decode_core, "mixed": make_mixed_core}
        )
    fatal(f"baton: {role or 'no role'}: must be prefill, decode or mixed")


if __name__ == "__main__":
    end_process(lambda: main(sys.argv[1:]))
