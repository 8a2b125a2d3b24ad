"""What a run is made of, all of it drawn from the seed before anything happens: sizes, network, load, faults.

A scenario is a value. So a run can be repeated with parts of it left out, which is how the shrinker works, and a failing one can be
written down. Sizes and kinds of faults are drawn swarm-wise (Groce et al., "Swarm testing", ISSTA 2012): each seed switches a
random subset on, because what is always on hides what only happens without it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Final

from engine.reserve import ReservePolicy

VOCAB_SIZE: Final = 11
BLOCK_SIZE: Final = 4
NO_LIMIT: Final = 1 << 16
MANY_ATTEMPTS: Final = 256  # more than any run has
SLOW_STEP_S: Final = 0.2  # so that tokens go on coming for longer than a session's grace

# Every kind of fault. "who" and "other" are hosts; what a fault does is in faults.py.
FAULT_KINDS: Final = (
    "crash",  # who: killed; its host refuses connections until a new process starts after `seconds`
    "power off",  # who: the same, but its host is silent meanwhile
    "stop",  # who: ends in order, is started again after `seconds`
    "drain",  # node who: takes no new work, hands over what it has, ends; is started again after `seconds`
    "pause",  # who: does nothing for `seconds`, like after SIGSTOP
    "partition",  # who | other, both ways for `seconds`
    "one way",  # nothing gets from who to other for `seconds`
    "slow",  # who <-> other: everything takes many times as long for `seconds`
    "cut stream",  # router who, node other: the session's TCP connection breaks; `number` says who notices
    "lose calls",  # who <-> other: calls and answers are lost for `seconds`
    "repeat calls",  # who -> other: Reserve arrives twice for `seconds`
    "cut link",  # sender who -> receiver other: the data link breaks; `number` messages still arrive
    "flip bit",  # sender who -> receiver other: in the next write
    "lose ack",  # sender who -> receiver other: the answer to the next Commit
    "broken row",  # node who: the next step's first row gives no number
)

# Drawn apart: "role", of node who: drains, and goes on in the role other, with its pool and what is cached there.

# What a fault may wait for, so that it hits in the middle of things: the next such event at one of its processes.
MOMENTS: Final = (
    "",
    "",
    "dispatch",
    "move",
    "reserve",
    "lease",
    "write",
    "commit",
    "activate",
    "step",
    "tokens",
    "session up",
)

KV_POOL_FLAWS: Final = ("slow", "fails", "full", "corrupts", "lies")

LINK_KINDS: Final = ("cut link", "flip bit", "lose ack")  # those need a node that may send KV to another


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong, once."""

    at: float  # world time in seconds
    kind: str
    who: str
    other: str = ""
    seconds: float = 0.0
    number: int = 0
    moment: str = ""  # not at that instant but at the next such event, 2 s later at the latest

    def __str__(self) -> str:
        parties = f"{self.who} {self.other}".strip()
        when = f" at the next {self.moment}" if self.moment else ""
        return f"{self.kind} {parties}{when}" + (f" for {self.seconds:.3f} s" if self.seconds else "")


