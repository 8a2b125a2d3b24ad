"""Bugs of a shared registry: how a router reads it, what lies there, what Redis decides."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_POLLED: Final = ("tests/registry/test_polled_listing.py",)
_RECORD: Final = ("tests/registry/test_registry_record.py",)
_ADDRESS: Final = ("tests/registry/test_redis_address.py",)
_SCRIPTS: Final = ("tests/registry/test_redis_scripts.py",)  # need a redis-server

MUTANTS: Final = (
    Mutant(
        "outage-counts-as-silence",
        "The time in which Redis could not be read passes for the nodes, too.",
        "runtime/polled_listing.py",
        "            if now - self._read_at > GAP_S:\n                self._resumes_at = now + REJOIN_S\n",
        "",
        _POLLED,
    ),
    Mutant(
        "no-time-to-rejoin",
        "Time passes again as soon as Redis is back, before the nodes are.",
        "runtime/polled_listing.py",
        "self._resumes_at = now + REJOIN_S",
        "self._resumes_at = now",
        _POLLED,
    ),
    Mutant(
        "old-stamp-renews",
        "An entry that merely lies there counts as repeated.",
        "runtime/polled_listing.py",
        "else row.stamp != before:",
        "else True:",
        _POLLED,
    ),
    Mutant(
        "old-entry-listed-at-first-sight",
        "A router that starts lists a node whose entry has been old for a while.",
        "runtime/polled_listing.py",
        "if row.age_s <= FRESH_S if before is None",
        "if True if before is None",
        _POLLED,
    ),
    Mutant(
        "goodbye-not-heard",
        "A node that deregistered stays listed until its entry expires.",
        "runtime/polled_listing.py",
        "            reading.changes += self._listing.deregister(peer)",
        "            del peer",
        _POLLED,
    ),
    Mutant(
        "header-not-checked",
        "What scripts decide by may differ from what routers read.",
        "runtime/registry_record.py",
        "or not record.startswith(_header(entry))",
        "",
        _RECORD,
    ),
    Mutant(
        "name-not-checked",
        "An entry under another's name is taken.",
        "runtime/registry_record.py",
        "if entry.node.name.encode() != name or",
        "if",
        _RECORD,
    ),
    Mutant(
        "password-shown",
        "A URL is shown with its user and password.",
        "runtime/redis_address.py",
        "{url.netloc.rpartition('@')[2]}",
        "{url.netloc}",
        _ADDRESS,
    ),
    Mutant(
        "bad-url-shown",
        "A URL that is none is shown as it stands, with the password in the wrong place.",
        "runtime/redis_address.py",
        'return f"{scheme}://…" if scheme in _SCHEMES else "…"',
        "return registry",
        _ADDRESS,
    ),
    Mutant(
        "older-process-takes-the-name",
        "Redis gives a name to whoever writes last, the process that was replaced included.",
        "runtime/redis_scripts.py",
        "if started_ms > 0 and started_ms < other.started_ms then",
        "if false then",
        _SCRIPTS,
    ),
    Mutant(
        "address-has-two-holders",
        "Redis lists two processes at one address.",
        "runtime/redis_scripts.py",
        "if holder and holder.is_listed and holder.address == address then",
        "if false then",
        _SCRIPTS,
    ),
    Mutant(
        "silent-process-comes-back",
        "A process that went silent takes its name back from the one that followed.",
        "runtime/redis_scripts.py",
        "if known and known.incarnation ~= incarnation then send_away(name, known.incarnation) else forget(name) end",
        "forget(name)",
        _SCRIPTS,
    ),
    Mutant(
        "gone-registers-again",
        "A process that deregistered is listed again by its own late word.",
        "runtime/redis_scripts.py",
        "if redis.call('ZSCORE', gone, incarnation .. ' ' .. name) then",
        "if false then",
        _SCRIPTS,
    ),
)
