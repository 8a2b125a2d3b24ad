"""Bugs of what is shown: parts of a request's time, its timeline, the deep look."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_TIMELINE: Final = ("tests/router/test_timeline.py",)
_CANARY: Final = ("tests/router/test_canary.py",)
_CORES: Final = ("tests/cores/test_timings.py",)
_METRICS: Final = ("tests/router/test_metrics.py",)

MUTANTS: Final = (
    Mutant(
        "prefill-counts-the-queue",
        "What an attempt waited for at its node is told as computing, too.",
        "node/timing.py",
        "prefill_us=to_us(now - begun_at)",
        "prefill_us=to_us(now - self.came_at)",
        _TIMELINE,
    ),
    Mutant(
        "reserve-wait-from-the-beginning",
        "The wait for a lease counts from the Dispatch, though computing goes on beside it.",
        "node/timing.py",
        "return 0 if self.told_at is None else to_us(now - self.told_at)",
        "return to_us(now - self.came_at)",
        _TIMELINE,
    ),
    Mutant(
        "local-prompt-never-begins",
        "A node that computes a prompt for itself tells all of it as waiting.",
        "decode_node/local_prompts.py",
        "self._not_begun.popleft()[1].begun_at = now",
        "self._not_begun.popleft()",
        _CORES,
    ),
    Mutant(
        "admit-from-the-lease",
        "A receiver counts from the beginning of its lease, not from the Commit.",
        "decode_node/receiving.py",
        "lease.commit, lease.committed_at, lease.reply_to = commit, now, reply_to",
        "lease.commit, lease.reply_to = commit, reply_to",
        _CORES,
    ),
    Mutant(
        "what-remains-is-lost",
        "The way between the hosts is no part of anything.",
        "router/timeline.py",
        "        take(rest, left, left)\n        left = total - last\n",
        "        left = total - last\n",
        _TIMELINE,
    ),
    Mutant(
        "attempts-in-vain-are-queueing",
        "The time of an attempt that failed is told as waiting for room.",
        "router/timeline.py",
        "        self._spend(RETRY, now)\n",
        "        self._spend(QUEUE, now)\n",
        _TIMELINE,
    ),
    Mutant(
        "a-move-that-is-off-lasts",
        "A move that came to nothing has no end: it is drawn for as long as somebody looks, and the retry behind it is not.",
        "router/timelines.py",
        "                track.move_off(now)\n",
        "                pass\n",
        (*_TIMELINE, "tests/router/test_timeline_picture.py"),
    ),
    Mutant(
        "a-move-outlasts-what-was-to-move",
        "A move is under way for ever whose holder was lost meanwhile.",
        "router/timeline.py",
        'and a move of it, too."""\n        self.move_off(now)\n',
        'and a move of it, too."""\n',
        _TIMELINE,
    ),
    Mutant(
        "refused-and-not-counted",
        "A request that the API itself refuses is in no metric.",
        "router/api.py",
        "            self._shell.metrics.turned_away(error.code)\n",
        "            pass\n",
        _METRICS,
    ),
    Mutant(
        "refused-by-its-key-and-counted-twice",
        "A request over its key's limit is counted by its account, and again by the API.",
        "router/api.py",
        "        if error.code != OVER_LIMIT:\n",
        "        if error.code:\n",
        ("tests/router/test_gate.py",),
    ),
    Mutant(
        "prompts-that-nobody-computes",
        "The prompts of requests that were turned away count as prompts to compute.",
        "router/shell.py",
        "num_to_compute = num_prompt_tokens if answer.is_dispatched else 0",
        "num_to_compute = num_prompt_tokens",
        _METRICS,
    ),
    Mutant(
        "counters-that-begin-with-one",
        "A counter is not there before it first counts: the first retry shows in no rate.",
        "router/metrics.py",
        "            self[label]  # makes it\n",
        "            pass\n",
        _METRICS,
    ),
    Mutant(
        "refused-before-the-core-and-not-counted",
        "A Reserve that its core never hears of is refused, and no counter says so.",
        "node/service.py",
        '        self._counters.count(f"reserve_refused_{pb.ErrorCode.Name(code).lower()}")\n',
        "",
        ("tests/node/test_service.py",),
    ),
    Mutant(
        "counters-that-fall-with-the-role",
        "A node that takes another role forgets what bytes it has moved.",
        "node/view.py",
        "                past.add(key, number)\n",
        "                pass\n",
        ("tests/node/test_http.py",),
    ),
    Mutant(
        "spans-of-what-has-been-read",
        "A request's span begins when its prompt has been tokenized: what that took is nobody's.",
        "runtime/tracing.py",
        "time.time_ns() - int(ago_s * 1e9)",
        "time.time_ns()",
        ("tests/e2e/test_spans.py::test_a_requests_span_begins_when_it_came_and_not_when_it_had_been_read",),
    ),
    Mutant(
        "happenings-without-bound",
        "A request that is refused for hours fills the memory.",
        "router/timeline.py",
        "if len(self.happenings) < MAX_EVENTS:",
        "if len(self.happenings) >= 0:",
        _TIMELINE,
    ),
    Mutant(
        "canary-compares-nothing",
        "A pair that gives other tokens is well.",
        "router/canary.py",
        "if expected != token_ids:",
        "if len(expected) != len(token_ids):",
        _CANARY,
    ),
    Mutant(
        "canary-is-retried",
        "A pair that fails once and then not is well, and a dead one costs four times as long.",
        "router/core.py",
        "replace(self._config, preempt_retry_count=0)",
        "replace(self._config, preempt_retry_count=3)",
        _CANARY,
    ),
    Mutant(
        "two-deep-looks",
        "Who asks again and again keeps the cluster busy with canaries.",
        "router/canary.py",
        "        self._is_looking = True\n        try:",
        "        try:",
        _CANARY,
    ),
)