@dataclass(frozen=True, slots=True)
class ClientPlan:
    """What one client does."""

    name: str  # of its request
    at: float
    router: int  # which it asks first
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int
    temperature: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    num_choices: int = 1
    num_logprobs: int | None = None
    wants_prompt_logprobs: bool = False
    presence_penalty: float = 0.0
    min_tokens: int = 0
    timeout_s: float = 600.0
    aborts_after_s: float | None = None  # disconnects
    stops: tuple[tuple[int, int], ...] = ()  # (choice, tokens): its text has a stop string there
    generated: tuple[int, ...] = ()  # of its completion, which another request has brought: it is a resubmission

    def __str__(self) -> str:
        parts = [f"{len(self.prompt)} prompt tokens", f"max_tokens {self.max_tokens}", f"choices {self.num_choices}"]
        parts += [f"disconnects after {self.aborts_after_s:.3f} s"] if self.aborts_after_s is not None else []
        parts += [f"resubmits {len(self.generated)} tokens"] if self.generated else []
        parts += [f"stop string in choice {choice} at {tokens}" for choice, tokens in self.stops]
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Knobs:
    """How large the cluster is, and how its network and clocks are."""

    num_routers: int = 1
    num_prefill: int = 1
    num_decode: int = 1
    num_mixed: int = 0
    num_other: int = 0  # of those, the last ones: nodes of another model (models.py)
    num_blocks: int = 40
    num_slots: int = 4
    max_batched_tokens: int = 16
    max_model_len: int = 96
    max_attempts: int = MANY_ATTEMPTS
    max_fences: int = NO_LIMIT
    max_queue: int = 1024
    max_inflight_prefills: int = 32
    retries: int = 3
    max_nodes_lost: int = 2
    excludes_decode: bool = True  # --preempt-retry-exclude-decode
    breaker_failures: int = 5
    local_prefill_max_tokens: int | None = None  # None: decode nodes compute no prompts
    local_prefill_chunk: int | None = None
    policy: str = "least_loaded"
    follows_caches: bool = False  # --placement-prefill cache_aware
    cache_piece: int = 4096  # of a node's news of its cache
    key_log: int = 1 << 16  # changes of it that a node keeps
    network: str = "even"  # or "jitter", "heavy"
    step_s: float = 0.005  # mean time of a step
    lease_life_s: float = 10.0
    reserve_policy: ReservePolicy = "ratio"
    preempt_move_s: float = 0.0  # --preempt-move-ms
    max_moves: int = 8
    reserves_for_running: bool = True  # --decode-reserve
    reserve_wait_s: float = 5.0
    max_waiting_reserves: int = 64
    is_one_sided: bool = False  # the transport: writes land unasked
    clock_spread: float = 0.0  # clocks run at 1 ± this
    kv_pool_flaws: tuple[str, ...] | None = None  # of the cluster's KV pool (kv_pool.py); None: there is none
    saves_finished: bool = True  # --save-finished-kv
    keeps_names: bool = True  # a restarted node has the old one's name
    keeps_addresses: bool = True

    @property
    def links_outlast_leases(self) -> bool:
        """Whether a lease may be over while its writes wait behind others' on the link, though nothing is struck."""
        return self.network == "heavy" and self.lease_life_s < 5.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """A run, but for what the processes do with it."""

    seed: int
    knobs: Knobs
    clients: tuple[ClientPlan, ...]
    faults: tuple[Fault, ...] = field(default=())

    @property
    def hosts(self) -> tuple[str, ...]:
        """Every host: routers, then nodes by role."""
        knobs = self.knobs
        numbers = (knobs.num_routers, knobs.num_prefill, knobs.num_decode, knobs.num_mixed)
        roles = zip(("router", "prefill", "decode", "mixed"), numbers, strict=True)
        return tuple(f"{role}-{index}" for role, count in roles for index in range(count))

    @property
    def handoff_pairs(self) -> tuple[tuple[str, str], ...]:
        """Every two hosts of which the first may hand KV over to the second: what it has computed, or what moves."""
        senders = [host for host in self.hosts if not host.startswith("router")]
        receivers = [host for host in self.hosts if host.startswith(("decode", "mixed"))]
        return tuple((one, other) for one in senders for other in receivers if one != other)

    def lines(self) -> list[str]:
        """The scenario for people."""
        plain = Knobs()
        values = {each.name: getattr(self.knobs, each.name) for each in fields(Knobs)}
        told = [f"{name} {value}" for name, value in values.items() if value != getattr(plain, name)]
        lines = [f"seed {self.seed}: {', '.join(told) or 'every knob at its default'}"]
        lines += [f"client {plan.at:9.6f}  {plan.name:<6} asks router-{plan.router}: {plan}" for plan in self.clients]
        lines += [f"fault  {fault.at:9.6f}  {fault}" for fault in self.faults]
        return lines


