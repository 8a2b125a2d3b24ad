"""Is this message one that a core can act on? Pure; every received message of another process is asked about here first.

A core may rely on what these functions promise: token ids are in the vocabulary, lengths fit the model, the numbers are in
order. Not here: anything that needs state (fences, leases, blocks, fingerprints); that is the core's.

Each function returns None, or one sentence that names the field, its value and its bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from node.sampling import GRAMMAR_KINDS
from proto import baton_pb2 as pb
from proto.block_key import KEY_BYTES
from proto.bounds import MAX_LOGIT_BIASES, MAX_PORT, MAX_PROMPT_LOGPROBS, is_address

PREFILLING: Final = frozenset({pb.ROLE_PREFILL, pb.ROLE_MIXED})  # roles that take a Dispatch to any node
DECODING: Final = frozenset({pb.ROLE_DECODE, pb.ROLE_MIXED})  # roles that give leases
MAX_ID_BYTES: Final = 256  # of a request id, a node's name, an address
MAX_STOP_TOKEN_IDS: Final = 1_024
MAX_BIAS: Final = 100.0  # either way, as is the next; these and the number of logprobs are OpenAI's
MAX_PENALTY: Final = 2.0
MAX_LOGPROBS: Final = 20  # most likely tokens beside each
MAX_GRAMMAR_BYTES: Final = 64 << 10
MAX_CHOICE: Final = 1_024  # choices of a request
MAX_MS_LEFT: Final = 24 * 3600 * 1000  # a day: no request may hold a fence for longer
SECRET_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Bounds:
    """What this node's role, model and pool allow."""

    role: pb.Role.ValueType
    vocab_size: int
    max_model_len: int  # tokens of prompt and completion together
    local_prefill: pb.PeerId | None = None  # itself, where a decode node computes prompts that stay here


def dispatch_problem(dispatch: pb.Dispatch, bounds: Bounds) -> str | None:
    """Why this node cannot start such a request."""
    if bounds.role not in PREFILLING and dispatch.target.node != bounds.local_prefill:
        return f"dispatch: the role of this node is {pb.Role.Name(bounds.role)}, only nodes that prefill take one"
    if not dispatch.branches:
        return "branches: none given, at least 1 is needed"
    branch = dispatch.branches[0]
    if len(dispatch.branches) > 1 and any(each.generated_token_ids for each in dispatch.branches):
        return f"generated_token_ids: given with {len(dispatch.branches)} branches, a branch that has any comes alone"
    return (
        _id_problem("request_id", dispatch.request_id)
        or _choices_problem([each.choice for each in dispatch.branches])
        or _tokens_problem("prompt_token_ids", dispatch.prompt_token_ids, bounds.vocab_size)
        or _tokens_problem("generated_token_ids", branch.generated_token_ids, bounds.vocab_size)
        or _lengths_problem(dispatch, branch, bounds)
        or sampling_problem(dispatch.sampling, bounds.vocab_size)
        or _prompt_logprobs_problem(dispatch)
        or _target_problem(dispatch.target)
        or _ms_left_problem(dispatch.ms_left)
    )


def cancel_problem(cancel: pb.Cancel) -> str | None:
    """Why this cancel cannot be obeyed. One without time left is still obeyed: its deadline has just passed."""
    return _key_problem(cancel.key)


def move_problem(move: pb.Move, bounds: Bounds) -> str | None:
    """Why no sequence of this node could go there."""
    if bounds.role not in DECODING:
        return f"move: the role of this node is {pb.Role.Name(bounds.role)}, only nodes that decode have what moves"
    if move.HasField("target") and move.next_attempt <= move.key.attempt:
        return f"next_attempt: {move.next_attempt} is not above attempt {move.key.attempt}"
    return _key_problem(move.key) or (_target_problem(move.target) if move.HasField("target") else None)


