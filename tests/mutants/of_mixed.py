"""Bugs of nodes that do both: what their cores owe each other, and what the router makes of a pair that is one node."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_CORE: Final = ("tests/cores/test_mixed_core.py",)
_WORLD: Final = ("tests/cores/test_mixed_world.py",)
_LIVES: Final = (
    "tests/cores/test_random_lives.py::"
    "test_a_mixed_node_short_of_blocks_says_the_right_tokens_once_and_ends_each_branch_once_in_any_order_of_events",
)
_ROUTER: Final = ("tests/router/test_core_mixed.py",)

MUTANTS: Final = (
    Mutant(
        "mixed-hands-over-to-itself",
        "A mixed node takes a Dispatch to itself for one to another node, and asks itself for a lease.",
        "mixed_node/core.py",
        "elif dispatch.target.node == self._self:",
        "elif dispatch.target.node.name == self._self.name and not self._self.incarnation:",
        _WORLD,
    ),
    Mutant(
        "mixed-leases-overtake-its-queue",
        "A mixed node gives leases while the head of its own queue finds no room, which then may never come.",
        "mixed_node/core.py",
        "        self._decode.hold_back(self._is_held_up)\n",
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
        "Cancel and a lost router reach the local core of a mixed node only.",
        "mixed_node/core.py",
        "            case ev.FromRouter() | ev.RouterLost():\n                for part in self._parts:\n"
        "                    part.take(event, now)\n",
        "            case ev.FromRouter() | ev.RouterLost():\n                self._local.take(event, now)\n",
        _CORE,
    ),
    Mutant(
        "local-cancel-goes-on-computing",
        "A cancelled attempt of a mixed node is forgotten, and computed to its end all the same.",
        "mixed_node/local_core.py",
        "        self._scheduler.abort(branch.key)\n",
        "",
        _LIVES,
    ),
    Mutant(
        "local-prompt-logprobs-told-again",
        "A mixed node tells the prompt's log-probabilities with every token.",
        "mixed_node/local_core.py",
        "        branch.prompt_logprobs.clear()\n",
        "",
        _LIVES,
    ),
    Mutant(
        "local-older-attempt-goes-on",
        "A newer attempt of a branch does not end the older one on a mixed node.",
        "mixed_node/local_core.py",
        "if branch is not None and branch.key.attempt < key.attempt:",
        "if branch is not None and branch.key.attempt + 1 < key.attempt:",
        _LIVES,
    ),
    Mutant(
        "resumed-chunk-ends-the-branch",
        "A decode core takes a chunk of a sequence that is computed again for its end.",
        "decode_node/core.py",
        "                if item.finish is not None:  # else it was preempted, and is being computed again\n",
        "                if True:\n",
        _WORLD,
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
        "router/core.py",
        "is_receiver = branch.pair.decode == ref",
        "is_receiver = branch.pair.prefill != ref",
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
        "router/nodes.py",
        "DECODING: Final = frozenset({pb.ROLE_DECODE, pb.ROLE_MIXED})",
        "DECODING: Final = frozenset({pb.ROLE_DECODE})",
        _ROUTER,
    ),
)
