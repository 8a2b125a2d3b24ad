"""Dispatches whose grammars are not compiled yet, and what came for them meanwhile: nothing is overtaken, nothing is lost.

Who is held is not with the core, which knows nothing of it: a Cancel or Move of a held attempt waits behind its Dispatch, and a
router's loss drops what it asked for. Pure. Not here: compiling (grammar_threads.py), and what drives this (grammar_gate.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from node.events import FromRouter, RouterId


@dataclass(slots=True)
class _Held:
    dispatch: FromRouter
    followers: list[FromRouter] = field(default_factory=list)


class HeldDispatches:
    """By a number that each is given."""

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, dispatch: FromRouter) -> int:
        """Keep a Dispatch until `release` or `drop`."""
        self._next += 1
        self._held[self._next] = _Held(dispatch)
        return self._next

    def defers(self, event: FromRouter) -> bool:
        """Whether it is about an attempt that is held: then it is kept behind that, and behind older ones that it ends, too."""
        message = event.message
        kind = message.WhichOneof("kind")
        if kind not in ("cancel", "move"):
            return False
        key = message.cancel.key if kind == "cancel" else message.move.key
        is_deferred = False
        for held in self._held.values():
            asked = held.dispatch.message.dispatch
            is_meant = (held.dispatch.router, asked.request_id) == (event.router, key.request_id)
            if is_meant and asked.attempt <= key.attempt and any(each.choice == key.choice for each in asked.branches):
                held.followers.append(event)
                is_deferred = True
        return is_deferred

    def forget(self, router: RouterId) -> None:
        """The session with the router is lost: nobody waits for what it asked."""
        self._held = {number: held for number, held in self._held.items() if held.dispatch.router != router}

    def release(self, number: int) -> list[FromRouter]:
        """The Dispatch and what came behind it, in order; nothing if it was forgotten."""
        held = self._held.pop(number, None)
        return [] if held is None else [held.dispatch, *held.followers]
