"""What routers and nodes bound alike: a request that the one lets in is none that the other refuses. Pure."""

from __future__ import annotations

import re
from typing import Final

MAX_LOGIT_BIASES: Final = 1024  # of a request
# Log-probabilities of one prompt: some 3 MiB in the one message that they travel in.
MAX_PROMPT_LOGPROBS: Final = 1 << 18
MAX_PORT: Final = 65_535

# A name as DNS takes it, an IPv4 address, or an IPv6 address in brackets: what a resolver can be asked without surprise.
_HOST: Final = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*|\[[0-9A-Fa-f:.]{2,45}\]")


def is_address(text: str) -> bool:
    """Whether it is the host:port of a member, with a port from 1 to MAX_PORT."""
    host, _, port = text.rpartition(":")
    is_number = port.isascii() and port.isdigit() and len(port) <= len(str(MAX_PORT))
    return bool(_HOST.fullmatch(host)) and is_number and 1 <= int(port) <= MAX_PORT
