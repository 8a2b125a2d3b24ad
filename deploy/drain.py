"""`baton drain NODE`: ask a node to end without a loss, show how far it is, and come back when its process has gone.

The node is found by its name, at a router's registry, or called at its gRPC address. Draining is the node's business: who
interrupts this command stops nothing. Not here: what draining is (node/ending.py).
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc
import grpc.aio

from deploy.finding import CALL_TIMEOUT_S, FailedError, FindingConfig, find_node, list_nodes, reason_of
from proto import baton_pb2 as pb
from proto.baton_pb2_grpc import NodeStub
from runtime.command_words import as_flags
from runtime.config import knob, load
from runtime.credentials import Credentials
from runtime.process import fatal, run_async

END_TIMEOUT_S: Final = 10.0  # from the node's last word until its port is closed, beside what it may take for a KV pool
END_POLL_S: Final = 0.02
DESCRIPTION: Final = """\
Drain a node: it takes no new work, moves what it runs to other nodes, KV and all, waits until what it lends has been
taken, and ends with exit code 0. No request fails, and nothing is computed twice where another node has room.

  baton drain decode-0 --router 127.0.0.1:8001    by its name, as the router lists it
  baton drain decode-0 --run-dir run              the same, in a cluster that `baton up` started
  baton drain 10.0.0.7:5001                       by its gRPC address (its log's node_ready line and its ready file have it)

SIGTERM does the same to a node, with its own --drain-timeout-s. To restart a cluster node by node: drain one, start it
again under its name, wait until the router's /ready answers 200, go on with the next."""


@dataclass(frozen=True, slots=True)
class DrainConfig(FindingConfig):
    """What the operator says."""

    timeout_s: float | None = knob(
        None,
        "seconds until what is left is given up, and computed again elsewhere; none: the node's --drain-timeout-s",
        low=0,
        high=86_400,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Drain a node; 0 once it has ended, 1 if it did otherwise, 2 for what the operator can mend."""
    words = list(sys.argv[1:] if argv is None else argv)
    config = load(DrainConfig, "baton drain", DESCRIPTION, as_flags(words, ("--node",)))
    try:
        run_async(_drain(config))
    except ValueError as error:
        fatal(f"baton drain: {error}")
    except FailedError as error:
        sys.stderr.write(f"baton drain: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write(f"baton drain: {config.node} goes on draining\n")
        return 1
    return 0


async def _drain(config: DrainConfig) -> None:
    credentials = Credentials(config.tls_dir)
    if config.is_address:
        address, incarnation = config.node, 0
    else:
        entry = find_node(config.node, await list_nodes(config, credentials))
        address, incarnation = entry.grpc_address, entry.node.incarnation
    request = pb.DrainRequest(to_incarnation=incarnation)
    if config.timeout_s is not None:
        request.timeout_ms = round(config.timeout_s * 1000)
    async with credentials.channel(address) as channel:
        last, seconds_left = await watch("drain", config.node, address, NodeStub(channel).Drain(request))
    await _until_gone(config.node, address, END_TIMEOUT_S + seconds_left)
    ending = "has drained"
    if last.was_cut_short:
        ending = "has ended; its time was over, and what was left goes on elsewhere"
    sys.stdout.write(f"baton drain: {config.node} {ending}\n")


async def watch(
    command: str, name: str, address: str, call: grpc.aio.UnaryStreamCall[Any, pb.DrainProgress]
) -> tuple[pb.DrainProgress, float]:
    """Print how far the node is, until its last word: that, and the seconds that it had left then, at most.

    Raises ValueError if it does not begin, FailedError if it does not end.
    """
    shown, seconds_left = "", 0.0
    try:
        while True:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                progress = await call.read()
            if not isinstance(progress, pb.DrainProgress):
                raise FailedError(f"{name} at {address} hung up before it had drained")
            if progress.has_ended or progress.has_changed:
                return progress, seconds_left
            seconds_left = progress.ms_left / 1000
            left = f"{progress.attempts} attempts and {progress.leases} leases left"
            if left != shown:
                shown = left
                sys.stdout.write(f"baton {command}: {name}: {left}, {seconds_left:.0f} s\n")
                sys.stdout.flush()
    except TimeoutError:
        raise FailedError(f"{name} at {address} has been silent for {CALL_TIMEOUT_S:g} s") from None
    except grpc.aio.AioRpcError as error:
        if shown:
            raise FailedError(f"{name} at {address} ended before it had drained: {reason_of(error)}") from None
        raise ValueError(f"{name}: {reason_of(error)}") from None


async def _until_gone(name: str, address: str, timeout_s: float) -> None:
    """Wait until nobody listens at the address: its name and ports are free for the next process.

    Behind its last word a node writes what it has staged for a KV pool, for as long as its drain may still take.
    """
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + timeout_s
    while loop.time() < give_up_at:
        try:
            # A shorter silence says nothing of the other side: this process may have been late itself.
            async with asyncio.timeout(max(give_up_at - loop.time(), END_TIMEOUT_S)):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port), family=socket.AF_UNSPEC)
        except OSError:  # refused; or nobody says anything, of whose container not even the address is left
            return
        writer.close()
        await asyncio.sleep(END_POLL_S)
    raise FailedError(f"{name} has drained, but still listens at {address}")


if __name__ == "__main__":
    sys.exit(main())
