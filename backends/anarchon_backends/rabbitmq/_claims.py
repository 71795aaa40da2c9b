"""The claim: a queue whose arguments carry the winner's number, so that declaring it is the act.

Imports the errors, the standard library and the connection beside it.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from aiormq.abc import AbstractChannel

from anarchon_backends.rabbitmq._connection import AccessDenied, Link, Refused
from anarchon_server.core.errors import OutcomeUnknown, StoreUnavailable

NUMBER_BITS = 62
NUMBER: Final = "x-max-length-bytes"
EXPIRES: Final = "x-expires"
TYPE: Final = "x-queue-type"

_NAME_MAX = 80  # the broker's answer of 255 bytes is to hold it, the virtual host and two numbers
_DIFFERS = re.compile(r"inequivalent arg '([a-z-]+)'.*?(?: but current is '([^']*)')?$", re.DOTALL)
_NO_QUEUE = "NOT_FOUND - no queue "
_AGREEING_MAX = 3  # arguments that may differ
_PAUSES_S = (0.02, 0.04, 0.08, 0.16)  # while a queue is being made

_T = TypeVar("_T")


def number_of(token: str) -> int:
    """The token's number: the first 62 bits of its SHA-256. The same token gives the same."""
    digest = hashlib.sha256(token.encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - NUMBER_BITS)


def queue_of(namespace: str, job: str, slot: int) -> str:
    """The name of the queue that is the claim of a slot. No two slots have the same."""
    return _short(f"an.{_part(namespace)}.{_part(job)}.{slot}")


def exchange_of(namespace: str) -> str:
    """The name of the exchange by which instances tell each other who won."""
    return _short(f"an.{_part(namespace)}")


def passing_of(namespace: str, purpose: str) -> str:
    """A new name for a queue that is no claim and goes with the connection: no job is nameless."""
    return _short(f"an.{_part(namespace)}..{purpose}.{secrets.token_hex(8)}")


def _part(name: str) -> str:
    """A namespace or a job's name as one part of a name whose parts are separated by dots.

    A comma, which no name has, stands for a dot. (AMQP's names, and the driver, know no `%`.)
    """
    return name.replace(".", ",")


def _short(name: str) -> str:
    if len(name) <= _NAME_MAX:
        return name
    return f"an.{hashlib.sha256(name.encode()).hexdigest()}"


@dataclass(frozen=True, slots=True)
class Holder:
    """Whose claim a queue is. `number` is the winner's (None: the broker did not say)."""

    mine: bool
    number: int | None


class Claims:
    """The queues of one broker that are claims, by names of `queue_of` and numbers of tokens."""

    def __init__(self, link: Link, queue_type: str, retention_ms: int) -> None:
        self._link = link
        self._arguments: dict[str, int | str] = {TYPE: queue_type, EXPIRES: retention_ms}
        self.disagrees = ""  # the argument in which somebody else's claims differ from ours

    async def declare(
        self,
        queue: str,
        number: int,
        deadline: float,
        is_timely: Callable[[], bool] = lambda: True,
    ) -> Holder | None:
        """Claims for this number, unless it is claimed. Repeated with the same, it is the same.

        Returns None, and has not asked, where it is not timely when the question can go out.
        """
        return await self._declare(queue, number, deadline, is_timely, must_exist=False)

    async def look(self, queue: str, number: int, deadline: float) -> Holder | None:
        """Whose it is, and None where it is nobody's, which this does not change.

        The broker tells numbers only to who declares, so that is done where a queue is there. Should
        it expire in between, it is claimed: that is a slot which was claimed a retention ago.
        """
        try:
            return await self._declare(queue, number, deadline, lambda: True, must_exist=True)
        except Refused:
            return None

    async def _declare(
        self,
        queue: str,
        number: int,
        deadline: float,
        is_timely: Callable[[], bool],
        *,
        must_exist: bool,
    ) -> Holder | None:
        """`must_exist` raises `Refused` where there is no such queue. It is asked on the channel on
        which it is declared: over two connections, the broker could have forgotten it in between.
        """
        arguments: dict[str, int | str] = {**self._arguments, NUMBER: number}

        async def question(channel: AbstractChannel) -> bool:
            if not is_timely():
                return False
            if must_exist:
                await channel.queue_declare(queue, passive=True)
            await channel.queue_declare(queue, durable=True, arguments=arguments)  # type: ignore[arg-type]
            return True

        for _ in range(_AGREEING_MAX):
            try:
                asked = await self._ask(question, deadline)
            except Refused as refused:
                if must_exist and _is_nobodys(refused):
                    raise
                differing, current = _difference(refused, queue)
            else:
                return Holder(mine=True, number=number) if asked else None
            if differing == NUMBER:
                return Holder(mine=False, number=_number_in(current))
            # It was claimed with other settings than ours: it is asked for once more with those.
            self.disagrees = differing
            theirs = _number_in(current) if differing == EXPIRES else current
            if not theirs or differing not in arguments:
                break
            arguments[differing] = theirs
        return Holder(mine=False, number=None)

    async def exists(self, queue: str, deadline: float) -> bool:
        """Whether it is claimed, by whomever. Does not claim it."""
        try:
            await self._ask(lambda channel: channel.queue_declare(queue, passive=True), deadline)
        except Refused as refused:
            if _is_nobodys(refused):
                return False
            raise _meaning(refused, queue) from None
        return True

    async def _ask(
        self, question: Callable[[AbstractChannel], Awaitable[_T]], deadline: float
    ) -> _T:
        """Asks, and again where the broker has written a queue down that it does not reach.

        Either its node is down, or (seen on 4.3, with quorum queues) it is being made just now, for
        another's claim.
        """
        for pause_s in _PAUSES_S:
            try:
                return await self._link.ask(question, deadline)
            except Refused as refused:
                if refused.code != 404 or _is_nobodys(refused):
                    raise
            await asyncio.sleep(pause_s)
        return await self._link.ask(question, deadline)

    async def delete(self, queue: str, deadline: float) -> None:
        """Removes a queue that is nobody's claim: one made for a trial."""
        try:
            await self._link.ask(lambda channel: channel.queue_delete(queue), deadline)
        except Refused as refused:
            raise _meaning(refused, queue) from None


def _difference(refused: Refused, queue: str) -> tuple[str, str]:
    """The argument in which the queue is another than was asked for, and its value there.

    The value is empty where the broker's answer was cut off before it. Raises for other refusals.
    """
    found = _DIFFERS.search(refused.text) if refused.code == 406 else None
    if found is None:
        raise _meaning(refused, queue)
    return found[1], found[2] or ""


def _is_nobodys(refused: Refused) -> bool:
    return refused.code == 404 and refused.text.startswith(_NO_QUEUE)


def _number_in(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() else None


def _meaning(refused: Refused, queue: str) -> StoreUnavailable | OutcomeUnknown:
    if refused.code == 403:
        return AccessDenied(refused.text)
    if refused.code == 406:
        return StoreUnavailable(refused.text)
    # A queue of a node that is down (404), somebody's exclusive queue (405): who holds the slot
    # cannot be found out now.
    return OutcomeUnknown(f"{queue}: {refused.text}")
