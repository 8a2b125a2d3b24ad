"""Which session of a node a Hello belongs to: a new one, one to be resumed, or none. Pure, like session.py.

A router has one session here: with another session_id, or another incarnation under the same name, it has given up the older.

A session that was lost stays lost: its work was cancelled, so a router that did not hear of the loss must not resume it. Such a
Hello can look like a first one (it has received nothing), hence the ids of lost sessions are remembered. The memory is bounded by
count; an id that was pushed out of it is still harmless, because its router has lost that session too, after its own grace.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from proto import baton_pb2 as pb
from runtime.session import Peer, SessionTiming, State
from runtime.session_end import SessionEnd, hello_problem
from runtime.session_events import Fate

MAX_SESSIONS: Final = 256  # routers at a time
MAX_LOST_IDS: Final = 4_096


@dataclass(frozen=True, slots=True)
class Admitted:
    """Feed Superseded to `superseded`, if any, then Called to `session`."""

    session: SessionEnd
    superseded: SessionEnd | None


@dataclass(frozen=True, slots=True)
class NotAdmitted:
    """Close the stream with this fate: unless it is ENDED the router must take the session for lost, else it may try again."""

    reason: str
    fate: Fate


class SessionBook:
    """The sessions of one listener."""

    def __init__(self, me: Peer, timing: SessionTiming) -> None:
        self._me = me
        self._timing = timing
        self._sessions: dict[str, SessionEnd] = {}  # by the router's name; none of them is lost
        self._lost: dict[tuple[str, int], None] = {}  # (router's name, session id), oldest first

    def admit(self, hello: pb.Hello) -> Admitted | NotAdmitted:
        """Find or make the session that this Hello opens."""
        problem = hello_problem(hello, self._me)
        if problem is not None:
            is_for_us = hello.to_incarnation == self._me.incarnation
            return NotAdmitted(problem, Fate.REFUSED if is_for_us else Fate.REPLACED)
        name = hello.peer.name
        if (name, hello.session_id) in self._lost:
            return NotAdmitted("the session was lost here", Fate.REFUSED)
        current = self._sessions.get(name)
        if current is not None and current.session_id == hello.session_id:
            if not current.accepts(hello):
                return NotAdmitted(f"last_received {hello.last_received} was never sent here", Fate.REFUSED)
            return Admitted(current, superseded=None)
        if hello.last_received:
            return NotAdmitted("there is no such session here", Fate.REFUSED)
        if current is None and len(self._sessions) >= MAX_SESSIONS:
            return NotAdmitted(f"{MAX_SESSIONS} routers hold sessions here", Fate.ENDED)
        peer = Peer(name, hello.peer.incarnation)
        session = SessionEnd(self._me, peer, hello.session_id, self._timing, dial_at=None)
        self._sessions[name] = session
        return Admitted(session, superseded=current)

    def strike(self, session: SessionEnd) -> None:
        """Take a lost session out; its id is remembered."""
        assert session.state is State.LOST
        if self._sessions.get(session.peer.name) is session:
            del self._sessions[session.peer.name]
        self._lost[session.peer.name, session.session_id] = None
        if len(self._lost) > MAX_LOST_IDS:
            del self._lost[next(iter(self._lost))]

    def find(self, peer: Peer) -> SessionEnd | None:
        """The live session of this router process."""
        session = self._sessions.get(peer.name)
        return session if session is not None and session.peer == peer else None

    def sessions(self) -> tuple[SessionEnd, ...]:
        """All live sessions."""
        return tuple(self._sessions.values())
