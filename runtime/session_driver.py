"""What both shells of a session share: the clock and timer of one end, and the writer of one stream.

Not here: what the outputs mean (session_dialer.py, session_server.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import grpc

from proto import baton_pb2 as pb
from runtime.alarm import Alarm
from runtime.bell import Bell
from runtime.session_end import SessionEnd
from runtime.session_events import Fate, Input, Output

MAX_FRAME_BYTES: Final = 17 << 20  # SessionTiming.max_message_bytes, and a header

# For channels and servers that carry sessions. Who notices a dead peer is the session, not gRPC.
CHANNEL_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
)


# What ends a stream, as its status; OK is said by a node that ends in good order, and by nothing else. Of those that gRPC makes
# itself there is none here.
STATUS: Final[Mapping[Fate, grpc.StatusCode]] = {
    Fate.ENDED: grpc.StatusCode.ABORTED,
    Fate.REFUSED: grpc.StatusCode.FAILED_PRECONDITION,
    Fate.REPLACED: grpc.StatusCode.NOT_FOUND,
    Fate.HUNG_UP: grpc.StatusCode.OK,
}
FATE: Final = {code: fate for fate, code in STATUS.items()}


class SessionDriver:
    """One end with a clock: ticks it before each input and when its next deadline comes."""

    def __init__(self, session: SessionEnd, perform: Callable[[Output], None]) -> None:
        self.session = session
        self._perform = perform
        self._loop = asyncio.get_running_loop()
        self._alarm = Alarm(self._loop, self._on_alarm)
        self._due_at: float | None = None
        self._arm()

    def feed(self, what: Input) -> None:
        """Take one input at the current time, and perform what follows from it."""
        now = self._loop.time()
        if self._due_at is not None and now >= self._due_at:  # before that a tick does nothing
            self._perform_all(self.session.tick(now))
        self._perform_all(self.session.receive(what, now))
        self._arm()

    def next_frame(self, stream: int) -> pb.Frame | None:
        """What the writer of this stream must write now."""
        frame = self.session.next_frame(stream, self._loop.time())
        if frame is not None:
            self._arm()
        return frame

    def stop(self) -> None:
        """End the timer; for a session that is lost."""
        self._alarm.cancel()

    def _perform_all(self, outputs: list[Output]) -> None:
        for output in outputs:
            self._perform(output)

    def _arm(self) -> None:
        self._due_at = self.session.next_deadline()
        self._alarm.arm(self._due_at)

    def _on_alarm(self) -> None:
        self._perform_all(self.session.tick(self._loop.time()))
        self._arm()


async def write_frames(
    driver: SessionDriver, stream: int, wake: Bell, write: Callable[[pb.Frame], Awaitable[None]]
) -> None:
    """Be the only writer of a stream until cancelled: all that is there, then wait for `wake`."""
    while True:
        while (frame := driver.next_frame(stream)) is not None:
            await write(frame)
        await wake.wait()


def surface(task: asyncio.Task[None]) -> None:
    """Done-callback: what ends a background task is a bug, and goes to the loop's exception handler at once."""
    if not task.cancelled() and (error := task.exception()) is not None:
        context = {"message": f"{task.get_name()} failed", "exception": error, "task": task}
        task.get_loop().call_exception_handler(context)
