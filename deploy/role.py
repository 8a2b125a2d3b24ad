"""`baton role NODE prefill|decode|mixed`: have a node drain and serve in another role; show how far it is until it does.

The process stays, and its model in its memory. The change is the node's business: who interrupts this command stops nothing. Not
here: what draining is (node/ending.py), what a change replaces (node/incarnation.py).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from deploy.drain import watch
from deploy.finding import FailedError, FindingConfig, find_node, list_nodes
from proto import baton_pb2 as pb
from proto.baton_pb2_grpc import NodeStub
from runtime.command_words import as_flags
from runtime.config import knob, load
from runtime.credentials import Credentials
from runtime.process import fatal, run_async

ROLES: Final = {"prefill": pb.ROLE_PREFILL, "decode": pb.ROLE_DECODE, "mixed": pb.ROLE_MIXED}
DESCRIPTION: Final = """\
Change a node's role without restarting it: it takes no new work, moves what it runs to other nodes, KV and all, waits until
what it lends has been taken, and then serves in the new role, with its model and its prefix cache still in memory, at the
same addresses. No request fails.

  baton role decode-0 prefill --router 127.0.0.1:8001    by its name, as the router lists it; the name stays
  baton role decode-0 mixed --run-dir run                the same, in a cluster that `baton up` started
  baton role 10.0.0.7:5001 decode                        by its gRPC address

The last node that computes prompts, or that decodes, is not changed without --force: meanwhile requests wait, for the
routers' --no-nodes-grace-s at most, and then they are turned away."""


@dataclass(frozen=True, slots=True)
class RoleConfig(FindingConfig):
    """What the operator says."""

    role: Literal["prefill", "decode", "mixed"] | None = knob(None, "what it is to be; also without the flag")
    timeout_s: float | None = knob(
        None,
        "seconds until what is left is given up, and computed again elsewhere; none: the node's --drain-timeout-s",
        low=0,
        high=86_400,
    )
    force: Literal["on", "off"] = knob("off", "change it although nobody else does what it does now")

    def __post_init__(self) -> None:
        FindingConfig.__post_init__(self)
        if self.role is None:
            raise ValueError("the role is missing: prefill, decode or mixed, as in baton role decode-0 prefill")


def find_lack(node: pb.NodeEntry, entries: Sequence[pb.NodeEntry]) -> str | None:
    """What nobody would do any more while this node changes its role, as a verb; None: nothing that it does now.

    Who has another fingerprint is no help, and who drains is as good as gone. A decode node that may compute prompts itself does so
    for all while there is no prefill node. What nobody does now, this one included, is no reason: a change may be what mends that.
    """
    others = [
        each
        for each in entries
        if each.node.name != node.node.name and not each.draining and each.fingerprint == node.fingerprint
    ]
    if not any(map(_decodes, others)):
        return "decodes" if _decodes(node) else None
    if not any(map(_prefills, others)):
        return "computes prompts" if _prefills(node) else None
    return None


def _decodes(node: pb.NodeEntry) -> bool:
    return node.role in (pb.ROLE_DECODE, pb.ROLE_MIXED)


def _prefills(node: pb.NodeEntry) -> bool:
    return node.role in (pb.ROLE_PREFILL, pb.ROLE_MIXED) or node.local_prefill


def main(argv: Sequence[str] | None = None) -> int:
    """Change a node's role; 0 once it serves in it, 1 if it came to something else, 2 for what the operator can mend."""
    words = list(sys.argv[1:] if argv is None else argv)
    config = load(RoleConfig, "baton role", DESCRIPTION, as_flags(words, ("--node", "--role"), ("--force",)))
    try:
        run_async(_change(config))
    except ValueError as error:
        fatal(f"baton role: {error}")
    except FailedError as error:
        sys.stderr.write(f"baton role: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write(f"baton role: {config.node} goes on changing its role\n")
        return 1
    return 0


async def _change(config: RoleConfig) -> None:
    assert config.role is not None, "RoleConfig says so"
    credentials, role = Credentials(config.tls_dir), ROLES[config.role]
    address, incarnation = config.node, 0
    if config.knows_registry:
        entries = await list_nodes(config, credentials)
        entry = find_node(config.node, entries)
        address, incarnation = entry.grpc_address, entry.node.incarnation
        lack = None if config.force == "on" or entry.role == role else find_lack(entry, entries)
        if lack is not None:
            raise ValueError(
                f"{config.node} is the last node that {lack}: requests would wait while it changes its role, and be turned "
                "away in the end; start another one first, or say --force"
            )
    request = pb.RoleRequest(to_incarnation=incarnation, role=role)
    if config.timeout_s is not None:
        request.timeout_ms = round(config.timeout_s * 1000)
    async with credentials.channel(address) as channel:
        last, _ = await watch("role", config.node, address, NodeStub(channel).ChangeRole(request))
    if not last.has_changed:
        raise FailedError(f"{config.node} was told to end, and has not changed its role")
    cut = "; its time was over, and what was left goes on elsewhere" if last.was_cut_short else ""
    sys.stdout.write(f"baton role: {config.node} is a {config.role} node{cut}\n")


if __name__ == "__main__":
    sys.exit(main())
