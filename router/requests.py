"""A request while it lives in the router: all that is kept of each branch, and the message that starts an attempt.

A request has a branch per choice. Each is queued, retried, moved, cancelled and finished by itself, under its own attempt numbers;
only a first dispatch can be of several (waiting.py), and an error is the whole request's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey, BranchKey
from router.events import GenerationRequest, Grammar, NodeRef, Sampling
from router.ownership import Side
from router.phases import (
    AwaitingPrompt,
    CommitUnknown,
    Decoding,
    Move,
    MoveDoubted,
    MoveUnknown,
    Phase,
    Post,
    Waiting,
    posts_of,
)
from router.placement import Pair
from router.retry import Tries
from router.seeds import branch_seed
from router.token_log import TokenLog

_GRAMMAR_KINDS: Final = {
    "json_schema": pb.Grammar.JSON_SCHEMA,
    "regex": pb.Grammar.REGEX,
    "ebnf": pb.Grammar.EBNF,
    "structural_tag": pb.Grammar.STRUCTURAL_TAG,
}


class KnownEnd(NamedTuple):
    """How a branch has ended, while its prompt's logprobs are still to come."""

    finish_reason: str
    num_tokens: int | None  # of the log that are the completion; None: all


class LiveBranch:
    """Everything that the router's core keeps for one choice of a request, until its one end."""

    def __init__(self, request: GenerationRequest, choice: int, arrival: int, tries: Tries, now: float) -> None:
        self.request = request
        self.key = BranchKey(request.request_id, choice)
        self.seed = branch_seed(request.seed, choice)
        self.arrival = arrival  # its place in the queue, also when it comes back
        self.log = TokenLog(request.sampling.max_tokens, request.generated_token_ids)
        self.tries = tries
        self.phase: Phase = Waiting()
        self.waits_since = now
        self.attempt = -1  # number of the attempt that counts; before the first there is none
        self.newest_attempt = -1  # the highest number given out, be it for a move that has not happened
        self.num_moves = 0  # from one decode node to another: those that came to nothing are none
        self.last_pair: Pair | None = None  # where the last attempt ran
        self.held_off: dict[NodeRef, float] = {}  # nodes that refused or failed it: not before that instant
        self.rests_until = 0.0  # nowhere before that
        self.begun_by: bytes | None = None  # fingerprint of the nodes that said the first of it
        self.gives_up_at: float | None = None  # when it is handed up, if no node has come that may go on with it
        self.known_end: KnownEnd | None = None  # what it waits for is not tokens
        # Of its prompt's blocks, by fingerprint, where placement asked (cache_map.py); all branches of a request have one.
        self.short_keys: dict[bytes, bytes] = {}
        self.awaits_prompt_logprobs = request.sampling.wants_prompt_logprobs and len(request.prompt_token_ids) > 1

    @property
    def pair(self) -> Pair | None:
        """The nodes that the attempt that counts is on; None while the branch waits."""
        return None if isinstance(self.phase, Waiting) else self.phase.pair

    @property
    def posts(self) -> tuple[Post | None, Post | None]:
        """Sender and receiver of its handover, or of its last one."""
        return posts_of(self.phase, self.attempt)

    @property
    def fence(self) -> AttemptKey:
        """The newest attempt: with it end all."""
        return AttemptKey(*self.key, self.newest_attempt)

    def side_of(self, node: NodeRef, attempt: int, from_receiver: bool | None = None) -> Side | None:
        """As which of the two a node speaks of an attempt, if it counts; `from_receiver` as its batch says, where it is one.

        In a move both have had the KV handed to them; what the prefill node says then is late, and nobody's.
        """
        if from_receiver and isinstance(self.phase, Decoding):  # nearly all that is ever said
            return Side.RECEIVER if (node, attempt) == (self.phase.pair.decode, self.attempt) else None
        sender, receiver = self.posts
        if isinstance(self.phase, Move):
            is_receiver = (node, attempt) == receiver
            is_known = from_receiver is not False and (is_receiver or (node, attempt) == sender)
        else:
            is_receiver = (node, attempt) == receiver if from_receiver is None else from_receiver
            is_known = (node, attempt) == (receiver if is_receiver else sender)
        return (Side.RECEIVER if is_receiver else Side.SENDER) if is_known else None

    def side_at(self, node: NodeRef) -> Side | None:
        """Which of the two a node is; a mixed node that is both is the receiver."""
        sender, receiver = self.posts
        if receiver is not None and receiver.node == node:
            return Side.RECEIVER
        return Side.SENDER if sender is not None and sender.node == node else None

    @property
    def num_tokens(self) -> int:
        """How long the sequence is now, prompt included."""
        return len(self.request.prompt_token_ids) + len(self.log)

    @property
    def total_tokens(self) -> int:
        """How long the sequence may become, prompt included."""
        return len(self.request.prompt_token_ids) + self.request.sampling.max_tokens

    @property
    def is_complete(self) -> bool:
        """Nothing is left to generate, whatever became of the attempt."""
        return self.ended_by_stop_token or len(self.log) >= self.request.sampling.max_tokens

    @property
    def ended_by_stop_token(self) -> bool:
        """The newest token ends the completion."""
        return self.log.last_token_id in self.request.sampling.stop_token_ids

    @property
    def has_told(self) -> bool:
        """Whether the client has got anything of it."""
        return len(self.log) > len(self.request.generated_token_ids)

    @property
    def author(self) -> bytes | None:
        """Fingerprint of who has said what its client has, which nobody may go on with but its heirs; None: it has nothing."""
        is_scored = self.request.sampling.wants_prompt_logprobs and not self.awaits_prompt_logprobs
        return self.begun_by if self.has_told or is_scored else None

    @property
    def can_share(self) -> bool:
        """Whether other choices of the request may be in the same attempt: there is nothing yet in which they differ.

        The prompt's logprobs are told once per attempt and branch: too much for one message.
        """
        return self.attempt < 0 and not self.log and not self.awaits_prompt_logprobs

    def logprobs_problem(self, tokens: pb.BranchTokens) -> str | None:
        """Why the logprobs of a batch cannot be right."""
        if self.request.sampling.num_logprobs is not None:
            num_tokens, num_logprobs = len(tokens.token_ids), len(tokens.logprobs)
            if num_tokens != num_logprobs:
                return f"{num_tokens} tokens arrived with {num_logprobs} logprobs"
        if self.awaits_prompt_logprobs:
            num_scored, num_expected = len(tokens.prompt_logprobs), len(self.request.prompt_token_ids) - 1
            if num_scored not in (0, num_expected):
                return f"{num_scored} prompt logprobs arrived where {num_expected} were due"
        return None

    def wake_at(self, now: float) -> float:
        """The nearest instant at which something happens to the branch by itself: the deadline at the latest."""
        instants = [self.request.deadline]
        if isinstance(self.phase, Waiting):
            instants += [until for until in (self.rests_until, *self.held_off.values()) if until > now]
            instants += [] if self.gives_up_at is None else [self.gives_up_at]
        if isinstance(self.phase, CommitUnknown | MoveUnknown | MoveDoubted | AwaitingPrompt):
            instants.append(self.phase.until)
        return min(instants)

    def ms_left(self, now: float) -> int:
        """Milliseconds of the deadline, as they cross the wire; at least one, since a dead request is not sent."""
        return max(int((self.request.deadline - now) * 1000), 1)

    def snapshot(self) -> dict[str, object]:
        """JSON-able state."""
        return {
            "choice": self.key.choice,
            "phase": type(self.phase).__name__,
            "attempt": self.attempt,
            "tokens": len(self.log),
            "retries_left": self.tries.retries_left,
        }


