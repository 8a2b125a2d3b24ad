"""Bugs of nodes that do both: what their cores owe each other, what a node does for itself, and what the router makes of a pair
that is one node."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_CORE: Final = ("tests/cores/test_mixed_core.py",)
_WORLD: Final = ("tests/cores/test_mixed_world.py",)
_LOCAL: Final = ("tests/cores/test_local_prefill.py",)
_LOCAL_ROUTER: Final = ("tests/router/test_core_local.py",)
_LIVES: Final = (
    "tests/cores/test_random_lives.py::"
    "test_a_node_that_prefills_for_itself_says_the_right_tokens_once_and_ends_each_branch_once_in_any_order_of_events",
)
_ROUTER: Final = ("tests/router/test_core_mixed.py",)

MUTANTS: Final = (
    Mutant(
        "mixed-hands-over-to-itself",
        "A mixed node takes a Dispatch to itself for one to another node, and asks itself for a lease.",
        "mixed_node/core.py",
        "if dispatch.target.node == self._self:",
        "if dispatch.target.node.name == self._self.name and not self._self.incarnation:",
        _WORLD,
    ),
    Mutant(
        "mixed-leases-overtake-its-queue",
        "A mixed node gives leases while the head of its own queue finds no room, which then may never come.",
        "mixed_node/core.py",
        "        self._decode.hold_back(self._steps.is_held_up)\n",
        "",
        _CORE,
    ),
    Mutant(
        "mixed-attempt-in-two-cores",
        "A Dispatch of an attempt that waits for its Commit starts a second sequence of the same name.",
        "mixed_node/core.py",
        "if any(map(self._decode.holds, keys)):",
        "if not keys:",
        _CORE,
    ),
    Mutant(
        "mixed-cancel-reaches-one-core",
        "Cancel and a lost router reach the decode core of a mixed node only.",
        "mixed_node/core.py",
        "            case ev.FromRouter() | ev.RouterLost() | ev.DrainAsked():\n                for part in self._parts:\n"
        "                    part.take(event, now)\n",
        "            case ev.FromRouter() | ev.RouterLost() | ev.DrainAsked():\n"
        "                self._decode.take(event, now)\n",
        _CORE,
    ),
    Mutant(
        "mixed-ends-with-its-first-core",
        "A mixed node has drained when one of its cores has, and ends with what the other still hands over.",
        "mixed_node/core.py",
        "if num_drained and not self._num_draining:",
        "if num_drained:",
        _CORE,
    ),
    Mutant(
        "local-cancel-goes-on-computing",
        "A cancelled attempt is forgotten, and computed to its end all the same.",
        "decode_node/mover.py",
        "        else:\n            self._scheduler.abort(key)\n\n    # ---",
        "\n    # ---",
        _LIVES,
    ),
    Mutant(
        "local-prompt-logprobs-told-again",
        "A node tells the log-probabilities of a prompt that it computed itself with every token.",
        "decode_node/running.py",
        "        branch.prompt_logprobs.clear()\n",
        "",
        _LIVES,
    ),
    Mutant(
        "local-older-attempt-goes-on",
        "A newer attempt of a branch does not end the older one that runs.",
        "decode_node/running.py",
        "if key.attempt < floors.get(key.branch, 0)]:",
        "if key.attempt + 1 < floors.get(key.branch, 0)]:",
        _LIVES,
    ),
    Mutant(
        "resumed-chunk-ends-the-branch",
        "A decode core takes a chunk of a prompt, or of a sequence that is computed again, for its end.",
        "decode_node/running.py",
        "            elif item.finish is not None:  # else it was a chunk, of a new prompt or of one that gave way\n"
        "                stopped.append((branch, item.finish))\n",
        '            else:\n                stopped.append((branch, item.finish or "broken"))\n',
        _LIVES,
    ),
    Mutant(
        "local-leases-overtake-prompts",
        "A decode node gives leases while a prompt that it is to compute itself finds no room.",
        "decode_node/core.py",
        "        self.hold_back(self._steps.is_held_up)\n",
        "",
        _LOCAL,
    ),
    Mutant(
        "local-attempt-with-a-lease",
        "A Dispatch of an attempt that a decode node holds a lease for starts it there too.",
        "decode_node/local_prompts.py",
        "if self._is_fresh(key) and not is_leased(key)]",
        "if self._is_fresh(key)]",
        _LOCAL,
    ),
    Mutant(
        "local-leaves-the-older-lease",
        "A Dispatch to a decode node itself leaves the lease of an older attempt standing.",
        "decode_node/core.py",
        "self._end_below(self._local.start(router, message.dispatch, self.holds, now), now)",
        "self._local.start(router, message.dispatch, self.holds, now)",
        _LOCAL,
    ),
    Mutant(
        "local-forgets-earlier-tokens",
        "What gives way goes back with the tokens of its last attempt only.",
        "decode_node/local_prompts.py",
        "                token_ids=[*generated],\n",
        "                token_ids=[],\n",
        _LIVES,
    ),
    Mutant(
        "local-prefill-for-others",
        "A decode node takes a Dispatch to another node, and computes for itself.",
        "node/validate.py",
        "and dispatch.target.node != bounds.local_prefill:",
        "and bounds.local_prefill is None:",
        ("tests/node/test_validate.py",),
    ),
    Mutant(
        "prompts-take-the-whole-step",
        "The smaller budget of prompts beside decodes holds in steps without decodes only.",
        "engine/planning.py",
        "if decodes else budget_tokens)",
        "if not decodes else budget_tokens)",
        ("tests/engine_pure/test_scheduler.py",),
    ),
    Mutant(
        "busy-prefill-nodes-spill-over",
        "Prompts that find every prefill node full are computed by decode nodes.",
        "router/nodes.py",
        "return node.prefills_locally and not any(",
        "return node.prefills_locally or not any(",
        _LOCAL_ROUTER,
    ),
    Mutant(
        "broken-prefill-node-is-absent",
        "A prefill node whose stream breaks for a moment counts as gone, and its queue comes over the decode nodes.",
        "router/nodes.py",
        "            and other.is_expected\n",
        "            and other.can_take_work\n",
        _LOCAL_ROUTER,
    ),
    Mutant(
        "stranded-by-any-model",
        "A prefill node of another model keeps decode nodes from computing prompts.",
        "router/nodes.py",
        "            and other.fingerprint == node.fingerprint\n",
        "",
        _LOCAL_ROUTER,
    ),
    Mutant(
        "left-alone-is-waited-for",
        "While the only prefill node is left alone because it fails everything, it is tried rather than done without.",
        "router/nodes.py",
        "            and other.ref.name not in without\n",
        "",
        _LOCAL_ROUTER,
    ),
    Mutant(
        "short-prompts-without-bound",
        "Of short prompts a decode node gets any number at once.",
        "router/nodes.py",
        "            and node.prefill_tokens + num_tokens <= max_tokens\n",
        "",
        _LOCAL_ROUTER,
    ),
    Mutant(
        "short-prompts-overtake-leases",
        "A short prompt goes to a decode node where a Reserve waits for room.",
        "router/nodes.py",
        "            and not node.load.waiting\n",
        "",
        _LOCAL_ROUTER,
    ),
    Mutant(
        "short-counts-one-choice",
        "A prompt of many choices is short if one of them is.",
        "router/waiting.py",
        "branch.num_tokens * (1 + len(self._mates(branch)))",
        "branch.num_tokens",
        _LOCAL_ROUTER,
    ),
    Mutant(
        "alone-where-it-was-refused",
        "A decode node that is to compute a prompt itself is asked again at once after it refused.",
        "router/placement.py",
        "[candidate for candidate in decodes if candidate.node not in excluded], avoided)",
        "decodes, avoided)",
        ("tests/router/test_placement.py",),
    ),
    Mutant(
        "degraded-is-not-told",
        "The router says when decode nodes begin to compute prompts, and never that it is over.",
        "router/nodes.py",
        "if self._is_degraded != bool(sentences) and not self.missing():",
        "if not self._is_degraded and sentences:",
        _LOCAL_ROUTER,
    ),
    Mutant(
        "begun-by-the-length-of-the-queue",
        "A prefill core asks for leases when the common queue is shorter than its own, which others lengthen.",
        "prefill_node/core.py",
        "and self._scheduler.block_ids(key):",
        "and len(self._not_started) > self._scheduler.num_waiting:",
        _WORLD,
    ),
    Mutant(
        "lost-mixed-node-is-only-a-sender",
        "The loss of a mixed node counts as the sender's, whom nobody believes once the receiver was heard: requests hang.",
        "router/requests.py",
        "        if receiver is not None and receiver.node == node:\n",
        "        if receiver is not None and receiver.node == node and (sender is None or sender.node != node):\n",
        _ROUTER,
    ),
    Mutant(
        "mixed-decodes-elsewhere",
        "What a mixed node prefills is handed over to whoever decodes least.",
        "router/placement.py",
        "decode = self._decode.choose(here or fitting)",
        "decode = self._decode.choose(fitting)",
        ("tests/router/test_placement.py", *_ROUTER),
    ),
    Mutant(
        "mixed-cannot-be-half-a-pair",
        "A mixed node takes prompts of its own only.",
        "router/node_state.py",
        "DECODING: Final = frozenset({pb.ROLE_DECODE, pb.ROLE_MIXED})",
        "DECODING: Final = frozenset({pb.ROLE_DECODE})",
        _ROUTER,
    ),
)
