"""Planted bugs of what is slow and not stuck, free and not used: links, workers, the registry, nodes that failed a request."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_SLOW: Final = ("tests/cores/test_slow_links.py",)

MUTANTS: Final = (
    Mutant(
        "failed-prefill-node-first",
        "A prefill node that failed a request gets all its retries, since it has the prompt cached.",
        "router/placement.py",
        "product((prefills.but(avoided), prefills), (decodes.but(avoided), decodes))",
        "product((prefills,), (decodes.but(avoided), decodes))",
        ("tests/router/test_core_avoided.py",),
    ),
    Mutant(
        "too-late-for-free-nodes",
        "Requests are refused because others wait for another node.",
        "router/waiting.py",
        "if self._is_all_claimed else 0.0",
        "if self._aside is not None else 0.0",
        ("tests/router/test_core_queue.py",),
    ),
    Mutant(
        "slow-link-taken-for-stuck",
        "Who has more queued on a link than it carries in a lease life is given up, again and again.",
        "node/handing_over.py",
        "if not handover.num_unread or self._patient_until(handover) <= now:",
        "if handover:",
        _SLOW,
    ),
    Mutant(
        "slow-delivery-taken-for-stuck",
        "A Commit behind what the kernel has yet to deliver is given up after a lease life.",
        "node/handing_over.py",
        "max(handover.overdue_at, self._patient_until(handover))",
        "handover.overdue_at",
        _SLOW,
    ),
    Mutant(
        "nodes-without-checksums",
        "KV crosses between nodes unchecked, whatever the flag says.",
        "connector/choosing.py",
        "LinkRules(is_encrypted=is_encrypted)",
        "LinkRules(has_checksums=False, is_encrypted=is_encrypted)",
        ("tests/node/test_between_nodes.py",),
    ),
    Mutant(
        "slow-registry-hides-deaths",
        "While Redis takes nearly half a second for each look no dead node is ever missed.",
        "runtime/polled_listing.py",
        "GAP_S: Final = 0.9",
        "GAP_S: Final = 0.6",
        ("tests/registry/test_polled_listing.py",),
    ),
    Mutant(
        "each-page-asked-for-by-itself",
        "A flood of requests for metrics makes the parent take its workers for hung, and kill them.",
        "router/worker_end.py",
        "        waiting = self._waiting.get(page)\n",
        "        waiting = None\n",
        ("tests/router/test_worker_link.py",),
    ),
    Mutant(
        "secret-in-an-error-line",
        "A key with a byte that is not UTF-8 is quoted where everybody reads it.",
        "runtime/knobs.py",
        "return name if self.kind is str and not self.choices else f",
        "return f",
        ("tests/deploy/test_config.py",),
    ),
)
