"""`python -m router`: the router process; also `baton router`."""

from __future__ import annotations

from collections.abc import Sequence

from router.config import RouterConfig
from runtime.config import load, set_grpc_environment
from runtime.process import end_process, end_while_loading, hold_standard_streams, ignore_hangups


def main(argv: Sequence[str] | None = None) -> int:
    """Run until a signal; 0 after one, 2 for what the user can mend."""
    hold_standard_streams()
    end_while_loading()
    ignore_hangups()  # a service manager's reload may come at once
    config = load(
        RouterConfig, "baton router", "Serve the OpenAI API; place requests on prefill and decode nodes.", argv
    )
    set_grpc_environment()
    if config.workers > 1:
        from router.workers import run_workers

        return run_workers(config)
    from runtime.collecting import loading  # heavy, as what is loaded is: --help and a wrong flag answer without them

    with loading():
        from router.process import run_router

    return run_router(config)


if __name__ == "__main__":
    end_process(main)
