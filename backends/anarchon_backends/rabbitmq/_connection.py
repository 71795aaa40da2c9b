"""A connection to the broker: how calls are bounded, and what their failures mean (S11).

Of the driver, aiormq, only the plain connection is used: it never reconnects by itself and keeps
nothing to be sent later. Imports the errors, the standard library and aiormq.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from itertools import cycle
from typing import Any, Protocol, SupportsIndex, TypeVar

from aiormq import Connection
from aiormq.abc import AbstractChannel
from aiormq.connection import TransportFactory
from aiormq.exceptions import (
    AMQPChannelError,
    AMQPError,
    AuthenticationError,
    ConnectionClosed,
    ConnectionNotAllowed,
    InvalidFrameError,
    ProbableAuthenticationError,
)
from yarl import URL

from anarchon_backends.rabbitmq._address import Address
from anarchon_server.core.errors import OutcomeUnknown, StoreUnavailable

_T = TypeVar("_T")

HEARTBEAT_S = 10
CHANNELS = 16  # on which one question each may be in flight
_CHANNEL_MAX = 2_047
_CLOSE_S = 1.0
_LAST_WORDS = re.compile(rb"(?:NOT_ALLOWED|ACCESS_REFUSED) - [ -~]*")

# The driver shouts at whatever we do on purpose, and what goes wrong is in the errors raised.
logging.getLogger("aiormq").setLevel(logging.CRITICAL)


class AccessDenied(StoreUnavailable):
    """The broker did not let us in, or does not let us do it, or is not the one we trust."""


class Refused(Exception):  # noqa: N818 - an answer, which says no
    """The broker closed the channel instead of doing what was asked: `code` and `text` say why.

    It has done nothing.
    """

    def __init__(self, code: int, text: str) -> None:
        self.code = code
        self.text = text
        super().__init__(text)


class _Wire(Connection):
    """aiormq's connection, with room for every answer to the broker.

    By default ten frames may wait to be written, and a `Channel.CloseOk` for which there is no room
    is dropped: the broker would ignore the channel's number from then on.
    """

    FRAME_BUFFER_SIZE = 0


class _Reader(asyncio.StreamReader):
    """Remembers what came last: the driver does not say why a virtual host was not opened."""

    last = b""

    def feed_data(self, data: Iterable[SupportsIndex]) -> None:
        self.last = bytes(data)
        super().feed_data(data)


class _Transport(TransportFactory):
    """Connects, and remembers what it connected so that it can be cut off at once."""

    def __init__(self, tls: ssl.SSLContext | None) -> None:
        self._tls = tls
        self._transport: asyncio.Transport | None = None
        self._reader = _Reader()

    async def create(self, url: URL, **_: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        loop, reader = asyncio.get_running_loop(), self._reader
        protocol = asyncio.StreamReaderProtocol(reader)
        self._transport, _protocol = await loop.create_connection(
            lambda: protocol, url.host or "", url.port or 0, ssl=self._tls
        )
        return reader, asyncio.StreamWriter(self._transport, protocol, reader, loop)

    def last_words(self) -> str:
        """Why the broker closed the connection, if it said so."""
        found = _LAST_WORDS.search(self._reader.last)
        return found[0].decode() if found else ""

    def cut(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class Greet(Protocol):
    """What is asked on a new connection first: of what the broker says of itself, and on channels
    that the second opens. Where it fails the connection does.
    """

    def __call__(
        self,
        properties: Mapping[str, Any],
        channel: Callable[[], Awaitable[AbstractChannel]],
        /,
    ) -> Awaitable[None]: ...


class Link:
    """One connection at a time, opened when it is needed, and channels on it.

    One whose call was cancelled, timed out or broke off is thrown away: its answer may still come.
    """

    def __init__(self, address: Address, name: str, timeout_ms: int) -> None:
        self._address = address
        self._name = name
        self._timeout_s = timeout_ms / 1_000
        self._tls = address.tls_context() if address.tls else None
        self._hosts = list(address.hosts)
        self._room = asyncio.Semaphore(CHANNELS)
        self._transports: dict[Connection, _Transport] = {}
        self._connection: Connection | None = None
        self._connecting: asyncio.Task[Connection] | None = None
        self._idle: list[AbstractChannel] = []
        self._numbers = iter(cycle(range(1, _CHANNEL_MAX + 1)))
        self._closing: set[asyncio.Task[None]] = set()
        self._open = False
        self.greet: Greet | None = None  # called on each new connection before it is used
        self.cluster_name = ""  # of the broker that was connected to last

    def start(self) -> None:
        """From now on calls are served."""
        self._open = True

    async def close(self) -> None:
        """Closes the connection, also where a call is using it."""
        self._open = False
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait([self._connecting])
        if self._connection is not None:
            self._discard(self._connection, politely=True)
        while self._closing:
            await asyncio.wait(self._closing)

    def deadline(self) -> float:
        """Until when, by the loop's clock, a call that begins now may last."""
        return asyncio.get_running_loop().time() + self._timeout_s

    async def server(self, deadline: float) -> dict[str, Any]:
        """What the broker says of itself when it is connected to."""
        connection = await self._by(deadline, self._connected())
        return dict(connection.server_properties)

    async def ask(
        self, question: Callable[[AbstractChannel], Awaitable[_T]], deadline: float
    ) -> _T:
        """Asks one question on a channel that nobody else is using.

        Raises `Refused` where the broker answers no, `StoreUnavailable` where the question surely
        was not sent, and `OutcomeUnknown` where there was no answer.
        """
        sent = False

        async def asked() -> _T:
            nonlocal sent
            async with self._room:
                connection = await self._connected()
                try:
                    channel = await self._channel(connection)
                    sent = True
                    answer = await question(channel)
                except AMQPChannelError:
                    raise
                except BaseException:
                    self._discard(connection)
                    raise
                self._give_back(channel)
                return answer

        try:
            return await self._by(deadline, asked())
        except StoreUnavailable as error:
            if sent:
                raise OutcomeUnknown(str(error)) from error.__cause__
            raise

    async def hold(
        self, prepare: Callable[[AbstractChannel], Awaitable[None]], deadline: float
    ) -> AbstractChannel:
        """A channel of the caller's own, prepared, for what comes unasked. Raises as `ask` does."""

        async def opened() -> AbstractChannel:
            connection = await self._connected()
            try:
                channel = await self._channel(connection, fresh=True)
                await prepare(channel)
            except BaseException:
                self._discard(connection)
                raise
            return channel

        return await self._by(deadline, opened())

    async def _by(self, deadline: float, work: Awaitable[_T]) -> _T:
        """Waits for it until then. Whatever else than a refusal goes wrong is `StoreUnavailable`."""
        try:
            async with asyncio.timeout_at(deadline):
                return await work
        except AMQPChannelError as error:
            raise refusal_of(error) from None
        except StoreUnavailable:
            raise
        except TimeoutError:
            text = f"{self._address.location}: no answer within {self._timeout_s * 1_000:g} ms"
            raise StoreUnavailable(text) from None
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise self._unavailable(error) from error  # the driver says so to all who wait for it
        except Exception as error:
            raise self._unavailable(error) from error

    def _unavailable(self, error: BaseException) -> StoreUnavailable:
        text = f"{error}" or "the connection was lost"
        return StoreUnavailable(f"{self._address.location}: {text}")

    # Connecting

    async def _connected(self) -> Connection:
        if not self._open:
            raise StoreUnavailable(f"{self._address.location}: not open")
        if self._connection is not None:
            if self._connection.is_opened:
                return self._connection
            self._discard(self._connection)
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect())
            self._connecting.add_done_callback(self._has_connected)
        return await asyncio.shield(self._connecting)

    def _has_connected(self, task: asyncio.Task[Connection]) -> None:
        self._connecting = None
        if not task.cancelled() and task.exception() is None:
            self._connection = task.result()
            name = self._connection.server_properties.get("cluster_name", "")
            self.cluster_name = str(name)

    async def _connect(self) -> Connection:
        """Tries one node after the other; the one that let us in is tried first from then on."""
        errors: list[Exception] = []
        for place, (host, port) in enumerate(self._hosts):
            try:
                connection = await self._connect_to(host, port)
            except (AMQPError, OSError) as error:  # a TimeoutError is one
                errors.append(error)
                continue
            self._hosts.insert(0, self._hosts.pop(place))
            return connection
        raise _why_not(errors[-1], self._address.location) from errors[-1]

    async def _connect_to(self, host: str, port: int) -> Connection:
        address = self._address
        url = URL.build(
            scheme="amqp",
            user=address.username,
            password=address.password,
            host=host,
            port=port,
            query={"heartbeat": str(HEARTBEAT_S), "name": self._name},
        )
        transport = _Transport(self._tls)
        connection = _Wire(url, transport_factory=transport)
        connection.vhost = address.virtual_host
        try:
            async with asyncio.timeout(self._timeout_s / len(self._hosts)):
                await connection.connect()
        except InvalidFrameError as error:
            transport.cut()
            if said := transport.last_words():
                raise ConnectionNotAllowed(said) from error
            raise
        except BaseException:
            transport.cut()
            raise
        self._transports[connection] = transport
        await self._greeted(connection)
        return connection

    async def _greeted(self, connection: Connection) -> None:
        if self.greet is None:
            return
        properties = connection.server_properties
        try:
            async with asyncio.timeout(self._timeout_s):
                await self.greet(properties, lambda: self._channel(connection, fresh=True))
        except BaseException:
            self._discard(connection)
            raise

    # Channels

    async def _channel(self, connection: Connection, *, fresh: bool = False) -> AbstractChannel:
        """An open channel. One that was used is as good as a new one."""
        while self._idle and not fresh:
            channel = self._idle.pop()
            if channel.connection is connection and not channel.is_closed:
                return channel
        # Not the driver's choice: it takes the number of a channel that the broker has just closed
        # before it has said so to the broker, which ignores what comes on that number until then.
        number = next(each for each in self._numbers if each not in connection.channels)
        return await connection.channel(number, publisher_confirms=False)

    def _give_back(self, channel: AbstractChannel) -> None:
        if channel.connection is self._connection:
            self._idle.append(channel)

    # Closing

    def _discard(self, connection: Connection, *, politely: bool = False) -> None:
        if connection is self._connection:
            self._connection = None
            self._idle.clear()
        transport = self._transports.pop(connection, None)
        if transport is None:  # somebody else has
            return
        if not politely:
            transport.cut()
        task = asyncio.create_task(_closed(connection, transport))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


