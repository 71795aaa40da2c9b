"""Connections: how the URL is read, how calls are bounded, and what their failures mean (S11).

asyncpg neither repeats nor buffers anything by itself, so what a failed call did is known: an
error that the server answered means that it was rolled back; no answer after sending means that
it may have been done. Imports the errors, the standard library and asyncpg.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit
from weakref import WeakKeyDictionary

import asyncpg

from anarchon_server.core.errors import OutcomeUnknown, StoreRefused, StoreUnavailable

_T = TypeVar("_T")

CONNECTIONS = 3  # claims, heartbeats and results do not wait for each other
_REPEATS = 5  # of a call that the server rolled back because of others
_CLOSE_S = 1.0
_CONNECT_S = 10.0  # at most; a call's own time bounds it too

# What the URL may say besides where the server is, in the words of libpq.
_LIBPQ = frozenset(
    (
        *("host", "port", "user", "password", "passfile", "dbname", "service", "servicefile"),
        *("sslmode", "sslrootcert", "sslcert", "sslkey", "sslcrl", "sslnegotiation"),
        *("ssl_min_protocol_version", "ssl_max_protocol_version", "krbsrvname"),
        "target_session_attrs",
    )
)
_OURS = frozenset({"schema", "pooler"})
_NAME_MAX = 63  # of PostgreSQL: longer names are cut without an error

_SESSION = {
    "application_name": "anarchon",
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
    "synchronous_commit": "on",
    "lock_timeout": "1s",
    "search_path": "pg_catalog",
    "jit": "off",
}


class _DoubtedError(Exception):
    """The server did what it was asked, and warned of it."""


# Errors that the server did not send, though asyncpg words some as if it had.
_CONNECTION_ERRORS = (
    OSError,
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    _DoubtedError,
)


@dataclass(frozen=True, slots=True)
class Address:
    """Where the store is: `dsn` for the driver, and a `location` that may be shown."""

    dsn: str
    location: str
    schema: str
    pooled: bool


def address_of(url: str) -> Address:
    """Reads the URL. What is wrong with it is said without showing it (it holds a password)."""
    try:
        parts = urlsplit(url)
        _ = parts.port if "," not in parts.netloc else 0  # read, to see whether it is a number
        options = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError as error:
        raise StoreRefused(
            "the PostgreSQL URL cannot be read; it is postgresql://user:password@host:port/database"
            "?option=value, with every special character of a part as %XX"
        ) from error
    if parts.scheme not in ("postgres", "postgresql") or not url.startswith(f"{parts.scheme}://"):
        raise StoreRefused("a PostgreSQL store is postgresql://user:password@host:port/database")
    if parts.fragment:
        raise StoreRefused("the PostgreSQL URL has a '#': write it as %23 where it belongs")
    names = [name for name, _ in options]
    for name in names:
        if name not in _LIBPQ | _OURS or names.count(name) > 1:
            wrong = "stands twice" if name in _LIBPQ | _OURS else "is not known"
            raise StoreRefused(
                f"the PostgreSQL URL's option {name[:40]!r} {wrong}; there are "
                f"{', '.join(sorted(_OURS))} and libpq's {', '.join(sorted(_LIBPQ))}"
            )
    given = dict(options)
    schema, pooler = given.get("schema", "anarchon"), given.get("pooler", "none")
    if not schema or len(schema.encode()) > _NAME_MAX or "\0" in schema or schema[:3] == "pg_":
        raise StoreRefused(
            f"the PostgreSQL URL's option schema is {schema[:80]!r}: it is a schema's name of 1 to "
            f"{_NAME_MAX} bytes that does not begin with pg_"
        )
    if pooler not in ("none", "transaction"):
        raise StoreRefused(
            f"the PostgreSQL URL's option pooler is {pooler[:40]!r}: it is 'transaction' behind a "
            "pooler in transaction mode, or 'none' (also behind one in session mode)"
        )
    rest = [(name, value) for name, value in options if name not in _OURS]
    dsn = urlunsplit(parts._replace(scheme="postgresql", query=urlencode(rest)))
    hosts = parts.netloc.rpartition("@")[2] or given.get("host", "") or "the default host"
    database = parts.path.lstrip("/") or given.get("dbname", "") or "the default database"
    return Address(dsn, f"{hosts}/{database}, schema {schema}", schema, pooler == "transaction")


class Pool:
    """A few connections, opened when they are needed, each checked by `verify` when it is new.

    A connection whose call failed other than by an answer is thrown away, as an answer to it may
    still come.
    """

    def __init__(
        self,
        address: Address,
        op_timeout_ms: int,
        verify: Callable[[asyncpg.Connection], Awaitable[None]],
    ) -> None:
        self._address = address
        self._timeout_ms = op_timeout_ms
        self._verify = verify
        self._idle: list[asyncpg.Connection] = []
        self._all: set[asyncpg.Connection] = set()
        self._doubted: WeakKeyDictionary[asyncpg.Connection, str] = WeakKeyDictionary()
        self._room = asyncio.Semaphore(CONNECTIONS)
        self._open = False

    def start(self) -> None:
        """From now on calls are served."""
        self._open = True

    async def connect(self) -> asyncpg.Connection:
        """A connection of its own, which the caller closes. Errors are those of asyncpg."""
        pooled = self._address.pooled
        session = _SESSION | {
            "statement_timeout": str(self._timeout_ms * 3 // 4),  # so that its word still comes
            "idle_in_transaction_session_timeout": str(self._timeout_ms),
        }
        connection = await asyncpg.connect(
            self._address.dsn,
            timeout=_CONNECT_S,
            statement_cache_size=0 if pooled else 200,
            max_cached_statement_lifetime=0,
            server_settings={"application_name": "anarchon"} if pooled else session,
        )
        self._all.add(connection)
        connection.add_termination_listener(self._all.discard)
        connection.add_log_listener(self._warned)
        return connection

    def _warned(self, connection: asyncpg.Connection, message: Any) -> None:
        """Notes a warning: a commit that no standby confirmed is answered like any other."""
        if isinstance(message, asyncpg.PostgresWarning):
            self._doubted[connection] = _said(message)

    async def close(self) -> None:
        """Closes every connection; one that does not go by itself is cut."""
        self._open = False
        self._idle.clear()
        for connection in list(self._all):
            await end(connection)

    async def call(self, work: Callable[[Session], Awaitable[_T]]) -> _T:
        """Carries out one call within its time; repeats it where others made it fail."""
        session = Session()
        try:
            async with asyncio.timeout(self._timeout_ms / 1_000):
                for repeats_left in reversed(range(_REPEATS)):
                    try:
                        async with self._connected(session):
                            return await work(session)
                    except (
                        asyncpg.SerializationError,
                        asyncpg.DeadlockDetectedError,
                        asyncpg.InvalidCachedStatementError,
                    ):
                        if not repeats_left:
                            raise
        except TimeoutError:
            raise self._failure(session, f"no answer within {self._timeout_ms} ms") from None
        except _CONNECTION_ERRORS as error:
            raise self._failure(session, _said(error)) from error
        except asyncpg.PostgresError as error:
            if getattr(error, "severity_en", "") in ("FATAL", "PANIC"):
                raise self._failure(session, _said(error)) from error
            raise self._failure(session, _said(error), answered=True) from error
        raise AssertionError("the last repeat raises")

    def _failure(
        self, session: Session, what: str, *, answered: bool = False
    ) -> OutcomeUnknown | StoreUnavailable:
        """Whether something may have been done: by a write that was sent and not answered."""
        unknown = session.done or (session.writing and not answered)
        failure = OutcomeUnknown if unknown else StoreUnavailable
        return failure(f"PostgreSQL at {self._address.location}: {what}")

    @asynccontextmanager
    async def _connected(self, session: Session) -> AsyncIterator[None]:
        if not self._open:
            raise StoreUnavailable(f"PostgreSQL at {self._address.location}: not open")
        async with self._room:
            connection = await self._take()
            session.use(connection)
            self._doubted.pop(connection, None)
            try:
                yield
                if session.done and connection in self._doubted:
                    raise _DoubtedError(self._doubted[connection])
            except asyncpg.PostgresError as error:
                if _is_over(error, connection):
                    connection.terminate()
                raise
            except BaseException:
                connection.terminate()
                raise
            finally:
                if not connection.is_closed() and self._open:
                    self._idle.append(connection)

    async def _take(self) -> asyncpg.Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed():
                return connection
        connection = await self.connect()
        try:
            await self._verify(connection)
        except BaseException:
            connection.terminate()
            raise
        return connection


class Session:
    """One call's use of a connection. It knows what was sent that may have changed something."""

    def __init__(self) -> None:
        self._connection: asyncpg.Connection = None
        self.writing = False
        self.done = False

    def use(self, connection: asyncpg.Connection) -> None:
        """The connection of this turn, on which nothing has been sent yet."""
        self._connection = connection
        self.writing = False

    async def read(self, sql: str, *values: object) -> Any:
        """The only value that a query gives, which changes nothing."""
        return await self._connection.fetchval(sql, *values)

    async def write(self, sql: str, *values: object) -> Any:
        """The same of one that may change something, and is a transaction of its own."""
        self.writing = True
        value = await self._connection.fetchval(sql, *values)
        self.writing, self.done = False, True
        return value

    @asynccontextmanager
    async def transaction(self, within_ms: int | None = None) -> AsyncIterator[None]:
        """What is read inside is one transaction, which changes something when it ends.

        The server gives each statement, and each pause between two, `within_ms`; None: as usual.
        """
        await self._connection.execute("BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE")
        try:
            if within_ms is not None:
                for limit in ("statement_timeout", "idle_in_transaction_session_timeout"):
                    await self._connection.execute(f"SET LOCAL {limit} = {within_ms:d}")
            yield
        except asyncpg.PostgresError:
            await self._connection.execute("ROLLBACK")
            raise
        self.writing = True
        await self._connection.execute("COMMIT")
        self.writing, self.done = False, True


