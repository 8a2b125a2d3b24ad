"""The way into a node's loop, for what outlives an incarnation."""

from __future__ import annotations

import asyncio

from node.events import Event, PoolSaid
from node.inbox import Inbox, NewestInbox


def test_what_is_said_before_there_is_an_incarnation_waits_for_the_first_and_then_all_goes_to_the_newest() -> None:
    """So what a KV pool is, which is told once, at start."""

    async def run() -> None:
        newest, inboxes = NewestInbox(), [Inbox(), Inbox()]
        said = [PoolSaid(bytes([number])) for number in range(3)]

        def taken(inbox: Inbox) -> list[Event]:
            events: list[Event] = []
            while (event := inbox.take()) is not None:
                events.append(event)
            return events

        newest.post(said[0])
        newest.turn_to(inboxes[0])
        newest.post(said[1])
        newest.turn_to(inboxes[1])
        newest.post(said[2])
        assert [taken(inbox) for inbox in inboxes] == [said[:2], said[2:]]

    asyncio.run(run())
