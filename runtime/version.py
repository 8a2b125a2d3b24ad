"""Which release of Baton runs here, and on what: for people who compare processes."""

from __future__ import annotations

import platform
from functools import cache
from importlib import metadata


@cache
def versions() -> dict[str, str]:
    """Of Baton and of what its answers may depend on; of what is not installed, nothing."""
    found = {"python": platform.python_version()}
    for name in ("baton", "torch"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