async def end(connection: asyncpg.Connection) -> None:
    """Closes the connection politely for a second, and then cuts it."""
    try:
        await connection.close(timeout=_CLOSE_S)
    except (TimeoutError, OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
        connection.terminate()


def _is_over(error: asyncpg.PostgresError, connection: asyncpg.Connection) -> bool:
    """Whether the connection is of no use after the error: it ends, or leads to a standby."""
    ends = getattr(error, "severity_en", "") in ("FATAL", "PANIC")
    return ends or isinstance(error, asyncpg.ReadOnlySQLTransactionError) or connection.is_closed()


def _said(error: BaseException) -> str:
    """What an error says, in one line."""
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or error}"
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


async def answer_of(work: Awaitable[Any], location: str, remedy: Sequence[tuple[str, str]]) -> Any:
    """What opening gives; every failure of it as `StoreRefused` or `StoreUnavailable`."""
    try:
        return await work
    except TimeoutError:
        raise StoreUnavailable(f"PostgreSQL at {location}: no answer in time") from None
    except (asyncpg.PostgresError, OSError, asyncpg.InterfaceError, ValueError) as error:
        said = _said(error)
        for sign, what in remedy:
            if sign in said:
                raise StoreRefused(f"PostgreSQL at {location}: {said}: {what}") from error
        temporary = isinstance(
            error,
            OSError
            | asyncpg.CannotConnectNowError
            | asyncpg.QueryCanceledError
            | asyncpg.LockNotAvailableError
            | asyncpg.TooManyConnectionsError
            | asyncpg.AdminShutdownError
            | asyncpg.CrashShutdownError
            | asyncpg.ConnectionDoesNotExistError,
        )
        failure = StoreUnavailable if temporary else StoreRefused
        raise failure(f"PostgreSQL at {location}: {said}") from error
