"""Bugs of what loads a server and talks to it: what is sent when, what counts as served in time, which rate is tried next."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_SWEEP: Final = ("tests/bench/test_sweep.py",)
_WORKLOAD: Final = ("tests/bench/test_workload.py",)
_LOAD: Final = ("tests/bench/test_load.py",)
_TALK: Final = ("tests/chat/test_talk.py",)

MUTANTS: Final = (
    Mutant(
        "sweep-believes-the-highest",
        "The knee is the highest rate that passed, though a lower one has failed.",
        "bench/sweep.py",
        "max((rate for rate in passed if high is None or rate < high), default=None)",
        "max(passed, default=None)",
        _SWEEP,
    ),
    Mutant(
        "sweep-without-an-upper-bound",
        "Doubling goes beyond the highest rate.",
        "bench/sweep.py",
        "min(low * 2, self.highest)",
        "low * 2",
        _SWEEP,
    ),
    Mutant(
        "late-generator-passes",
        "A rate passes though the generator could not send it.",
        "bench/serve_result.py",
        "return Verdict.LATE if self.report.is_late else Verdict.PASSED",
        "return Verdict.PASSED",
        _SWEEP,
    ),
    Mutant(
        "goodput-of-the-answered",
        "A request that failed counts as served in time.",
        "bench/goodput.py",
        "        if not record.is_ok:\n            return False\n",
        "",
        _SWEEP,
    ),
    Mutant(
        "prefix-of-a-piece-drawn-anew",
        "The tokens of a cut block are not the beginning of the whole one's.",
        "bench/workload.py",
        'random.Random(f"{self._seed}/{piece.space}/{piece.number}")',
        'random.Random(f"{self._seed}/{piece}")',
        _WORKLOAD,
    ),
    Mutant(
        "blocks-without-a-name",
        "Blocks of two hash ids may begin with the same tokens.",
        "bench/workload.py",
        "for _ in range(self._width):",
        "for _ in range(0):",
        _WORKLOAD,
    ),
    Mutant(
        "gaps-keep-their-length",
        "A trace is replayed at its own speed whatever was asked for.",
        "bench/trace.py",
        "Entry(entry.at_s / scaling.speed, ",
        "Entry(entry.at_s, ",
        _WORKLOAD,
    ),
    Mutant(
        "arrivals-wait-for-answers",
        "The next request is sent when the one before it has been answered.",
        "bench/load.py",
        "tasks.append(group.create_task(sender.send(each, records[-1])))",
        "await sender.send(each, records[-1])",
        _LOAD,
    ),
    Mutant(
        "tokens-by-chunks",
        "Where nobody counts tokens, events of the stream are counted.",
        "bench/completions.py",
        "            record.output_tokens = len(record.token_ids)\n",
        "            record.output_tokens = len(record.chunk_at_s)\n",
        _LOAD,
    ),
    Mutant(
        "chat-forgets-a-stopped-answer",
        "What was said before Ctrl-C is no part of the chat.",
        "deploy/chat_talk.py",
        "        if answer.text:\n            self.said",
        "        if answer.finish_reason:\n            self.said",
        _TALK,
    ),
    Mutant(
        "chat-shows-escapes",
        "A model's escape sequences reach the terminal.",
        "deploy/chat_talk.py",
        'unicodedata.category(each) not in ("Cc", "Cs")',
        'unicodedata.category(each) != "Cs"',
        _TALK,
    ),
    Mutant(
        "chat-waits-beyond-patience",
        "A server that says so is waited for without end.",
        "deploy/chat_talk.py",
        "return seconds if waited_s + seconds <= patience_s else None",
        "return seconds",
        _TALK,
    ),
)
