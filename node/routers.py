"""The routers' side of a node: what they say goes to the core, what the core says goes to them.

A Dispatch that the core cannot act on is answered here with a PD Error that names the field: the router accepted that request,
so it must end. Not here: the session protocol (runtime/session_server.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from node.events import FromRouter, RouterId, RouterLost
from node.grammar_gate import GrammarGate
from node.grammar_threads import Flaw
from node.identity import NodeIdentity
from node.metrics import Counters
from node.pd_error import pd_error
from node.validate import MAX_CHOICE, MAX_ID_BYTES, Bounds, cancel_problem, dispatch_problem, move_problem
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey
from runtime.logs import log_event
from runtime.session import Peer, SessionTiming
from runtime.session_server import SessionServer

LOG = logging.getLogger(__name__)
RETRY_AFTER_MS: Final = 500


class Routers:
    """Holds the sessions with all routers."""

    def __init__(
        self,
        identity: NodeIdentity,
        bounds: Bounds,
        counters: Counters,
        gate: GrammarGate,
        load: Callable[[], pb.LoadReport],
        timing: SessionTiming,
    ) -> None:
        self._name = identity.name
        self._bounds = bounds
        self._counters = counters
        self._gate = gate
        self.sessions = SessionServer(Peer(identity.name, identity.incarnation), self, load, timing)

    def send(self, router: RouterId, message: pb.NodeMessage) -> None:
        """Queue a message on the router's session; dropped if that is lost."""
        self.sessions.send(Peer(*router), message)

    def on_message(self, router: Peer, message: pb.RouterMessage) -> None:
        """Check a message of a session, which came in order and once, and hand it to the core."""
        router_id = RouterId(router.name, router.incarnation)
        match message.WhichOneof("kind"):
            case "dispatch":
                problem = dispatch_problem(message.dispatch, self._bounds)
                if problem is not None:
                    self._refuse(router_id, message.dispatch, problem)
                    return
            case "cancel":
                problem = cancel_problem(message.cancel)
            case "move":
                problem = move_problem(message.move, self._bounds)
            case "cache":
                problem = None  # it can ask for nothing that there is not
            case None:
                problem = "kind: none that this version knows"
        if problem is None:
            self._gate.post_from_router(FromRouter(router_id, message), self._turn_away)
        else:
            self._counters.count("malformed_messages")
            log_event(LOG, logging.WARNING, "message_dropped", router=router.name, node=self._name, problem=problem)

    def on_lost(self, router: Peer) -> None:
        """Tell the core that the session with this router is lost for good."""
        self._gate.post_from_router(RouterLost(RouterId(router.name, router.incarnation)), self._turn_away)

    def _refuse(self, router: RouterId, dispatch: pb.Dispatch, problem: str) -> None:
        self._counters.count("malformed_messages")
        named = {"request": dispatch.request_id[:MAX_ID_BYTES], "router": router.name, "node": self._name}
        log_event(LOG, logging.WARNING, "dispatch_refused", **named, problem=problem)
        # No other node would find it sound.
        self._give_back(router, dispatch, pb.INTERNAL, problem, is_retryable=False)

    def _turn_away(self, event: FromRouter, flaw: Flaw) -> None:
        """A grammar that is asked for cannot be had. The log has what is wrong here; what is wrong with it is the client's."""
        request_id, code = event.message.dispatch.request_id, pb.ErrorCode.Name(flaw.code)
        named = {"request": request_id, "router": event.router.name, "node": self._name}
        is_retryable = flaw.code == pb.BUSY
        told = named | ({"code": code, "reason": flaw.reason} if is_retryable else {"code": code})
        log_event(LOG, logging.INFO, "grammar_refused", **told)
        self._give_back(event.router, event.message.dispatch, flaw.code, flaw.reason, is_retryable=is_retryable)

    def _give_back(
        self,
        router: RouterId,
        dispatch: pb.Dispatch,
        code: pb.ErrorCode.ValueType,
        problem: str,
        *,
        is_retryable: bool,
    ) -> None:
        for branch in dispatch.branches[:MAX_CHOICE] or (pb.Branch(),):
            key = AttemptKey(dispatch.request_id, branch.choice, dispatch.attempt)
            error = pd_error(code, problem, key, self._name, completion_token_ids=tuple(branch.generated_token_ids))
            error.retryable = is_retryable
            error.retry_after_ms = RETRY_AFTER_MS if is_retryable else 0
            # Not from inside the session's own callback.
            asyncio.get_running_loop().call_soon(self.send, router, pb.NodeMessage(error=error))
