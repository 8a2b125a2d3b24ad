"""What routers and nodes bound alike: a request that the one lets in is none that the other refuses. Pure."""

from __future__ import annotations

from typing import Final

MAX_LOGIT_BIASES: Final = 1024  # of a request
# Log-probabilities of one prompt: some 3 MiB in the one message that they travel in.
MAX_PROMPT_LOGPROBS: Final = 1 << 18
