"""Models of a known shape without files: random weights that are made where they compute, in seconds.

Good for speed alone: what they say is noise. Not here: the shapes (engine/model_sizes.py), models to serve (`baton model make`).
"""

from __future__ import annotations

import json
import tempfile
import zlib
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from engine.model import Model, build_model
from engine.model_config import ModelConfig, read_model_config
from engine.model_sizes import ModelSize, config_json
from engine.split import WHOLE, Split
from engine.tensor_names import tensor_shapes
from kernels.choice import Choice

_SPREAD: Final = 0.02  # as models begin their training


class RandomTensors:
    """engine.model_weights.Tensors of numbers that follow from each tensor's name."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self._shapes = tensor_shapes(config)
        self._device = device

    def read(self, name: str, dtype: torch.dtype, split: Split = WHOLE) -> Tensor:
        """See Tensors. Norms are ones."""
        shape = self._shapes[name]
        part = split.part(shape[0])
        if "norm" in name:
            return torch.ones(shape, dtype=dtype, device=self._device)[part]
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        numbers = torch.randn(shape, generator=generator, dtype=dtype, device=self._device)
        return numbers.mul_(_SPREAD)[part]


def shaped_model(size: ModelSize, dtype: str, choice: Choice, device: torch.device) -> Model:
    """Make it for dtype "fp32", "bf16", "fp16", or "auto": as the shape's weights are stored."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config_json(size, size.stored_dtype)), encoding="utf-8")
        config = read_model_config(Path(folder))
    return build_model(config, config.resolve_dtype(dtype), RandomTensors(config, device), choice, device)
