"""NIXL's library as one end of one link: an agent, the KV memory that it may touch, and what it moves.

Every link has agents of its own at both ends, so that a link is torn down by destroying them: the receiver's takes no byte from
then on, whatever the sender, dead or alive, had under way, and the sender's reads no source block any more. NIXL drives UCX, which
takes RDMA where there is any, shared memory within a host, and TCP.

NIXL is an optional extra (`nixl` of pyproject.toml) and is imported when the first link is opened. UCX listens on a TCP port of
its own, to which anybody may connect who reaches it, and encrypts nothing: hence no nixl with --tls-dir. NIXL's own
progress threads spin (a third of a core for each agent, measured): there are none, and whoever has an agent drives it while
something moves.
Not here: who is told of an agent, and what may be written (nixl_receiver.py, nixl_sender.py).
Source: https://github.com/ai-dynamo/nixl/blob/main/docs/nixl.md
"""

from __future__ import annotations

import importlib
import importlib.util
import ipaddress
import logging
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from connector.copying import Bytes
from connector.transport import MAX_PAYLOAD_BYTES

_LOG = logging.getLogger(__name__)

_PACKAGES: Final = ("nixl", "nixl_cu13", "nixl_cu12")  # the first chooses between the others
_MAX_BLOCKS: Final = 1 << 22  # that a peer may say that it has; the pieces of all are listed before the first moves
_DESCRIPTORS_LEFT: Final = 64  # an agent takes 20; UCX ends the process where it gets none
_RDMA_DEVICES: Final = Path("/sys/class/infiniband")


class NixlFault(OSError):
    """NIXL is not there, or cannot go on; the message says why."""


def is_installed() -> bool:
    """Whether the extra is there."""
    return _find_package() is not None


def has_rdma() -> bool:
    """Whether this host has what NIXL is faster with than a socket."""
    return _RDMA_DEVICES.is_dir() and any(_RDMA_DEVICES.iterdir())


class NixlLibrary:
    """NIXL and UCX, loaded, which takes half a second; makes agents."""

    def __init__(self, host: str) -> None:
        """Raise NixlFault where they cannot be. UCX keeps to the loopback device if `host` does, else to UCX_NET_DEVICES."""
        if (package := _find_package()) is None:
            raise NixlFault("NIXL is not installed: pip install -c constraints.txt -e '.[nixl]'")
        try:
            self.api: Final = importlib.import_module(f"{package}._api")
            bindings = vars(importlib.import_module(f"{package}._bindings"))
        except (ImportError, OSError) as fault:  # a library that is missing, of another release, …
            raise NixlFault(f"NIXL cannot be loaded: {fault}") from None
        # The bindings have a type for each status, and none for all of them.
        kinds = [each for each in bindings.values() if isinstance(each, type) and issubclass(each, Exception)]
        self._fault_kinds: tuple[type[Exception], ...] = (*kinds, RuntimeError, ValueError, TypeError)
        logging.getLogger("nixl").setLevel(logging.WARNING)  # what it says goes to stdout
        self._ucx: Final = {"engine_config": "NET_DEVICES=lo"} if _is_loopback(host) else {}
        self.agent("first", np.zeros((1, 4096), np.uint8)).close()  # loads the plugins

    def agent(self, name: str, memory: Bytes) -> NixlAgent:
        """One end of a link; raises NixlFault."""
        if _num_descriptors_left() < _DESCRIPTORS_LEFT:
            raise NixlFault("no NIXL agent: too few descriptors are left")
        return NixlAgent(self, name, memory, self._ucx)

    @contextmanager
    def told(self, what: str) -> Iterator[None]:
        """Raise NixlFault for whatever NIXL raises inside."""
        try:
            yield
        except self._fault_kinds as fault:
            raise NixlFault(f"{what}: {fault}") from None


