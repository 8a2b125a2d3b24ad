"""Bugs of what loads a server and talks to it: what is sent when, what counts as served in time, which rate is tried next."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_SWEEP: Final = ("tests/bench/test_sweep.py",)
_WORKLOAD: Final = ("tests/bench/test_workload.py",)
_LOAD: Final = ("tests/bench/test_load.py",)
_ODD: Final = ("tests/bench/test_odd_servers.py",)
_SERVE_LOAD: Final = ("tests/bench/test_serve_load.py",)
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
        "tasks.append(group.create_task(_send_due(sender, each, records[-1], due_at)))",
        "await sender.send(each, records[-1])",
        _LOAD,
    ),
    Mutant(
        "given-up-is-quick",
        "An answer that the server gave up counts as answered.",
        "bench/completions.py",
        'if (reason := choice.get("finish_reason")) in _GIVEN_UP:',
        'if (reason := choice.get("finish_reason")) in ():',
        _ODD,
    ),
    Mutant(
        "an-error-with-200-is-an-answer",
        "A whole answer that is an error counts as answered where its status is 200.",
        "bench/completions.py",
        'if content.get("error") or not content.get("choices"):',
        "if False:",
        _ODD,
    ),
    Mutant(
        "interim-is-the-answer",
        "100 Continue or 103 Early Hints is taken for the answer.",
        "bench/http_exchange.py",
        "        if self._is_interim:\n",
        "        if False:\n",
        _ODD,
    ),
    Mutant(
        "sweep-of-a-moment",
        "A sweep's runs are over before a queue could show.",
        "bench/serve_config.py",
        "math.ceil((rate or 0.0) * self.settling_s)",
        "NUM_REQUESTS",
        _SERVE_LOAD,
    ),
    Mutant(
        "late-generator-is-a-slow-server",
        "Where the generator was late at every rate, the server is said to meet no limit.",
        "bench/serve_result.py",
        "if found is None and is_late:",
        "if False:",
        _SERVE_LOAD,
    ),
    Mutant(
        "lateness-before-the-texts",
        "A request that waits for the others' texts counts as sent when its own was made.",
        "bench/load.py",
        "    record.lag_s = time.monotonic() - due_at\n",
        "",
        _SERVE_LOAD,
    ),
    Mutant(
        "results-replace-devices",
        "A benchmark's result takes the place of /dev/null.",
        "bench/frame.py",
        "(path.is_symlink() or (path.exists() and not path.is_file()))",
        "False",
        _SERVE_LOAD,
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