async def _closed(connection: Connection, transport: _Transport) -> None:
    """Ends the connection's tasks. Not even that may last: it says farewell, and waits for one."""
    with suppress(Exception):
        async with asyncio.timeout(_CLOSE_S):
            await connection.close(ConnectionClosed(0, "the connection was closed"))
    transport.cut()


def refusal_of(error: AMQPChannelError) -> Refused:
    """What the broker said when it closed a channel."""
    text = str(error.args[-1] if error.args else error)
    code = _CODES.get(text.partition(" ")[0], 0)
    return Refused(code, text)


_CODES = {
    "ACCESS_REFUSED": 403,
    "NOT_FOUND": 404,
    "RESOURCE_LOCKED": 405,
    "PRECONDITION_FAILED": 406,
}


def _why_not(error: Exception, location: str) -> StoreUnavailable:
    denied = isinstance(
        error,
        AuthenticationError
        | ConnectionNotAllowed
        | ProbableAuthenticationError
        | ssl.SSLCertVerificationError,
    )
    if isinstance(error, TimeoutError):
        text = "no connection in time"
    elif isinstance(error, ConnectionClosed):
        text = str(error.args[-1])
    else:
        text = str(error) or type(error).__name__
    return (AccessDenied if denied else StoreUnavailable)(f"{location}: {text}")
