"""The log of a run, for people: one line an event, who did what and why, oldest first.

Nothing in a line depends on the machine: two runs of a seed give the same bytes. A line has the world's time in seconds, the
process (host and how many processes that host has had), what happened, and what to know about it.
"""

from __future__ import annotations

from node import events as ev
from proto import baton_pb2 as pb


class Trace:
    """Lines in order. Callers build a line only if there is a trace: most runs have none."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, now: float, who: str, what: str, why: str = "") -> None:
        """One event."""
        self.lines.append(f"{now:12.6f}  {who:<12} {what:<18} {why}".rstrip())

    def __str__(self) -> str:
        return "\n".join(self.lines)


def name_of(key: pb.AttemptKey) -> str:
    """An attempt: request/choice#attempt."""
    return f"{key.request_id}/{key.choice}#{key.attempt}"


def describe_to_node(message: pb.RouterMessage) -> str:
    """What a router says, in a few words."""
    if message.WhichOneof("kind") == "cancel":
        return f"Cancel {name_of(message.cancel.key)}"
    if message.WhichOneof("kind") == "move":
        move = message.move
        where = f"as #{move.next_attempt} to {move.target.node.name}" if move.HasField("target") else "nowhere"
        return f"Move {name_of(move.key)} {where}"
    if message.WhichOneof("kind") == "cache":
        return f"CacheAsk behind {message.cache.taken}"
    dispatch = message.dispatch
    choices = ",".join(str(branch.choice) for branch in dispatch.branches)
    generated = sum(len(branch.generated_token_ids) for branch in dispatch.branches)
    known = f" behind {generated} tokens" if generated else ""
    return f"Dispatch {dispatch.request_id}/{choices}#{dispatch.attempt}{known} for {dispatch.target.node.name}"


def describe_to_router(message: pb.NodeMessage) -> str:
    """What a node says, in a few words."""
    if message.WhichOneof("kind") == "error":
        error = message.error
        unsure = " (Commit unanswered)" if error.commit_unanswered else ""
        return f"PD Error {pb.ErrorCode.Name(error.code)} {name_of(error.key)}{unsure}: {error.message}"
    if message.WhichOneof("kind") == "wants_move":
        return f"WantsMove {name_of(message.wants_move.key)} {pb.MoveReason.Name(message.wants_move.reason)}"
    if message.WhichOneof("kind") == "cache":
        news = message.cache
        whole = f", and on from block {news.next_block}" if news.HasField("next_block") else ""
        return f"CacheNews to {news.taken}: {len(news.stored) // 8} stored, {len(news.evicted) // 8} evicted{whole}"
    parts = []
    for tokens in message.tokens.branches:
        end = tokens.first_index + len(tokens.token_ids)
        finish = f" {pb.FinishReason.Name(tokens.finish)}" if tokens.finish else ""
        parts.append(f"{name_of(tokens.key)}[{tokens.first_index}:{end}]{finish}")
    return f"tokens as {'receiver' if message.tokens.from_receiver else 'sender'} {' '.join(parts)}"


def describe_event(event: ev.Event) -> tuple[str, str]:
    """What a node's core hears: what, and what to know about it."""
    match event:
        case ev.FromRouter(router, message):
            return "takes", f"{describe_to_node(message)} from {router.name}"
        case ev.RouterLost(router):
            return "takes", f"the loss of {router.name}"
        case ev.ReserveAsked(_, request):
            return "takes", f"Reserve {name_of(request.key)} from {request.sender.name}"
        case ev.ReserveAnswered(key, reply):
            answer = "no answer" if reply is None else _reply_text(reply)
            return "takes", f"the answer to Reserve {name_of(key.to_proto())}: {answer}"
        case ev.RenewAnswered(key, reply):
            answer = "none" if reply is None else f"{reply.life_ms} ms"
            return "takes", f"the answer to Renew {name_of(key.to_proto())}: {answer}"
        case ev.RenewAsked(_, request):
            return "takes", f"Renew {name_of(request.key)}"
        case ev.ReleaseAsked(request):
            return "takes", f"Release {name_of(request.key)}"
        case ev.StepDone(result):
            return "step done", f"{result.step_id}: {result.token_ids.tolist()}"
        case ev.BlocksStaged() | ev.PoolLooked() | ev.BlocksFetched() | ev.PoolSaid():
            return "takes", f"of the KV pool: {event}"
        case ev.DrainAsked():
            return "takes", "the wish that it drains"
        case _:
            return "takes", _transport_text(event)


def describe_action(action: ev.Action) -> tuple[str, str] | None:
    """What a node's core wants done: what, and what to know about it; None for what is only counted."""
    match action:
        case ev.ToRouter(_, message):
            return "says", describe_to_router(message)
        case ev.RunStep(plan):
            rows = f"{len(plan.decodes)} decodes, chunks of {[len(chunk.token_ids) for chunk in plan.chunks]}"
            return "launches", f"{plan.step_id}: {rows}"
        case ev.SendReserve(key, address) | ev.SendRenew(key, address):
            return "asks", f"{type(action).__name__.removeprefix('Send')} {name_of(key.to_proto())} of {address}"
        case ev.SendRelease(address, request):
            return "asks", f"Release {name_of(request.key)} of {address}"
        case ev.AnswerReserve(_, reply):
            return "answers", f"Reserve: {_reply_text(reply)}"
        case ev.WriteBlocks(link_id, _, blocks):
            return "writes", f"blocks {[index for index, _ in blocks]} of the lease on {link_id}"
        case ev.NotifyLink(_, message):
            return "writes", f"Commit {name_of(message.commit.key)}"
        case ev.AnswerCommit(_, message):
            word = "refuses" if message.answer.HasField("error") else "acknowledges"
            return word, f"Commit {name_of(message.answer.key)}"
        case ev.DropWrites(link_id, lease):
            return "drops", f"what is queued for lease {lease.lease_id:x} on {link_id}"
        case ev.RevokeLease() | ev.CloseLink():
            return "ends", "a lease" if isinstance(action, ev.RevokeLease) else f"link {action.link_id}"
        case ev.SaveBlocks(number, blocks) | ev.FetchBlocks(number, blocks):
            named = [block_id for _, block_id in blocks]
            return "asks", f"{type(action).__name__} {number} of the KV pool: blocks {named}"
        case ev.TakeOutBlocks(keys):
            return "asks", f"TakeOutBlocks of the KV pool: {len(keys)} blocks"
        case ev.LookInPool(number, keys):
            return "asks", f"LookInPool {number} of the KV pool: {len(keys)} blocks"
        case ev.Drained():
            return "has drained", ""
        case ev.Ended(key, outcome):
            return "attempt ended", f"{name_of(key.to_proto())}: {outcome}"
        case _:
            return None


def _reply_text(reply: pb.ReserveReply) -> str:
    if reply.WhichOneof("result") == "error":
        return reply.error.message
    return f"a lease of {reply.lease.num_blocks} blocks, {reply.lease.num_blocks_held} of them held"


def _transport_text(event: ev.Event) -> str:
    """A transport's event without what only a machine can read."""
    fields = [
        f"{name}={getattr(event, name)}" for name in ("link_id", "block_indices", "reason") if hasattr(event, name)
    ]
    return f"{type(event).__name__} {' '.join(fields)}"
