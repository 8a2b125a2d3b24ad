"""Which registries a node registers with: those of its routers, or the one in Redis that they share."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.advertise import HostPort, split_address
from runtime.credentials import NO_CREDENTIALS, Credentials
from runtime.redis_address import DEFAULT_NAMESPACE, EMBEDDED, server_of
from runtime.registry_client import EmbeddedRegistry, Registry
from runtime.registry_server import TTL_S


def choose_registries(
    registry: str, namespace: str | None, routers: Sequence[str], credentials: Credentials = NO_CREDENTIALS
) -> list[Registry]:
    """As the knobs say, which have no registry_problem; `routers`: host:port of each embedded one."""
    if registry == EMBEDDED:
        return [EmbeddedRegistry(router, credentials) for router in routers]
    from runtime.redis_store import RedisStore  # heavy: only who uses Redis pays for its client

    return [RedisStore(registry, namespace or DEFAULT_NAMESPACE, TTL_S)]


def registry_servers(registry: str, routers: Sequence[str]) -> list[HostPort]:
    """Where those are; none for a Redis behind a socket of this machine."""
    if registry == EMBEDDED:
        return [split_address(router) for router in routers]
    server = server_of(registry)
    return [] if server is None else [server]
