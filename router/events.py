"""The vocabulary of the router's core: what it hears, and what it asks of the shell.

What is made for every token or several times for a request is a named tuple, which costs a third of a frozen dataclass.
Requests arrive parsed, validated and tokenized; text never enters the core. Messages of nodes arrive in the order of their
session, each once; there is no order between sessions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from proto import baton_pb2 as pb

RESCHEDULED: Final = "pd_reschedule"  # the finish reason of a choice that somebody else is to go on with


class NodeRef(NamedTuple):
    """A node process: the name alone would take a restarted node for the old one."""

    name: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Grammar:
    """The texts that a completion may be (structured.py)."""

    kind: Literal["json_schema", "regex", "ebnf", "structural_tag"]
    text: str
    is_compact: bool = False  # JSON: no white space but one blank behind each comma and colon
    end_token_ids: tuple[int, ...] = ()  # what may follow a whole text; nodes want at least one
    field: str = ""  # where the client wrote it, for a node's refusal; not told to nodes


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a completion's tokens are drawn, and what ends it; 0 switches off what has no other default."""

    temperature: float
    max_tokens: int  # completion tokens of a branch, across attempts and those of `generated_token_ids`
    stop_token_ids: tuple[int, ...]  # the client's and, unless it ignores them, the model's own
    top_k: int = 0
    top_p: float = 0.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 0.0
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    num_logprobs: int | None = None  # None: none; else each token's own, and of so many most likely ones
    wants_prompt_logprobs: bool = False
    grammar: Grammar | None = None  # None: any text


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What a client asked of one prompt, in tokens: `num_choices` completions, each a branch of its own."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    seed: int  # effective, of choice 0: drawn by the API if the client gave none; for the others see seeds.py
    sampling: Sampling
    deadline: float  # the instant, on the router's monotonic clock
    num_choices: int = 1
    generated_token_ids: tuple[int, ...] = ()  # a resubmission: what choice 0 starts with
    pinned: tuple[str, str] | None = None  # names of the nodes that it goes to or to nobody, once: a canary (canary.py)

    @property
    def num_given(self) -> int:
        """Tokens that nodes compute before they say any; each choice's prompt is computed by itself where it is scored."""
        num_times = self.num_choices if self.sampling.wants_prompt_logprobs else 1
        return num_times * len(self.prompt_token_ids) + len(self.generated_token_ids)


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Submitted:
    """A client's request; one Finished per choice or one Failed answers it, unless the client aborts."""

    request: GenerationRequest


@dataclass(frozen=True, slots=True)
class Aborted:
    """The client went away; nothing more is emitted for this request."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Stopped:
    """A stop string was found in the text of a choice's first `num_tokens` tokens: it ends with them."""

    request_id: str
    choice: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class NodeListed:
    """The registry has this entry, new or changed (a new incarnation included)."""

    entry: pb.NodeEntry


@dataclass(frozen=True, slots=True)
class NodeMissed:
    """The registry has not heard of it lately; while its session is up it works on, and gets more."""

    node: NodeRef


@dataclass(frozen=True, slots=True)
class NodeUnlisted:
    """It has gone by its own word, or was replaced: it gets no more work; ends no session."""

    node: NodeRef


@dataclass(frozen=True, slots=True)
class NodeDrains:
    """It has told us itself, whatever the registry says."""

    node: NodeRef


@dataclass(frozen=True, slots=True)
class SessionUp:
    """The session with this node is open: it can take work. Also after a resume."""

    node: NodeRef


@dataclass(frozen=True, slots=True)
class SessionBroken:
    """No stream at the moment; within the grace it may be resumed. No new work goes there meanwhile."""

    node: NodeRef


@dataclass(frozen=True, slots=True)
class SessionLost:
    """Gone for good: every attempt there is NODE_LOST."""

    node: NodeRef
    has_died: bool = False  # its process has ended, and not in good order; else it may be silent, cut off, or well


class FromNode(NamedTuple):
    """A message of the node's session."""

    node: NodeRef
    message: pb.NodeMessage


@dataclass(frozen=True, slots=True)
class LoadReported:
    """The node's newest load report."""

    node: NodeRef
    load: pb.LoadReport


Event = (
    Submitted
    | Aborted
    | Stopped
    | NodeListed
    | NodeMissed
    | NodeUnlisted
    | NodeDrains
    | SessionUp
    | SessionBroken
    | SessionLost
    | FromNode
    | LoadReported
)

# ---------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class Dial:
    """Open a session with this node and keep it."""

    entry: pb.NodeEntry


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A node that is listed gets no session: its tokenizer is not the router's."""

    entry: pb.NodeEntry


@dataclass(frozen=True, slots=True)
class HangUp:
    """Forget the session with this node."""

    node: NodeRef


@dataclass(frozen=True, slots=True)
class Degraded:
    """What requests are served without, as sentences, has changed; none: nothing is lacking."""

    sentences: tuple[str, ...]


class ToNode(NamedTuple):
    """Send on the node's session; dropped if that session is lost."""

    node: NodeRef
    message: pb.RouterMessage


class Emitted(NamedTuple):
    """New tokens of a choice's completion, from index `first_index`, without gap or repeat."""

    request_id: str
    first_index: int
    token_ids: tuple[int, ...]
    choice: int = 0
    logprobs: tuple[pb.TokenLogprobs, ...] = ()  # one per token where they were asked for


@dataclass(frozen=True, slots=True)
class PromptScored:
    """The logprobs of prompt tokens 1, 2, …, where they were asked for: once per choice, before its Finished."""

    request_id: str
    choice: int
    logprobs: tuple[pb.TokenLogprobs, ...]


class Finished(NamedTuple):
    """A choice's only result; everything was emitted before."""

    request_id: str
    finish_reason: str  # "stop", "length", RESCHEDULED
    token_ids: tuple[int, ...]  # the whole completion
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """The request's only error: it ends every choice that has not finished."""

    request_id: str
    status: int  # of the HTTP answer, if none was begun
    code: str  # a PD Error code's name, or "OVERLOADED", "LATE", "NO_NODES"
    message: str
    retry_after_s: float | None
    is_refusal: bool = False  # it was turned away as it came


class Count(NamedTuple):
    """Raise a counter; `name` is one of the router's counters (see router/metrics.py)."""

    name: str
    label: str = ""
    amount: int = 1


class Observe(NamedTuple):
    """Add to a histogram; `name` is one of the core's (see router/metrics.py)."""

    name: str
    seconds: float


class Noted(NamedTuple):
    """Something has happened to a choice that its timeline is to show (router/timelines.py); nothing is decided by it."""

    request_id: str
    choice: int
    what: (
        str  # "dispatched", "handed_over", "commit_unanswered", "failed", "given_up", "move_begun", "moved", "move_off"
    )
    attempt: int
    nodes: tuple[str, ...] = ()  # names
    code: str = ""  # how the prompt is computed, or a PD Error code's name
    why: str = ""  # of what has gone wrong, a sentence for the log


@dataclass(frozen=True, slots=True)
class CircuitChanged:
    """What failed at a node has opened its circuit, so that it is left alone for a while; or it works again."""

    node: str
    is_open: bool


@dataclass(frozen=True, slots=True)
class Timed:
    """A node has told parts of an attempt's time, be it one that counts or not."""

    timing: pb.Timing


Action = (
    Dial
    | CircuitChanged
    | LeftOut
    | HangUp
    | Degraded
    | ToNode
    | Emitted
    | PromptScored
    | Finished
    | Failed
    | Count
    | Observe
    | Noted
    | Timed
)
