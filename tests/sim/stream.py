"""One stream of a session: a TCP connection with a gRPC stream on it, from a router's dial until both ends have let go of it.

Either direction keeps its order. The stream can break without a word (half open): then each end finds out for itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from proto import baton_pb2 as pb
from runtime.session_events import Fate
from tests.sim.kernel import Kernel, Process
from tests.sim.network import Channel, Network


class DialerSide(Protocol):
    """What the router's end of a stream hears."""

    def connected(self, stream: Stream) -> None:
        """The node's kernel has taken the connection."""

    def frame_came(self, stream: Stream, frame: pb.Frame) -> None:
        """In order."""

    def ended(self, stream: Stream, fate: Fate, reason: str) -> None:
        """Nothing follows."""


class ListenerSide(Protocol):
    """What the node's end of a stream hears."""

    def frame_came(self, stream: Stream, frame: pb.Frame) -> None:
        """In order; the first one should be a Hello."""

    def ended(self, stream: Stream, reason: str) -> None:
        """Nothing follows."""


@dataclass(frozen=True, slots=True)
class Wire:
    """What a stream is made on."""

    kernel: Kernel
    network: Network
    find_listener: Callable[[Process], ListenerSide]


class Stream:
    """Made by dialing."""

    def __init__(self, wire: Wire, router: Process, dialer: DialerSide, number: int, host: str) -> None:
        """`number` is the dialer's own; it dials `host`."""
        self._wire = wire
        self.number = number
        self.router = router
        self.host = host
        self.node: Process | None = None  # who took the connection
        self.is_connected = False  # as far as the router knows
        self.is_dialer_open = True
        self.is_listener_open = False
        self.is_cut = False
        self._dialer = dialer
        self._up = Channel(wire.kernel, wire.network, router.host, host)
        self._down = Channel(wire.kernel, wire.network, host, router.host)
        wire.network.send(router.host, host, self._knock)

    # ---------------------------------------------------------------- the dial

    def _knock(self) -> None:
        network = self._wire.network
        node = network.find(self.host)
        if node is not None:
            self.node = node
            self.is_listener_open = True
            network.send(self.host, self.router.host, lambda: self._at_dialer(self._connected))
        elif not network.is_off(self.host):
            network.send(self.host, self.router.host, lambda: self._end_dialer(Fate.PORT_REFUSED, "refused"))

    def _connected(self) -> None:
        self.is_connected = True
        self._dialer.connected(self)

    # ---------------------------------------------------------------- frames

    def send_up(self, frame: pb.Frame) -> None:
        """From the router."""
        self._up.send(lambda: self._arrive_up(frame))

    def send_down(self, frame: pb.Frame) -> None:
        """From the node."""
        self._down.send(lambda: self._at_dialer(lambda: self._dialer.frame_came(self, frame)))

    def _arrive_up(self, frame: pb.Frame) -> None:
        node = self.node
        if node is None:
            return
        if not node.is_alive:  # nobody has this connection: its kernel says so, if there is one
            if not self._wire.network.is_off(self.host):
                self._down.finish(lambda: self._end_dialer(Fate.ENDED, "connection reset"))
            return

        def take() -> None:
            if self.is_listener_open:
                self._wire.find_listener(node).frame_came(self, frame)

        self._wire.kernel.run_on(node, take)

    def _at_dialer(self, act: Callable[[], None]) -> None:
        def take() -> None:
            if self.is_dialer_open:
                act()

        self._wire.kernel.run_on(self.router, take)

    # ---------------------------------------------------------------- ends

    def close_by_dialer(self) -> None:
        """The router lets go of it: what it has sent still arrives, then the end."""
        if self.is_dialer_open:
            self.is_dialer_open = False
            if not self.is_cut:
                self._up.finish(lambda: self._end_listener("the router closed the stream"))

    def close_by_listener(self, fate: Fate, reason: str) -> None:
        """The node ends it, with a status that the router reads."""
        if self.is_listener_open:
            self.is_listener_open = False
            if not self.is_cut:
                self._down.finish(lambda: self._end_dialer(fate, reason))

    def cut(self, tells_router: bool, tells_node: bool, share_lost: float = 1.0) -> None:
        """The connection breaks; whoever is told hears of it a moment later."""
        self.is_cut = True
        self._up.lose(share_lost)
        self._down.lose(share_lost)
        if tells_router:
            self._down.finish(lambda: self._end_dialer(Fate.ENDED, "connection reset"))
        if tells_node:
            self._up.finish(lambda: self._end_listener("connection reset"))

    def end_died(self, process: Process, says_so: bool, share_lost: float) -> None:
        """The process at one end is gone; what it had sent last may be lost with it."""
        if process is self.router:
            self.is_dialer_open = False
            self._up.lose(share_lost)
            if says_so:
                self._up.finish(lambda: self._end_listener("connection reset"))
        else:
            self.is_listener_open = False
            self._down.lose(share_lost)
            if says_so:
                self._down.finish(lambda: self._end_dialer(Fate.ENDED, "connection reset"))

    def _end_dialer(self, fate: Fate, reason: str) -> None:
        def end() -> None:
            self.is_dialer_open = False
            self._dialer.ended(self, fate, reason)

        self._at_dialer(end)

    def _end_listener(self, reason: str) -> None:
        node = self.node
        if node is None:
            return

        def end() -> None:
            if self.is_listener_open:
                self.is_listener_open = False
                self._wire.find_listener(node).ended(self, reason)

        self._wire.kernel.run_on(node, end)
