"""The vocabulary of a session's end (session_end.py): what its shell tells it, and what it asks of the shell."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from proto import baton_pb2 as pb

Message = pb.RouterMessage | pb.NodeMessage

# ---------------------------------------------------------------- inputs


class Fate(Enum):
    """Why a stream ended, as far as the shell can tell."""

    ENDED = auto()
    REFUSED = auto()  # there is no such session here
    REPLACED = auto()  # nor such a process: another one has its address
    HUNG_UP = auto()  # the process ends the session in good order
    PORT_REFUSED = auto()  # the plain TCP connect was refused


class Loss(Enum):
    """What a dialer knows of the peer's process when the session with it is lost."""

    DIED = auto()  # nobody listens at its port, or another process has its name or address
    HUNG_UP = auto()  # it said that it ends
    UNKNOWN = auto()  # it is silent, cut off, or alive without the session


@dataclass(frozen=True, slots=True)
class FrameArrived:
    stream: int
    frame: pb.Frame


@dataclass(frozen=True, slots=True)
class StreamEnded:
    stream: int
    fate: Fate
    reason: str


@dataclass(frozen=True, slots=True)
class Called:
    """Listener: a stream whose Hello SessionBook has found to be meant for this session."""

    stream: int
    hello: pb.Hello


@dataclass(frozen=True, slots=True)
class Send:
    message: Message


@dataclass(frozen=True, slots=True)
class Superseded:
    reason: str


@dataclass(frozen=True, slots=True)
class HangUp:
    pass


Input = FrameArrived | StreamEnded | Called | Send | Superseded | HangUp


# ---------------------------------------------------------------- outputs


@dataclass(frozen=True, slots=True)
class OpenStream:
    """Dial; then write what next_frame gives, and feed what comes."""

    stream: int


@dataclass(frozen=True, slots=True)
class CloseStream:
    stream: int
    fate: Fate  # to tell the peer
    reason: str


@dataclass(frozen=True, slots=True)
class WakeWriter:
    """next_frame has something for the attached stream."""


@dataclass(frozen=True, slots=True)
class Deliver:
    message: Message


@dataclass(frozen=True, slots=True)
class LoadArrived:
    load: pb.LoadReport


@dataclass(frozen=True, slots=True)
class Up:
    is_resumed: bool


@dataclass(frozen=True, slots=True)
class Broken:
    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The session never was up, and never will be."""

    reason: str


@dataclass(frozen=True, slots=True)
class Lost:
    reason: str
    loss: Loss  # a listener's: of no meaning


Output = OpenStream | CloseStream | WakeWriter | Deliver | LoadArrived | Up | Broken | Refused | Lost
