"""What two nodes must have in common before KV may go from one to the other.

Field names are those of proto's Fingerprint message. Not here: comparing two of them, and the message itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from engine.config_values import ModelError
from engine.model_config import read_model_config
from engine.weight_files import find_weight_files
from proto.block_key import fingerprint_bytes

_SAMPLE_BYTES: Final = 64 << 10
_NUM_SAMPLES: Final = 16  # per file, evenly spaced: a megabyte read of files that may have a hundred gigabytes
# Of each tensor: between the samples of a file whole matrices find room, and a fine-tuning may have changed no others.
_TENSOR_SAMPLE_BYTES: Final = 4 << 10
_NUM_TENSOR_SAMPLES: Final = 4
_MAX_HEADER_BYTES: Final = 100_000_000  # the format's own bound


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Two nodes with equal fingerprints compute the same KV for the same tokens, in the same layout."""

    architecture: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str  # "fp32", "bf16" or "fp16"
    block_size: int
    weights: str  # hex SHA-256 over config.json and headers, sizes and samples of the weight files
    kernels: str  # the back end, which vector instructions it was compiled for, and what angles it rotates by

    def to_bytes(self) -> bytes:
        """Same fields, same bytes, on every machine: what block keys are seeded with."""
        return fingerprint_bytes(asdict(self))


def fingerprint_fields(model_dir: Path, dtype: str, block_size: int, kernels: str) -> Fingerprint:
    """Take the fingerprint of a model directory for a dtype (or "auto") and a back end by name. Raises ModelError.

    Reads config.json, each file's header, a megabyte of samples and four small ones of each tensor: one that has been trained is
    seen, whichever it is; a few changed rows between its samples are not.
    """
    config = read_model_config(model_dir)
    digest = hashlib.sha256((model_dir / "config.json").read_bytes())
    for path in find_weight_files(model_dir):
        digest.update(_file_digest(path))
    return Fingerprint(
        architecture=config.architecture,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=config.resolve_dtype(dtype),
        block_size=block_size,
        weights=digest.hexdigest(),
        kernels=kernels,
    )


def files_state(model_dir: Path) -> tuple[tuple[str, int, int, int], ...]:
    """What changes when a file is replaced or written to: equal before and after, what was read in between is one model's.

    For each of config.json, indices and weights its name, inode, size and time.
    """
    found = []
    for path in sorted([model_dir / "config.json", *model_dir.glob("*.safetensors*")]):
        with suppress(OSError):  # whoever reads it says so
            stat = path.stat()
            found.append((path.name, stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return tuple(found)


def _file_digest(path: Path) -> bytes:
    """Hash name, size, safetensors header and samples: the first and last bytes of the tensors are always in."""
    size = path.stat().st_size
    digest = hashlib.sha256(path.name.encode() + b"\0" + size.to_bytes(8, "little"))
    with path.open("rb", buffering=0) as file:  # some file systems fill a buffer with megabytes, at each sample
        header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > min(size - 8, _MAX_HEADER_BYTES):
            raise ModelError(f"{path} is not a safetensors file: its header would have {header_bytes} bytes")
        header = file.read(header_bytes)
        digest.update(header)
        begin = 8 + header_bytes
        parts = [(begin, size, _NUM_SAMPLES, _SAMPLE_BYTES)]
        parts += [
            (begin + first, begin + end, _NUM_TENSOR_SAMPLES, _TENSOR_SAMPLE_BYTES)
            for first, end in _tensor_places(header, size - begin)
        ]
        for start, stop, num_samples, sample_bytes in parts:
            last = max(start, stop - sample_bytes)
            for offset in sorted({start + (last - start) * index // (num_samples - 1) for index in range(num_samples)}):
                file.seek(offset)
                digest.update(file.read(min(sample_bytes, stop - offset)))
    return digest.digest()


def _tensor_places(header: bytes, num_bytes: int) -> Iterator[tuple[int, int]]:
    """First byte and end of each tensor behind the header. None of a header that is not one: no tensor is read by it either."""
    try:
        for name, each in json.loads(header).items():
            if name != "__metadata__":
                first, end = map(int, each["data_offsets"])
                if 0 <= first <= end <= num_bytes:
                    yield first, end
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return
