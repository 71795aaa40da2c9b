"""One call of the port: until when it lasts, what the store's time is, and whether it wrote.

Imports JetStream, the machine, the errors and the standard library.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from anarchon_backends.nats.jetstream import JetStream
from anarchon_server.core import machine
from anarchon_server.core.errors import OutcomeUnknown, StoreUnavailable

_T = TypeVar("_T")
_R = TypeVar("_R")

_AT_ONCE = 256  # requests of one call that wait for their answers together


class Call:
    """One call. Its time is asked for once, while its first rows are read, and reckoned on.

    `wrote`: something of it is done, so that no failure that follows means "surely not done".
    """

    def __init__(self, jetstream: JetStream, stream: str, until: float, listed: str = "") -> None:
        self._jetstream = jetstream
        self._stream = stream
        self.until = until
        self.wrote = False
        asked = {"subjects_filter": listed} if listed else None
        self._measuring = asyncio.ensure_future(jetstream.info(stream, until, asked))

    async def info(self) -> dict[str, Any]:
        """The stream, as it was measured."""
        return await asyncio.shield(self._measuring)

    async def listed(self) -> list[str]:
        """The subjects that the call has asked for with its time."""
        return list((await self.info()).get("state", {}).get("subjects") or ())

    async def moment(self) -> machine.Moment:
        """The store's time now. Leases go by the same clock, which may be stepped."""
        await self.info()
        return _moment(self._jetstream.time.now_us())

    async def run(self, work: Callable[[Call], Awaitable[_R]]) -> _R:
        """Does the work. A failure after a part of it was written is `OutcomeUnknown`."""
        try:
            return await work(self)
        except StoreUnavailable as error:
            if self.wrote:
                raise OutcomeUnknown(f"{error}; a part of the call was done before") from error
            raise
        except asyncio.CancelledError:
            self._measuring.cancel()
            raise
        finally:
            await asyncio.gather(self._measuring, return_exceptions=True)

    def left_s(self) -> float:
        """How many seconds it may still take; at most 0 when it is over."""
        return self.until - asyncio.get_running_loop().time()

    async def each(self, work: Callable[[_T], Awaitable[_R]], items: Iterable[_T]) -> list[_R]:
        """Does the work for all items at once, and waits for all of it, whatever fails."""
        room = asyncio.Semaphore(_AT_ONCE)

        async def one(item: _T) -> _R:
            async with room:
                return await work(item)

        return await all_of([one(item) for item in items])


async def all_of(works: Iterable[Awaitable[_R]]) -> list[_R]:
    """Waits for all of the works, whatever fails: none goes on behind the caller's back."""
    done = await asyncio.gather(*works, return_exceptions=True)
    answers: list[_R] = []
    failures: list[BaseException] = []
    for each in done:
        if isinstance(each, BaseException):
            failures.append(each)
        else:
            answers.append(each)
    for failure in sorted(failures, key=_weight):
        raise failure
    return answers


def _weight(failure: BaseException) -> int:
    """What matters most comes first: our own mistakes, then what may have been done."""
    if isinstance(failure, OutcomeUnknown):
        return 1
    return 2 if isinstance(failure, StoreUnavailable) else 0


def _moment(at_us: int) -> machine.Moment:
    return machine.Moment(at_us, at_us // 1_000, "", steady=False)
