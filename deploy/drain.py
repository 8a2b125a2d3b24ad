"""`baton drain NODE`: ask a node to end without a loss, show how far it is, and come back when its process has gone.

The node is found by its name, at a router's registry, or called at its gRPC address. Draining is the node's business: who
interrupts this command stops nothing. Not here: what draining is (node/ending.py).
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
import grpc.aio

from proto import baton_pb2 as pb
from proto.baton_pb2_grpc import NodeStub, RegistryStub
from runtime.config import knob, load, silence_grpc
from runtime.credentials import Credentials
from runtime.process import fatal
from runtime.redis_address import DEFAULT_NAMESPACE, EMBEDDED, registry_problem
from runtime.registry_client import RegistryUnreachable
from runtime.registry_server import TTL_S

CALL_TIMEOUT_S: Final = 5.0  # also of a node's silence: it speaks every second
END_TIMEOUT_S: Final = 10.0  # from the node's last word until its port is closed
END_POLL_S: Final = 0.02
_ADDRESS: Final = re.compile(r"(\[[0-9a-fA-F:]+\]|[^:\s]+):(\d{1,5})")
DESCRIPTION: Final = """\
Drain a node: it takes no new work, moves what it runs to other nodes, KV and all, waits until what it lends has been
taken, and ends with exit code 0. No request fails, and nothing is computed twice where another node has room.

  baton drain decode-0 --router 127.0.0.1:8001    by its name, as the router lists it
  baton drain decode-0 --run-dir run              the same, in a cluster that `baton up` started
  baton drain 10.0.0.7:5001                       by its gRPC address (its log's node_ready line and its ready file have it)

SIGTERM does the same to a node, with its own --drain-timeout-s. To restart a cluster node by node: drain one, start it
again under its name, wait until the router's /ready answers 200, go on with the next."""


@dataclass(frozen=True, slots=True)
class DrainConfig:
    """What the operator says."""

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
    timeout_s: float | None = knob(
        None,
        "seconds until what is left is given up, and computed again elsewhere; none: the node's --drain-timeout-s",
        low=0,
        high=86_400,
    )
    tls_dir: Path | None = knob(None, "this host's certificates, in a cluster whose processes have them", metavar="DIR")

    def __post_init__(self) -> None:
        if problem := registry_problem(self.registry, self.registry_namespace):
            raise ValueError(problem)
        if not self.node:
            raise ValueError(
                "NODE is missing: the node's name, as in baton drain decode-0, or HOST:PORT of its gRPC port"
            )
        is_found = self.router or self.run_dir is not None or self.registry != EMBEDDED
        if not _ADDRESS.fullmatch(self.node) and not is_found:
            raise ValueError(f"{self.node}: --router HOST:PORT or --run-dir DIR is missing, to find it by its name")
        for address in self.router:
            if not _ADDRESS.fullmatch(address):
                raise ValueError(f"--router {address}: must be HOST:PORT")

    @property
    def routers(self) -> tuple[str, ...]:
        """Whose registries to ask for the node's address. Raises ValueError where the run directory does not say."""
        if self.run_dir is None:
            return self.router
        try:
            content = json.loads((self.run_dir / "cluster.json").read_text(encoding="utf-8"))
            return (*self.router, str(content["router"]["registry"]))
        except (OSError, ValueError, KeyError, TypeError):
            raise ValueError(f"--run-dir {self.run_dir}: no cluster of `baton up` runs there") from None


class _Failed(Exception):
    """The command did not come to its end; the message is one sentence."""


def main(argv: Sequence[str] | None = None) -> int:
    """Drain a node; 0 once it has ended, 1 if it did otherwise, 2 for what the operator can mend."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and not words[0].startswith("-"):
        words.insert(0, "--node")
    config = load(DrainConfig, "baton drain", DESCRIPTION, words)
    silence_grpc()
    try:
        asyncio.run(_drain(config))
    except ValueError as error:
        fatal(f"baton drain: {error}")
    except _Failed as error:
        sys.stderr.write(f"baton drain: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write(f"baton drain: {config.node} goes on draining\n")
        return 1
    return 0


async def _drain(config: DrainConfig) -> None:
    credentials = Credentials(config.tls_dir)
    if _ADDRESS.fullmatch(config.node):
        address, incarnation = config.node, 0
    else:
        entry = await _find(config, credentials)
        address, incarnation = entry.grpc_address, entry.node.incarnation
    request = pb.DrainRequest(to_incarnation=incarnation)
    if config.timeout_s is not None:
        request.timeout_ms = round(config.timeout_s * 1000)
    was_cut_short = await _watch(config.node, address, request, credentials)
    await _until_gone(config.node, address)
    ending = "has ended; its time was over, and what was left goes on elsewhere" if was_cut_short else "has drained"
    sys.stdout.write(f"baton drain: {config.node} {ending}\n")


async def _find(config: DrainConfig, credentials: Credentials) -> pb.NodeEntry:
    """The node of this name; ValueError if no registry has it."""
    entries = [entry for address in config.routers for entry in await _listed_at(address, credentials)]
    if config.registry != EMBEDDED:
        entries += await _listed_in_redis(config.registry, config.registry_namespace)
    for entry in entries:
        if entry.node.name == config.node:
            return entry
    known = sorted({entry.node.name for entry in entries})
    raise ValueError(f"{config.node}: no such node; there are: {', '.join(known) or 'none'}")


async def _listed_at(router: str, credentials: Credentials) -> Sequence[pb.NodeEntry]:
    async with credentials.channel(router) as channel:
        try:
            return (await RegistryStub(channel).List(pb.ListRequest(), timeout=CALL_TIMEOUT_S)).nodes
        except grpc.aio.AioRpcError as error:
            raise ValueError(f"--router {router}: {_reason(error)}") from None


async def _listed_in_redis(url: str, namespace: str | None) -> Sequence[pb.NodeEntry]:
    from runtime.redis_store import RedisStore  # heavy: only who uses Redis pays for its client

    store = RedisStore(url, namespace or DEFAULT_NAMESPACE, TTL_S)
    try:
        return [row.entry for row in (await store.read()).rows]
    except RegistryUnreachable as error:
        raise ValueError(f"--registry {store.name}: cannot be read: {error}") from None
    finally:
        await store.hang_up()


async def _watch(name: str, address: str, request: pb.DrainRequest, credentials: Credentials) -> bool:
    """Print how far the node is until its last word; whether it had to give something up."""
    shown = ""
    async with credentials.channel(address) as channel:
        call = NodeStub(channel).Drain(request)
        try:
            while True:
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    progress = await call.read()
                if not isinstance(progress, pb.DrainProgress):
                    raise _Failed(f"{name} at {address} hung up before it had drained")
                if progress.has_ended:
                    return progress.was_cut_short
                left = f"{progress.attempts} attempts and {progress.leases} leases left"
                if left != shown:
                    shown = left
                    sys.stdout.write(f"baton drain: {name}: {left}, {progress.ms_left / 1000:.0f} s\n")
                    sys.stdout.flush()
        except TimeoutError:
            raise _Failed(f"{name} at {address} has been silent for {CALL_TIMEOUT_S:g} s") from None
        except grpc.aio.AioRpcError as error:
            if shown:
                raise _Failed(f"{name} at {address} ended before it had drained: {_reason(error)}") from None
            raise ValueError(f"{name}: {_reason(error)}") from None


def _reason(error: grpc.aio.AioRpcError) -> str:
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return "nobody answers there"
    return f"{error.code().name} {error.details()}"


async def _until_gone(name: str, address: str) -> None:
    """Wait until nobody listens at the address: its name and ports are free for the next process."""
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + END_TIMEOUT_S
    while loop.time() < give_up_at:
        try:
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port), family=socket.AF_UNSPEC)
        except OSError:
            return
        writer.close()
        await asyncio.sleep(END_POLL_S)
    raise _Failed(f"{name} has drained, but still listens at {address}")


if __name__ == "__main__":
    sys.exit(main())
