"""Everything that reads what others have written, as functions of any bytes: a refusal is fine, an exception is a bug.

The hypothesis tests, `make fuzz` (atheris) and the test of their memory call these. Who sends over a session or a link has shown a
certificate, where there are any; but members break, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeVar, cast

import numpy as np
from google.protobuf.message import DecodeError, Message
from uvicorn.config import Config
from uvicorn.server import ServerState

from connector.kv_record import HEADER_BYTES, KvRecords
from connector.landing import Landing
from connector.link_channel import Channel, ChannelBroken
from connector.transport import NotifyArrived
from connector.writes import IncomingNotice, IncomingWrite, decode, decode_described
from node import events as ev
from node.validate import (
    Bounds,
    cancel_problem,
    dispatch_problem,
    move_problem,
    release_problem,
    renew_problem,
    reserve_problem,
)
from proto import baton_pb2 as pb
from router.api_keys import KeyFileError, read_keys
from router.chat_types import ChatBody
from router.events import FromNode
from router.openai_types import ApiError, CompletionBody, parse_body, prompts_of
from runtime.http_protocol import BoundedHttp, HttpBounds
from runtime.listing import Listing, entry_problem
from runtime.registry_record import decode_gone, decode_record
from runtime.session import Peer, SessionTiming
from runtime.session_end import SessionEnd, hello_problem
from runtime.session_events import Called, FrameArrived
from tests.cores.nodes import MAX_MODEL_LEN, VOCAB_SIZE, Decode
from tests.router.core_world import CoreWorld, ref

M = TypeVar("M", bound=Message)

LEASE_SECRET: Final = b"0123456789abcdef"
MEMORY: Final = np.zeros((8, 64), np.uint8)
_ME: Final = Peer("node", 5)
_ROUTER: Final = Peer("router", 7)
_BOUNDS: Final = Bounds(role=pb.ROLE_DECODE, vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN)


def records(data: bytes) -> Iterator[bytes]:
    """Bytes cut into pieces, each behind its length in three bytes; the last one may be short."""
    at = 0
    while at < len(data):
        length = int.from_bytes(data[at : at + 3], "little")
        yield data[at + 3 : at + 3 + length]
        at += 3 + length


def joined(pieces: list[bytes]) -> bytes:
    """What `records` gives back."""
    return b"".join(len(piece).to_bytes(3, "little") + piece for piece in pieces)


def read_write(data: bytes) -> None:
    """A message of a zmq link, to a lease that is there: nothing lands outside its blocks."""
    memory = np.zeros((8, 64), np.uint8)
    landing = Landing(memory, lambda event: None)
    landing.admit(1, LEASE_SECRET, [2, 5])
    arrived = decode(list(records(data)))
    if isinstance(arrived, IncomingWrite) and (running := landing.begin(arrived, "peer")) is not None:
        landing.finish(running)
    assert not memory[[0, 1, 3, 4, 6, 7]].any()


def read_described_write(data: bytes) -> None:
    """A message of a shm link: it describes bytes of its sender's memory and no others."""
    arrived = decode_described(data, MEMORY)
    if isinstance(arrived, IncomingWrite):
        for span, begin in zip(arrived.spans, arrived.begins, strict=True):
            assert begin >= 0 and begin % MEMORY.shape[1] + span.length <= MEMORY.shape[1]
            assert begin + span.length <= arrived.source.nbytes == MEMORY.nbytes


def read_link_channel(data: bytes) -> None:
    """What a process of this host says on a link's socket."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with near, far:
        near.setblocking(False)
        far.setblocking(False)
        channel = Channel(near)
        for begin in range(0, len(data), 4096):
            far.send(data[begin : begin + 4096])
            try:
                channel.receive()
            except ChannelBroken:
                return


def read_frames(data: bytes) -> None:
    """What either side of a session says, on both of its ends."""
    listener = SessionEnd(_ME, _ROUTER, 9, SessionTiming(), dial_at=None)
    listener.receive(Called(1, pb.Hello()), 0.0)
    dialer = SessionEnd(_ROUTER, _ME, 9, SessionTiming(), dial_at=0.0)
    dialer.tick(0.0)
    for number, piece in enumerate(records(data)):
        if (frame := _parsed(pb.Frame, piece)) is None:
            return
        hello_problem(frame.hello, _ME)
        for end in (listener, dialer):
            end.tick(now := number * 0.01)
            end.receive(FrameArrived(1, frame), now)
            while end.next_frame(1, now) is not None:
                pass


def read_nodes_words(data: bytes) -> None:
    """What nodes tell a router that has given them work."""
    world = CoreWorld.with_nodes("p", "d")
    world.submit("r", num_choices=3, max_tokens=4)
    for number, piece in enumerate(records(data)):
        if (message := _parsed(pb.NodeMessage, piece)) is None:
            return
        for request_key in _keys_in(message):  # else it would hit nobody
            request_key.request_id = request_key.request_id and "r"
        world.feed(FromNode(ref("pd"[number % 2]), message))


def read_peers_words(data: bytes) -> None:
    """What routers and other nodes tell a decode node: checked as the service does, then decided by its core."""
    node = Decode()
    for number, piece in enumerate(records(data)):
        event = _checked(piece[:1], piece[1:], number)
        if event is not None:
            node.core.tick(number * 0.01)
            node.core.receive(event, number * 0.01)
    for now in (1.0, 30.0, 1e6):
        node.core.tick(now)


def read_registration(data: bytes) -> None:
    """What comes to a router's registry, and what lies in Redis."""
    listing = Listing(1.5)
    for number, piece in enumerate(records(data)):
        decode_record(piece[:40], piece)
        decode_gone(piece)
        entry = _parsed(pb.NodeEntry, piece)
        if entry is not None:
            entry_problem(entry)
            listing.register(entry, number * 0.1)
    listing.expire(1e6)


