"""Events on their way to one client: a bounded queue that never makes the engine wait.

Imports the standard library and core.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from anarchon_server.core import limits
from anarchon_server.core.errors import AnarchonError
from anarchon_server.core.messages import Assigned, Attached, Cancelled, Draining

Event = Attached | Assigned | Cancelled | Draining


class Stream:
    """The events of one Subscribe, in order, until it is ended."""

    def __init__(self, session_id: str, stream_id: int) -> None:
        self.session_id = session_id
        self.stream_id = stream_id
        self.error: AnarchonError | None = None
        self._events: deque[Event] = deque()
        self._changed = asyncio.Event()
        self._ended = asyncio.Event()

    @property
    def full(self) -> bool:
        """Whether the client has left so much unread that no more is kept for it."""
        return self.unread >= limits.EVENT_QUEUE_MAX

    @property
    def unread(self) -> int:
        """How many events its reader has not taken yet."""
        return len(self._events)

    @property
    def is_ended(self) -> bool:
        """Whether no event follows what is in the queue."""
        return self._ended.is_set()

    def put(self, event: Event) -> None:
        """Add an event. It is not `full`, and not ended."""
        assert not self.full, "a full stream is ended"
        self._events.append(event)
        self._changed.set()

    def end(self, error: AnarchonError | None) -> None:
        """End the stream after what is in the queue; with `error` as its status."""
        if not self.is_ended:
            self.error = error
            self._ended.set()
            self._changed.set()

    async def ended(self) -> None:
        """Wait until the stream is ended."""
        await self._ended.wait()

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            while self._events:
                yield self._events.popleft()
            if self.is_ended:
                return
            self._changed.clear()
            await self._changed.wait()
