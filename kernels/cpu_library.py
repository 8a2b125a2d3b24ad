"""The compiled library seen from Python: its structures, its functions, loading it.

Field by field what kernels/cpu/library.cpp and the headers it includes declare; whoever changes one changes the other and
`INTERFACE`. Not here: whose memory the pointers point to (cpu_kernels.py).
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, byref, c_double, c_float, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Final

import torch  # loaded before the library, so that both share one OpenMP runtime, and with it one set of threads
from numpy.typing import NDArray

INTERFACE: Final = 10
DTYPE_CODES: Final = MappingProxyType({torch.float32: 0, torch.bfloat16: 1, torch.float16: 2})
MAX_HEAD_DIM: Final = 1024
NUM_PHASES: Final = 9

_Fields = list[tuple[str, Any]]


class CLinear(Structure):
    """linear.h."""

    _fields_: ClassVar[_Fields] = [
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("scales", c_void_p),
        ("in_features", c_int32),
        ("out_features", c_int32),
        ("gated", c_int32),
    ]


class CBatch(Structure):
    """attention.h."""

    _fields_: ClassVar[_Fields] = [
        ("spans", c_void_p),  # [num_spans, 3] int32: kernels.interface.RowSpan
        ("tables", c_void_p),
        ("write_positions", c_void_p),
        ("table_stride", c_int64),
        ("num_spans", c_int32),
        ("num_rows", c_int32),
    ]


class CCache(Structure):
    """attention.h."""

    _fields_: ClassVar[_Fields] = [
        ("kv", c_void_p),
        ("num_layers", c_int32),
        ("block_size", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("num_heads", c_int32),
        ("position_size", c_int32),
    ]


class CRotation(Structure):
    """layers.h."""

    _fields_: ClassVar[_Fields] = [("cos", c_void_p), ("sin", c_void_p), ("positions", c_void_p)]


class CLayer(Structure):
    """layers.h."""

    _fields_: ClassVar[_Fields] = [
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("qkv", CLinear),
        ("attention_out", CLinear),
        ("gate_up", CLinear),
        ("down", CLinear),
        ("window", c_int32),
    ]


class CStack(Structure):
    """layers.h."""

    _fields_: ClassVar[_Fields] = [
        ("layers", POINTER(CLayer)),
        ("num_layers", c_int32),
        ("hidden_size", c_int32),
        ("norm_eps", c_float),
    ]


class CEnds(Structure):
    """layers.h."""

    _fields_: ClassVar[_Fields] = [
        ("embedding", c_void_p),
        ("final_norm", c_void_p),
        ("head", CLinear),
        ("token_ids", c_void_p),
        ("logit_rows", c_void_p),
        ("logits", c_void_p),
        ("normed", c_void_p),
        ("num_logits", c_int32),
    ]


class CShares(Structure):
    """share.h."""

    _fields_: ClassVar[_Fields] = [
        ("temperatures", c_void_p),
        ("greatest", c_void_p),
        ("token_ids", c_void_p),
        ("above", c_void_p),
        ("beside", c_void_p),
        ("num_rows", c_int32),
        ("vocab_size", c_int32),
    ]


class CContest(Structure):
    """contend.h."""

    _fields_: ClassVar[_Fields] = [
        ("temperatures", c_void_p),
        ("streams", c_void_p),
        ("greatest", c_void_p),
        ("greatest_ids", c_void_p),
        ("ids", c_void_p),
        ("values", c_void_p),
        ("counts", c_void_p),
        ("num_rows", c_int32),
        ("vocab_size", c_int32),
        ("limit", c_int32),
    ]


class CScreen(Structure):
    """screen.h."""

    _fields_: ClassVar[_Fields] = [
        ("weight", c_void_p),
        ("radii", c_void_p),
        ("rows", c_void_p),
        ("in_features", c_int32),
    ]


class CSlots(Structure):
    """layout.h."""

    _fields_: ClassVar[_Fields] = [
        ("block_ids", c_void_p),
        ("num_blocks", c_void_p),
        ("token_ids", c_void_p),
        ("next_indices", c_void_p),
        ("seeds", c_void_p),
        ("temperatures", c_void_p),
        ("max_blocks", c_int64),
    ]


class CDecodeRows(Structure):
    """layout.h."""

    _fields_: ClassVar[_Fields] = [("slots", c_void_p), ("positions", c_void_p), ("num_rows", c_int32)]


class CDraws(Structure):
    """draw.h."""

    _fields_: ClassVar[_Fields] = [
        ("screen", POINTER(CScreen)),
        ("contest", POINTER(CContest)),
        ("drawn", c_void_p),
        ("margin", c_double),
    ]


_FUNCTIONS: Final = MappingProxyType(
    {
        "baton_interface": (c_int, ()),
        "baton_num_taken_over": (c_uint64, ()),
        "baton_workspace_new": (c_void_p, ()),
        "baton_workspace_delete": (None, (c_void_p,)),
        "baton_workspace_bytes": (c_size_t, (c_void_p,)),
        "baton_packed_size": (c_size_t, (POINTER(CLinear), c_int)),
        "baton_pack": (None, (POINTER(CLinear), c_void_p, c_void_p, c_int)),
        "baton_linear": (None, (POINTER(CLinear), c_void_p, c_int, c_void_p, c_int, c_int)),
        "baton_rms_norm": (None, (c_void_p, c_void_p, c_int, c_int, c_float, c_void_p, c_int)),
        "baton_rotate": (None, (c_void_p, POINTER(CRotation), c_void_p, c_int64, c_void_p, c_int)),
        "baton_gate": (None, (c_void_p, c_int, c_int, c_void_p, c_int)),
        "baton_contend": (None, (POINTER(CContest), c_void_p, c_int, c_int)),
        "baton_share": (None, (POINTER(CShares), c_void_p, c_int, c_int)),
        "baton_attend": (
            None,
            (c_void_p, POINTER(CCache), POINTER(CBatch), c_void_p, c_void_p, c_int, c_int, c_int, c_int),
        ),
        "baton_layers": (
            None,
            (
                c_void_p,
                POINTER(CStack),
                POINTER(CCache),
                POINTER(CBatch),
                POINTER(CRotation),
                c_void_p,
                c_int,
                POINTER(c_double),
                c_int,
            ),
        ),
        "baton_forward": (
            c_int,
            (
                c_void_p,
                POINTER(CStack),
                POINTER(CCache),
                POINTER(CBatch),
                POINTER(CRotation),
                POINTER(CEnds),
                c_int,
                POINTER(c_double),
                c_int,
            ),
        ),
        "baton_copy": (None, (c_void_p, c_void_p, c_void_p, c_int, c_void_p, c_void_p)),
        "baton_decode": (
            c_int,
            (
                c_void_p,
                POINTER(CStack),
                POINTER(CCache),
                POINTER(CRotation),
                POINTER(CEnds),
                POINTER(CSlots),
                POINTER(CDecodeRows),
                POINTER(CDraws),
                c_int,
                POINTER(c_double),
                c_int,
            ),
        ),
    }
)


class Library:
    """One loaded variant. Its functions let go of the GIL."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if it cannot be loaded, is another version's, or needs what the kernel does not let this process use."""
        library = ctypes.CDLL(str(path))
        if getattr(library, "baton_interface", int)() != INTERFACE:
            raise OSError(f"{path} is of another version")
        if not library.baton_is_allowed():
            raise OSError(f"{path}: Linux does not let this process use the CPU's tiles (AMX)")
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype = result
            function.argtypes = arguments
        self.call: Final[Any] = library  # ctypes has no types for what it finds


class Workspace:
    """Memory that a step needs besides its result: grows to the largest step's need and is then used again."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self.address: Final[int] = library.call.baton_workspace_new()

    def __del__(self) -> None:
        self._library.call.baton_workspace_delete(self.address)

    @property
    def num_bytes(self) -> int:
        """What it holds now."""
        return int(self._library.call.baton_workspace_bytes(self.address))


def address(array: NDArray[Any]) -> int:
    """Where a contiguous array lies; numpy's own `ctypes` takes several times as long to say. Raises ValueError for any other."""
    if not array.flags.c_contiguous:
        raise ValueError("the array is not contiguous")
    place: int = array.__array_interface__["data"][0]
    return place


def reference(structure: Structure) -> Any:
    """A pointer to pass on; the structure must outlive the call."""
    return byref(structure)
