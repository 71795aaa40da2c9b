"""What a broker may have forgotten when it was restarted, and how its claims are put back.

A broker that keeps declarations in Mnesia answers before it has written down that they count. After
`kill -9` or a power cut it does not know those of its last moments: two seconds, for which Mnesia's
log buffers what it is given, and however long the process that gives it was not scheduled. So

- winners declare again, on their next connection, what they won in the last moments of the one before;
- nobody declares a slot that was due before a restart until winners had the time to do that.

A restart is noticed by an exchange that does not outlive the broker. The first who connects declares
it, and all others read in it when that was. Imports the port's clock, the errors, the standard library
and aiormq.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiormq.abc import AbstractChannel, AbstractConnection
from aiormq.exceptions import AMQPChannelError

from anarchon_backends.rabbitmq._claims import Claims
from anarchon_backends.rabbitmq._connection import CHANNELS, Link, refusal_of
from anarchon_server.core.errors import StoreError
from anarchon_server.core.store import StoreClock

KHEPRI_ALONE = (4, 3)  # from this version on there is no Mnesia
HELD_MS = 10_000  # how long after a restart the slots that were due before it wait for winners
UNSURE_MS = 10_000  # how old a claim is at most that a broker forgets

# Of no namespace and no job, as what they say holds for the whole virtual host.
KNOWN = "an...known"  # durable: somebody has claimed here
SINCE = "an...since"  # as long as the broker runs

_CLOCKS_DIFFER_MS = 2_000
_RECENT_MAX = 10_000
_PAUSE_FIRST_S = 0.05
_PAUSE_MOST_S = 1.0
_WHEN = "alternate-exchange"  # nothing is ever sent to the exchange: its argument is what is read
_CURRENT = re.compile(rf"inequivalent arg '{_WHEN}'.* but current is 'an\.(\d{{1,18}})'")

_log = logging.getLogger("anarchon")


def version_of(properties: Mapping[str, Any]) -> tuple[int, ...]:
    """The broker's version as two numbers, of what it says of itself; fewer where it says less."""
    return tuple(int(n) for n in re.findall(r"\d+", str(properties.get("version", "")))[:2])


@dataclass(frozen=True, slots=True)
class _Won:
    """A claim that was won at `at`, by the boot-time clock."""

    at: int
    job: str
    slot: int
    queue: str
    number: int


class Restarts:
    """Holds back what a restarted broker may have forgotten, and puts back what was won here."""

    def __init__(self, link: Link, claims: Claims, clock: StoreClock) -> None:
        self._link = link
        self._claims = claims
        self._clock = clock
        self._recent: deque[_Won] = deque(maxlen=_RECENT_MAX)
        self._connection: AbstractConnection | None = None  # the newest, until it is lost
        self._lost = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._may_forget = False
        self._since = 0  # by the wall clock: when it was first noticed that the broker runs
        self._held_until = 0  # by the boot-time clock

    def start(self) -> None:
        """From now on, what was won is put back when the connection is lost."""
        self._task = asyncio.create_task(self._put_back_when_lost())

    async def close(self) -> None:
        """Ends it. What was won is remembered."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    def holds_back(self, slot: int) -> bool:
        """Whether the slot may have a winner whom the broker on this connection has forgotten."""
        was_due = slot <= self._since + _CLOCKS_DIFFER_MS
        return was_due and self._clock.boot_ms() < self._held_until

    def won(self, job: str, slot: int, queue: str, number: int) -> None:
        """Notes a claim that the broker has just acknowledged."""
        if not self._may_forget:
            return
        now = self._clock.boot_ms()
        self._recent.append(_Won(now, job, slot, queue, number))
        while self._recent[0].at < now - UNSURE_MS:
            self._recent.popleft()
        if self._connection is None:  # it was lost with the answer
            self._lost.set()

    # On each new connection

    async def greet(
        self,
        properties: Mapping[str, Any],
        channel: Callable[[], Awaitable[AbstractChannel]],
    ) -> None:
        """Finds out, before anything is claimed on a connection, since when its broker runs."""
        self._may_forget = version_of(properties) < KHEPRI_ALONE
        if not self._may_forget:
            self._held_until = 0
            return
        wall, boot = self._clock.wall_us() // 1_000, self._clock.boot_ms()
        self._since = min(await self._running_since(channel, wall), wall)
        self._held_until = boot + max(0, self._since + HELD_MS - wall)
        connection = (await channel()).connection
        self._connection = connection
        connection.closing.add_done_callback(partial(self._has_lost, connection))

    async def _running_since(
        self, channel: Callable[[], Awaitable[AbstractChannel]], now: int
    ) -> int:
        """Zero in a virtual host in which nobody has claimed before: there is nothing to forget.

        Now, which is the safe side, where the broker does not tell.
        """
        try:
            await (await channel()).exchange_declare(KNOWN, passive=True)
        except AMQPChannelError as error:
            is_new = refusal_of(error).code == 404
        else:
            is_new = False
        since = 0 if is_new else now
        try:
            await (await channel()).exchange_declare(
                SINCE, exchange_type="fanout", arguments={_WHEN: f"an.{since}"}
            )
        except AMQPChannelError as error:
            found = _CURRENT.search(refusal_of(error).text)
            since = int(found[1]) if found else now
        if is_new:
            with suppress(AMQPChannelError):  # not permitted: then nothing can be claimed either
                await (await channel()).exchange_declare(
                    KNOWN, exchange_type="fanout", durable=True
                )
        return since

    def _has_lost(self, connection: AbstractConnection, closing: asyncio.Future[Any]) -> None:
        if not closing.cancelled():
            closing.exception()  # which is not news here
        if connection is self._connection:
            self._connection = None
        self._lost.set()

    # After a connection was lost

    async def _put_back_when_lost(self) -> None:
        while True:
            await self._lost.wait()
            self._lost.clear()
            pause_s = _PAUSE_FIRST_S
            while not await self._put_back():
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _PAUSE_MOST_S)

    async def _put_back(self) -> bool:
        """Declares again what was won last; whether all of it was. Whoever has it now, keeps it."""
        recent = list(self._recent)
        for first in range(0, len(recent), CHANNELS):
            some = recent[first : first + CHANNELS]
            deadline = self._link.deadline()
            said = await asyncio.gather(
                *(self._claims.declare(won.queue, won.number, deadline) for won in some),
                return_exceptions=True,
            )
            for won, holder in zip(some, said, strict=True):
                if isinstance(holder, StoreError):
                    return False
                if isinstance(holder, BaseException):
                    raise holder
                if holder is not None and not holder.mine:
                    self._was_taken(won)
        return True

    def _was_taken(self, won: _Won) -> None:
        """Two have won the slot. There is nothing to be done about it but to say so."""
        with suppress(ValueError):
            self._recent.remove(won)
        _log.error("claim_forgotten", extra={"fields": {"job": won.job, "slot": won.slot}})
