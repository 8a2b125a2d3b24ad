"""The network: how long everything takes, what does not get through, and what of it keeps its order.

A channel is one direction of a TCP connection: it keeps its order, and what is sent into a partition arrives behind it, as
retransmitted segments do. Whatever else is sent arrives when it does. Nothing is lost here but what a connection loses with its
end; calls are lost in calls.py.

Not here: who is at the other end. A host is a name; it may have a process, refuse (its port is closed) or be silent (it is off).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tests.sim.kernel import Kernel, Process

_SLOWNESS: Final = 30
_SLOWEST_S: Final = 2.5  # what was sent while a way was slow is there before the fault counts as over (world.py)


class Network:
    """Hosts and the ways between them."""

    def __init__(self, kernel: Kernel, kind: str) -> None:
        self._kernel = kernel
        self._kind = kind
        self._rng = kernel.rng("network")
        self._blocked_until: dict[tuple[str, str], float] = {}  # by direction
        self._slow_until: dict[frozenset[str], float] = {}
        self._off_until: dict[str, float] = {}
        self._latest: dict[tuple[str, str], float] = {}  # arrival of what was sent that way
        self._processes: dict[str, Process] = {}  # by host

    # ---------------------------------------------------------------- hosts

    def start(self, process: Process) -> None:
        """Listen on the process's host."""
        self._processes[process.host] = process

    def end(self, process: Process, silent_s: float = 0.0) -> None:
        """Nobody listens there any more, and for so long nobody says so either."""
        if self._processes.get(process.host) is process:
            del self._processes[process.host]
        self._off_until[process.host] = self._kernel.now + silent_s

    def find(self, host: str) -> Process | None:
        """The process that listens on this host."""
        return self._processes.get(host)

    def is_off(self, host: str) -> bool:
        """Whether the host does not even refuse a connection."""
        return self._off_until.get(host, 0.0) > self._kernel.now

    # ---------------------------------------------------------------- faults

    def block(self, source: str, target: str, seconds: float) -> None:
        """Nothing gets from source to target for so long."""
        way = (source, target)
        self._blocked_until[way] = max(self._blocked_until.get(way, 0.0), self._kernel.now + seconds)

    def slow(self, one: str, other: str, seconds: float) -> None:
        """Everything between them takes many times as long."""
        self._slow_until[frozenset((one, other))] = self._kernel.now + seconds

    def blocked_until(self, source: str, target: str) -> float:
        """When something gets through again; an instant that has passed if nothing is in its way."""
        return self._blocked_until.get((source, target), 0.0)

    # ---------------------------------------------------------------- messages

    def delay(self, source: str, target: str) -> float:
        """How long the next message takes, in seconds."""
        rng = self._rng
        if self._kind == "even":
            seconds = rng.uniform(0.0001, 0.0008)
        elif self._kind == "jitter":
            seconds = rng.expovariate(300)
        else:
            seconds = rng.uniform(0.01, 0.35) if rng.random() < 0.1 else rng.expovariate(1000)
        is_slow = self._slow_until and self._slow_until.get(frozenset((source, target)), 0.0) > self._kernel.now
        if is_slow:
            seconds = min(seconds * _SLOWNESS, _SLOWEST_S)
        self._note(source, target, self._kernel.now + seconds)
        return seconds

    def _note(self, source: str, target: str, arrives_at: float) -> None:
        """Count what overtakes something that was sent before it, on another channel."""
        latest = self._latest.get((source, target), 0.0)
        if arrives_at < latest:
            self._kernel.count("overtaken")
        else:
            self._latest[source, target] = arrives_at

    def send(self, source: str, target: str, arrive: Callable[[], None]) -> None:
        """Something that is ordered behind nothing."""
        self._kernel.after(self.delay(source, target), lambda: self.pass_on(source, target, arrive))

    def pass_on(self, source: str, target: str, arrive: Callable[[], None]) -> None:
        """It would arrive now: so it does, or behind the partition."""
        until = self.blocked_until(source, target)
        if until > self._kernel.now:
            self._kernel.count("held up by a partition")
            self._kernel.at(until, lambda: self.pass_on(source, target, arrive))
        else:
            arrive()


class Channel:
    """One direction of a connection, in order. What was sent beyond `limit` messages is lost, once one is set."""

    def __init__(self, kernel: Kernel, network: Network, source: str, target: str) -> None:
        self._kernel = kernel
        self._network = network
        self._source = source
        self._target = target
        self._last_at = 0.0
        self._num_sent = 0
        self._num_arrived = 0
        self._limit: int | None = None

    def send(self, arrive: Callable[[], None]) -> None:
        """Behind everything that was sent before."""
        self._num_sent += 1
        number = self._num_sent
        self._put(lambda: self._arrive(number, arrive))

    def finish(self, arrive: Callable[[], None]) -> None:
        """The connection's end: it arrives behind what still does, whatever is lost."""
        self._put(arrive)

    def lose(self, share: float) -> None:
        """Of what is under way the last `share` is lost, and everything that is sent from now on."""
        under_way = self._num_sent - self._num_arrived
        self._limit = self._num_arrived + round((1 - share) * under_way)

    def _put(self, arrive: Callable[[], None]) -> None:
        at = max(self._last_at, self._kernel.now + self._network.delay(self._source, self._target))
        self._last_at = at
        self._kernel.at(at, lambda: self._network.pass_on(self._source, self._target, arrive))

    def _arrive(self, number: int, arrive: Callable[[], None]) -> None:
        self._num_arrived += 1
        if self._limit is None or number <= self._limit:
            arrive()
        else:
            self._kernel.count("lost with a connection")
