"""One call of the port: until when it lasts, what the store's time is, and whether it wrote.

Imports JetStream, the machine, the port's clock, the errors and the standard library.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from anarchon_backends.nats.jetstream import JetStream
from anarchon_backends.nats.time import microseconds
from anarchon_server.core import machine
from anarchon_server.core.errors import OutcomeUnknown, StoreUnavailable
from anarchon_server.core.store import StoreClock

_T = TypeVar("_T")
_R = TypeVar("_R")

_AT_ONCE = 256  # requests of one call that wait for their answers together


class Call:
    """One call. Its time is asked for while its first rows are read, and reckoned on from there.

    What the leader said then, and what has passed since it was heard, is what its clock shows at the
    least: no lease is taken as over too early, and one that is given ends no sooner than its length
    after the call began. Earlier measurements, from before a step perhaps, are not asked.
    With `virtual` the store's time is that of `clock`, and nothing is measured: for tests.
    `wrote`: something of it is done, so that no failure that follows means "surely not done".
    """

    def __init__(
        self,
        jetstream: JetStream,
        stream: str,
        clock: StoreClock,
        *,
        virtual: bool = False,
        listed: str = "",
    ) -> None:
        self._clock = clock
        self._virtual = virtual
        self._begun_ms = self._heard_ms = clock.boot_ms()
        self.until = jetstream.connection.until()
        self.wrote = False
        self._measuring = asyncio.ensure_future(self._measure(jetstream, stream, listed))

    async def _measure(self, jetstream: JetStream, stream: str, listed: str) -> dict[str, Any]:
        asked = {"subjects_filter": listed} if listed else None
        answer = await jetstream.info(stream, self.until, asked)
        self._heard_ms = self._clock.boot_ms()
        return answer

    async def info(self) -> dict[str, Any]:
        """The stream, as it was when the time was asked for."""
        return await asyncio.shield(self._measuring)

    async def listed(self) -> list[str]:
        """The subjects that the call has asked for with its time."""
        return list((await self.info()).get("state", {}).get("subjects") or ())

    async def moment(self) -> machine.Moment:
        """The store's time now. Leases go by the same clock, which may be stepped."""
        at_us = await self._at_us(self._clock.boot_ms)
        return machine.Moment(at_us, at_us // 1_000, "", steady=False)

    async def middle(self) -> int:
        """The store's time (ms) in the middle of the call, which is what its sender takes it for."""
        return await self._at_us(lambda: (self._begun_ms + self._clock.boot_ms()) // 2) // 1_000

    async def _at_us(self, boot_ms: Callable[[], int]) -> int:
        said = await self.info()
        if self._virtual:
            return self._clock.wall_us()
        return microseconds(said["ts"]) + (boot_ms() - self._heard_ms) * 1_000

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
