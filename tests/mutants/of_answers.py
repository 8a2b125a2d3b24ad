"""Bugs of the router's way from tokens to text and to the client, of what is handed up and resubmitted, and of who is let in."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_TEXT: Final = ("tests/router/test_stop_strings.py",)
_HANDED_UP: Final = ("tests/router/test_handed_up.py",)
_RESUBMISSION: Final = ("tests/router/test_resubmission.py",)
_PACE: Final = ("tests/router/test_pace.py",)
_ADMISSION: Final = ("tests/router/test_admission.py",)

MUTANTS: Final = (
    Mutant(
        "handed-up-text-is-flushed",
        "A choice that is handed up shows what is held back, and its resubmission shows it again.",
        "router/answer.py",
        "            self.finish_reason, self._handed_up_ids = reason, token_ids\n            self._tell()\n            return\n",
        "            self._handed_up_ids = token_ids\n",
        _HANDED_UP,
    ),
    Mutant(
        "resubmission-drops-what-was-held-back",
        "What may have begun a stop string at the break is shown by neither half.",
        "router/choice_text.py",
        "        shown = self.push(given_ids).text\n",
        "        shown = self.push(given_ids).text + (self._matcher.flush() if self._matcher is not None else '')\n",
        _TEXT,
    ),
    Mutant(
        "resubmission-forgets-the-stop-string-begun",
        "A stop string that spans the break is not found.",
        "router/choice_text.py",
        "        self._num_characters -= len(shown)\n",
        "        self._num_characters -= len(shown)\n        if self._matcher is not None:\n"
        "            self._matcher = StopMatcher(rules.stop_strings)\n",
        _TEXT,
    ),
    Mutant(
        "resubmission-forgets-half-a-character",
        "A character that spans the break is lost.",
        "router/choice_text.py",
        "        self._num_characters -= len(shown)\n",
        "        self._num_characters -= len(shown)\n        self._detokenizer.finish()\n",
        _TEXT,
    ),
    Mutant(
        "min-tokens-start-anew",
        "A resubmission's min_tokens do not count the tokens that it was given.",
        "router/choice_text.py",
        "        self._num_characters -= len(shown)\n",
        "        self._num_characters -= len(shown)\n        self.num_tokens = 0\n",
        _TEXT,
    ),
    Mutant(
        "offsets-start-behind-what-was-held-back",
        "text_offset of a resubmission does not count the characters that it shows first.",
        "router/choice_text.py",
        "        self._num_characters -= len(shown)\n",
        "        self._num_characters = 0\n",
        _TEXT,
    ),
    Mutant(
        "handed-up-ids-are-the-new-ones",
        "A resubmission that is handed up again forgets the tokens that it was given.",
        "router/shell.py",
        "choice.finish(finished.finish_reason, finished.token_ids)",
        "choice.finish(finished.finish_reason, finished.token_ids[-choice.num_tokens :])",
        _HANDED_UP,
    ),
    Mutant(
        "handed-up-ids-only-where-asked",
        "Without return_token_ids a stream's choice is handed up without its tokens.",
        "router/openai_answers.py",
        "        if piece.handed_up_ids is not None:\n",
        "        if piece.handed_up_ids is not None and self._options.returns_token_ids:\n",
        _RESUBMISSION,
    ),
    Mutant(
        "handed-up-tokens-twice",
        "A stream's last chunk has a choice's new tokens beside all of them.",
        "router/openai_answers.py",
        "        last = Piece(finish_reason=piece.finish_reason,",
        "        last = replace(piece, text='',",
        _RESUBMISSION,
    ),
    Mutant(
        "a-complete-resubmission-runs",
        "A resubmission that has all of max_tokens is sent to nodes.",
        "router/intake.py",
        'return "length" if len(given) == sampling.max_tokens else None',
        "return None",
        _RESUBMISSION,
    ),
    Mutant(
        "a-resubmission-runs-on-behind-its-stop-token",
        "A resubmission that ends with a stop token is sent to nodes.",
        "router/intake.py",
        "if text.is_stopped or given[-1] in sampling.stop_token_ids:",
        "if text.is_stopped:",
        _RESUBMISSION,
    ),
    Mutant(
        "a-resubmission-runs-on-behind-its-stop-string",
        "A resubmission whose text holds a stop string is sent to nodes.",
        "router/intake.py",
        "if text.is_stopped or given[-1] in sampling.stop_token_ids:",
        "if given[-1] in sampling.stop_token_ids:",
        _RESUBMISSION,
    ),
    Mutant(
        "nobody-hears-that-the-client-left",
        "A client that leaves is noticed when its answer is written, which may be never.",
        "router/streaming.py",
        "            pass\n        self._abort()\n",
        "            pass\n",
        ("tests/router/test_clients_leave.py",),
    ),
    Mutant(
        "pace-of-who-never-waited",
        "Dispatches that found room at once count as the pace of a queue.",
        "router/pace.py",
        " or (not self._num_dispatched and now <= self._last_at):",
        ":",
        _PACE,
    ),
    Mutant(
        "pace-outlives-its-queue",
        "The pace of an earlier queue turns away who comes to a new one.",
        "router/pace.py",
        "        self._last_at, self._num_dispatched, self._dispatches, self._seconds = None, 0, 0.0, 0.0\n",
        "        self._last_at = None\n",
        (*_PACE, *_ADMISSION),
    ),
    Mutant(
        "pace-blind-to-a-standstill",
        "A queue that no longer moves is thought as fast as it was.",
        "router/pace.py",
        "max(self._seconds, now - self._last_at)",
        "self._seconds",
        _PACE,
    ),
    Mutant(
        "pace-slow-between-leaps",
        "The time since the last dispatch counts in full, so a queue that moves by leaps is thought slower than it is.",
        "router/pace.py",
        "max(self._seconds, now - self._last_at)",
        "(self._seconds + now - self._last_at)",
        _PACE,
    ),
    Mutant(
        "pace-never-fades",
        "What was long ago counts as much as what was just now.",
        "router/pace.py",
        "fading = math.exp((self._last_at - now) / _MEMORY_S)",
        "fading = 1 - 1e-12",
        _PACE,
    ),
    Mutant(
        "pace-counts-the-refused",
        "A request that nodes refuse again and again makes its queue look fast.",
        "router/waiting.py",
        "            self._pace.came_back()\n",
        "            pass\n",
        _ADMISSION,
    ),
    Mutant(
        "queue-never-found-empty",
        "A queue that has been served keeps its pace.",
        "router/waiting.py",
        "            self._pace.is_empty()\n",
        "            pass\n",
        _ADMISSION,
    ),
    Mutant(
        "late-let-in",
        "A request is let in though it would still wait at its deadline.",
        "router/entrance.py",
        "now + wait_s > request.deadline",
        "now + wait_s > request.deadline + 60",
        _ADMISSION,
    ),
    Mutant(
        "late-told-to-come-at-once",
        "Who is turned away for being late is told to come back before the queue is shorter.",
        "router/entrance.py",
        "max(wait_s - left_s, self._config.retry_after_s)",
        "self._config.retry_after_s",
        _ADMISSION,
    ),
)