def reserve_problem(request: pb.ReserveRequest, bounds: Bounds) -> str | None:
    """Why no lease could ever be made of this request. The incarnation that it is meant for is the service's check."""
    if bounds.role not in DECODING:
        return _no_leases(bounds)
    if request.num_tokens < 1:
        return "num_tokens: 0, at least 1 is needed"
    if request.max_total_tokens <= request.num_tokens:  # at least one more is said there
        return f"max_total_tokens: {request.max_total_tokens} is not more than num_tokens {request.num_tokens}"
    # Whatever the sender's block size (the fingerprint's business), a block holds a token at least.
    if len(request.block_keys) > request.num_tokens:
        return f"block_keys: {len(request.block_keys)} for {request.num_tokens} tokens"
    if any(len(key) != KEY_BYTES for key in request.block_keys):
        return f"block_keys: each must have {KEY_BYTES} bytes"
    return (
        _key_problem(request.key)
        or _choices_problem([request.key.choice, *request.more_choices])
        or (grammar_problem(request.grammar, bounds.vocab_size) if request.HasField("grammar") else None)
        or _peer_problem("sender", request.sender)
        or _peer_problem("router", request.router)
        or _ms_left_problem(request.ms_left)
    )


def renew_problem(request: pb.RenewRequest, bounds: Bounds) -> str | None:
    """Why this cannot name a lease of this node."""
    if bounds.role not in DECODING:
        return _no_leases(bounds)
    if len(request.secret) != SECRET_BYTES:
        return f"secret: {len(request.secret)} bytes, {SECRET_BYTES} are needed"
    return _key_problem(request.key)


def release_problem(request: pb.ReleaseRequest, bounds: Bounds) -> str | None:
    """Why this cannot name an attempt that this node reserved for."""
    if bounds.role not in DECODING:
        return _no_leases(bounds)
    return _key_problem(request.key) or _choices_problem([request.key.choice, *request.more_choices])


