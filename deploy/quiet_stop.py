"""`python -m deploy.quiet_stop MODULE …`: as `python -m MODULE`, but who stops it while it still imports is shown no traceback.

Not here: what a command does with Ctrl-C once it runs.
"""

from __future__ import annotations

import runpy
import sys
from types import TracebackType


def main() -> None:
    """Become the module that the first argument names."""
    sys.excepthook = _tell
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)


def _tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)


if __name__ == "__main__":
    main()
