"""What a sequence has said so far, as penalties count it. No tensors, no plans: the runner keeps one per slot that needs it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


class TokenCounts:
    """The tokens of one prompt and its completion, each once, and how often the completion has them."""

    def __init__(self, prompt_token_ids: Iterable[int], generated_token_ids: Iterable[int]) -> None:
        known = dict.fromkeys(prompt_token_ids)
        self._index = {token_id: index for index, token_id in enumerate(known)}
        self._token_ids = np.array([*known], np.int64)
        self._counts = np.zeros(len(known), np.int64)
        for token_id in generated_token_ids:
            self.add(token_id)

    def add(self, token_id: int) -> None:
        """Count one more token of the completion. Amortised O(1)."""
        index = self._index.setdefault(token_id, len(self._index))
        if index == len(self._token_ids):
            spare = np.zeros(max(16, index), np.int64)
            self._token_ids = np.concatenate([self._token_ids, spare])
            self._counts = np.concatenate([self._counts, spare])
        self._token_ids[index] = token_id
        self._counts[index] += 1

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """Each token id of prompt and completion, once; valid until the next add()."""
        return self._token_ids[: len(self._index)]

    @property
    def counts(self) -> NDArray[np.int64]:
        """How often the completion has each of token_ids; 0 for what only the prompt has."""
        return self._counts[: len(self._index)]