def draw_scenario(seed: int) -> Scenario:
    """The scenario of a seed."""
    rng = random.Random(f"scenario {seed}")
    knobs = _with_local_prefill(_draw_knobs(rng), random.Random(f"local prefill {seed}"))
    knobs = _with_kv_pool(knobs, random.Random(f"kv pool {seed}"))
    knobs = _with_caches(knobs, random.Random(f"caches {seed}"))
    if (models := random.Random(f"models {seed}")).random() < 0.2:
        num_other = models.choice((1, 2))
        knobs = replace(knobs, num_mixed=knobs.num_mixed + num_other, num_other=num_other)
    load_s = rng.uniform(0.5, 4.0)
    clients = _sharing_more(_draw_clients(rng, knobs, load_s), knobs, random.Random(f"shared prompts {seed}"))
    scenario = Scenario(seed, knobs, clients)
    is_on = {kind: rng.random() < 0.4 for kind in FAULT_KINDS}
    kinds = [kind for kind, on in is_on.items() if on and (scenario.handoff_pairs or kind not in LINK_KINDS)]
    num_faults = rng.choice((0, 1, 1, 2, 3, 5, 8)) if kinds else 0
    faults = [_draw_fault(rng, rng.choice(kinds), scenario, load_s) for _ in range(num_faults)]
    drained = _with_drains(Scenario(seed, knobs, clients, _in_order(faults)), random.Random(f"drains {seed}"), load_s)
    return _with_roles(drained, random.Random(f"roles {seed}"), load_s)


def _in_order(faults: Iterable[Fault]) -> tuple[Fault, ...]:
    return tuple(sorted(faults, key=lambda fault: fault.at))


