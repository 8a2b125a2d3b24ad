"""Bounds on what a request may ask for that several files must agree on. Imports nothing, so that flags can name them."""

from __future__ import annotations

from typing import Final

MAX_CHOICES_PER_PROMPT: Final = 128  # as OpenAI's; --max-n is mostly less
