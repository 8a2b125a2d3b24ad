"""Which files of a model directory have its weights: safetensors only, in one file or in shards with an index.

Every other format is refused, because reading pickles runs them. Loads no torch: what is missing is said at once. Not here: the
tensors (engine/weights.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from engine.config_values import ModelError

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
# Everything else that weights come in, for the sentence that refuses it.
_REFUSED_SUFFIXES: Final = (".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


def find_weight_files(model_dir: Path) -> tuple[Path, ...]:
    """The safetensors files of the model, sorted by name. Raises ModelError if there are none or one is missing."""
    index_path = model_dir / INDEX_FILE
    if index_path.exists():
        names = sorted(set(read_weight_map(index_path).values()))
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


def read_weight_map(index_path: Path) -> Mapping[str, str]:
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
