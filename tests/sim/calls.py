"""Unary calls between processes (Reserve, Renew, Release, Register, Deregister): lost, repeated, late, and each with one outcome.

As gRPC has them: a call has a time limit; its answer, None for none, comes once; a request may arrive although its caller has given
up; a call to a closed port fails at once, or, if the caller waits for readiness, tries again until its limit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from google.protobuf.message import Message

from tests.sim.kernel import Kernel, Process
from tests.sim.network import Network

M = TypeVar("M", bound=Message)
Answer = Callable[[Message], None]
Serve = Callable[[Any, Message, Answer], None]  # process, request, how to answer
_RETRY_S = 0.1
_P_LOST = 0.5
_P_REPEATED = 0.7


@dataclass(slots=True, eq=False)
class _Call:
    caller: Process
    host: str
    request: Message
    serve: Serve
    on_outcome: Callable[[Any], None]
    waits: bool
    is_done: bool = False


def copy_of(message: M) -> M:
    """What the receiver of a message gets: nothing that its sender still holds."""
    copied = type(message)()
    copied.CopyFrom(message)
    return copied


class Calls:
    """Every call under way."""

    def __init__(self, kernel: Kernel, network: Network) -> None:
        self._kernel = kernel
        self._network = network
        self._rng = kernel.rng("calls")
        self._lossy_until: dict[frozenset[str], float] = {}
        self._repeating_until: dict[frozenset[str], float] = {}
        self._served: dict[Process, dict[_Call, None]] = {}

    def lose(self, one: str, other: str, seconds: float) -> None:
        """Fault: calls and answers between them are lost, half of them."""
        self._lossy_until[frozenset((one, other))] = self._kernel.now + seconds

    def repeat(self, one: str, other: str, seconds: float) -> None:
        """Fault: requests between them arrive twice, most of them."""
        self._repeating_until[frozenset((one, other))] = self._kernel.now + seconds

    def call(
        self,
        caller: Process,
        host: str,
        request: Message,
        serve: Serve,
        on_outcome: Callable[[Any], None],
        *,
        timeout_s: float,
        waits: bool = False,
    ) -> None:
        """`serve` runs at the host's process; `on_outcome` hears its answer, or None, at the caller. `timeout_s`: its clock."""
        call = _Call(caller, host, request, serve, on_outcome, waits)
        self._kernel.after(caller.seconds(timeout_s), lambda: self._end(call, None), caller)
        self._send(call)

    def fail_all(self, server: Process) -> None:
        """The server has died, and its kernel says so to everybody who waits for it."""
        for call in self._served.pop(server, {}):
            self._network.send(server.host, call.caller.host, lambda call=call: self._outcome(call, None))  # type: ignore[misc]

    def forget_all(self, server: Process) -> None:
        """The server's host is off: nobody says anything."""
        self._served.pop(server, None)

    def _send(self, call: _Call) -> None:
        listening = self._network.find(call.host)
        pair = frozenset((call.caller.host, call.host))
        if not self._is_lost(pair, call, "call"):
            self._network.send(call.caller.host, call.host, lambda: self._arrive(call, listening))
        if self._repeating_until.get(pair, 0.0) > self._kernel.now and self._rng.random() < _P_REPEATED:
            self._tell(call, "repeats", "call")
            again = replace(call, on_outcome=_ignore)  # its answer reaches nobody: the call has one stream
            self._network.send(call.caller.host, call.host, lambda: self._arrive(again, listening))

    def _is_lost(self, pair: frozenset[str], call: _Call, what: str) -> bool:
        is_lost = self._lossy_until.get(pair, 0.0) > self._kernel.now and self._rng.random() < _P_LOST
        if is_lost:
            self._tell(call, "loses", what)
        return is_lost

    def _tell(self, call: _Call, does: str, what: str) -> None:
        self._kernel.count(f"{does} {'an' if what == 'answer' else 'a'} {what}")
        name = type(call.request).__name__.removesuffix("Request")
        self._kernel.tell("NETWORK", does, f"the {what} {name} of {call.caller.label} to {call.host}")

    def _arrive(self, call: _Call, listening: Process | None) -> None:
        """`listening`: the process that the caller was connected with, if with any; another one resets its connection."""
        server = self._network.find(call.host)
        if server is not None and listening in (None, server):
            self._served.setdefault(server, {})[call] = None
            answer = _Once(lambda reply: self._answered(call, server, reply))
            self._kernel.run_on(server, lambda: call.serve(server, copy_of(call.request), answer))
        elif self._network.is_off(call.host):
            pass
        elif call.waits and listening is None:
            self._kernel.after(_RETRY_S, lambda: None if call.is_done else self._send(call), call.caller)
        else:
            self._network.send(call.host, call.caller.host, lambda: self._outcome(call, None))

    def _answered(self, call: _Call, server: Process, reply: Message) -> None:
        self._served.get(server, {}).pop(call, None)
        if not self._is_lost(frozenset((call.caller.host, call.host)), call, "answer"):
            copied = copy_of(reply)
            self._network.send(server.host, call.caller.host, lambda: self._outcome(call, copied))

    def _outcome(self, call: _Call, reply: Message | None) -> None:
        self._kernel.run_on(call.caller, lambda: self._end(call, reply))

    def _end(self, call: _Call, reply: Message | None) -> None:
        if not call.is_done:
            call.is_done = True
            call.on_outcome(reply)


def _ignore(reply: object) -> None:
    """The answer to a repetition."""


class _Once:
    """An answer that may be given once: a second one is a bug of the server."""

    def __init__(self, give: Callable[[Message], None]) -> None:
        self._give: Callable[[Message], None] | None = give

    def __call__(self, reply: Message) -> None:
        give, self._give = self._give, None
        assert give is not None, f"a call was answered twice: {reply}"
        give(reply)
