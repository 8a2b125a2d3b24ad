"""For HTTP clients that meet no TLS: what httpx takes for `verify`, made once and without the world's certificates.

httpx reads those for each client that is told nothing, also where it speaks plain HTTP: 20 ms of computing, more than most answers.
"""

from __future__ import annotations

import ssl
from typing import Final

NO_CERTIFICATES: Final = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # trusts nobody
