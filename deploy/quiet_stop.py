"""`python -m deploy.quiet_stop MODULE …`: as `python -m MODULE`, but who stops it while it still imports is shown no traceback, and
who stops reading what it says does not end it, or only as it sees fit. A full disk behind its stdout is one line.

Not here: what a command does with Ctrl-C once it runs.
"""

from __future__ import annotations

import runpy
import sys
from types import TracebackType
from typing import Final

from deploy.heedless import CannotSay, outlive_readers

_STDOUT: Final = 1
_HEEDS_READERS: Final = ("deploy.chat",)  # for what nobody reads it has nothing generated
_GOES_ON: Final = (
    "deploy.drain",
    "deploy.role",
)  # as the node does that it waits for, whatever becomes of what it says


def main() -> None:
    """Become the module that the first argument names."""
    sys.excepthook = _tell
    outlive_readers(of_all=sys.argv[1] in _GOES_ON, of_none=sys.argv[1] in _HEEDS_READERS)
    from runtime.config import set_grpc_environment  # behind the hook: who stops this, too, is shown no traceback
    from runtime.process import end_process, hold_standard_streams

    hold_standard_streams()
    if sys.stdout is None and sys.argv[1] not in _HEEDS_READERS:  # closed from the first: said to nobody
        sys.stdout = open(_STDOUT, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - open to the end
    set_grpc_environment()  # here, since gRPC reads it as it is imported, which a command does at its top
    end_process(_command)  # what it cannot write, the hook tells of


def _command() -> None:
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)


def _tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, CannotSay):
        sys.stderr.write(f"baton: {error}\n")
    elif not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)


if __name__ == "__main__":
    main()