def sampling_problem(sampling: pb.Sampling, vocab_size: int) -> str | None:
    """Why no tokens can be drawn like this. A lone 0 is "off" wherever the message says so."""
    if not 0 <= sampling.temperature < math.inf:
        return f"temperature: {sampling.temperature}, must be finite and at least 0"
    for field in ("top_p", "min_p"):
        if not 0 <= (share := getattr(sampling, field)) <= 1:
            return f"{field}: {share}, must be from 0 to 1"
    for field in ("presence_penalty", "frequency_penalty"):
        if not -MAX_PENALTY <= (penalty := getattr(sampling, field)) <= MAX_PENALTY:
            return f"{field}: {penalty}, must be from {-MAX_PENALTY} to {MAX_PENALTY}"
    if not 0 <= sampling.repetition_penalty < math.inf:
        return f"repetition_penalty: {sampling.repetition_penalty}, must be finite and at least 0"
    if sampling.min_tokens > sampling.max_tokens:
        return f"min_tokens: {sampling.min_tokens} is above max_tokens {sampling.max_tokens}"
    if sampling.num_logprobs > MAX_LOGPROBS:
        return f"num_logprobs: {sampling.num_logprobs}, at most {MAX_LOGPROBS} are allowed"
    if len(sampling.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        return f"stop_token_ids: {len(sampling.stop_token_ids)}, at most {MAX_STOP_TOKEN_IDS} are allowed"
    return (
        _tokens_problem("stop_token_ids", sampling.stop_token_ids, vocab_size)
        or _bias_problem(sampling, vocab_size)
        or (grammar_problem(sampling.grammar, vocab_size) if sampling.HasField("grammar") else None)
    )


def grammar_problem(grammar: pb.Grammar, vocab_size: int) -> str | None:
    """Why no text could be bound by it, whatever it says."""
    if grammar.kind not in GRAMMAR_KINDS:
        return f"grammar.kind: {grammar.kind}, none that this version knows"
    num_bytes = len(grammar.text.encode())
    if not 0 < num_bytes <= MAX_GRAMMAR_BYTES:
        return f"grammar.text: {num_bytes} bytes, must be from 1 to {MAX_GRAMMAR_BYTES}"
    if not 0 < len(grammar.end_token_ids) <= MAX_STOP_TOKEN_IDS:
        return f"grammar.end_token_ids: {len(grammar.end_token_ids)}, must be from 1 to {MAX_STOP_TOKEN_IDS}"
    return _tokens_problem("grammar.end_token_ids", grammar.end_token_ids, vocab_size)


def _bias_problem(sampling: pb.Sampling, vocab_size: int) -> str | None:
    token_ids = [entry.token_id for entry in sampling.logit_bias]
    if len(token_ids) > MAX_LOGIT_BIASES:
        return f"logit_bias: {len(token_ids)} entries, at most {MAX_LOGIT_BIASES} are allowed"
    if len({*token_ids}) < len(token_ids):
        return "logit_bias: a token id is given twice"
    for entry in sampling.logit_bias:
        if not -MAX_BIAS <= entry.bias <= MAX_BIAS:
            return f"logit_bias: {entry.bias} for token {entry.token_id}, must be from {-MAX_BIAS} to {MAX_BIAS}"
    return _tokens_problem("logit_bias", token_ids, vocab_size)


def _prompt_logprobs_problem(dispatch: pb.Dispatch) -> str | None:
    num_logprobs = len(dispatch.prompt_token_ids) * (1 + dispatch.sampling.num_logprobs) * len(dispatch.branches)
    if dispatch.sampling.prompt_logprobs and num_logprobs > MAX_PROMPT_LOGPROBS:
        return f"prompt_logprobs: {num_logprobs} of one prompt, at most {MAX_PROMPT_LOGPROBS} are allowed"
    return None


def _no_leases(bounds: Bounds) -> str:
    return f"lease: the role of this node is {pb.Role.Name(bounds.role)}, only nodes that decode hold any"


def _id_problem(field: str, value: str) -> str | None:
    if not value:
        return f"{field}: is empty"
    num_bytes = len(value.encode())
    if num_bytes > MAX_ID_BYTES:
        return f"{field}: {num_bytes} bytes, at most {MAX_ID_BYTES} are allowed"
    return None


def _choice_problem(choice: int) -> str | None:
    return f"choice: {choice} is not below {MAX_CHOICE}" if choice >= MAX_CHOICE else None


def _choices_problem(choices: Sequence[int]) -> str | None:
    if len(choices) > MAX_CHOICE or len({*choices}) < len(choices):
        return f"choice: {len(choices)} given, at most {MAX_CHOICE} different ones are allowed"
    return _choice_problem(max(choices))


def _key_problem(key: pb.AttemptKey) -> str | None:
    return _id_problem("request_id", key.request_id) or _choice_problem(key.choice)


def _peer_problem(field: str, peer: pb.PeerId) -> str | None:
    if not peer.incarnation:
        return f"{field}.incarnation: is 0"
    return _id_problem(f"{field}.name", peer.name)


def _target_problem(target: pb.Target) -> str | None:
    if (problem := _peer_problem("target.node", target.node)) is not None:
        return problem
    address = target.grpc_address
    if not is_address(address):  # gRPC reads others as it likes, and has been seen to hang over them
        return f"target.grpc_address: {address[:64]!r}, must be host:port with a port from 1 to {MAX_PORT}"
    return None


def _ms_left_problem(ms_left: int) -> str | None:
    if 0 < ms_left <= MAX_MS_LEFT:
        return None
    return f"ms_left: {ms_left}, must be from 1 to {MAX_MS_LEFT}"


def _tokens_problem(field: str, token_ids: Iterable[int], vocab_size: int) -> str | None:
    highest = max(token_ids, default=0)
    return f"{field}: {highest} is not below the vocabulary's {vocab_size}" if highest >= vocab_size else None


def _lengths_problem(dispatch: pb.Dispatch, branch: pb.Branch, bounds: Bounds) -> str | None:
    num_prompt, num_generated = len(dispatch.prompt_token_ids), len(branch.generated_token_ids)
    max_tokens = dispatch.sampling.max_tokens
    if num_prompt < 1:
        return "prompt_token_ids: is empty"
    if num_generated >= max_tokens:
        return f"max_tokens: {max_tokens}, must be above the {num_generated} tokens generated already"
    if num_prompt + max_tokens > bounds.max_model_len:
        return f"max_tokens: {num_prompt} prompt tokens + {max_tokens} exceed max_model_len {bounds.max_model_len}"
    return None
