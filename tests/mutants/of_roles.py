"""Bugs in the change of a node's role."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_CHANGE: Final = ("tests/node/test_role_change.py",)
_ROLES: Final = ("tests/node/test_roles.py",)

MUTANTS: Final[tuple[Mutant, ...]] = (
    Mutant(
        "role-wins-over-an-end",
        "A node that is told to end while it changes its role goes on in the new one.",
        "node/drain.py",
        "        self.next_role = None\n        if timeout_s <= 0",
        "        if timeout_s <= 0",
        _CHANGE,
    ),
    Mutant(
        "end-waits-for-the-switch",
        "A node that is told to end between two roles takes the next one up.",
        "node/drain.py",
        "if timeout_s <= 0 or self.stage is Stage.SWITCHING:",
        "if timeout_s <= 0:",
        _CHANGE,
    ),
    Mutant(
        "role-beside-a-drain",
        "A node that is to end begins to change its role instead.",
        "node/drain.py",
        "        if self.stage is not Stage.SERVING:\n            return Answer.ENDS if",
        "        if self.next_role is not None:\n            return Answer.ENDS if",
        _CHANGE,
    ),
    Mutant(
        "role-goes-on-with-what-is-left",
        "A node whose core never drains takes the next role with blocks that somebody may write into.",
        "node/drain.py",
        "if self.next_role is not None and not has_drained:",
        "if False:",
        _CHANGE,
    ),
    Mutant(
        "role-keeps-the-old-deadline",
        "The drain behind a change of role ends at the deadline of the change.",
        "node/drain.py",
        'self.stage, self.deadline = Stage.SERVING, float("inf")',
        "self.stage = Stage.SERVING",
        _CHANGE,
    ),
    Mutant(
        "role-looks-at-the-core-alone",
        "A role begins while a fetch out of the KV pool still writes into its blocks.",
        "node/ending.py",
        "if has_drained and self._drain.next_role is not None:",
        "if False:",
        _CHANGE,
    ),
    Mutant(
        "role-begins-with-a-fetch-under-way",
        "A role begins while the KV pool has not answered what the last one asked; the next core takes the answer for its own.",
        "node/roles.py",
        '        "questions to the KV pool": _number(snapshot, "kv_looks") + _number(snapshot, "kv_fetches"),\n',
        "",
        _ROLES,
    ),
    Mutant(
        "role-begins-with-quarantined-blocks",
        "A role begins while somebody may still write into blocks that a lease of the last one had.",
        "node/roles.py",
        '        "quarantined blocks": counts.quarantined,\n',
        "",
        _ROLES,
    ),
    Mutant(
        "role-keeps-the-old-budget",
        "A prefill node that was a decode node computes prompts in chunks of 32 tokens.",
        "engine/scheduler.py",
        "        self._planner.bound_prompts(max_prompt_tokens_beside_decodes)\n",
        "",
        _ROLES,
    ),
    Mutant(
        "role-keeps-the-old-count",
        "A new core takes all that its node has ever computed for the first step's tokens, and its speed for a thousandfold.",
        "engine/scheduler.py",
        "        self._reader.resumes_preempted = resumes_preempted\n        self.num_prompt_tokens = 0\n",
        "        self._reader.resumes_preempted = resumes_preempted\n",
        _ROLES,
    ),
    Mutant(
        "role-port-stays-open",
        "Between two roles calls go to the core that is gone, and nobody answers them.",
        "node/port.py",
        "        self._is_open = False\n",
        "        pass\n",
        _ROLES,
    ),
    Mutant(
        "role-leaves-calls-unanswered",
        "A Reserve that came behind all that the old core has read waits for its answer until its sender gives up.",
        "node/service.py",
        "                reserve.set_result(None)\n",
        "                pass\n",
        _ROLES,
    ),
    Mutant(
        "circuit-outlives-the-role",
        "A node that failed as a decode node gets no prompts once it is a prefill node.",
        "router/breaker.py",
        "if self._roles.pop(name, role) != role:",
        "if self._roles.pop(name, role) is None:",
        ("tests/router/test_breaker.py",),
    ),
    Mutant(
        "role-answers-the-next-wish",
        "Who asks for a role while the node is still about to be found in the last one hears at once that it serves.",
        "node/ending.py",
        "        self._taken_up.set_result(None)\n",
        "        self._begun.set_result(None)\n",
        _CHANGE,
    ),
    Mutant(
        "role-watched-for-ever",
        "Who asked for a change of role hears nothing once the node serves in it.",
        "node/ending.py",
        "return self._watch(last_word, self._over, changed)",
        "return self._watch(last_word, self._over)",
        _CHANGE,
    ),
    Mutant(
        "role-ends-on-a-full-disk",
        "A node that cannot write its ready file ends when it takes another role, though nobody reads that file any more.",
        "node/process.py",
        "entry, scheme)) and not has_changed:",
        "entry, scheme)):",
        ("tests/node/test_role_process.py",),
    ),
    Mutant(
        "role-kept-for-what-it-never-did",
        "A prefill node is not changed where nobody decodes, though that may be what is lacking.",
        "deploy/role.py",
        'return "decodes" if _decodes(node) else None',
        'return "decodes"',
        ("tests/deploy/test_role.py",),
    ),
)
