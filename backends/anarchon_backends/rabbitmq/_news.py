"""Who won what, told to all instances of a namespace, so that most losers need not ask.

A help only: what is not heard is found out by asking the broker. It has a connection of its own,
since a broker that runs short of memory stops reading from connections that publish, and claims
must go on. Imports the port's clock, the errors, the standard library and aiormq.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from aiormq.abc import AbstractChannel, DeliveredMessage

from anarchon_backends.rabbitmq._address import Address
from anarchon_backends.rabbitmq._claims import NUMBER_BITS, exchange_of, passing_of
from anarchon_backends.rabbitmq._connection import Link, Refused
from anarchon_server.core.errors import StoreError
from anarchon_server.core.store import StoreClock

CLOCKS_DIFFER_MS = 2_000
_WARN_EVERY_MS = 3_600_000
_CLOCK_KEPT_MS = 600_000  # a clock that was not heard of for so long may have been set
_LATE_FOR_MS = 60_000  # a message may come late, and many at once; not all for so long
_SENDERS_MAX = 1_000
_HEARD_MAX = 20_000
_WAITING_MAX = 100
_MESSAGE_MAX = 1_000_000
_LENGTH_MAX = 10_000  # of the queue that an instance listens on
_NAME_MAX = 128
_PAUSE_FIRST_S = 0.1
_PAUSE_MOST_S = 5.0
_PAUSE_REFUSED_S = 60.0

_log = logging.getLogger("anarchon")


@dataclass(frozen=True, slots=True)
class Win:
    """That the token of this number has won the slot, for the instance of this label."""

    job: str
    slot: int
    number: int
    instance_id: str


@dataclass(slots=True)
class _Sender:
    """What is known of another instance. Times are on the boot-time clock, but for `said`, the time
    that it said it was when it was last heard, at `heard_at`.

    `late_since`: from then on every message of it came later than clocks that agree explain.
    """

    said: int = 0
    heard_at: int = 0
    late_since: int | None = None
    warned_at: int | None = None
    warned_of_retention_at: int | None = None


class News:
    """Wins of this instance, to be told, and of others, as far as they were heard of."""

    def __init__(
        self, address: Address, namespace: str, clock: StoreClock, timeout_ms: int
    ) -> None:
        self._link = Link(address, f"anarchon {namespace}: news", timeout_ms)
        self._namespace = namespace
        self._retention_ms = address.retention_ms
        self._exchange = exchange_of(namespace)
        self._sender = secrets.token_hex(8)
        self._clock = clock
        self._heard: dict[tuple[str, int], Win] = {}
        self._senders: dict[str, _Sender] = {}
        self._waiting: asyncio.Queue[bytes] = asyncio.Queue(_WAITING_MAX)
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Begins to listen. Raises where that is not possible now; it is tried again all the same."""
        self._link.start()
        try:
            channel = await self._subscribe()
        except (StoreError, Refused):
            self._run(None)
            raise
        self._run(channel)

    def _run(self, channel: AbstractChannel | None) -> None:
        self._tasks = {
            asyncio.create_task(self._listen(channel)),
            asyncio.create_task(self._tell()),
        }

    async def close(self) -> None:
        """Stops listening, and forgets what was not told."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._tasks = set()
        await self._link.close()

    def winner(self, job: str, slot: int) -> Win | None:
        """Who has won the slot, if that was heard of."""
        return self._heard.get((job, slot))

    def latest(self) -> int:
        """The time by the clock that is the furthest ahead of those heard of lately; 0: of none."""
        now = self._clock.boot_ms()
        ages = ((each.said, now - each.heard_at) for each in self._senders.values())
        return max((said + age for said, age in ages if age <= _CLOCK_KEPT_MS), default=0)

    def tell(self, wins: Sequence[Win]) -> None:
        """Tells all others soon, if there is a way, of wins of this instance."""
        if not wins:
            return
        said = {
            "sender": self._sender,
            "instance": wins[0].instance_id,
            "at": self._clock.wall_us() // 1_000,
            "retention_ms": self._retention_ms,
            "won": [[win.job, win.slot, win.number] for win in wins],
        }
        with suppress(asyncio.QueueFull):
            self._waiting.put_nowait(json.dumps(said, separators=(",", ":")).encode())

    # Telling

    async def _tell(self) -> None:
        while True:
            body = await self._waiting.get()
            with suppress(StoreError, Refused):
                await self._link.ask(
                    lambda channel, body=body: channel.basic_publish(  # type: ignore[misc]
                        body, exchange=self._exchange
                    ),
                    self._link.deadline(),
                )

    # Listening

    async def _listen(self, channel: AbstractChannel | None) -> None:
        pause_s = _PAUSE_FIRST_S
        while True:
            if channel is not None:
                pause_s = _PAUSE_FIRST_S
                await asyncio.wait([channel.closing])
                channel = None
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MOST_S)
            try:
                channel = await self._subscribe()
            except StoreError:
                continue
            except Refused:  # which fills the broker's log
                pause_s = _PAUSE_REFUSED_S

    async def _subscribe(self) -> AbstractChannel:
        # A new name each time: the broker may not have noticed the end of the last connection.
        queue = passing_of(self._namespace, "news")

        async def prepare(channel: AbstractChannel) -> None:
            await channel.exchange_declare(self._exchange, exchange_type="fanout", durable=True)
            await channel.queue_declare(
                queue, exclusive=True, arguments={"x-max-length": _LENGTH_MAX}
            )
            await channel.queue_bind(queue, self._exchange)
            await channel.basic_consume(queue, self._has_heard, no_ack=True)

        return await self._link.hold(prepare, self._link.deadline())

    async def _has_heard(self, message: DeliveredMessage) -> None:
        """Takes in a message. It is input: what is not as we write it is left out."""
        if len(message.body) > _MESSAGE_MAX:
            return
        try:
            said = json.loads(message.body)
            sender, label, at = str(said["sender"]), str(said["instance"]), int(said["at"])
            retention_ms = int(said["retention_ms"])
            wins = [_win(each, label[:_NAME_MAX]) for each in said["won"]]
        except (ValueError, TypeError, KeyError, LookupError):
            return
        if sender == self._sender:
            return
        for win in wins:
            self._heard[win.job, win.slot] = win
        while len(self._heard) > _HEARD_MAX:
            del self._heard[next(iter(self._heard))]
        self._compare(sender[:_NAME_MAX], label[:_NAME_MAX], at, retention_ms)

    def _compare(self, name: str, label: str, at: int, retention_ms: int) -> None:
        """What the sender says of itself with what is so here."""
        sender = self._senders.pop(name, None) or _Sender()
        self._senders[name] = sender
        while len(self._senders) > _SENDERS_MAX:
            del self._senders[next(iter(self._senders))]
        sender.said, sender.heard_at = at, self._clock.boot_ms()
        self._compare_clocks(sender, label, at)
        if retention_ms != self._retention_ms and self._is_due(sender.warned_of_retention_at):
            sender.warned_of_retention_at = sender.heard_at
            both = {"ours_ms": self._retention_ms, "theirs_ms": retention_ms}
            _log.warning("retention_differs", extra={"fields": {"instance": label, **both}})

    def _compare_clocks(self, sender: _Sender, label: str, at: int) -> None:
        now, boot_at = self._clock.wall_us() // 1_000, self._clock.boot_ms()
        if now - at <= CLOCKS_DIFFER_MS:
            sender.late_since = None
        elif sender.late_since is None:
            sender.late_since = boot_at
        is_behind = sender.late_since is not None and boot_at - sender.late_since >= _LATE_FOR_MS
        differ = at - now > CLOCKS_DIFFER_MS or is_behind
        if differ and self._is_due(sender.warned_at):
            sender.warned_at = boot_at
            fields = {"instance": label, "ahead_ms": at - now}
            _log.warning("clocks_differ", extra={"fields": fields})

    def _is_due(self, warned_at: int | None) -> bool:
        return warned_at is None or self._clock.boot_ms() - warned_at > _WARN_EVERY_MS


def _win(said: Any, label: str) -> Win:
    job, slot, number = said
    if not (isinstance(job, str) and isinstance(slot, int) and isinstance(number, int)):
        raise TypeError
    if len(job) > _NAME_MAX or not 0 <= number < 2**NUMBER_BITS:
        raise ValueError
    return Win(job, slot, number, label)
