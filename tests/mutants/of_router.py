"""Bugs of the router's decisions: token log, owner rule, fences, retries, load."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_LOG: Final = ("tests/router/test_token_log.py",)
_OWNER: Final = ("tests/handoff/test_owner_rule.py",)
_CORE: Final = ("tests/router/test_core.py", "tests/router/test_core_fence.py")
_RETRY: Final = ("tests/router/test_retry.py", "tests/router/test_core_retry.py")
_RANDOM: Final = ("tests/router/test_core_random.py",)

MUTANTS: Final = (
    Mutant(
        "log-takes-a-gap",
        "The token log is off by one: a batch that leaves a hole of one token is taken.",
        "router/token_log.py",
        "if first_index > length:",
        "if first_index > length + 1:",
        _LOG,
    ),
    Mutant(
        "log-takes-a-repeat",
        "A repeated batch is appended a second time.",
        "router/token_log.py",
        "fresh = tuple(token_ids[num_known:])",
        "fresh = tuple(token_ids)",
        _LOG,
    ),
    Mutant(
        "log-one-over-max-tokens",
        "The log takes one token more than the client asked for.",
        "router/token_log.py",
        "> self._max_tokens:",
        "> self._max_tokens + 1:",
        _LOG,
    ),
    Mutant(
        "log-overlooks-the-last-difference",
        "Of a repeat the last known token is not compared.",
        "router/token_log.py",
        "for offset in range(num_known):",
        "for offset in range(num_known - 1):",
        _LOG,
    ),
    Mutant(
        "unsure-is-retried",
        "An attempt whose Commit has no answer is retried, while the receiver may run it.",
        "router/ownership.py",
        "(_O.SENDER, _W.SENDER_UNSURE): (_O.UNSURE, _V.AWAIT_RECEIVER),",
        "(_O.SENDER, _W.SENDER_UNSURE): (_O.NOBODY, _V.RETRY),",
        _OWNER,
    ),
    Mutant(
        "sender-takes-back",
        "A late word of the sender's loss ends an attempt that the receiver runs.",
        "router/ownership.py",
        "(_O.RECEIVER, _W.SENDER_TOKENS): (_O.RECEIVER, _V.TAKE),  # late, and a repeat: the log drops it",
        "(_O.RECEIVER, _W.SENDER_TOKENS): (_O.RECEIVER, _V.TAKE),\n    (_O.RECEIVER, _W.SENDER_LOST): (_O.NOBODY, _V.RETRY),",
        _OWNER,
    ),
    Mutant(
        "unsure-for-ever",
        "The grace after an unanswered Commit decides nothing, and the attempt never ends.",
        "router/ownership.py",
        "(_O.UNSURE, _W.GRACE_OVER): (_O.NOBODY, _V.RETRY),",
        "(_O.UNSURE, _W.GRACE_OVER): (_O.UNSURE, _V.AWAIT_RECEIVER),",
        _OWNER,
    ),
    Mutant(
        "receiver-unheard-while-unsure",
        "After an unanswered Commit the receiver's batch is not believed.",
        "router/ownership.py",
        "**{(owner, _W.RECEIVER_TOKENS): (_O.RECEIVER, _V.TAKE) for owner in _RECEIVERS},",
        "**{(owner, _W.RECEIVER_TOKENS): (_O.RECEIVER, _V.TAKE) for owner in (_O.SENDER, _O.RECEIVER, _O.MOVING)},",
        _OWNER,
    ),
    Mutant(
        "old-attempt-believed",
        "A message of an older attempt counts as one of the newest.",
        "router/requests.py",
        "            is_known = (node, attempt) == (receiver if is_receiver else sender)\n",
        "            post = receiver if is_receiver else sender\n"
        "            is_known = post is not None and node == post.node\n",
        _CORE,
    ),
    Mutant(
        "old-node-believed",
        "A node that is not the attempt's is believed.",
        "router/requests.py",
        "            is_known = (node, attempt) == (receiver if is_receiver else sender)\n",
        "            post = receiver if is_receiver else sender\n"
        "            is_known = post is not None and attempt == post.attempt\n",
        _CORE,
    ),
    Mutant(
        "old-attempt-runs-on",
        "A stale batch is dropped, but what sent it is not cancelled.",
        "router/core.py",
        "        self._live.send(node, pb.RouterMessage(cancel=pb.Cancel(key=key, ms_left=ms_left)))\n",
        "",
        _CORE,
    ),
    Mutant(
        "retry-without-cancel",
        "A retry does not fence the attempt before it.",
        "router/attempt_ends.py",
        "self._live.cancel(branch, now)\n        self._live.leave_nodes(branch, now)\n        branch.phase = Waiting()",
        "self._live.leave_nodes(branch, now)\n        branch.phase = Waiting()",
        _CORE,
    ),
    Mutant(
        "attempt-number-reused",
        "A retry runs under the number of the attempt before it.",
        "router/core.py",
        "attempt = 1 + max(branch.newest_attempt for branch in group)",
        "attempt = max(0, *(branch.newest_attempt for branch in group))",
        _CORE,
    ),
    Mutant(
        "retry-forgets-the-tokens",
        "A retry starts without the tokens that the client has already.",
        "router/requests.py",
        "generated_token_ids=each.log.token_ids[: -1 if each.is_complete else None]",
        "generated_token_ids=each.request.generated_token_ids",
        _RETRY,
    ),
    Mutant(
        "refusal-costs-a-retry",
        "A full node uses up the retries of a request.",
        "router/retry.py",
        "    pb.NO_BLOCKS: Cost.NOTHING,",
        "    pb.NO_BLOCKS: Cost.RETRY,",
        _RETRY,
    ),
    Mutant(
        "retries-unlimited",
        "A handoff that always breaks is retried until the deadline.",
        "router/retry.py",
        "            self._credit -= PREEMPTIONS_PER_RETRY\n",
        "",
        _RETRY,
    ),
    Mutant(
        "prefill-load-leaks",
        "A prefill node counts as busy until the request ends.",
        "router/live.py",
        "            self._nodes.vacate_prefill(branch.key, branch.pair)\n",
        "",
        _CORE,
    ),
    Mutant(
        "load-leaks-at-the-end",
        "A request that ends leaves its load on its nodes.",
        "router/live.py",
        "        key = branch.key\n        self.leave_nodes(branch, now)\n",
        "        key = branch.key\n",
        _CORE,
    ),
    Mutant(
        "deadline-starts-anew",
        "A retry is given the whole time limit again.",
        "router/requests.py",
        "ms_left=head.ms_left(now),",
        "ms_left=head.ms_left(head.request.deadline - 600),",
        _CORE,
    ),
    Mutant(
        "no-wake-up-at-the-deadline",
        "A request past its deadline ends when something else happens, not before.",
        "router/requests.py",
        "instants = [self.request.deadline]",
        "instants = [self.request.deadline + 60]",
        _CORE,
    ),
    Mutant(
        "grace-without-a-timer",
        "After an unanswered Commit nothing wakes the router, and the client waits for its deadline.",
        "router/requests.py",
        "if isinstance(self.phase, CommitUnknown | MoveUnknown | MoveDoubted | AwaitingPrompt):",
        "if isinstance(self.phase, MoveUnknown | MoveDoubted | AwaitingPrompt):",
        _CORE,
    ),
    Mutant(
        "restarted-node-not-noticed",
        "A process that took over a node's address does not replace it.",
        "router/nodes.py",
        " or other.entry.grpc_address == entry.grpc_address):",
        "):",
        _CORE,
    ),
    Mutant(
        "lost-node-keeps-its-requests",
        "A lost node's requests are not told, and wait for their deadlines.",
        "router/nodes.py",
        "        change.orphans += [(key, node.ref) for key in dict.fromkeys([*node.prefilling, *node.branches])]\n",
        "",
        _CORE,
    ),
    Mutant(
        "ended-twice",
        "A choice that has finished is still known, and a late batch finishes it again.",
        "router/live.py",
        "        self.actions.append(ev.Finished(request_id, end.finish_reason, token_ids, choice))\n"
        "        self._forget(branch, now)\n",
        "        self.actions.append(ev.Finished(request_id, end.finish_reason, token_ids, choice))\n",
        _RANDOM,
    ),
    Mutant(
        "timer-left-behind",
        "The timer of a branch that has ended fires.",
        "router/live.py",
        "        self._timers.discard(key)\n",
        "",
        _RANDOM,
    ),
)
