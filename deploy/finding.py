"""How an operator's command finds a node: by its name, at a router's registry or in Redis, or by its gRPC address.

Not here: what it is asked for (drain.py, role.py).
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc.aio
from google.protobuf.message import DecodeError

from proto import baton_pb2 as pb
from proto.baton_pb2_grpc import RegistryStub
from runtime.config import knob
from runtime.credentials import Credentials
from runtime.grpc_reply import parsed
from runtime.redis_address import DEFAULT_NAMESPACE, EMBEDDED, registry_problem
from runtime.registry_client import RegistryUnreachable
from runtime.registry_server import TTL_S
from runtime.unanswered import why_no_grpc, why_no_redis

CALL_TIMEOUT_S: Final = 5.0  # also of a node's silence: it speaks every second
_ADDRESS: Final = re.compile(r"(\[[0-9a-fA-F:]+\]|[^:\s]+):(\d{1,5})")


class FailedError(Exception):
    """The command did not come to its end; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class FindingConfig:
    """What the operator says of the node that is meant."""

    node: str = knob("", "name of the node, or HOST:PORT of its gRPC port; also without the flag", metavar="NODE")
    router: tuple[str, ...] = knob((), "registry of a router, as nodes are given it", metavar="HOST:PORT,…")
    registry: str = knob(
        EMBEDDED,
        "where the node registers; embedded: with that router; or a Redis, redis://HOST:PORT/DB",
        metavar="URL",
    )
    registry_namespace: str | None = knob(
        None, f"the cluster's name in Redis; none: {DEFAULT_NAMESPACE}", metavar="NAME"
    )
    run_dir: Path | None = knob(None, "run directory of a `baton up`, whose router is asked", metavar="DIR")
    tls_dir: Path | None = knob(None, "this host's certificates, in a cluster whose processes have them", metavar="DIR")

    def __post_init__(self) -> None:
        if problem := registry_problem(self.registry, self.registry_namespace):
            raise ValueError(problem)
        if not self.node:
            raise ValueError("NODE is missing: the node's name, such as decode-0, or HOST:PORT of its gRPC port")
        if not self.is_address and not self.knows_registry:
            raise ValueError(
                f"{self.node}: --router HOST:PORT, --registry URL or --run-dir DIR is missing, to find it by its name"
            )
        for address in self.router:
            if not _ADDRESS.fullmatch(address):
                raise ValueError(f"--router {address}: must be HOST:PORT")

    @property
    def is_address(self) -> bool:
        """Whether the node is called where it listens."""
        return _ADDRESS.fullmatch(self.node) is not None

    @property
    def knows_registry(self) -> bool:
        """Whether somebody can be asked who is there."""
        return bool(self.router) or self.run_dir is not None or self.registry != EMBEDDED


async def list_nodes(config: FindingConfig, credentials: Credentials) -> list[pb.NodeEntry]:
    """Everybody who is registered, with any router that answers. Raises ValueError where none does, or a Redis does not."""
    routers = {each: f"--router {each}" for each in config.router}
    registry, namespace, lack = config.registry, config.registry_namespace, ""
    if config.run_dir is not None:
        told, its_namespace = _told_in(config.run_dir)
        namespace = namespace or its_namespace
        if "://" not in told[0]:
            routers = {each: f"--run-dir {config.run_dir}: its router {each}" for each in told} | routers
        elif registry == EMBEDDED:
            registry, lack = told[0], "; cluster.json has it without password and options: with them, give --registry"
    entries = await _listed_at_any(routers, credentials)
    if registry != EMBEDDED:
        entries += await _listed_in_redis(registry, namespace, lack)
    return entries


def _told_in(run_dir: Path) -> tuple[list[str], str | None]:
    """The registries of a `baton up`, at its routers or in Redis, and its name there. Raises ValueError where none runs."""
    try:
        content = json.loads((run_dir / "cluster.json").read_text(encoding="utf-8"))
        return [str(router["registry"]) for router in content["routers"]], content["registry_namespace"]
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"--run-dir {run_dir}: no cluster of `baton up` runs there") from None
    except OSError as error:
        raise ValueError(f"--run-dir {run_dir}: cluster.json cannot be read: {error.strerror}") from None


def find_node(name: str, entries: Sequence[pb.NodeEntry]) -> pb.NodeEntry:
    """The node of this name, or at this address. Raises ValueError if none of these is."""
    for entry in entries:
        if name in (entry.node.name, entry.grpc_address):
            return entry
    known = sorted({entry.node.name for entry in entries})
    raise ValueError(f"{name}: no such node; there are: {', '.join(known) or 'none'}")


async def _listed_at_any(routers: Mapping[str, str], credentials: Credentials) -> list[pb.NodeEntry]:
    """By all that answer: nodes register with each of them, and one may be down. Raises ValueError if none does.

    `routers`: each with where the operator has it from.
    """
    lists = (_listed_at(each, said, credentials) for each, said in routers.items())
    found = await asyncio.gather(*lists, return_exceptions=True)
    faults = [each for each in found if isinstance(each, BaseException)]
    if faults and (len(faults) == len(found) or not all(isinstance(each, ValueError) for each in faults)):
        raise faults[0]
    return [entry for each in found if not isinstance(each, BaseException) for entry in each]


async def _listed_at(router: str, said: str, credentials: Credentials) -> Sequence[pb.NodeEntry]:
    async with credentials.channel(router) as channel:
        try:
            return parsed(await RegistryStub(channel).List(pb.ListRequest(), timeout=CALL_TIMEOUT_S)).nodes
        except grpc.aio.AioRpcError as error:
            raise ValueError(f"{said}: {reason_of(error)}") from None
        except DecodeError as error:
            raise ValueError(f"{said}: {error}") from None


async def _listed_in_redis(url: str, namespace: str | None, lack: str) -> Sequence[pb.NodeEntry]:
    from runtime.redis_store import RedisStore  # heavy: only who uses Redis pays for its client

    store = RedisStore(url, namespace or DEFAULT_NAMESPACE, TTL_S, CALL_TIMEOUT_S)
    try:
        return [row.entry for row in (await store.read()).rows]
    except RegistryUnreachable as error:
        raise ValueError(f"--registry {store.name}: {why_no_redis(str(error))}{lack}") from None
    finally:
        await store.hang_up()


def reason_of(error: grpc.aio.AioRpcError) -> str:
    """What a call failed of, in some words."""
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return why_no_grpc(error.details() or "")
    if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
        return error.details() or ""  # a sentence of the node's
    return f"{error.code().name} {error.details()}"
