"""Bugs of structured outputs: what is followed, what is rebuilt, what waits for what."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_ENGINE: Final = ("tests/engine_torch/test_grammars.py",)
_HELD: Final = ("tests/node/test_held.py",)
_GATE: Final = ("tests/node/test_grammar_gate.py",)
_BOOK: Final = ("tests/node/test_grammar_book.py",)
_ASKED: Final = ("tests/node/test_grammar_asked.py",)
_PROCESSES: Final = ("tests/node/test_grammar_processes.py",)
_SCHEMAS: Final = ("tests/router/test_structured.py",)

MUTANTS: Final = (
    Mutant(
        "grammar-forgets-tokens-so-far",
        "A sequence that goes on elsewhere is bound as if it had said nothing.",
        "engine/sequence.py",
        "if spec.sampling.looks_back else ()",
        "if has_penalties else ()",
        _ENGINE,
    ),
    Mutant(
        "grammar-never-advances",
        "The runner does not tell a slot's matcher what was drawn.",
        "engine/runner.py",
        "for past in (self._counts[slot], self._constraints[slot]):",
        "for past in (self._counts[slot],):",
        _ENGINE,
    ),
    Mutant(
        "stops-banned-within-grammar",
        "min_tokens bans the end of a whole text, and nothing is left to say.",
        "engine/sampler.py",
        "return int(draw.allowed[[*stops]].sum()) < int(draw.allowed.sum())",
        "return True",
        _ENGINE,
    ),
    Mutant(
        "special-tokens-as-text",
        "A special token may stand in a text for what it spells, and is not shown.",
        "engine/grammars.py",
        '"" if token_id in added and added[token_id].special else',
        '"" if token_id in added and False else',
        _ENGINE,
    ),
    Mutant(
        "control-characters-in-json",
        "A string of a bounded length may have a control character, which no JSON parser takes.",
        "engine/grammars.py",
        "byte < 0x20 and byte not in _JSON_CONTROLS for byte in each",
        "byte < 0 for byte in each",
        _SCHEMAS,
    ),
    Mutant(
        "half-characters",
        "Any continuing byte may follow any first one: surrogates, and numbers beyond Unicode.",
        "engine/grammars.py",
        "return self._bits if behind is None else self._bits & behind",
        "return self._bits",
        _ENGINE,
    ),
    Mutant(
        "cache-without-bound",
        "Compiled grammars are kept for ever.",
        "engine/grammars.py",
        "while self._compiled_bytes > self._cache_bytes and len(self._compiled) > 1:",
        "while False:",
        _ENGINE,
    ),
    Mutant(
        "cancel-overtakes-its-dispatch",
        "A Cancel is let in before the held Dispatch that it is for, which then runs for nobody.",
        "node/held.py",
        "                held.followers.append(event)\n                is_deferred = True\n",
        "                return False\n",
        _HELD,
    ),
    Mutant(
        "lost-routers-dispatch-let-in",
        "What a lost router had asked for is started once its grammar is compiled.",
        "node/held.py",
        "if held.dispatch.router != router}",
        "if True}",
        _HELD,
    ),
    Mutant(
        "bad-grammar-let-in",
        "A Dispatch whose grammar nobody can follow reaches the core.",
        "node/grammar_gate.py",
        "            if flaw is None:\n",
        "            if True:\n",
        _GATE,
    ),
    Mutant(
        "given-tokens-unchecked",
        "A resubmission whose tokens are no beginning of the grammar is let in.",
        "node/grammar_gate.py",
        "generated = tuple(dispatch.branches[0].generated_token_ids)",
        "generated = ()",
        _GATE,
    ),
    Mutant(
        "keyword-silently-left-out",
        "A keyword that is not followed is taken all the same.",
        "router/structured.py",
        "for name in sorted(schema.keys() - own - _NOTES):",
        "for name in []:",
        _SCHEMAS,
    ),
    Mutant(
        "choice-as-pattern",
        "What a choice has besides letters and digits is read as grammar.",
        "router/structured.py",
        "c if c.isascii() and c.isalnum() else",
        "c if True else",
        _SCHEMAS,
    ),
    Mutant(
        "slow-grammar-little-by-little",
        "A grammar that takes a fifth of a second for each token holds up every step for ever.",
        "node/grammar_book.py",
        "max(0.0, self._spent_s + cost_s - ANSWER_S - TOKEN_S * num_tokens)",
        "0.0",
        (*_BOOK, *_PROCESSES),
    ),
    Mutant(
        "slow-machine-blames-the-grammar",
        "A process that was given no time to compute is taken for one that is lost in its grammar.",
        "node/grammar_book.py",
        "return Verdict.LOST if waited_s >= STALL_S else Verdict.WAIT",
        "return Verdict.STALLED if waited_s >= STALL_S else Verdict.WAIT",
        (*_BOOK, *_PROCESSES),
    ),
    Mutant(
        "grammar-in-use-thrown-out",
        "A grammar's process is ended for another one while a completion is bound by it.",
        "node/grammar_book.py",
        "if now - used_at < QUIET_S:",
        "if False:",
        _BOOK,
    ),
    Mutant(
        "stalled-as-broken",
        "A completion whose grammar cannot be followed in time goes on elsewhere, and holds up the next node.",
        "engine/runner.py",
        "                token_ids[slot][0] = STALLED_ROW\n",
        "                token_ids[slot][0] = BROKEN_ROW\n",
        _ENGINE,
    ),
    Mutant(
        "refused-grammar-taken-again",
        "What held up a step may do so again.",
        "node/grammar_processes.py",
        "if self._book.is_refused(grammar):",
        "if False:",
        _PROCESSES,
    ),
    Mutant(
        "answers-that-nobody-reads-are-kept",
        "What may follow in a row that has ended is kept for ever.",
        "node/grammar_asked.py",
        "if told.row in self._told:",
        "if True:",
        _ASKED,
    ),
    Mutant(
        "both-ends-wait-to-be-read",
        "A node that has much to say to a grammar's process reads no answer, for which that one waits.",
        "node/grammar_asked.py",
        "                    if ready & ~select.POLLOUT:",
        "                    if False:",
        _ASKED,
    ),
    Mutant(
        "asked-behind-its-end",
        "What may follow the end of a text is asked, and the row stays open.",
        "node/grammar_asked.py",
        "if token_id in self._process.grammar.end_token_ids:",
        "if False:",
        _ASKED,
    ),
    Mutant(
        "followed-though-it-gave-way",
        "A grammar's process is not told that a row gave way.",
        "engine/runner.py",
        "        self._counts[slot] = None\n        self._unbind(slot)\n",
        "        self._counts[slot] = None\n",
        _ENGINE,
    ),
    Mutant(
        "drawn-out-of-its-grammar",
        "A bound row takes what it would have taken without its grammar.",
        "engine/sampler.py",
        "_LIMITS.take(allowed.view(np.uint8))",
        "np.inf",
        ("tests/engine_torch/test_sampler.py",),
    ),
    Mutant(
        "killed-and-not-reaped",
        "A grammar's process that was killed is left unreaped.",
        "node/grammar_process.py",
        "                os.waitpid(pid, 0)  # at once: nothing of it is left then\n",
        "",
        _PROCESSES,
    ),
    Mutant(
        "lease-before-its-grammar",
        "A lease is given while its grammar is being compiled, and the first step waits for that.",
        "node/grammar_gate.py",
        'return compiling.result() if done else Flaw(pb.BUSY, "its grammar is being compiled")',
        "return compiling.result() if done else None",
        _GATE,
    ),
)
