"""A router process in the simulation: the production core, listing and session ends, and a shell without asyncio.

The shell is router/shell.py (tick before each event, what an action causes waits for the actions before it) and
runtime/registry_server.py in short.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Final

from google.protobuf.message import Message

from proto import baton_pb2 as pb
from router import events as rev
from router.cache_index import CacheIndex
from router.cache_map import CacheMap
from router.core import RouterCore
from router.entrance import RouterCoreConfig
from router.placement import CACHE_AWARE, Imbalance, Placement
from router.retry import COST, Cost
from runtime.listing import Change, Listed, Listing, Missed
from runtime.registry_server import TTL_S
from runtime.session import Peer
from runtime.session_events import Loss
from tests.sim.calls import Answer
from tests.sim.clients import Choice, Client, request_of
from tests.sim.kernel import Process
from tests.sim.nodes import Surroundings
from tests.sim.sessions import Dialer
from tests.sim.stream import Wire
from tests.sim.targets import Targets
from tests.sim.timelines import CheckedTimelines
from tests.sim.trace import describe_to_node, describe_to_router

_SLACK_S: Final = 1e-6
_OF_SLOW_LINKS: Final = (pb.LEASE_EXPIRED, pb.TRANSFER_FAILED)  # what a lease ends with that its link outlasts


class SimRouter(Process):
    """One process; a restarted router is another one, under another name."""

    def __init__(self, around: Surroundings, wire: Wire, host: str, generation: int, rate: float) -> None:
        super().__init__(around.kernel, host, generation, rate)
        self._around = around
        knobs = around.knobs
        rng = around.kernel.rng(f"router {self.label}")
        self.config = RouterCoreConfig(
            max_queue=knobs.max_queue,
            max_inflight_prefills=knobs.max_inflight_prefills,
            preempt_retry_count=knobs.retries,
            preempt_retry_exclude_decode=knobs.excludes_decode,
            max_nodes_lost=knobs.max_nodes_lost,
            max_moves=knobs.max_moves,
            breaker_failures=knobs.breaker_failures,
            seed=rng.getrandbits(63),
            local_prefill_max_tokens=knobs.local_prefill_max_tokens or 0,
        )
        policy = CACHE_AWARE if knobs.follows_caches else knobs.policy
        placement = Placement(policy, knobs.policy, rng.getrandbits(63), Imbalance(64, 2.0))
        self.caches = CacheMap(CacheIndex(1 << 20)) if knobs.follows_caches else None
        self.core = RouterCore(self.config, placement, self.caches)
        self.listing = Listing(TTL_S)
        self.dialer = Dialer(self, Peer(self.label, rng.getrandbits(63) + 1), wire, self, self._tell)
        self.clients: dict[str, Client] = {}  # by request id
        self._targets = Targets(self.core, self.config)
        self._timelines = CheckedTimelines()
        self.circuits: dict[str, str] = {}  # as the invariants saw them last
        self._hosts: dict[rev.NodeRef, str] = {}
        self._roles: dict[rev.NodeRef, str] = {}
        self._models: dict[rev.NodeRef, str] = {}
        self._listed: dict[rev.NodeRef, None] = {}  # nodes that have not gone, and do not drain
        self._connected: dict[rev.NodeRef, None] = {}  # nodes whose session was up and is not lost
        self._pair_seen_at: dict[str, float] = {}  # by model, by its clock
        self._events: deque[rev.Event] = deque()
        self._is_woken = False
        self.is_changed = True  # since the invariants of the core were looked at
        self._is_heard = True  # since the core was asked for its deadline
        self._core_deadline: float | None = None
        self.is_busy = False

    def _tell(self, what: str, why: str) -> None:
        if what == "session up":
            self._around.moment(what, self.host)
        self.kernel.tell(self.label, what, why)

    # ---------------------------------------------------------------- Process

    def next_deadline(self) -> float | None:
        """Of the core, the listing and every session."""
        parts = (self.core_deadline(), self.listing.next_deadline(), self.dialer.next_deadline())
        return min((at for at in parts if at is not None), default=None)

    def core_deadline(self) -> float | None:
        """The core's, which only an event or a tick changes."""
        if self._is_heard:
            self._core_deadline, self._is_heard = self.core.next_deadline(), False
        return self._core_deadline

    def on_alarm(self) -> None:
        """Tick what is due."""
        self._report(self.listing.expire(self.clock()))
        self.dialer.tick()
        if (due := self.core_deadline()) is not None and due <= self.clock():
            self._tick()

    # ---------------------------------------------------------------- clients

    def submit(self, client: Client) -> None:
        """A request that is in `clients` arrives."""
        request = request_of(client.plan, self.clock() + client.plan.timeout_s)
        self._timelines.begin(request, self.clock())
        self._feed(rev.Submitted(request))

    def open_clients(self) -> list[Client]:
        """Those that have not ended, as far as this process knows."""
        return [client for client in self.clients.values() if not client.is_over]

    def abort(self, client: Client) -> None:
        """The client has gone; without effect once the request has ended."""
        if not client.is_over:
            client.close("aborted", self.kernel.now)
            self._feed(rev.Aborted(client.plan.name))

    def stop_serving(self, client: Client) -> None:
        """The router ends in order: its nodes are told."""
        self._feed(rev.Aborted(client.plan.name))

    # ---------------------------------------------------------------- sessions (RouterHears)

    def on_up(self, node: Peer) -> None:
        self._feed(rev.SessionUp(rev.NodeRef(*node)))

    def on_broken(self, node: Peer) -> None:
        self._feed(rev.SessionBroken(rev.NodeRef(*node)))

    def on_lost(self, node: Peer, loss: Loss) -> None:
        ref = rev.NodeRef(*node)
        self.kernel.count("sessions lost")
        self._check_struck(f"{ref.name} was lost", {self.host, self._hosts[ref]})
        self._feed(rev.SessionLost(ref, has_died=loss is Loss.DIED))

    def on_message(self, node: Peer, message: pb.NodeMessage) -> None:
        self._feed(rev.FromNode(rev.NodeRef(*node), message))

    def on_load(self, node: Peer, load: pb.LoadReport) -> None:
        self._feed(rev.LoadReported(rev.NodeRef(*node), load))

    # ---------------------------------------------------------------- what it was told, for ends.py

    def _note(self, event: rev.Event) -> None:
        """The core is about to hear this."""
        if isinstance(event, rev.FromNode):
            self._note_message(event.node, event.message)
            return
        self._look_for_pair()
        match event:
            case rev.NodeListed(entry):
                ref = rev.NodeRef(entry.node.name, entry.node.incarnation)
                for other in [each for each, at in self._hosts.items() if at == self._hosts[ref] and each != ref]:
                    self._lost(other, has_died=True)  # another process is in its place
                    self._listed.pop(other, None)
                self._listed.pop(ref, None)
                if not entry.draining:
                    self._listed[ref] = None
            case rev.NodeUnlisted(ref):
                self._listed.pop(ref, None)
            case rev.SessionUp(ref):
                self._connected[ref] = None
            case rev.SessionLost(ref, has_died):
                self._lost(ref, has_died)
        self._look_for_pair()

    def _note_message(self, node: rev.NodeRef, message: pb.NodeMessage) -> None:
        kind = message.WhichOneof("kind")
        if message.error.code == pb.DRAINING or message.wants_move.reason == pb.MOVE_DRAINING:
            name = message.error.node_id or node.name  # who drains may say so to a router before the registry does
            self._listed = {each: None for each in self._listed if each.name != name}
        if kind == "error" and (client := self.clients.get(message.error.key.request_id)) is not None:
            self._note_error(client, message.error)
        for tokens in message.tokens.branches if kind == "tokens" and message.tokens.from_receiver else ():
            if (client := self.clients.get(tokens.key.request_id)) is not None:
                client.trials[tokens.key.choice].heard_receiver(tokens.key.attempt)

    def _look_for_pair(self) -> None:
        """Whether there is a pair of nodes of a model that are listed and not lost."""
        roles: dict[str, set[str]] = {}
        for node in self._connected:
            if node in self._listed:
                roles.setdefault(self._models[node], set()).add(self._roles[node])
        for model, found in roles.items():
            if found - {"decode"} and found - {"prefill"}:
                self._pair_seen_at[model] = self.clock()

    def had_no_pair(self, models: Collection[str] | None = None) -> bool:
        """Whether none of some of these models, or of any, is there, and none was for as long as requests wait for one."""
        self._look_for_pair()
        latest = self.clock() - self.config.no_nodes_grace_s + _SLACK_S
        seen_at = self._pair_seen_at
        if models is None:
            return max(seen_at.values(), default=latest) <= latest
        return any(seen_at.get(model, latest) <= latest for model in models)

    def _lost(self, node: rev.NodeRef, has_died: bool) -> None:
        self._connected.pop(node, None)
        for client in self.open_clients():
            for trials in client.trials:
                trials.lost_node(node, has_died)

    def _note_error(self, client: Client, error: pb.PDError) -> None:
        choice, trials = client.choices[error.key.choice], client.trials[error.key.choice]
        is_open = not client.is_over and choice.finish_reason is None and not choice.is_stopped
        if is_open and error.key.attempt == trials.attempt and trials.pair is not None:
            is_too_slow = error.code in _OF_SLOW_LINKS and self._around.knobs.links_outlast_leases
            if COST.get(error.code) is Cost.RETRY and not is_too_slow:
                code = pb.ErrorCode.Name(error.code)
                hosts = {self.host, *(self._hosts[node] for node in trials.nodes)}
                self._check_struck(f"{client.plan.name}/{error.key.choice} fails with {code}, {error.message},", hosts)
            trials.heard_error(error)

    def _check_struck(self, what: str, hosts: set[str]) -> None:
        assert self._around.blames.excuses(frozenset(hosts)), f"{self.label}: {what}, and nothing had struck it"

    # ---------------------------------------------------------------- the registry

    def serve_register(self, message: Message, answer: Answer) -> None:
        """As RegistryServer.Register."""
        assert isinstance(message, pb.NodeEntry)
        now = self.clock()
        self._report(self.listing.expire(now))
        outcome = self.listing.register(message, now)
        if isinstance(outcome, str):
            self._tell("refuses to list", f"{message.node.name}: {outcome}")
            answer(pb.RegisterReply(refused=outcome))
            return
        self._report(outcome)
        answer(pb.RegisterReply(ttl_ms=round(TTL_S * 1000)))

    def serve_deregister(self, message: Message, answer: Answer) -> None:
        """As RegistryServer.Deregister."""
        assert isinstance(message, pb.PeerId)
        self._report(self.listing.deregister(Peer(message.name, message.incarnation)))
        answer(pb.DeregisterReply())

    def _report(self, changes: list[Change]) -> None:
        for change in changes:
            if isinstance(change, Listed):
                entry = change.entry
                ref = rev.NodeRef(entry.node.name, entry.node.incarnation)
                self._hosts[ref] = entry.grpc_address.partition(":")[0]
                self._models[ref] = entry.fingerprint.weights
                self._roles[ref] = pb.Role.Name(entry.role).removeprefix("ROLE_").lower()
                self._tell("lists", entry.node.name)
                self._feed(rev.NodeListed(entry))
            elif isinstance(change, Missed):
                self._tell("misses", change.peer.name)
                self._feed(rev.NodeMissed(rev.NodeRef(*change.peer)))
            else:
                self._tell("lists no more", change.peer.name)
                self._feed(rev.NodeUnlisted(rev.NodeRef(*change.peer)))

    # ---------------------------------------------------------------- the core

    def _feed(self, event: rev.Event) -> None:
        self._events.append(event)
        if not self._is_woken:
            self._is_woken = True
            self.kernel.after(0.0, self._run, self)

    def _tick(self) -> None:
        now, due = self.clock(), self.core_deadline()
        actions = self.core.tick(now)
        self.is_changed |= bool(actions) or (due is not None and due <= now)
        self._is_heard = True
        self._perform(actions)

    def _run(self) -> None:
        self._is_woken = False
        self._tick()
        while self._events:
            event = self._events.popleft()
            if self.kernel.trace is not None and isinstance(event, rev.FromNode):
                self._tell("takes", f"{describe_to_router(event.message)} from {event.node.name}")
            num_queued = self._num_queued() if isinstance(event, rev.Submitted) else None
            if not isinstance(event, rev.LoadReported):
                self._note(event)
            actions = self.core.receive(event, self.clock())
            self._is_heard = True
            self.is_changed |= bool(actions) or not isinstance(event, rev.LoadReported)
            if num_queued is not None:
                self._check_door(num_queued, actions)
            self._perform(actions)
            self._tick()

    def _num_queued(self) -> int:
        number = self.core.snapshot()["queued"]
        assert isinstance(number, int)
        return number

    def _check_door(self, num_queued: int, actions: Sequence[rev.Action]) -> None:
        """The queue is bounded: a full one lets nobody in, and no other one turns anybody away."""
        is_refused = any(isinstance(action, rev.Failed) and action.code == "OVERLOADED" for action in actions)
        is_full = num_queued >= self.config.max_queue
        assert is_refused == is_full, (
            f"{self.label}: a request came to {num_queued} queued, {self.config.max_queue} at most"
        )
        is_late = any(isinstance(action, rev.Failed) and action.code == "LATE" for action in actions)
        assert num_queued or not is_late, f"{self.label}: a request was turned away though nobody waited"

    def _perform(self, actions: Sequence[rev.Action]) -> None:
        self._timelines.take(actions, self.clock())
        for action in actions:
            match action:
                case rev.ToNode(node, message):
                    self._say(node, message)
                case rev.Emitted(request_id) | rev.PromptScored(request_id):
                    self._show(self.clients[request_id], action)
                case rev.Finished(request_id) | rev.Failed(request_id):
                    self._end(self.clients[request_id], action)
                case rev.Dial(entry):
                    self.dialer.dial(entry)
                case rev.HangUp(node):
                    self.dialer.hang_up(Peer(node.name, node.incarnation))
                case rev.Count(name, label, amount):
                    self.kernel.count(f"{name}:{label}", amount)
                    if name == "retries":
                        self._tell("retries", f"because of {label}")
                case rev.Observe():
                    pass

    def _say(self, node: rev.NodeRef, message: pb.RouterMessage) -> None:
        self._tell("says", f"{describe_to_node(message)} to {node.name}") if self.kernel.trace is not None else None
        if message.WhichOneof("kind") == "dispatch":
            client = self.clients.get(message.dispatch.request_id)
            if client is not None:
                target = message.dispatch.target.node
                pair = (node, rev.NodeRef(target.name, target.incarnation))
                for branch in message.dispatch.branches:
                    client.trials[branch.choice].dispatched(message.dispatch.attempt, pair)
                sender, receiver = (self._hosts[each] for each in pair)
                roles = [self._roles[each] for each in pair]
                self.kernel.count(
                    "dispatched to itself" if sender == receiver else "dispatched: {} to {}".format(*roles)
                )
        if message.WhichOneof("kind") == "move":
            self._note_move(node, message.move)
        self.dialer.send(Peer(node.name, node.incarnation), message)

    def _note_move(self, holder: rev.NodeRef, move: pb.Move) -> None:
        client, choice, target = self.clients[move.key.request_id], move.key.choice, move.target.node
        ref = rev.NodeRef(target.name, target.incarnation) if move.HasField("target") else None
        if ref is not None:
            client.trials[choice].may_move(move.next_attempt, ref)
        if (reason := self._targets.reason(client, choice, holder, ref, self.clock())) is not None:
            self.kernel.count(f"{reason} {self._hosts[holder]} runs")

    def _show(self, client: Client, news: rev.Emitted | rev.PromptScored) -> None:
        if client.end in ("aborted", "router lost"):
            return
        if isinstance(news, rev.PromptScored):
            client.take_prompt_logprobs(news)
        elif (num_tokens := client.take(news)) is not None:
            self._tell("stop string", f"in {client.plan.name}/{news.choice} at {num_tokens}")
            self.kernel.count("stop string")
            self._events.append(rev.Stopped(client.plan.name, news.choice, num_tokens))

    def _end(self, client: Client, end: rev.Finished | rev.Failed) -> None:
        if client.end in ("aborted", "router lost"):
            return
        name = client.plan.name
        if isinstance(end, rev.Finished):
            client.finish(end, self.kernel.now)
            if end.finish_reason == "pd_reschedule":
                self._note_heirs(client.choices[end.choice])
            else:
                self._count_recoveries(client, end.choice)
            self._tell("finishes", f"{name}/{end.choice}: {end.finish_reason}")
            self.kernel.count("Finished")
        else:
            client.had_no_pair = self.had_no_pair()
            for choice in client.choices:
                self._note_heirs(choice)
            client.fail(end, self.kernel.now)
            self._tell("fails", f"{name}: {end.code} {end.message}")
            self.kernel.count(f"Failed:{end.code}")

    def _note_heirs(self, choice: Choice) -> None:
        choice.had_no_heirs = self.had_no_pair({each.model.weights for each in choice.answers})
        self.kernel.count("no heirs", choice.had_no_heirs)

    def _count_recoveries(self, client: Client, choice: int) -> None:
        trials = client.trials[choice]
        for code in set(trials.failed.values()) | ({"PREEMPTED"} if trials.preempted else set()):
            self.kernel.count(f"recovered from {code}")
        self.kernel.count("moved", trials.num_moved)
        for node in trials.died:
            self.kernel.count(f"outlived a {self._hosts[node].partition('-')[0]} node")
