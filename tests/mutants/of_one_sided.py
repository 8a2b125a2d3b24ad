"""Bugs of one-sided transports: who may still write, and what is said before it is there."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_BOTH_HALVES: Final = ("tests/transport/test_one_sided_sending.py",)
_STEPS: Final = ("tests/transport/test_one_sided.py",)

MUTANTS: Final = (
    Mutant(
        "writers-do-not-keep-a-lease",
        "A lease into which a sender writes by itself is quiet as soon as it is revoked.",
        "connector/admissions.py",
        "            lease.num_running += 1\n            return lease.block_ids",
        "            return lease.block_ids",
        _BOTH_HALVES,
    ),
    Mutant(
        "stopped-before-moved",
        "A sender says that it has stopped while what it had begun still moves.",
        "connector/one_sided_sending.py",
        "        self._wait(Stopped(lease_id), is_ready=True)",
        "        self._outbox.appendleft(_Waiting(Stopped(lease_id), True))",
        _BOTH_HALVES,
    ),
    Mutant(
        "said-before-moved",
        "A write is told, and its source given back, before it stands in the receiver's memory.",
        "connector/one_sided_sending.py",
        "self._wait(Written(head, True, self._num_put), is_ready=False)",
        "self._wait(Written(head, True, self._num_put), is_ready=True)",
        _BOTH_HALVES,
    ),
    Mutant(
        "stop-is-ignored",
        "A sender goes on writing into a lease that its receiver has ended.",
        "connector/one_sided_sending.py",
        "            self._known[lease] = None\n",
        "            pass\n",
        _BOTH_HALVES,
    ),
    Mutant(
        "ended-leases-are-remembered",
        "A link remembers every lease that it ever wrote into.",
        "connector/one_sided_sending.py",
        "            del self._known[lease]",
        "            self._known[lease] = None",
        _BOTH_HALVES,
    ),
    Mutant(
        "writers-are-not-told",
        "Nobody tells a sender that a lease is over.",
        "connector/one_sided.py",
        "        return tuple(self._writers[lease_id])",
        "        return ()",
        _STEPS,
    ),
    Mutant(
        "a-link-that-is-gone-may-write",
        "The end of a link leaves its sender among those who may write.",
        "connector/one_sided.py",
        "            self.stopped(link, lease_id)",
        "            pass",
        _STEPS,
    ),
)
