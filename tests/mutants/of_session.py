"""Bugs of the session between router and node, and of the registry's list."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_END: Final = ("tests/session/test_session_end.py",)
_TABLE: Final = ("tests/session/test_table.py",)
_LISTING: Final = ("tests/registry/test_listing.py",)

MUTANTS: Final = (
    Mutant(
        "resend-not-deduplicated",
        "A message that is sent again on a new stream is delivered a second time.",
        "runtime/session_end.py",
        "        if frame.seq <= self._received:\n            return self._step(Event.REPEAT, now)\n",
        "",
        _END,
    ),
    Mutant(
        "resend-forgotten",
        "What was written on a stream that broke is not sent again.",
        "runtime/session_end.py",
        "        self._cursor = self._acked + 1\n        self._beat_at",
        "        self._beat_at",
        _END,
    ),
    Mutant(
        "hello-does-not-acknowledge",
        "What the peer's Hello says it has is sent again all the same.",
        "runtime/session_end.py",
        "        self._trim(hello.last_received)\n        return",
        "        return",
        _END,
    ),
    Mutant(
        "gap-accepted",
        "A message that skips a number is delivered.",
        "runtime/session_end.py",
        "if frame.seq > self._received + 1:",
        "if frame.seq > self._received + 2:",
        _END,
    ),
    Mutant(
        "hello-for-another-incarnation",
        "A restarted node takes a session that was meant for the process before it.",
        "runtime/session_end.py",
        "if hello.to_incarnation != me.incarnation:",
        "if not hello.to_incarnation:",
        _END,
    ),
    Mutant(
        "answer-of-another-incarnation",
        "A router takes a restarted node for the one that it had a session with.",
        "runtime/session_end.py",
        "if problem is None and Peer(hello.peer.name, hello.peer.incarnation) != self.peer:",
        "if problem is None and hello.peer.name != self.peer.name:",
        _END,
    ),
    Mutant(
        "own-absence-is-silence",
        "A loop that was held up takes its own absence for the peer's silence.",
        "runtime/session_end.py",
        "            self._heard_at += now - deadline + timing.late_s\n",
        "            pass\n",
        _END,
    ),
    Mutant(
        "grace-never-ends",
        "A session whose peer is silent is never lost, and its work is never freed.",
        "runtime/session_end.py",
        "if self.state in _DOWN and now >= self._heard_at + timing.grace_s:",
        "if self.state in _DOWN and now >= self._attached_at + 1000 * timing.grace_s:",
        _END,
    ),
    Mutant(
        "lost-session-keeps-its-messages",
        "A session that is lost keeps what it could not send.",
        "runtime/session_end.py",
        "            self._kept.clear()\n            self._kept_bytes = 0\n",
        "",
        _END,
    ),
    Mutant(
        "buffer-unbounded-in-bytes",
        "Unacknowledged messages are bounded in number, not in bytes.",
        "runtime/session_end.py",
        " or self._kept_bytes + size > timing.max_unacked_bytes:",
        ":",
        _END,
    ),
    Mutant(
        "lost-session-resumed",
        "A router that did not hear of the loss resumes a session whose work was cancelled.",
        "runtime/session_book.py",
        "if (name, hello.session_id) in self._lost:",
        "if (name, hello.session_id) in self._sessions:",
        _END,
    ),
    Mutant(
        "old-session-not-superseded",
        "A router's new session leaves its old one, and that one's work, alive.",
        "runtime/session_book.py",
        "return Admitted(session, superseded=current)",
        "return Admitted(session, superseded=None)",
        _END,
    ),
    Mutant(
        "loss-not-reported",
        "A detached session that is lost is not reported, so its router's work runs on.",
        "runtime/session.py",
        "(S.DETACHED, E.GRACE_OVER): (S.LOST, (A.REPORT_LOST,)),",
        "(S.DETACHED, E.GRACE_OVER): (S.LOST, ()),",
        _TABLE,
    ),
    Mutant(
        "delivered-without-acknowledgement",
        "A delivered message is never acknowledged, and the peer's buffer runs over.",
        "runtime/session.py",
        "(S.ATTACHED, E.MESSAGE): (S.ATTACHED, (A.DELIVER, A.ACK_SOON)),",
        "(S.ATTACHED, E.MESSAGE): (S.ATTACHED, (A.DELIVER,)),",
        _END,
    ),
    Mutant(
        "sent-while-broken-is-lost",
        "What is given to a session whose stream is broken is dropped.",
        "runtime/session.py",
        "(S.BROKEN, E.SEND): (S.BROKEN, (A.KEEP,)),",
        "(S.BROKEN, E.SEND): (S.BROKEN, ()),",
        _END,
    ),
    Mutant(
        "replaced-process-comes-back",
        "A process that was replaced registers again and takes the name back.",
        "runtime/listing.py",
        "if peer in self._gone:",
        "if peer in self._silent:",
        _LISTING,
    ),
    Mutant(
        "late-word-unlists-the-successor",
        "A Register of a process that was replaced, on its way since before, takes the name back.",
        "runtime/listing.py",
        "if any(0 < entry.started_ms < other.started_ms for other in others.values()):",
        "if False:",
        _LISTING,
    ),
    Mutant(
        "late-word-takes-a-drain-back",
        "A Register on its way since before a node began to drain lists it as one that takes work.",
        "runtime/listing.py",
        "if known is not None and known.draining and _peer(known) == peer and not entry.draining:",
        "if False:",
        _LISTING,
    ),
    Mutant(
        "last-words-unsaid",
        "A router that ends in good order hangs up before its Cancels are out: nodes work on for the session's grace.",
        "runtime/session_dialer.py",
        "while any(map(_has_to_say, self._lines.values())) and",
        "while False and",
        ("tests/session/test_streams.py", "tests/router/test_draining.py"),
    ),
    Mutant(
        "silent-node-stays-listed",
        "A node that went silent stays on the list.",
        "runtime/listing.py",
        "if now >= expires_at]",
        "if now >= expires_at + 3600]",
        _LISTING,
    ),
)
