"""A cluster: which node has a key, and a few connections to each of them.

The driver's own cluster client repeats what it does not know the outcome of; this one sends again
only what a node has surely not done. Imports the errors, the standard library and redis-py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from redis.asyncio.connection import Connection
from redis.crc import key_slot
from redis.exceptions import AskError, MovedError, RedisError

from anarchon_backends.redis._address import Address, shown_host
from anarchon_backends.redis._connection import (
    AccessDenied,
    Answer,
    Call,
    Command,
    Pool,
)
from anarchon_backends.redis._script import Script
from anarchon_server.core.errors import (
    OutcomeUnknown,
    StoreError,
    StoreRefused,
    StoreUnavailable,
)

_SLOTS = 16_384
_ROUNDS = 4  # a call is sent so often at most: the table of slots may be old twice, and a node gone
_PART_SHARE = 3 / 4  # of a call's time, what the nodes have: the caller hears of those that answer
_LOOK_S = 0.25  # how long a node that was silent is waited for, each time that it is looked at
_LOOK_AGAIN_S = 0.05
_PROBES = 1_000_000  # names tried to find one that belongs to a node

Host = tuple[str, int]
_T = TypeVar("_T")


class Cluster:
    """The masters of a cluster, each with a pool, and the slots that each has.

    What a node refuses with MOVED goes to the node that it names. ASK is never followed: the node
    that a slot is moving to has some of a job's keys, and the other has the rest, so that a claim
    there could win a slot that is taken. Such a job is unavailable until its slot has moved.
    """

    def __init__(self, address: Address, op_timeout_ms: int) -> None:
        self._address = address
        self._timeout_ms = op_timeout_ms
        self._pools: dict[Host, Pool] = {}
        self._table: list[Host | None] = [None] * _SLOTS
        self._seeds = {host: self._pool_of(host) for host in address.hosts}
        self._gone: list[Pool] = []
        self._refreshing = asyncio.Lock()
        self._looks: dict[Host, asyncio.Task[None]] = {}
        self._refreshes = 0
        self._is_old = False
        self._losses = 0
        self._open = False

    @property
    def location(self) -> str:
        """Where the cluster is, as it may be shown."""
        return self._address.location

    @property
    def losses(self) -> int:
        """How often a node may have lost acknowledged writes, or another came to have its slots."""
        return self._losses + sum(pool.losses for pool in self._pools.values())

    @property
    def watched(self) -> bool:
        """Whether all masters let their identity be seen."""
        return all(pool.watched for pool in self._pools.values())

    def nodes(self) -> Mapping[Host, Pool]:
        """The masters that are known."""
        return self._pools

    def start(self) -> None:
        """From now on calls are served."""
        self._open = True
        for pool in (*self._seeds.values(), *self._pools.values()):
            pool.start()

    async def close(self) -> None:
        """Closes every connection, also those in use."""
        self._open = False
        for look in self._looks.values():
            look.cancel()
        self._looks.clear()
        for pool in (*self._seeds.values(), *self._pools.values(), *self._gone):
            await pool.close()

    def _pool_of(self, host: Host) -> Pool:
        scheme = self._address.location.partition(":")[0]
        own = replace(
            self._address, hosts=(host,), location=f"{scheme}://{shown_host(host)}", cluster=False
        )
        return Pool(own, self._timeout_ms)

    # Calls

    async def run(self, script: Script, keys: Sequence[str], batch: bytes) -> bytes:
        """Carries out a script that may write. Its keys are in one hash tag."""
        (answer,) = await self.run_each([Call(script, keys, batch)])
        if isinstance(answer, StoreError):
            raise answer
        return answer

    async def run_each(
        self, calls: Sequence[Call], *, durable: bool = False, within_s: float | None = None
    ) -> list[Answer]:
        """Carries out scripts that may write: one round trip to every node that has a part of
        them, all at once. The keys of each are in one hash tag.

        Within `within_s` (the usual time of a call), of which a node has three quarters.
        """

        async def work(pool: Pool, part: Sequence[Call], within_s: float) -> list[Answer]:
            return await pool.run_each(part, durable=durable, within_s=within_s)

        keys = [call.keys[0] for call in calls]
        return await self._over_the_nodes(calls, keys, work, within_s)

    async def read(self, *commands: Command) -> list[Any]:
        """Carries out commands that only read, each by itself, on the node that has its key. One
        without a key goes to the node of the command after it.
        """
        keys = [str(each[1]) if len(each) > 1 else str(commands[1][1]) for each in commands]

        async def work(pool: Pool, part: Sequence[Command], within_s: float) -> list[Any]:
            return [
                pool.meaning_of(each) if isinstance(each, RedisError) else each
                for each in await pool.ask(*part, within_s=within_s)
            ]

        answers = await self._over_the_nodes(commands, keys, work)
        for each in answers:
            if isinstance(each, StoreError):
                raise each
        return answers

    async def connect(self, key: str) -> Connection:
        """A connection of its own to the node that has the key, which the caller gives to
        `discard`.
        """
        for _ in range(_ROUNDS):
            seen = self._refreshes
            host = self._table[slot_of(key)]
            try:
                if host is not None:
                    return await self._pools[host].connect()
            except StoreUnavailable as error:
                if isinstance(error, AccessDenied):
                    raise
            if not await self._refresh(seen, self._timeout_ms / 1_000 / _ROUNDS):
                break
        raise StoreUnavailable(f"{self.location}: no node that has {key!r} can be reached")

    async def discard(self, connection: Connection) -> None:
        """Closes a connection, whatever state it is in."""
        for pool in (*self._seeds.values(), *self._pools.values()):
            await pool.discard(connection)

    async def _over_the_nodes(
        self,
        items: Sequence[_T],
        keys: Sequence[str],
        work: Callable[..., Any],
        within_s: float | None = None,
    ) -> list[Any]:
        """What `work` answers for every item, carried out on the node of its key.

        What was surely not done, because the slot or the node is not there any more, is asked
        again where the table of slots says then.
        """
        now = asyncio.get_running_loop().time
        usual_s = self._timeout_ms / 1_000
        end = now() + min(usual_s, within_s or usual_s) * _PART_SHARE
        if self._is_old:  # a node did not answer, and that took all the time there was
            await self._refresh(self._refreshes, (end - now()) / 2)
        answers: list[Any] = [None] * len(items)
        places: Sequence[int] = range(len(items))
        for attempt in range(1, _ROUNDS + 1):
            seen = self._refreshes
            asked = self._by_node(places, keys)
            parts = [
                self._part(host, [items[p] for p in part], work, end - now())
                for host, part in asked.items()
            ]
            for part, said in zip(asked.values(), await asyncio.gather(*parts), strict=True):
                for place, answer in zip(part, said, strict=True):
                    answers[place] = answer
            self._is_old = any(isinstance(each, OutcomeUnknown) for each in answers)
            places = [p for p in places if _may_be_elsewhere(answers[p])]
            if not places or attempt == _ROUNDS:
                break
            if now() >= end:
                self._is_old = True
                break
            asked_of = {p: host for host, part in asked.items() for p in part}
            await self._refresh(seen, end - now())
            for place in places:
                self._believe(answers[place], keys[place])
            places = [p for p in places if self._table[slot_of(keys[p])] != asked_of[p]]
        return answers

    def _by_node(self, places: Iterable[int], keys: Sequence[str]) -> dict[Host | None, list[int]]:
        found: dict[Host | None, list[int]] = {}
        for place in places:
            found.setdefault(self._table[slot_of(keys[place])], []).append(place)
        return found

    async def _part(
        self, host: Host | None, items: Sequence[_T], work: Callable[..., Any], within_s: float
    ) -> list[Any]:
        if not self._open:
            return [StoreUnavailable(f"{self.location}: not open")] * len(items)
        pool = self._pools.get(host) if host else None
        if pool is None:
            return [StoreUnavailable(f"{self.location}: no node has the slot")] * len(items)
        if host in self._looks:  # others are not to wait for it each time
            away = StoreUnavailable(f"{pool.location}: did not answer in time, and has not since")
            return [away] * len(items)
        try:
            said: list[Any] = await work(pool, items, within_s)
        except StoreError as error:
            said = [error] * len(items)
        if pool.is_silent and host not in self._looks:
            look = self._looks[pool.host] = asyncio.create_task(self._look_at(pool))
            await asyncio.wait({look}, timeout=_LOOK_AGAIN_S)
        return said

    async def _look_at(self, pool: Pool) -> None:
        """Until the node answers again, refuses, or is none any more, nothing else is asked of it."""
        try:
            while pool.is_silent and self._pools.get(pool.host) is pool:
                with suppress(StoreError):
                    await pool.ask(["PING"], within_s=_LOOK_S)
                if pool.is_silent:
                    await asyncio.sleep(_LOOK_AGAIN_S)
        finally:
            self._looks.pop(pool.host, None)

    # The table of slots

    async def refresh(self) -> None:
        """Reads which node has which slots. Raises `StoreUnavailable`, and `StoreRefused` where
        the server is not a node of a cluster.
        """
        if not await self._refresh(self._refreshes, self._timeout_ms / 1_000, first=True):
            raise StoreUnavailable(f"{self.location}: no node of the cluster can be reached")

    async def _refresh(self, seen: int, within_s: float, *, first: bool = False) -> bool:
        """Reads it anew, unless another has done so since `seen`. Whether some node told it."""
        try:
            async with asyncio.timeout(within_s), self._refreshing:
                if self._refreshes != seen:
                    return True
                known = {**self._pools, **self._seeds}
                for pool in sorted(known.values(), key=lambda each: each.host in self._looks):
                    try:
                        (said,) = await pool.ask(
                            ["CLUSTER", "SLOTS"], within_s=within_s / (len(known) + 1)
                        )
                    except AccessDenied:
                        if first:
                            raise
                        continue
                    except StoreError:
                        continue
                    if isinstance(said, RedisError):
                        if first:
                            raise _no_slots(pool.location, said)
                        continue
                    if self._take_in(said, pool.host):
                        while self._gone:
                            await self._gone.pop().close()
                        return True
        except TimeoutError:
            pass
        return False

    def _take_in(self, said: Sequence[Any], asked: Host) -> bool:
        """Takes in the answer to CLUSTER SLOTS; whether it names any master."""
        table: list[Host | None] = [None] * _SLOTS
        hosts: dict[Host, None] = {}
        for first, last, master, *_ in said:
            name = (master[0] or b"").decode()
            host = (asked[0] if name in ("", "?") else name, int(master[1]))
            hosts[host] = None
            table[first : last + 1] = [host] * (last + 1 - first)
        if not hosts:
            return False
        for host in hosts:
            self._add(host)
        for host in [each for each in self._pools if each not in hosts]:
            # Another has its slots, and may lack what it had acknowledged last.
            self._losses += 1 + self._pools[host].losses
            self._gone.append(self._pools.pop(host))
        self._table = table
        self._refreshes += 1
        self._is_old = False
        return True

    def _add(self, host: Host) -> None:
        if host not in self._pools:
            self._pools[host] = self._pool_of(host)
            if self._open:
                self._pools[host].start()

    def _believe(self, answer: Any, key: str) -> None:
        """A node that says who has a slot knows better than the table that another node told."""
        cause = answer.__cause__
        if isinstance(cause, MovedError) and cause.host:
            host = (cause.host, cause.port)
            self._add(host)
            self._table[slot_of(key)] = host

    def key_on(self, host: Host, named: Callable[[int], str]) -> str | None:
        """The first of the names `named(0)`, `named(1)`, ... that this node has, if any."""
        slots = {slot for slot, owner in enumerate(self._table) if owner == host}
        if not slots:
            return None
        return next((name for n in range(_PROBES) if slot_of(name := named(n)) in slots), None)


Server = Pool | Cluster


def server_of(address: Address, op_timeout_ms: int) -> Server:
    """The server or the cluster at an address. Nothing is connected yet."""
    return (Cluster if address.cluster else Pool)(address, op_timeout_ms)


def slot_of(key: str) -> int:
    """The slot that a key is in, by its hash tag."""
    return key_slot(key.encode())


def _may_be_elsewhere(answer: Any) -> bool:
    """Whether it was surely not done, and may be done if another node is asked."""
    if not isinstance(answer, StoreUnavailable) or isinstance(answer, AccessDenied):
        return False
    return type(answer.__cause__) is not AskError  # of which MovedError is one to the driver


def _no_slots(location: str, said: RedisError) -> StoreError:
    if "cluster support disabled" in str(said):
        return StoreRefused(
            f"{location}: the server is not a node of a cluster: leave cluster=true out of the URL"
        )
    return StoreUnavailable(f"{location}: {said}")