def read_kv_record(data: bytes) -> None:
    """What lies in the KV pool."""
    for secret in (None, b"s" * 32):
        pool = KvRecords(64, secret)
        assert not pool.is_right(b"k" * 32, data[:HEADER_BYTES], memoryview(data[HEADER_BYTES:].ljust(64)[:64]))


def read_body(data: bytes) -> None:
    """The body of a request."""
    for body_type in (CompletionBody, ChatBody):
        with contextlib.suppress(ApiError):
            body = parse_body(body_type, data)
            if isinstance(body, CompletionBody):
                prompts_of(body.prompt)


def read_key_file(data: bytes) -> None:
    """The operator's own file."""
    with contextlib.suppress(KeyFileError):
        read_keys(data, b"s").find(data[:300])


def read_http(data: bytes) -> None:
    """A connection to an HTTP server, in pieces."""
    loop = asyncio.new_event_loop()
    try:
        bounds = HttpBounds(max_head_bytes=4096)
        state = ServerState()
        config = Config(_nothing, log_config=None, lifespan="off", ws="none")
        protocol = BoundedHttp(bounds, lambda reason: None, config, state, {}, loop)
        transport = _Wire()
        protocol.connection_made(cast(asyncio.Transport, transport))
        for piece in records(data):
            if not transport.is_closed and piece:
                protocol.data_received(piece)
        protocol.connection_lost(None)
        for task in (tasks := list(state.tasks)):
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks))
    finally:
        loop.close()


TARGETS: Final[Mapping[str, Callable[[bytes], None]]] = {
    "write": read_write,
    "described-write": read_described_write,
    "link-channel": read_link_channel,
    "frames": read_frames,
    "nodes-words": read_nodes_words,
    "peers-words": read_peers_words,
    "registration": read_registration,
    "kv-record": read_kv_record,
    "body": read_body,
    "key-file": read_key_file,
    "http": read_http,
}


async def _nothing(scope: Any, receive: Any, send: Any) -> None:
    while (await receive())["type"] == "http.request":
        pass


class _Wire:
    """A transport that swallows everything."""

    def __init__(self) -> None:
        self.is_closed = False

    def write(self, data: bytes) -> None:
        assert data

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default


def _parsed(kind: type[M], data: bytes) -> M | None:
    """The message; None for what gRPC would not hand on."""
    try:
        return kind.FromString(data)
    except DecodeError:
        return None


def _keys_in(message: pb.NodeMessage) -> list[pb.AttemptKey]:
    found = [branch.key for branch in message.tokens.branches[:100]]
    for kind in ("error", "wants_move"):
        if message.HasField(kind):
            found.append(getattr(message, kind).key)
    return found


def _checked(kind: bytes, data: bytes, number: int) -> ev.Event | None:
    match int.from_bytes(kind) % 5:
        case 0:
            return _routers_word(data)
        case 1:
            reserve = _parsed(pb.ReserveRequest, data)
            return (reserve and not reserve_problem(reserve, _BOUNDS) and ev.ReserveAsked(number, reserve)) or None
        case 2:
            renew = _parsed(pb.RenewRequest, data)
            return (renew and not renew_problem(renew, _BOUNDS) and ev.RenewAsked(number, renew)) or None
        case 3:
            release = _parsed(pb.ReleaseRequest, data)
            return (release and not release_problem(release, _BOUNDS) and ev.ReleaseAsked(release)) or None
        case _:
            notice = decode([data])
            return NotifyArrived(number, notice.payload) if isinstance(notice, IncomingNotice) else None


def _routers_word(data: bytes) -> ev.Event | None:
    message = _parsed(pb.RouterMessage, data)
    if message is None:
        return None
    problems: dict[str | None, Callable[[], str | None]] = {
        "dispatch": lambda: dispatch_problem(message.dispatch, _BOUNDS),
        "cancel": lambda: cancel_problem(message.cancel),
        "move": lambda: move_problem(message.move, _BOUNDS),
        "cache": lambda: None,
        None: lambda: "no kind",
    }
    if problems[message.WhichOneof("kind")]() is not None:
        return None
    return ev.FromRouter(ev.RouterId(*_ROUTER), message)
