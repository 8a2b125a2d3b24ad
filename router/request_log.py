"""What the log says of a request: why an attempt of it came to nothing, and its one end. No prompt, no text, no key.

Refusals for want of room are many where room is short, cost no retry, and are counted by the metrics: not said here.
"""

from __future__ import annotations

import logging
from typing import Final

from router.answer import Answer
from router.events import Noted
from runtime.logs import log_event

_LOG: Final = logging.getLogger(__name__)
_GIVEN_UP: Final = "given_up"


def log_failure(note: Noted) -> None:
    """An attempt of a choice failed, and another follows or none does; of what has no `why` nothing is said."""
    if note.why:
        log_event(
            _LOG,
            logging.INFO,
            "request_given_up" if note.what == _GIVEN_UP else "attempt_failed",
            request=note.request_id,
            **({} if note.choice == 0 else {"choice": note.choice}),
            attempt=note.attempt,
            code=note.code,
            **({} if not note.nodes else {"nodes": ",".join(note.nodes)}),
            why=note.why,
        )


def log_end(answer: Answer, outcome: str, seconds: float, error: str | None) -> None:
    """A request has its end; `error`: what its client was told."""
    arrival, num_choices = answer.arrival, len(answer.choices)
    log_event(
        _LOG,
        logging.INFO,
        "request_ended",
        request=answer.request.request_id,
        outcome=outcome,
        prompt_tokens=len(answer.request.prompt_token_ids),
        completion_tokens=answer.num_tokens,
        seconds=round(seconds, 4),
        **({} if num_choices == 1 else {"choices": num_choices}),
        **({} if answer.num_attempts <= num_choices else {"attempts": answer.num_attempts}),
        **({} if arrival.client_request_id is None else {"client_request": arrival.client_request_id}),
        **({} if arrival.client is None else {"client": arrival.client}),
        **({} if error is None else {"error": error}),
    )
