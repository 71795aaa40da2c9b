"""A connection's thread, which is handed whole transactions. Imports aiosqlite and the errors."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import aiosqlite

from anarchon_server.core.errors import StoreUnavailable

_T = TypeVar("_T")


class Connection(aiosqlite.Connection):
    """aiosqlite's thread, which is handed whole transactions instead of single statements.

    The thread must not keep a process alive that ends without closing.
    """

    def __init__(self, connector: Callable[[], sqlite3.Connection]) -> None:
        super().__init__(connector, iter_chunk_size=64)
        self._thread.daemon = True

    async def opened(self) -> None:
        """Connects. Where that fails the thread has ended before the error is raised: aiosqlite does
        not wait for it, and it would speak to an event loop that may be closed by then.
        """
        try:
            _ = await self
        except BaseException:
            await asyncio.to_thread(self._thread.join)
            raise

    async def run(self, call: Call[_T]) -> _T:
        try:
            answer: _T = await self._execute(call, self._conn)  # type: ignore[no-untyped-call]
        except ValueError:  # aiosqlite's word for a closed connection
            raise StoreUnavailable("the store is closed") from None
        return answer

    async def shut(self, within_s: float) -> None:
        """Ends the thread after what it is doing now, and waits for that for so long at most.

        `close` would wait for as long as it takes.
        """
        ended = self.stop()
        if ended is not None:
            ended.add_done_callback(lambda each: each.cancelled() or each.exception())
            await asyncio.wait([ended], timeout=within_s)


class Call(Generic[_T]):
    """Work for the connection's thread, which can be withdrawn for as long as it waits there.

    `begin` is what it waits with for the file's lock; it changes nothing yet.
    """

    def __init__(
        self,
        work: Callable[[sqlite3.Connection], _T],
        begin: Callable[[sqlite3.Connection], object] = lambda _: None,
    ) -> None:
        self._work = work
        self._begin = begin
        self._decided = threading.Lock()

    def __call__(self, db: sqlite3.Connection) -> _T | None:
        if self._decided.locked():
            return None
        self._begin(db)
        if not self._decided.acquire(blocking=False):
            db.rollback()
            return None
        return self._work(db)

    def withdraw(self) -> bool:
        """Whether the work had not begun; then it never will."""
        return self._decided.acquire(blocking=False)
