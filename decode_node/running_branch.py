"""An attempt that generates here: all that its routers, or another node that takes it over, must be told. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from node.events import RouterId
from node.timing import Computed, Received
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey


@dataclass(slots=True)
class RunningBranch:
    """An attempt of one branch, from its Commit, or from its Dispatch to this node, to its end."""

    key: AttemptKey
    router: RouterId
    deadline: float
    prompt_token_ids: tuple[int, ...]
    sampling: pb.Sampling
    seed: int
    token_ids: list[int]  # of the whole completion, those of earlier attempts included
    first_index: int  # of the first token of this attempt
    times: Computed | Received | None  # what is still to be told of how long it took; None: nothing
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)  # of the tokens from there on, where asked for
    is_local: bool = False  # its prompt is computed here
    prompt_logprobs: list[pb.TokenLogprobs] = field(default_factory=list)  # not told yet

    @property
    def num_tokens(self) -> int:
        """Prompt and completion so far."""
        return len(self.prompt_token_ids) + len(self.token_ids)

    @property
    def max_total_tokens(self) -> int:
        """Prompt and completion, at its limit."""
        return len(self.prompt_token_ids) + self.sampling.max_tokens
