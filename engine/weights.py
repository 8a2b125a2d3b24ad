"""The tensors of a model directory: found, checked against what the model needs, read one at a time.

Safetensors only, in one file or in shards with an index; every other format is refused, because reading pickles runs them.
Not here: what the tensors mean.
"""

from __future__ import annotations

import json
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

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
_ROWS_COMPARED: Final = 4096  # at one go: two embeddings in fp32 may be gigabytes
_READABLE_DTYPES: Final = ("F32", "BF16", "F16")
# Everything else that weights come in, for the sentence that refuses it.
_REFUSED_SUFFIXES: Final = (".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


def find_weight_files(model_dir: Path) -> tuple[Path, ...]:
    """The safetensors files of the model, sorted by name. Raises ModelError if there are none or one is missing."""
    index_path = model_dir / INDEX_FILE
    if index_path.exists():
        names = sorted(set(_read_weight_map(index_path).values()))
        # transformers would read the one file, vLLM the others.
        if SINGLE_FILE not in names and (model_dir / SINGLE_FILE).exists():
            raise ModelError(
                f"{model_dir} has {SINGLE_FILE}, and {INDEX_FILE}, which names other files: one is too many"
            )
    elif (model_dir / SINGLE_FILE).exists():
        names = [SINGLE_FILE]
    else:
        others = sorted(p.name for p in model_dir.glob("*") if p.suffix in _REFUSED_SUFFIXES)
        found = f"{others[0]} is not read, only safetensors" if others else f"no {SINGLE_FILE} and no {INDEX_FILE}"
        raise ModelError(f"{model_dir} has no weights that can be loaded: {found}")
    for name in names:
        if not (model_dir / name).is_file():
            raise ModelError(f"{index_path.name} names {name}, which does not exist in {model_dir}")
    return tuple(model_dir / name for name in names)


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
        said = dict(_read_weight_map(index_path)) if index_path.exists() else {}
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


def _read_weight_map(index_path: Path) -> Mapping[str, str]:
    """Tensor name to file name. A file name with a directory in it is refused: it would leave the model directory."""
    try:
        index = json.loads(index_path.read_bytes())
    except OSError as error:
        raise ModelError(f"{index_path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{index_path} is not JSON: {error}") from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index_path} has no weight_map")
    for name, file_name in weight_map.items():
        if (
            not isinstance(file_name, str)
            or Path(file_name).name != file_name
            or not file_name.endswith(".safetensors")
        ):
            raise ModelError(
                f"{index_path.name} puts tensor {name} into {file_name!r}, which is not a safetensors file name"
            )
    return weight_map