def _with_drains(scenario: Scenario, rng: random.Random, load_s: float) -> Scenario:
    """In a part of the seeds, drawn apart: nodes are drained while they decode long streams, so that these move."""
    hosts = [host for host in scenario.hosts if host.startswith(("decode", "mixed"))]
    if rng.random() < 0.6 or len(hosts) < 2:
        return scenario
    knobs = scenario.knobs
    room = -(-knobs.max_model_len // BLOCK_SIZE)
    knobs = replace(
        knobs,
        step_s=max(knobs.step_s, 0.05),
        num_slots=max(knobs.num_slots, 4),
        max_batched_tokens=max(knobs.max_batched_tokens, 8),
        num_blocks=max(knobs.num_blocks, 3 * room),
    )
    clients = []
    for plan in scenario.clients:
        max_tokens = min(rng.randint(20, 60), knobs.max_model_len - len(plan.prompt))
        stop_token_ids = plan.stop_token_ids if rng.random() < 0.3 else ()
        clients.append(replace(plan, max_tokens=max(max_tokens, plan.max_tokens), stop_token_ids=stop_token_ids))
    drains = [
        Fault(rng.uniform(0.7, 1.0 + load_s), "drain", host, seconds=rng.uniform(0.01, 1.0), moment=rng.choice(MOMENTS))
        for host in rng.sample(hosts, rng.randint(1, len(hosts)))
    ]
    return replace(scenario, knobs=knobs, clients=tuple(clients), faults=_in_order((*scenario.faults, *drains)))


def _with_roles(scenario: Scenario, rng: random.Random, load_s: float) -> Scenario:
    """In a part of the seeds, drawn apart: nodes take other roles; some that can serve without them keep theirs."""
    kept = ("mixed-0",) if "mixed-0" in scenario.hosts else ("prefill-0", "decode-0")
    others = [host for host in scenario.hosts if not host.startswith("router") and host not in kept]
    if rng.random() < 0.7 or not others:
        return scenario
    roles = [
        Fault(rng.uniform(0.3, 2.0 + load_s), "role", rng.choice(others), role, 0.01, moment=rng.choice(MOMENTS))
        for role in rng.choices(("prefill", "decode", "mixed"), k=rng.randint(1, 6))
    ]
    return replace(scenario, faults=_in_order((*scenario.faults, *roles)))


def _draw_knobs(rng: random.Random) -> Knobs:
    is_tight = rng.random() < 0.3
    max_model_len = rng.choice((48, 64, 96))
    room = -(-max_model_len // BLOCK_SIZE)
    num_slots = rng.choice((1, 2, 4, 8))
    num_mixed = rng.choice((0, 0, 0, 1, 1, 2))
    return Knobs(
        num_routers=rng.choice((1, 1, 2, 3)),
        num_prefill=rng.choice((0, 1, 2) if num_mixed else (1, 1, 2, 3)),
        num_decode=rng.choice((0, 1, 2) if num_mixed else (1, 2, 2, 3)),
        num_mixed=num_mixed,
        num_blocks=rng.choice((room, room + 1, 2 * room, 4 * room)),
        num_slots=num_slots,
        max_batched_tokens=max(num_slots, rng.choice((4, 8, 16, 64))),
        max_model_len=max_model_len,
        max_attempts=rng.choice((1, 2, 4)) if is_tight else MANY_ATTEMPTS,
        max_fences=64 if is_tight and rng.random() < 0.5 else NO_LIMIT,
        max_queue=rng.choice((1, 4)) if is_tight and rng.random() < 0.5 else 1024,
        max_inflight_prefills=rng.choice((1, 2, 32)),
        retries=rng.choice((0, 1, 3, 3, 3)),
        max_nodes_lost=rng.choice((1, 2, 2, 3)),
        excludes_decode=rng.random() < 0.7,
        breaker_failures=rng.choice((1, 2, 5)),
        policy=rng.choice(("least_loaded", "round_robin", "power_of_two", "random")),
        network=rng.choice(("even", "jitter", "heavy")),
        step_s=rng.choice((0.001, 0.005, 0.005, 0.02, 0.02, SLOW_STEP_S)),
        lease_life_s=rng.choice((10.0, 10.0, 1.5)),
        reserve_policy=rng.choice(("full", "ratio", "fixed", "none", "none")),
        preempt_move_s=rng.choice((0.0, 0.1, 2.0)),
        max_moves=rng.choice((1, 8, 8)),
        reserves_for_running=rng.random() < 0.6,
        reserve_wait_s=rng.choice((0.0, 0.1, 1.0, 5.0)),
        max_waiting_reserves=rng.choice((1, 64)),
        is_one_sided=rng.random() < 0.5,
        clock_spread=rng.choice((0.0, 0.001, 0.05)),
        keeps_names=rng.random() < 0.7,
        keeps_addresses=rng.random() < 0.7,
    )


def _with_local_prefill(knobs: Knobs, rng: random.Random) -> Knobs:
    """In a part of the seeds, drawn apart so that everything else of a seed is what it was without."""
    if rng.random() < 0.6:
        return knobs
    if rng.random() < 0.2:
        knobs = replace(knobs, num_prefill=0, num_mixed=0, num_decode=max(knobs.num_decode, 1))
    return replace(knobs, local_prefill_max_tokens=rng.choice((0, 8, 200)), local_prefill_chunk=rng.choice((1, 5, 64)))


def _with_kv_pool(knobs: Knobs, rng: random.Random) -> Knobs:
    """The same."""
    if rng.random() < 0.5:
        return knobs
    flaws = tuple(flaw for flaw in KV_POOL_FLAWS if rng.random() < 0.3)
    return replace(knobs, kv_pool_flaws=flaws, saves_finished=rng.random() < 0.8)


def _sharing_more(clients: tuple[ClientPlan, ...], knobs: Knobs, rng: random.Random) -> tuple[ClientPlan, ...]:
    """Where there is a KV pool most prompts have a long beginning in common, as far as it fits."""
    if knobs.kv_pool_flaws is None:
        return clients
    shared = tuple(rng.randrange(VOCAB_SIZE) for _ in range(knobs.max_model_len))
    rooms = (knobs.max_model_len - len(plan.prompt) - plan.max_tokens for plan in clients)
    lengths = [rng.choice((0, room // 2, room)) for room in rooms]
    return tuple(
        replace(plan, prompt=shared[:length] + plan.prompt) for plan, length in zip(clients, lengths, strict=True)
    )


def _with_caches(knobs: Knobs, rng: random.Random) -> Knobs:
    """Routers that place by cache, in a part of the seeds; drawn apart too."""
    if rng.random() < 0.5:
        return knobs
    return replace(knobs, follows_caches=True, cache_piece=rng.choice((1, 3, 16)), key_log=rng.choice((2, 16, 1 << 16)))


def _draw_clients(rng: random.Random, knobs: Knobs, load_s: float) -> tuple[ClientPlan, ...]:
    shared = tuple(rng.randrange(VOCAB_SIZE) for _ in range(3 * BLOCK_SIZE))  # some prompts begin alike
    p_abort, p_stop = rng.choice((0.0, 0.1, 0.4)), rng.choice((0.0, 0.2))
    p_logprobs, p_short = rng.choice((0.0, 0.3)), rng.choice((0.0, 0.0, 0.2))
    clients = []
    for number in range(rng.randint(1, 22 if knobs.step_s < SLOW_STEP_S else 6)):
        max_tokens = rng.choice((1, 2, rng.randint(3, 24), rng.randint(3, 24)))
        room = knobs.max_model_len - max_tokens
        head = shared[: rng.choice((0, 0, 4, 8, 12))]
        prompt = (*head, *(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, min(30, room - len(head))))))
        num_choices = rng.choice((1, 1, 1, 2, 3, 6))
        stops = tuple((choice, rng.randint(1, max_tokens)) for choice in range(num_choices) if rng.random() < p_stop)
        has_logprobs = rng.random() < p_logprobs
        clients.append(
            ClientPlan(
                name=f"r{number}",
                at=1.0 + rng.random() * load_s,
                router=rng.randrange(knobs.num_routers),
                prompt=prompt,
                max_tokens=max_tokens,
                seed=rng.getrandbits(53),
                temperature=rng.choice((0.0, 1.0)),
                stop_token_ids=(rng.randrange(VOCAB_SIZE),) if rng.random() < 0.4 else (),
                num_choices=num_choices,
                num_logprobs=rng.choice((0, 2)) if has_logprobs else None,
                wants_prompt_logprobs=has_logprobs and rng.random() < 0.5,
                presence_penalty=rng.choice((0.0, 0.0, 0.5)),
                min_tokens=rng.choice((0, 0, min(3, max_tokens))),
                timeout_s=rng.choice((0.5, 3.0, 20.0)) if rng.random() < p_short else 600.0,
                aborts_after_s=rng.expovariate(4) if rng.random() < p_abort else None,
                stops=stops,
            )
        )
    return tuple(sorted(clients, key=lambda plan: plan.at))


def _draw_fault(rng: random.Random, kind: str, scenario: Scenario, load_s: float) -> Fault:
    hosts = scenario.hosts
    nodes = [host for host in hosts if not host.startswith("router")]
    routers = [host for host in hosts if host.startswith("router")]
    who, other = rng.sample(hosts, 2)
    match kind:
        case "crash" | "power off" | "stop" | "pause":
            who, other = rng.choice((rng.choice(hosts), rng.choice(nodes))), ""
        case "broken row" | "drain":
            who, other = rng.choice(nodes), ""
        case "cut stream":
            who, other = rng.choice(routers), rng.choice(nodes)
        case "cut link" | "flip bit" | "lose ack":
            who, other = rng.choice(scenario.handoff_pairs)
        case "lose calls" | "repeat calls" | "slow":
            who, other = rng.choice([*scenario.handoff_pairs, *((a, b) for a in nodes for b in routers)])
    has_length = (
        kind in ("crash", "power off", "stop", "drain", "pause", "partition", "one way", "slow") or "calls" in kind
    )
    return Fault(
        at=rng.uniform(0.2, 1.0 + load_s),
        kind=kind,
        who=who,
        other=other,
        seconds=rng.choice((rng.uniform(0.01, 0.5), rng.uniform(0.2, 2.0), rng.uniform(1.0, 7.0))) if has_length else 0,
        number=rng.randrange(4),
        moment=rng.choice(MOMENTS),
    )
