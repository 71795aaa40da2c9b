"""Connections: how calls are bounded, and what their failures mean (S11).

redis-py would repeat a command whose reply was lost, and take the answer to the second for that
to the first: here it may not, and nothing is sent on a connection that is not there. What a call
wrote may be waited for, until replicas or the disk have it (R3: visible is not durable), and the
server's identity is watched. Imports the errors, the standard library and redis-py.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from redis.asyncio.connection import Connection, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AskError,
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    ExecAbortError,
    MasterDownError,
    MaxConnectionsError,
    MovedError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError

from anarchon_backends.redis._address import Address
from anarchon_backends.redis._identity import Identity
from anarchon_backends.redis._script import Script
from anarchon_server.core.errors import OutcomeUnknown, StoreError, StoreUnavailable

Command = Sequence[str | bytes | int]

CONNECTIONS = 4  # claims, heartbeats, results and reading do not wait for each other
_CLOSE_S = 1.0
_LOOK_S = 10.0  # a connection looks so often whether its server is still the one it was
_KEPT_SHARE = 2 / 3  # of a call's time, what it may wait for replicas or the disk

# Answers which mean that nothing was done, also when a command inside of a script met them: they
# stop a script only before its first write.
_NOT_DONE = (
    AskError,
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    MaxConnectionsError,
    MovedError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    TryAgainError,
)
_NOT_DONE_CODES = frozenset(
    {
        "ANARCHONSCHEMA",
        "BUSY",
        "CLUSTERDOWN",
        "LOADING",
        "MASTERDOWN",
        "MISCONF",
        "NOAUTH",
        "NOREPLICAS",
        "OOM",
        "READONLY",
    }
)
_CODE = re.compile(r"^-?([A-Z]+) |: -([A-Z]+) ")  # the second as 6.2 says it of a script's command


class AccessDenied(StoreUnavailable):
    """The server did not let us in, or does not let us do it, or is not the one we trust."""


@dataclass(frozen=True, slots=True)
class Call:
    """A script to be carried out, with its keys and its batch."""

    script: Script
    keys: Sequence[str]
    batch: bytes


Answer = bytes | StoreError  # what a script said, or why there is no answer


class Pool:
    """A few connections to one server, opened when they are needed.

    One whose call was cancelled, timed out or broke off is thrown away: its answer may still come.
    `losses` counts how often the server may have lost what it had acknowledged. `is_silent`: it did
    not answer the last call in its time.
    """

    def __init__(self, address: Address, op_timeout_ms: int) -> None:
        self._address = address
        self._timeout_ms = op_timeout_ms
        self._idle: list[Connection] = []
        self._used: set[Connection] = set()
        self._room = asyncio.Semaphore(CONNECTIONS)
        self._sentinels = list(address.hosts)
        self._open = False
        self.is_silent = False
        self._identity = Identity()
        self._taught: set[str] = set()  # digests of scripts that the server has been sent
        self._looked_at: WeakKeyDictionary[Connection, float] = WeakKeyDictionary()

    @property
    def location(self) -> str:
        """Where the server is, as it may be shown."""
        return self._address.location

    @property
    def host(self) -> tuple[str, int]:
        """The first host of its address."""
        return self._address.hosts[0]

    def nodes(self) -> dict[tuple[str, int], Pool]:
        """The one server, as a cluster has several."""
        return {self.host: self}

    @property
    def losses(self) -> int:
        """How often the server may have lost acknowledged writes since it was first asked."""
        return self._identity.losses

    @property
    def watched(self) -> bool:
        """Whether the server lets its identity be seen (INFO); known after the first call."""
        return self._identity.visible

    def start(self) -> None:
        """From now on calls are served."""
        self._open = True

    async def close(self) -> None:
        """Closes every connection, also those in use."""
        self._open = False
        connections = [*self._idle, *self._used]
        self._idle.clear()
        for connection in connections:
            self._used.discard(connection)
            with suppress(RedisError, OSError, TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await connection.disconnect()

    async def run(self, script: Script, keys: Sequence[str], batch: bytes) -> bytes:
        """Carries out a script that may write."""
        (answer,) = await self.run_each([Call(script, keys, batch)])
        if isinstance(answer, StoreError):
            raise answer
        return answer

    async def run_each(
        self, calls: Sequence[Call], *, durable: bool = False, within_s: float | None = None
    ) -> list[Answer]:
        """Carries out scripts that may write, all in one round trip, each by itself.

        With `durable`, none counts as answered before what it wrote is as safe as the URL's
        `durability` says: until then its outcome is unknown.
        """
        answers: list[Any] = [None] * len(calls)
        safe = self._command_that_waits() if durable else None

        async def work(connection: Connection, sent: Callable[[], None]) -> bool:
            sent()
            kept = await self._exchange(connection, calls, answers, safe)
            if any(isinstance(each, ReadOnlyError | MasterDownError) for each in answers):
                await self._forsake(connection)  # another server is the master by now
            return kept

        try:
            kept = await self._call(work, within_s)
        except StoreError as error:
            return [error if safe else self._told(each, error) for each in answers]
        told = [self._told(each, None) for each in answers]
        if kept:
            return told
        doubt = OutcomeUnknown(self._not_kept())
        return [each if isinstance(each, StoreError) else doubt for each in told]

    async def _exchange(
        self,
        connection: Connection,
        calls: Sequence[Call],
        answers: list[Any],
        safe: Command | None,
    ) -> bool:
        """Sends the scripts and reads what they say. Whether what they wrote is safe."""
        kept = True
        places, known = list(range(len(calls))), True
        while places:
            commands: list[Command] = []
            # Where it waits there is no time to wait twice: a script is sent whole the first time.
            sure = known and not safe
            taught = set(self._taught) if safe and known else set()
            for call in (calls[place] for place in places):
                commands.append(_command_of(call, known=sure or call.script.sha in taught))
                taught.add(call.script.sha)
            await _send(connection, *commands, *([safe] if safe else []))
            for place in places:
                try:
                    answers[place] = await _answer(connection)
                except (BusyLoadingError, AuthenticationError) as error:
                    answers[place] = error  # and there is no connection any more, says the driver
            if safe:
                kept = self._is_kept(await _answer(connection))
            # After a restart, a fail-over, or SCRIPT FLUSH.
            places = [p for p in places if known and isinstance(answers[p], NoScriptError)]
            known = False
            self._taught = set() if places else self._taught | taught
        return kept

    def _told(self, said: Any, otherwise: StoreError | None) -> Answer:
        if said is None:
            assert otherwise is not None, "a call that did not fail has all its answers"
            return otherwise
        if isinstance(said, RedisError):
            return self.meaning_of(said)
        answer: bytes = said
        return answer

    async def read(self, *commands: Command) -> list[Any]:
        """Carries out commands that only read, as one step."""

        async def work(connection: Connection, _: Callable[[], None]) -> Any:
            await _send(connection, ["MULTI"], *commands, ["EXEC"])
            queued = [await _answer(connection) for _ in range(len(commands) + 1)]
            answers = await _answer(connection)
            inside = answers if isinstance(answers, list) else [answers]
            refused = [each for each in (*queued, *inside) if isinstance(each, RedisError)]
            if refused:
                raise refused[0]
            return answers

        answers: list[Any] = await self._call(work)
        return answers

    async def ask(self, *commands: Command, within_s: float | None = None) -> list[Any]:
        """Carries out commands that only read, each by itself. An answer may be a `RedisError`."""

        async def work(connection: Connection, _: Callable[[], None]) -> Any:
            await _send(connection, *commands)
            return [await _answer(connection) for _ in commands]

        answers: list[Any] = await self._call(work, within_s)
        return answers

    def meaning_of(self, said: RedisError) -> StoreError:
        """What an error that the server answered means for what was asked."""
        meaning = self._meaning(said, was_sent=True)
        meaning.__cause__ = said
        return meaning

    # Durability

    def _command_that_waits(self) -> Command | None:
        wait_ms = int(self._timeout_ms * _KEPT_SHARE)
        if self._address.fsync:
            return ["WAITAOF", 1, 0, wait_ms]
        if self._address.replicas:
            return ["WAIT", self._address.replicas, wait_ms]
        return None

    def _is_kept(self, said: Any) -> bool:
        """Whether the answer to WAIT or WAITAOF is what the URL asks for."""
        if isinstance(said, RedisError):
            return False
        return bool(said[0] >= 1 if self._address.fsync else said >= self._address.replicas)

    def _not_kept(self) -> str:
        where = "disk" if self._address.fsync else f"{self._address.replicas} replicas"
        wait_ms = int(self._timeout_ms * _KEPT_SHARE)
        return f"{self.location}: done, but not acknowledged by {where} within {wait_ms} ms"

    # Connections

    async def connect(self, _key: str = "") -> Connection:
        """A connection of its own, which the caller discards. Every key is on this server."""
        address = self._address
        where = await self._master() if address.sentinel else address.hosts[0]
        connection = self._make(where)
        self._used.add(connection)
        try:
            await connection.connect()  # type: ignore[no-untyped-call]
            if address.sentinel:
                await _check_master(connection)
        except (RedisError, OSError) as error:
            await self.discard(connection)
            known = isinstance(error, AuthenticationError | ResponseError)
            kind = AccessDenied if known or "CERTIFICATE" in str(error) else StoreUnavailable
            raise kind(f"{self._address.location}: {error}") from None
        except BaseException:
            await self.discard(connection)
            raise
        return connection

    async def _master(self) -> tuple[str, int]:
        """Where the Sentinels say that the master is. The one that answered is asked first."""
        name, said = self._address.sentinel, ["no Sentinel was asked"]
        for place, sentinel in enumerate(self._sentinels):
            connection = self._make(sentinel, of_sentinel=True)
            self._used.add(connection)
            try:
                async with asyncio.timeout(self._timeout_ms / 1_000 / (len(self._sentinels) + 1)):
                    await connection.connect()  # type: ignore[no-untyped-call]
                    await _send(connection, ["SENTINEL", "get-master-addr-by-name", name])
                    found = await connection.read_response()
            except (RedisError, OSError) as error:  # a TimeoutError is one
                said[0] = f"{sentinel[0]}:{sentinel[1]}: {str(error) or 'no answer in time'}"
                continue
            finally:
                await self.discard(connection)
            if found:
                self._sentinels.insert(0, self._sentinels.pop(place))
                return str(found[0].decode()), int(found[1])
            said[0] = f"{sentinel[0]}:{sentinel[1]} knows no such master"
        raise StoreUnavailable(f"{self._address.location}: {said[0]}")

    async def discard(self, connection: Connection) -> None:
        """Closes a connection, whatever state it is in."""
        self._used.discard(connection)
        with suppress(RedisError, OSError, TimeoutError):
            await connection.disconnect(nowait=True)

    async def _call(self, work: Callable[..., Any], within_s: float | None = None) -> Any:
        """Carries out one call within its time. `work` says when something that writes goes out."""
        within_s = self._timeout_ms / 1_000 if within_s is None else within_s
        if not self._open:
            raise StoreUnavailable(f"{self._address.location}: not open")
        was_sent = False

        def sent() -> None:
            nonlocal was_sent
            was_sent = True

        try:
            async with asyncio.timeout(within_s), self._room:
                connection = await self._take()
                try:
                    await self._look(connection)
                    answer = await work(connection, sent)
                except (ReadOnlyError, MasterDownError):
                    await self._forsake(connection)  # another server is the master by now
                    raise
                except ResponseError:
                    await self._give_back(connection)
                    raise
                except BaseException:
                    await self._forsake(connection)  # most likely the idle ones are no better
                    raise
                await self._give_back(connection)
                self.is_silent = False
                return answer
        except TimeoutError:
            self.is_silent = True
            text = f"{self._address.location}: no answer within {within_s * 1_000:.0f} ms"
            raise (OutcomeUnknown if was_sent else StoreUnavailable)(text) from None
        except (RedisError, OSError) as error:
            self.is_silent = False
            raise self._meaning(error, was_sent=was_sent) from error

    async def _look(self, connection: Connection) -> None:
        """Sees now and then whether the server is still the one it was (S27a)."""
        now = asyncio.get_running_loop().time()
        if not self._identity.visible or now - self._looked_at.get(connection, -_LOOK_S) < _LOOK_S:
            return
        await _send(connection, *self._identity.QUESTIONS)
        self._identity.learn([await _answer(connection) for _ in self._identity.QUESTIONS])
        self._looked_at[connection] = now

    def _meaning(self, error: Exception, *, was_sent: bool) -> StoreError:
        text = f"{self._address.location}: {error}"
        if isinstance(error, AuthenticationError):
            return AccessDenied(text)
        aborted = isinstance(error, ExecAbortError) and "NOPERM" in text
        if (isinstance(error, NoPermissionError) or aborted) and " script: " not in text:
            return AccessDenied(text)
        if not was_sent or isinstance(error, _NOT_DONE):
            return StoreUnavailable(text)
        found = _CODE.search(str(error)) if isinstance(error, ResponseError) else None
        if found and (found[1] or found[2]) in _NOT_DONE_CODES:
            return StoreUnavailable(text)
        return OutcomeUnknown(text)

    async def _take(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            self._used.add(connection)
            if connection.is_connected and not await _has_news(connection):
                return connection
            await self.discard(connection)
        return await self.connect()

    async def _forsake(self, connection: Connection) -> None:
        """Discards it, and the idle ones with it."""
        await self.discard(connection)
        while self._idle:
            await self.discard(self._idle.pop())

    async def _give_back(self, connection: Connection) -> None:
        if not self._open:
            await self.discard(connection)
        elif connection in self._used:  # and not discarded meanwhile
            self._used.discard(connection)
            self._idle.append(connection)

    def _make(self, where: tuple[str, int], *, of_sentinel: bool = False) -> Connection:
        address = self._address
        username = address.sentinel_username if of_sentinel else address.username
        password = address.sentinel_password if of_sentinel else address.password
        settings: dict[str, Any] = {
            "host": where[0],
            "port": where[1],
            "db": 0 if of_sentinel else address.database,
            "username": username or None,
            "password": password or None,
            "socket_timeout": None,
            "socket_connect_timeout": self._timeout_ms / 1_000,
            "retry": Retry(NoBackoff(), 0),
            "health_check_interval": 0,
            "protocol": 2,
        }
        if not address.tls:
            return Connection(**settings)
        settings |= {
            "ssl_ca_certs": address.tls_ca or None,
            "ssl_certfile": address.tls_cert or None,
            "ssl_keyfile": address.tls_key or None,
            "ssl_cert_reqs": "required" if address.tls_verify else "none",
            "ssl_check_hostname": address.tls_verify,
        }
        return SSLConnection(**settings)


def _command_of(call: Call, *, known: bool) -> Command:
    """A script is sent whole where the server does not know it."""
    form = ("EVALSHA", call.script.sha) if known else ("EVAL", call.script.source)
    return [*form, len(call.keys), *call.keys, call.batch]


async def _send(connection: Connection, *commands: Command) -> None:
    packed: list[bytes] = []
    for command in commands:
        packed += connection.pack_command(*command)
    await connection.send_packed_command(packed, check_health=False)


async def _check_master(connection: Connection) -> None:
    """A Sentinel may not know yet that what it calls the master has become a replica."""
    await _send(connection, ["ROLE"])
    role = await connection.read_response()
    if role[0] != b"master":
        raise RedisConnectionError(f"a Sentinel calls it the master, but it is a {role[0]!r}")


async def _answer(connection: Connection) -> Any:
    """The next answer; an error that the server answered is an answer."""
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error


async def _has_news(connection: Connection) -> bool:
    """Whether there is something to read though nothing was asked: most likely its end."""
    writer = connection._writer
    if writer is None or writer.is_closing():  # reset: the driver does not see that by itself
        return True
    look = getattr(connection, "can_read", None) or connection.can_read_destructive
    try:
        return bool(await look())
    except (RedisError, OSError):
        return True
