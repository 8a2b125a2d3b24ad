"""A node with nothing but its end of the session, as a process to be stopped and killed: prints its port, serves until EOF."""

from __future__ import annotations

import asyncio
import sys

from runtime.session import Peer
from tests.session.ends import running_node, to_router


async def main(incarnation: int) -> None:
    """Answer every message with its number."""
    loop = asyncio.get_running_loop()
    async with running_node(Peer("node", incarnation)) as node:
        node.handler.reply = lambda router, number: node.sessions.send(router, to_router(number))
        sys.stdout.write(f"{node.port}\n")
        sys.stdout.flush()
        await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
