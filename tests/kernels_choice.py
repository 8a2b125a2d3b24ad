"""The back end that tests compute with where they do not try all: `BATON_KERNELS=torch make test` runs them on the reference."""

from __future__ import annotations

import os
from typing import Final

KERNELS: Final = os.environ.get("BATON_KERNELS", "cpu")
