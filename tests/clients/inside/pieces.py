"""The pieces of a stream, as a script counts them; at the first one the server must still be at work on the rest."""

from __future__ import annotations

import re
import urllib.request
from typing import Any


class Pieces:
    """Of one stream; nothing else may be asked of that server meanwhile."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._num = 0
        self._was_at_work = False

    def count(self) -> None:
        """One came."""
        self._num += 1
        if self._num == 1:
            with urllib.request.urlopen(f"{self._url}/metrics", timeout=60) as answer:
                live = re.search(r"(?m)^baton_router_live_requests (\S+)$", answer.read().decode())
            self._was_at_work = live is not None and float(live[1]) > 0

    def told(self) -> dict[str, Any]:
        """For who compares."""
        return {"num_pieces": self._num, "was_at_work": self._was_at_work}
