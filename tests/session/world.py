"""A router, a node and the streams between them as one value, for the exhaustive exploration of sessions.

Both ends are the real ones (real_ends.py). What an end does with an input depends on that end alone, so it is worked out once per
(state of the end, input), and a world is a small tuple.

A stream is two queues. Either direction can die at any moment with what is on it, unnoticed, or noticed by either end at any later
moment (half open). A stream that its dialer has given up can still hand its frames to the node, a late Hello among them.

Messages are numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from proto import baton_pb2 as pb
from runtime.session import Peer, State
from runtime.session_book import Admitted
from runtime.session_end import SessionEnd
from runtime.session_events import (
    Called,
    CloseStream,
    Deliver,
    Fate,
    FrameArrived,
    Input,
    Loss,
    Lost,
    OpenStream,
    Output,
    Refused,
    Send,
    StreamEnded,
    Superseded,
)
from tests.copied import Copier
from tests.session.real_ends import NODE_NAME, ROUTER, TIMING, Ends, Node, Router, feed, fire_due, new_node, strike_lost

ENDED: Final = b"ENDED"  # behind the last frame of a stream that was closed
FATES: Final = {fate.name.encode(): fate for fate in Fate}  # the same, by the status that it was closed with


@dataclass(frozen=True)
class Budget:
    """What keeps the joint machine finite."""

    streams: int  # later dials reach nobody
    sessions: int
    from_router: int  # messages given; 3 are one more than may be unacknowledged
    from_node: int


class Stream(NamedTuple):
    session_id: int
    number: int  # of the dialer; also the listener's, with the session's id before it
    up: tuple[bytes, ...] = ()  # router to node
    down: tuple[bytes, ...] = ()
    is_up_alive: bool = True
    is_down_alive: bool = True
    is_dialer_open: bool = True
    listener: str = "waiting"  # for the Hello; then "attached", "closed"

    @property
    def listener_number(self) -> int:
        return self.session_id * 100 + self.number


class World(NamedTuple):
    router: int  # a state of Ends
    node: int | None  # None: crashed
    streams: tuple[Stream, ...] = ()
    num_streams: int = 0
    incarnation: int = 1  # of the node, last started
    given_up: tuple[tuple[int, int], ...] = ()  # (session id, message), in order
    given_down: tuple[tuple[int, int], ...] = ()
    got_up: tuple[tuple[int, int], ...] = ()  # delivered to the node
    got_down: tuple[tuple[int, int], ...] = ()
    lost_at_router: frozenset[int] = frozenset()
    lost_at_node: frozenset[int] = frozenset()


class Cluster:
    """Every move that a world can make."""

    def __init__(self, budget: Budget) -> None:
        self.ends = Ends()
        self._copier = Copier()
        self._refusals: dict[tuple[int, bytes], Fate | None] = {}  # by a node's number and a Hello
        self._budget = budget

    def start(self) -> World:
        router = Router(0.0, 1, 0, None)
        self._next_session(router)
        world = World(self.ends.add(router), self.ends.add(new_node(1)))
        return self._router_does(world, "start", lambda side: [])

    # ---------------------------------------------------------------- moves

    def faults(self, w: World) -> Iterator[World]:
        """What the world does to them, and what they are asked to do."""
        session_id = self.ends.router(w.router).session_id
        if len(w.given_up) < self._budget.from_router and self._router_state(w) in (State.OPEN, State.BROKEN):
            given = w._replace(given_up=(*w.given_up, (session_id, len(w.given_up))))
            message = pb.RouterMessage(cancel=pb.Cancel(key=pb.AttemptKey(attempt=len(w.given_up))))
            yield self._router_hears(given, ("send", len(w.given_up)), Send(message))
        if w.node is not None and len(w.given_down) < self._budget.from_node:
            for end in self.ends.node(w.node).book.sessions():
                number = len(w.given_down)
                given = w._replace(given_down=(*w.given_down, (end.session_id, number)))
                reply = pb.NodeMessage(error=pb.PDError(retry_after_ms=number))
                yield self._node_hears(given, ("send", number), end.session_id, Send(reply))
        for i, s in enumerate(w.streams):
            if s.is_up_alive:
                yield _with(w, i, s._replace(is_up_alive=False, up=()))
            if s.is_down_alive:
                yield _with(w, i, s._replace(is_down_alive=False, down=()))
        if w.node is not None and w.incarnation == 1:
            streams = [s._replace(listener="closed", is_up_alive=False, is_down_alive=False, up=()) for s in w.streams]
            yield _tidy(w._replace(node=None, streams=tuple(streams)))

    def moves(self, w: World) -> Iterator[World]:
        """What happens by itself, sooner or later: frames and ends of streams arrive, time passes, a crashed node is restarted."""
        for i, s in enumerate(w.streams):
            if s.up and s.listener != "closed":
                yield self._arrive_at_node(_with(w, i, s._replace(up=s.up[1:])), i, s.up[0])
            if s.down and s.is_dialer_open:
                yield self._arrive_at_router(_with(w, i, s._replace(down=s.down[1:])), s, s.down[0])
            if not (s.is_up_alive and s.is_down_alive):
                if s.is_dialer_open:
                    yield self._arrive_at_router(w, s, ENDED)
                if s.listener == "attached":
                    yield self._arrive_at_node(w, i, ENDED)
        state = self._router_state(w)
        if state is not None and not (state is State.CONNECTING and w.num_streams >= self._budget.streams):
            yield self._router_does(w, "later", _router_later)
        if w.node is not None and self.ends.node(w.node).book.sessions():
            yield self._node_does(w, "later", _node_later)
        if w.node is None:
            if state is State.BROKEN and (stream := self._router_stream(w)) is not None:
                refused = StreamEnded(stream, Fate.PORT_REFUSED, "")
                yield self._router_hears(w, ("refused", stream), refused)
            yield w._replace(node=self.ends.add(new_node(2)), incarnation=2)
        if w.incarnation == 2 and self.ends.router(w.router).incarnation == 1:
            yield self._router_does(w, "relisted", self._relist)

    # ---------------------------------------------------------------- the router

    def _router_state(self, w: World) -> State | None:
        end = self.ends.router(w.router).end
        return None if end is None else end.state

    def _router_stream(self, w: World) -> int | None:
        end = self.ends.router(w.router).end
        return None if end is None else end.stream

    def _next_session(self, router: Router) -> None:
        router.end = None
        if router.session_id < self._budget.sessions:
            router.session_id += 1
            peer = Peer(NODE_NAME, router.incarnation)
            router.end = SessionEnd(ROUTER, peer, router.session_id, TIMING, dial_at=router.now)

    def _relist(self, side: Router | Node) -> list[tuple[int, Output]]:
        assert isinstance(side, Router)
        side.incarnation = 2
        if side.end is None:
            return []
        out = feed(side.end, Superseded(""), side.now)
        self._next_session(side)
        return out

    def _arrive_at_router(self, w: World, s: Stream, data: bytes) -> World:
        router = self.ends.router(w.router)
        if router.session_id != s.session_id:
            return w
        if data in FATES:
            return self._router_hears(w, (data, s.number), StreamEnded(s.number, FATES[data], ""))
        frame = FrameArrived(s.number, pb.Frame.FromString(data))
        return self._router_hears(w, (data, s.number), frame)

    def _router_hears(self, w: World, what: Hashable, heard: Input) -> World:
        def act(side: Router | Node) -> list[tuple[int, Output]]:
            assert isinstance(side, Router)
            return [] if side.end is None else feed(side.end, heard, side.now)

        return self._router_does(w, what, act)

    def _router_does(self, w: World, what: Hashable, act: Callable[[Router | Node], list[tuple[int, Output]]]) -> World:
        def act_and_go_on(side: Router | Node) -> list[tuple[int, Output]]:
            assert isinstance(side, Router)
            out = act(side)
            if side.end is not None:
                out += [(side.end.session_id, output) for output in fire_due(side.end, side.now)]
                if side.end.state is State.LOST:
                    self._next_session(side)
            return out

        key, outputs, frames = self.ends.apply(w.router, what, act_and_go_on)
        w = w._replace(router=key)
        for session_id, output in outputs:
            match output:
                case OpenStream(number) if w.num_streams < self._budget.streams:
                    streams = w.streams if w.node is None else (*w.streams, Stream(session_id, number))
                    w = w._replace(streams=streams, num_streams=w.num_streams + 1)
                case CloseStream(number):
                    w = _close(w, session_id, number, "dialer", b"")
                case Deliver(message):
                    assert isinstance(message, pb.NodeMessage)
                    assert session_id not in w.lost_at_router, "delivered after LOST"
                    w = w._replace(got_down=(*w.got_down, (session_id, message.error.retry_after_ms)))
                case Lost() | Refused():
                    if isinstance(output, Lost) and output.loss is not Loss.UNKNOWN:
                        assert output.loss is Loss.DIED, "nobody hangs up here"
                        assert w.node is None or w.incarnation == 2, "it has not died"
                    w = w._replace(lost_at_router=w.lost_at_router | {session_id})
                case _:
                    pass
        for session_id, number, data in frames:
            streams = tuple(
                s._replace(up=(*s.up, data))
                if (s.session_id, s.number) == (session_id, number) and s.is_up_alive
                else s
                for s in w.streams
            )
            w = w._replace(streams=streams)
        return _tidy(w)

    # ---------------------------------------------------------------- the node

    def _arrive_at_node(self, w: World, i: int, data: bytes) -> World:
        s = w.streams[i]
        number = s.listener_number
        if s.listener == "attached":
            heard: Input = (
                StreamEnded(number, Fate.ENDED, "")
                if data == ENDED
                else FrameArrived(number, pb.Frame.FromString(data))
            )
            if data == ENDED:
                w = _with(w, i, s._replace(listener="closed", is_down_alive=False, up=()))
            return self._node_hears(w, (data, number), s.session_id, heard)
        if data == ENDED:
            return _tidy(_with(w, i, s._replace(listener="closed", is_down_alive=False, up=())))
        hello = pb.Frame.FromString(data).hello
        assert w.node is not None
        refusal = self._refusal(w.node, data)
        if refusal is not None:
            down = (refusal.name.encode(),) if s.is_down_alive else ()
            return _tidy(_with(w, i, s._replace(listener="closed", down=down)))

        def act(side: Router | Node) -> list[tuple[int, Output]]:
            assert isinstance(side, Node)
            admission = side.book.admit(hello)
            assert isinstance(admission, Admitted)
            out: list[tuple[int, Output]] = []
            if admission.superseded is not None:
                out += feed(admission.superseded, Superseded(""), side.now)
                strike_lost(side, [admission.superseded])
            return out + feed(admission.session, Called(number, hello), side.now)

        return self._node_does(_with(w, i, s._replace(listener="attached")), (data, number), act)

    def _refusal(self, node: int, hello: bytes) -> Fate | None:
        """What a node in this state says to a Hello that it does not admit."""
        if (node, hello) not in self._refusals:
            book = self._copier.copied(self.ends.node(node).book)
            found = book.admit(pb.Frame.FromString(hello).hello)
            self._refusals[node, hello] = None if isinstance(found, Admitted) else found.fate
        return self._refusals[node, hello]

    def _node_hears(self, w: World, what: Hashable, session_id: int, heard: Input) -> World:
        def act(side: Router | Node) -> list[tuple[int, Output]]:
            assert isinstance(side, Node)
            ends = [end for end in side.book.sessions() if end.session_id == session_id]
            return feed(ends[0], heard, side.now) if ends else []

        return self._node_does(w, (what, session_id), act)

    def _node_does(self, w: World, what: Hashable, act: Callable[[Router | Node], list[tuple[int, Output]]]) -> World:
        def act_and_strike(side: Router | Node) -> list[tuple[int, Output]]:
            assert isinstance(side, Node)
            out = act(side)
            for end in side.book.sessions():
                out += [(end.session_id, output) for output in fire_due(end, side.now)]
            strike_lost(side, side.book.sessions())
            return out

        assert w.node is not None
        key, outputs, frames = self.ends.apply(w.node, what, act_and_strike)
        w = w._replace(node=key)
        for session_id, output in outputs:
            match output:
                case CloseStream(number, fate):
                    w = _close(w, session_id, number % 100, "listener", fate.name.encode())
                case Deliver(message):
                    assert isinstance(message, pb.RouterMessage)
                    assert session_id not in w.lost_at_node, "delivered after LOST"
                    w = w._replace(got_up=(*w.got_up, (session_id, message.cancel.key.attempt)))
                case Lost():
                    w = w._replace(lost_at_node=w.lost_at_node | {session_id})
                case _:
                    pass
        for _, number, data in frames:
            streams = tuple(
                s._replace(down=(*s.down, data)) if s.listener_number == number and s.is_down_alive else s
                for s in w.streams
            )
            w = w._replace(streams=streams)
        return _tidy(w)


def _router_later(side: Router | Node) -> list[tuple[int, Output]]:
    assert isinstance(side, Router)
    side.now += 1.0
    return []  # what is due fires behind every move


def _node_later(side: Router | Node) -> list[tuple[int, Output]]:
    assert isinstance(side, Node)
    side.now += 1.0
    return []


def _with(w: World, i: int, s: Stream) -> World:
    return w._replace(streams=(*w.streams[:i], s, *w.streams[i + 1 :]))


def _close(w: World, session_id: int, number: int, side: str, word: bytes) -> World:
    """One side closes; the other learns it behind what is under way, unless that direction dies."""
    streams = []
    for s in w.streams:
        if (s.session_id, s.number) == (session_id, number):
            if side == "dialer":
                up = (*s.up, ENDED) if s.is_up_alive else ()
                s = s._replace(is_dialer_open=False, up=up, down=(), is_up_alive=False, is_down_alive=False)
            elif s.listener != "closed":
                down = (*s.down, word) if s.is_down_alive else ()
                s = s._replace(listener="closed", down=down, up=(), is_up_alive=False, is_down_alive=False)
        streams.append(s)
    return w._replace(streams=tuple(streams))


def _tidy(w: World) -> World:
    """Leave out streams on which nothing can happen any more."""
    return w._replace(
        streams=tuple(
            s for s in w.streams if s.is_dialer_open or s.listener == "attached" or (s.up and s.listener == "waiting")
        ),
    )