class NixlAgent:
    """One end of one link; `close` it once. memory: [num_blocks, block_bytes] u8, contiguous. Raises NixlFault throughout."""

    def __init__(self, library: NixlLibrary, name: str, memory: Bytes, ucx: Mapping[str, str]) -> None:
        self._library = library
        self._memory = memory
        self._handles: dict[int, Any] = {}  # of what is under way, by number
        with library.told("no NIXL agent"):
            config = library.api.nixl_agent_config(enable_prog_thread=False, backends=[])
            self._agent: Any = library.api.nixl_agent(name, config)
            self._agent.create_backend("UCX", dict(ucx))
            region = (memory.ctypes.data, memory.nbytes, 0, "")
            self._registered = self._agent.register_memory([region], "DRAM")
        self._peer: str | None = None
        self._lists: tuple[Any, Any] | None = None

    def metadata(self) -> bytes:
        """What a peer needs to reach this agent's memory."""
        with self._library.told("no metadata"):
            return bytes(self._agent.get_agent_metadata())

    def connect(self, metadata: bytes, address: int, num_blocks: int, block_bytes: int) -> None:
        """Make ready to put pieces of this memory's blocks into the peer's, which lie at `address` there."""
        own_bytes = self._memory.shape[1]
        if own_bytes > block_bytes:
            raise NixlFault(f"blocks of {own_bytes} bytes do not fit into {block_bytes}")
        if num_blocks > _MAX_BLOCKS:
            raise NixlFault(f"it has {num_blocks} blocks; at most {_MAX_BLOCKS}")
        with self._library.told("no way there"):
            self._peer = str(_text(self._agent.add_remote_agent(metadata)))
            own = _pieces(self._memory.ctypes.data, len(self._memory), own_bytes, own_bytes)
            theirs = _pieces(address, num_blocks, block_bytes, own_bytes)
            self._lists = (
                self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", own, "DRAM"),
                self._agent.prep_xfer_dlist(self._peer, theirs, "DRAM"),
            )

    def put(self, number: int, sources: Sequence[tuple[int, int]], places: Sequence[int]) -> None:
        """Begin to copy pieces (block id, offset) into the peer's blocks `places`, at the same offsets."""
        assert self._lists is not None, "put before connect"
        per_block = -(-self._memory.shape[1] // MAX_PAYLOAD_BYTES)
        own = [block_id * per_block + offset // MAX_PAYLOAD_BYTES for block_id, offset in sources]
        theirs = [
            block_id * per_block + offset // MAX_PAYLOAD_BYTES
            for block_id, (_, offset) in zip(places, sources, strict=True)
        ]
        with self._library.told("cannot write"):
            handle = self._agent.make_prepped_xfer("WRITE", self._lists[0], own, self._lists[1], theirs)
            self._handles[number] = handle
            state = self._agent.transfer(handle)
        if state == "ERR":
            raise NixlFault("a write failed")

    def progress(self) -> None:
        """Let what a peer has under way towards this agent go on; it needs that on every way but RDMA."""
        with self._library.told("connection lost"):
            self._agent.get_new_notifs()

    def finished(self) -> list[int]:
        """The numbers of those puts that stand in the peer's memory now; each once."""
        done: list[int] = []
        for number, handle in tuple(self._handles.items()):
            with self._library.told("connection lost"):
                state = self._agent.check_xfer_state(handle)
                if state == "DONE":
                    self._agent.release_xfer_handle(handle)
            if state == "ERR":
                raise NixlFault("connection lost: a write failed")
            if state == "DONE":
                del self._handles[number]
                done.append(number)
        return done

    def close(self) -> None:
        """Destroy the agent: behind it neither end of what was under way touches this memory."""
        agent, self._agent = self._agent, None
        for handle in self._handles.values():
            self._try(agent.release_xfer_handle, handle)
        self._handles.clear()
        for handle in self._lists or ():
            self._try(agent.release_dlist_handle, handle)
        self._lists = None
        if self._peer is not None:
            self._try(agent.remove_remote_agent, self._peer)
        self._try(agent.deregister_memory, self._registered)

    def _try(self, call: Callable[[Any], object], what: object) -> None:
        """At the end nothing can be done about a failure: the agent goes, and all that it had with it."""
        try:
            with self._library.told(call.__name__):
                call(what)
        except NixlFault as fault:
            _LOG.info("event=nixl_release_failed reason=%s", fault)


def _num_descriptors_left() -> float:
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        return (inf if most == resource.RLIM_INFINITY else most) - sum(1 for _ in Path("/proc/self/fd").iterdir())
    except OSError:  # none to look with
        return 0


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _find_package() -> str | None:
    return next((name for name in _PACKAGES if importlib.util.find_spec(name) is not None), None)


def _pieces(address: int, num_blocks: int, block_bytes: int, cut_bytes: int) -> npt.NDArray[np.uint64]:
    """[pieces, 3]: address, length and device of the first `cut_bytes` of each block, cut as writes are."""
    offsets = np.arange(0, cut_bytes, MAX_PAYLOAD_BYTES, dtype=np.uint64)
    lengths = np.minimum(MAX_PAYLOAD_BYTES, cut_bytes - offsets).astype(np.uint64)
    blocks = np.uint64(address) + np.arange(num_blocks, dtype=np.uint64) * np.uint64(block_bytes)
    begins = (blocks[:, None] + offsets[None, :]).reshape(-1)
    rows = np.zeros((len(begins), 3), np.uint64)
    rows[:, 0] = begins
    rows[:, 1] = np.tile(lengths, num_blocks)
    return rows


def _text(name: object) -> object:
    return name.decode() if isinstance(name, bytes) else name