def dispatch_message(group: Sequence[LiveBranch], target: pb.Target, now: float) -> pb.Dispatch:
    """The message that starts the newest attempt of these branches of one request, together.

    Of a complete branch only the prompt's logprobs are wanted: its last token is generated again.
    """
    head = group[0]
    return pb.Dispatch(
        request_id=head.key.request_id,
        attempt=head.attempt,
        branches=[
            pb.Branch(
                choice=each.key.choice,
                seed=each.seed,
                generated_token_ids=each.log.token_ids[: -1 if each.is_complete else None],
            )
            for each in group
        ],
        prompt_token_ids=head.request.prompt_token_ids,
        sampling=_sampling_message(head.request.sampling, head.awaits_prompt_logprobs),
        target=target,
        ms_left=head.ms_left(now),
    )


def _sampling_message(sampling: Sampling, awaits_prompt_logprobs: bool) -> pb.Sampling:
    return pb.Sampling(
        temperature=sampling.temperature,
        max_tokens=sampling.max_tokens,
        stop_token_ids=sampling.stop_token_ids,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        min_tokens=sampling.min_tokens,
        logit_bias=[pb.LogitBias(token_id=token_id, bias=bias) for token_id, bias in sampling.logit_bias],
        num_logprobs=sampling.num_logprobs,
        prompt_logprobs=awaits_prompt_logprobs,
        grammar=None if sampling.grammar is None else _grammar_message(sampling.grammar),
    )


def _grammar_message(grammar: Grammar) -> pb.Grammar:
    return pb.Grammar(
        kind=_GRAMMAR_KINDS[grammar.kind],
        text=grammar.text,
        is_compact=grammar.is_compact,
        end_token_ids=grammar.end_token_ids,
    )
