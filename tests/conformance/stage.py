"""Plays several scenarios at a time: most of one is waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

AT_A_TIME = 4


class Stage:
    """Begins what it is given, in order, and lets tests wait for each by its name."""

    def __init__(self, plays: Mapping[str, Callable[[], Awaitable[None]]]) -> None:
        self._room = asyncio.Semaphore(AT_A_TIME)
        self._plays = {name: asyncio.create_task(self._play(play)) for name, play in plays.items()}

    async def _play(self, play: Callable[[], Awaitable[None]]) -> None:
        async with self._room:
            await play()

    async def played(self, name: str) -> None:
        """Wait for one, and raise what it has raised."""
        await self._plays[name]

    async def close(self) -> None:
        """Break off what nobody waits for any more."""
        for task in self._plays.values():
            task.cancel()
        await asyncio.gather(*self._plays.values(), return_exceptions=True)
