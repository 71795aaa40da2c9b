"""News of runs that others should look at, over a connection that listens. Imports the standard library and asyncpg."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

import asyncpg

SILENCE_S = 30.0  # after which a listener makes sure that its connection still is one


class News:
    """What a channel says, counted from `listen` on."""

    def __init__(
        self, channel: str, connect: Callable[[], Awaitable[asyncpg.Connection]], ask_ms: int
    ) -> None:
        self.channel = channel
        self._connect = connect
        self._ask_s = ask_ms / 1_000
        self._heard = asyncio.Event()
        self._closed = False
        self._connection: asyncpg.Connection = None

    def close(self) -> None:
        """Ends whoever waits; the connection is closed by whom it came from."""
        self._closed = True
        self._heard.set()

    def _is_closed(self) -> bool:
        return self._closed

    async def listen(self) -> None:
        """Hears what is said from now on; the connection's end is heard, too."""
        connection = await self._connect()
        try:
            await connection.add_listener(self.channel, lambda *_: self._heard.set())
        except BaseException:
            connection.terminate()
            raise
        connection.add_termination_listener(lambda _: self._heard.set())
        self._connection = connection

    async def watch(self) -> AsyncGenerator[None]:
        """Yields when something was heard, and when something may have been missed."""
        while not self._closed:
            if self._connection is None or self._connection.is_closed():
                await self.listen()
                yield
                continue
            try:
                async with asyncio.timeout(SILENCE_S):
                    await self._heard.wait()
            except TimeoutError:
                await self._ask()
                continue
            if self._is_closed():
                return
            self._heard.clear()
            if not self._connection.is_closed():
                yield

    async def _ask(self) -> None:
        """Cuts a connection that only looks as if it were there."""
        try:
            await self._connection.fetchval("SELECT 1", timeout=self._ask_s)
        except (TimeoutError, OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
            self._connection.terminate()
