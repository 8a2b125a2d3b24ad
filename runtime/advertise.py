"""By which host others dial this process: told, or found where it listens on every address.

    --advertise HOST          that one
    --host 10.0.0.5           that one
    --host 0.0.0.0, or ::     the address from which this machine speaks to its registry, by the kernel's routes; no packet is sent

An address of loopback is never found: who listens everywhere is meant for other machines, and they would dial themselves.
Not here: who is told, and of which ports (node/process.py).
"""

from __future__ import annotations

import ipaddress
import logging
import re
import socket
import time
from collections.abc import Callable, Sequence
from typing import Final

from runtime.logs import log_event
from runtime.process import is_everywhere

_LOG: Final = logging.getLogger(__name__)
_RETRY_S: Final = 1.0
# As the registry takes it (listing.py), without the brackets of IPv6.
_NAME: Final = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*")

HostPort = tuple[str, int]
FindSource = Callable[[HostPort, bool], str]  # the way to there, and whether an IPv6 address may be taken


class NoAddress(ValueError):
    """Which host others should dial cannot be told, and waiting will not help; the message is one sentence."""


def advertise_problem(host: str, flag: str = "--advertise") -> str | None:
    """What is wrong with `--advertise HOST`, or with another flag's host that others dial, in one sentence; None if nothing is."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        address = None
    if address is None and (not _NAME.fullmatch(host) or re.fullmatch(r"[0-9.]+", host)):
        return f"{flag} {host}: must be a host name or an address, without a port and without brackets"
    if address is not None and (address.is_unspecified or address.is_multicast or "%" in host):
        return f"{flag} {host}: must be one host's address, that others can dial"
    return None


def with_port(host: str, port: int) -> str:
    """HOST:PORT, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> HostPort:
    """HOST:PORT, taken apart."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def known_host(
    name: str,
    host: str,
    towards: Sequence[HostPort],
    find: FindSource | None = None,
    wait: Callable[[float], None] = time.sleep,
) -> str:
    """By which host others dial a process that listens at `host`, and was not told so by --advertise.

    `name`: the process's, for the log. `towards`: where its registries are. While no way leads to any of them (a name that is not
    known yet, a network that is not up yet) this waits, and says so. Raises NoAddress.
    """
    if not is_everywhere(host):
        return host
    if not towards:
        raise NoAddress(f"--host {host}: which address others should dial cannot be told: --advertise HOST says it")
    told: set[str] = set()
    while True:
        for target in towards:
            try:
                found = (find or source_towards)(target, ":" in host)
            except OSError as error:
                reason = f"{with_port(*target)}: {error.strerror}"
                if reason not in told:
                    log_event(_LOG, logging.WARNING, "no_way_yet", node=name, towards=reason)
                told.add(reason)
                continue
            if ipaddress.ip_address(found).is_loopback:
                raise NoAddress(
                    f"--host {host}: the way to {with_port(*target)} is loopback, which other machines cannot dial: "
                    "--advertise HOST says what they should"
                )
            log_event(_LOG, logging.INFO, "advertised", node=name, host=found, towards=with_port(*target))
            return found
        wait(_RETRY_S)


def source_towards(target: HostPort, takes_ipv6: bool) -> str:
    """The address from which this machine would speak to there. Raises OSError."""
    family = socket.AF_UNSPEC if takes_ipv6 else socket.AF_INET
    fault = OSError(0, "has no address")
    try:
        ways = socket.getaddrinfo(*target, family, socket.SOCK_DGRAM)
    except UnicodeError:
        raise OSError(0, "is no host name") from None
    for kind, _, _, _, where in ways:
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(where)  # of UDP: chooses a way, sends nothing
            except OSError as error:
                fault = error
            else:
                return str(probe.getsockname()[0]).partition("%")[0]
    raise fault
