"""The tensors of a model directory: checked against what the model needs, read one at a time.

Not here: which files they are in (engine/weight_files.py), and what they mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.config_values import ModelError
from engine.split import WHOLE, Split
from engine.weight_files import INDEX_FILE, find_weight_files, read_weight_map

_ROWS_COMPARED: Final = 4096  # at one go: two embeddings in fp32 may be gigabytes
_READABLE_DTYPES: Final = ("F32", "BF16", "F16")


class TensorFiles:
    """Open safetensors files as one mapping from tensor name to tensor. A context manager.

    Raises ModelError where a file cannot be read, or an index puts a tensor elsewhere than it is.
    """

    def __init__(self, model_dir: Path) -> None:
        self._open_files = ExitStack()
        self._readers: dict[str, Any] = {}  # safe_open has no types for what is read from it
        try:
            self._open(model_dir)
        except ModelError:
            self._open_files.close()
            raise

    def _open(self, model_dir: Path) -> None:
        index_path = model_dir / INDEX_FILE
        said = dict(read_weight_map(index_path)) if index_path.exists() else {}
        for path in find_weight_files(model_dir):
            try:
                reader = self._open_files.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} is not a readable safetensors file: {error}") from None
            for name in reader.keys():  # noqa: SIM118 - not a mapping
                if name in self._readers:
                    raise ModelError(f"tensor {name} is in two files of {model_dir}, the second is {path.name}")
                if (where := said.pop(name, path.name)) != path.name:
                    raise ModelError(f"tensor {name} is in {path.name}, {INDEX_FILE} puts it into {where}")
                self._readers[name] = reader
        for name, where in said.items():
            raise ModelError(f"tensor {name} is not in {where}, where {INDEX_FILE} puts it")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open_files.close()

    def check(self, expected: Mapping[str, tuple[int, ...]], ignored: frozenset[str] = frozenset()) -> None:
        """Raise ModelError that names the first missing, misshapen, unreadable or extra tensor.

        `ignored` may be there or not: leftovers that some exporters write and the model does not read.
        """
        for name, shape in expected.items():
            if name not in self._readers:
                raise ModelError(f"tensor {name} is missing")
            stored = self._readers[name].get_slice(name)
            found, dtype = tuple(stored.get_shape()), stored.get_dtype()
            if found != shape:
                raise ModelError(f"tensor {name} has shape {list(found)}, config.json asks for {list(shape)}")
            if dtype not in _READABLE_DTYPES:
                raise ModelError(f"tensor {name} has dtype {dtype}, not one of {', '.join(_READABLE_DTYPES)}")
        extra = sorted(self._readers.keys() - expected.keys() - ignored)
        if extra:
            raise ModelError(f"tensor {extra[0]} is extra: {len(extra)} that the architecture does not have")

    def check_tied(self, name: str, to: str) -> None:
        """Raise ModelError where the tensor `name` is stored, and is not the checked tensor `to` that stands for it."""
        if name not in self._readers:
            return
        self.check({name: tuple(self._readers[to].get_slice(to).get_shape())}, frozenset(self._readers))
        rows, others = self._readers[name].get_slice(name), self._readers[to].get_slice(to)
        for start in range(0, rows.get_shape()[0], _ROWS_COMPARED):
            part = slice(start, start + _ROWS_COMPARED)
            if not torch.equal(rows[part].float(), others[part].float()):
                raise ModelError(f"tensor {name} is not {to}, as tie_word_embeddings in config.json has it")

    def read(self, name: str, dtype: torch.dtype, split: Split = WHOLE) -> Tensor:
        """Copy one checked tensor, or a rank's part of its rows, into memory of its own."""
        stored = self._readers[name].get_slice(name)
        part = split.part(stored.get_shape()[0])
        tensor: Tensor = stored[part] if split.size > 1 else self._readers[name].get_tensor(name)
        return tensor.to(dtype, copy=True)
