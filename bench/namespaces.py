"""A network of several hosts on this one: each party in a network namespace of its own, all of them joined by one in the middle.

    party 10.77.1.2 --veth-- 10.77.1.1  middle  10.77.2.1 --veth-- 10.77.2.2 party

The middle forwards, and is where the calling thread is while the network stands: its sockets, threads and children are there too.
`cut` makes it drop what two parties send each other, both ways and without a word, as a partition does; `unplug` takes a
party's cable. Linux and root only. Namespaces have no names, so that nothing is left behind however this process ends: they go
with their last descriptor and process.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Final

_CLONE_NEWNET: Final = 0x40000000  # linux/sched.h
_OWN: Final = Path("/proc/thread-self/ns/net")
_JOIN_BOUND_S: Final = 10.0
_PROBE_S: Final = 0.2  # a connection between two namespaces takes well below a millisecond


class Network:
    """Parties by name; made by `network`."""

    def __init__(self, names: Sequence[str], middle: int, namespaces: Sequence[int]) -> None:
        """`middle` and `namespaces` are descriptors of network namespaces."""
        self._middle = middle
        self._namespaces = dict(zip(names, namespaces, strict=True))
        self._numbers = {name: number for number, name in enumerate(names, 1)}
        self._cuts: set[frozenset[str]] = set()
        self._unplugged: set[str] = set()

    def address(self, name: str) -> str:
        """The party's, where the others and the middle reach it."""
        return f"10.77.{self._numbers[name]}.2"

    @contextmanager
    def entered(self, name: str) -> Iterator[None]:
        """The calling thread is in the party's namespace: what it starts there stays there."""
        _set_namespace(self._namespaces[name])
        try:
            yield
        finally:
            _set_namespace(self._middle)

    def cut(self, one: str, other: str) -> None:
        """Drop everything between two parties from now on."""
        assert frozenset((one, other)) not in self._cuts
        self._cuts.add(frozenset((one, other)))
        for words in self._rules(one, other):
            _ip(f"rule add {words}")

    def heal(self, one: str, other: str) -> None:
        """Let it through again."""
        self._cuts.remove(frozenset((one, other)))
        for words in self._rules(one, other):
            _ip(f"rule del {words}")

    def unplug(self, name: str) -> None:
        """Take the party's cable: nobody reaches it, and who tries is told so by the middle."""
        self._unplugged.add(name)
        _ip(f"link set {self._cable(name)} down")

    def plug(self, name: str) -> None:
        """Put it back; returns when it carries."""
        self._unplugged.remove(name)
        _ip(f"link set {self._cable(name)} up")
        self.wait_until_joined(name)

    def wait_until_joined(self, name: str) -> None:
        """The kernel takes up to a second until a new cable carries. Raises OSError."""
        until = time.monotonic() + _JOIN_BOUND_S
        while not _answers(self.address(name)):
            if time.monotonic() > until:
                raise OSError(f"the cable to {name} carries nothing")

    def mend(self) -> None:
        """Undo every cut and unplugging that stands."""
        for pair in list(self._cuts):
            self.heal(*pair)
        for name in list(self._unplugged):
            self.plug(name)

    def reaches(self, one: str, other: str) -> bool:
        """Whether a TCP connection from one party to another's host gets any answer; no answer costs 0.2 s."""
        with self.entered(one):
            return _answers(self.address(other))

    def _rules(self, one: str, other: str) -> list[str]:
        pairs = ((one, other), (other, one))
        return [f"from {self.address(source)} to {self.address(target)} blackhole" for source, target in pairs]

    def _cable(self, name: str) -> str:
        return f"party{self._numbers[name]}"


@contextmanager
def network(names: Sequence[str]) -> Iterator[Network]:
    """A network of these parties; the calling thread is in its middle until the end. At most 250 parties."""
    descriptors = [os.open(_OWN, os.O_RDONLY)]
    try:
        for _ in ("the middle", *names):
            _call("unshare", _CLONE_NEWNET)
            descriptors.append(os.open(_OWN, os.O_RDONLY))
            _ip("link set lo up")
        _, middle, *parties = descriptors
        _set_namespace(middle)
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1", encoding="ascii")
        for number, party in enumerate(parties, 1):
            _join(number, party, middle)
        joined = Network(names, middle, parties)
        for name in names:
            joined.wait_until_joined(name)
        yield joined
    finally:
        _set_namespace(descriptors[0])
        for descriptor in descriptors:
            os.close(descriptor)


def why_not() -> str | None:
    """Why there can be no such network here, as one clause; None if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "the command ip (iproute2) is missing"
    try:
        with network(("one", "other")) as tried:
            for one, other in combinations(("one", "other"), 2):
                if not tried.reaches(one, other):
                    return "the kernel forwards nothing between network namespaces"
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network namespaces do not work here ({error})"
    return None


def _answers(address: str) -> bool:
    """Whether a host lets a connection of the calling thread come about, or refuses it."""
    with socket.socket() as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect((address, 9))  # nobody listens there: a host that is reached refuses
        except ConnectionRefusedError:
            return True
        except OSError:  # silence, or the word of somebody on the way
            return False
    return True


def _join(number: int, party: int, middle: int) -> None:
    """Lay the cable between the middle, where the thread is, and a party."""
    ours, theirs = f"10.77.{number}.1", f"10.77.{number}.2"
    _ip(f"link add party{number} type veth peer name cable netns /proc/{os.getpid()}/fd/{party}")
    _ip(f"addr add {ours}/30 dev party{number}")
    _ip(f"link set party{number} up")
    _set_namespace(party)
    try:
        _ip(f"addr add {theirs}/30 dev cable")
        _ip("link set cable up")
        _ip(f"route add default via {ours}")
    finally:
        _set_namespace(middle)


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True)


def _set_namespace(descriptor: int) -> None:
    _call("setns", descriptor, _CLONE_NEWNET)


def _call(name: str, *arguments: int) -> None:
    """A call of libc that Python 3.11 has no name for; raises OSError. It concerns the calling thread alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
