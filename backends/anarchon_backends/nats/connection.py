"""Requests to the servers, each with one answer and an end, on a connection that is made anew.

Imports the address, the errors, the standard library and nats-py. Of the driver only the wire is
used: it keeps nothing to be sent later (a publish that its caller saw time out would land after the
reconnect) and never reconnects. A connection that ended, or on which a request had no answer in
time, gets no further request; the next one makes another.
"""

from __future__ import annotations

import asyncio
import random
import re
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import count
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import (
    AuthorizationError,
    ConnectionClosedError,
    Error,
    MaxPayloadError,
    NoServersError,
    OutboundBufferLimitError,
)

from anarchon_backends.nats.address import Address
from anarchon_server.core.errors import OutcomeUnknown, StoreRefused, StoreUnavailable

Listener = Callable[[bytes], None]

_NOBODY = "503"
_PING_S = 10
_CLOSE_S = 1.0
_CONNECT_SHARE = 0.8  # of a call's time: whoever waits for a connection learns why there is none
_FORBIDDEN = re.compile(
    r'permissions violation for (publish|subscription) to "([^"]*)"', re.IGNORECASE
)
_AUTHORIZATION = re.compile(
    r"authori[sz]ation|authentication|certificate|permission", re.IGNORECASE
)


class AccessDenied(StoreUnavailable):
    """The server does not let us in, or does not let us do it: surely not done."""


class NobodyThereError(StoreUnavailable):
    """Nobody serves the subject: no such stream, or a stream without a leader. Surely not done."""


class _Wire(Client):
    """The driver's client, which sends no credentials in the clear where TLS is asked for."""

    def __init__(self, *, tls: bool, ended: Callable[[str], None]) -> None:
        super().__init__()
        self._tls_is_due = tls
        self._tell_end = ended

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        if self._tls_is_due and initial_connection and not self.options["tls_handshake_first"]:
            if not (info.get("tls_required") or info.get("tls_available")):
                raise Error("the server has no TLS, and the URL asks for it (tls:)")
            info["tls_required"] = True
        await super()._process_info(info, initial_connection)

    async def _process_op_err(self, e: Exception) -> None:
        self._tell_end(str(e) or type(e).__name__)
        await super()._process_op_err(e)


class _Link:
    """One TCP connection, and the requests that wait for their answers on it."""

    def __init__(self, address: Address, host: tuple[str, int]) -> None:
        self.host = host
        self.wire = _Wire(tls=address.tls, ended=self.end)
        self.waiting: dict[int, tuple[str, asyncio.Future[Msg]]] = {}
        self.inbox = ""
        self.ended = ""  # why, when it has
        self.said = ""  # the server's last error
        self.denied: AccessDenied | None = None  # where no answer can reach us
        self._numbers = count(1)

    @property
    def usable(self) -> bool:
        return not self.ended and self.wire.is_connected

    def end(self, reason: str) -> None:
        """It has ended: nobody waits any longer."""
        self.ended = self.ended or reason
        self._fail(_Ended(reason), lambda _: True)

    async def on_error(self, error: Exception) -> None:
        self.said = str(error) or type(error).__name__
        forbidden = _FORBIDDEN.search(self.said)
        if forbidden is None:
            return
        # The driver shows the server's words in small letters.
        denied = AccessDenied(self.said.removeprefix("nats: "))
        if forbidden[1] == "subscription":
            if self.inbox and forbidden[2].startswith(self.inbox.lower()):
                self.denied = denied
                self._fail(denied, lambda _: True)
            return
        self._fail(denied, lambda subject: subject.lower() == forbidden[2])

    def _fail(self, error: Exception, concerns: Callable[[str], bool]) -> None:
        for subject, answer in self.waiting.values():
            if concerns(subject) and not answer.done():
                answer.set_exception(error)

    async def on_end(self) -> None:
        self.end(self.said or "the connection was closed")

    async def on_answer(self, message: Msg) -> None:
        number = int(message.subject.rpartition(".")[2])
        _, answer = self.waiting.get(number, ("", None))
        if answer is not None and not answer.done():
            answer.set_result(message)

    def expect(self, subject: str) -> tuple[int, asyncio.Future[Msg]]:
        number = next(self._numbers)
        answer: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        self.waiting[number] = subject, answer
        return number, answer

    async def close(self) -> None:
        """Closes it, whatever state it is in; what was not sent yet is not sent any more."""
        self.end("closed")
        self.wire._pending.clear()
        self.wire._pending_data_size = 0
        writer = getattr(self.wire._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()
        with suppress(Error, OSError, TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await self.wire.close()


class _Ended(Exception):  # noqa: N818 - a fact about the connection
    """The connection ended before the answer came."""


class Connection:
    """What both backends ask the servers through. Safe for many requests at once.

    `generation` grows with each connection that was made: what was learnt of the node at its other
    end, such as its time, is worth nothing on another.
    """

    def __init__(self, address: Address, timeout_ms: int) -> None:
        self._address = address
        self._timeout_s = timeout_ms / 1_000
        self._open = False
        self._link: _Link | None = None  # that requests go out on
        self._links: set[_Link] = set()  # that one, and those on which answers are still awaited
        self._connecting: asyncio.Task[_Link] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._listeners: list[tuple[str, Listener]] = []
        self._hosts = list(address.hosts)
        random.shuffle(self._hosts)
        self.generation = 0

    @property
    def location(self) -> str:
        """Where it leads to, for people."""
        return self._address.location

    def until(self, times: float = 1) -> float:
        """The moment at which a call that begins now gives up: `times` the usual time from now."""
        return asyncio.get_running_loop().time() + self._timeout_s * times

    async def open(self) -> Mapping[str, Any]:
        """Connects, and returns what the server says of itself (its INFO)."""
        self._open = True
        return (await self._ready(self.until())).wire._server_info

    async def close(self) -> None:
        """Closes everything. Safe to call twice."""
        self._open = False
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait((self._connecting,))
        for link in list(self._links):
            self._drop(link)
        while self._closing:
            await asyncio.gather(*self._closing)

    async def listen(self, subject: str, listener: Listener, until: float) -> None:
        """Calls `listener` with the payload of every message on `subject`, from now on.

        After a reconnect, too; what was said meanwhile is lost.
        """
        link = await self._ready(until)
        self._listeners.append((subject, listener))
        await _subscribe(link, subject, listener)

    async def publish(self, subject: str, payload: bytes, until: float) -> None:
        """Says something that nobody answers: a wake-up. It may get lost."""
        link = await self._ready(until)
        with suppress(ConnectionClosedError, OutboundBufferLimitError):
            await link.wire.publish(subject, payload)

    async def ask(
        self,
        subject: str,
        payload: bytes = b"",
        *,
        until: float,
        headers: dict[str, str] | None = None,
        writes: bool = False,
    ) -> bytes:
        """Sends a request, and returns the answer's payload.

        With `writes` a request that was sent and had no answer is `OutcomeUnknown`.
        """
        link = await self._ready(until)
        if asyncio.get_running_loop().time() >= until:
            raise StoreUnavailable(f"{self.location}: the call's time is over")
        if link.denied is not None:
            raise AccessDenied(f"{self.location}: {link.denied}")
        number, answer = link.expect(subject)
        sent = False
        try:
            async with asyncio.timeout_at(until):
                reply = f"{link.inbox}.{number}"
                sent = True  # unless the driver refuses it at once
                await link.wire.publish(subject, payload, reply, headers)
                message = await answer
        except (ConnectionClosedError, OutboundBufferLimitError) as error:
            self._retire(link)
            raise StoreUnavailable(f"{self.location}: {error}") from None
        except MaxPayloadError:
            raise StoreUnavailable(
                f"{self.location}: {len(payload)} bytes are more than the server takes "
                f"(its max_payload is {link.wire.max_payload})"
            ) from None
        except AccessDenied as error:
            raise AccessDenied(f"{self.location}: {error}") from None
        except (OSError, _Ended) as error:  # a TimeoutError is one
            self._leave(link)
            reason = str(error) or "no answer in time"
            kind = OutcomeUnknown if writes and sent else StoreUnavailable
            raise kind(f"{self.location}: {reason}") from None
        except asyncio.CancelledError:
            self._retire(link)
            raise
        finally:
            del link.waiting[number]
            if link is not self._link and not link.waiting:
                self._drop(link)
        if message.headers and message.headers.get("Status") == _NOBODY:
            if len(self._hosts) > 1:
                self._leave(link)
            raise NobodyThereError(f"{self.location}: nobody answers to {subject}")
        return message.data

    # --- Connections ---------------------------------------------------------------------

    async def _ready(self, until: float) -> _Link:
        """A connection to send on. All who wait for one share the attempt and its failure."""
        if not self._open:
            raise StoreUnavailable(f"{self.location}: not open")
        link = self._link
        if link is not None and link.usable:
            return link
        if link is not None:
            self._retire(link)
        if self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())
            self._connecting.add_done_callback(self._connected)
        attempt = self._connecting
        rest = until - asyncio.get_running_loop().time()
        await asyncio.wait((attempt,), timeout=rest)
        if not attempt.done() or attempt.cancelled():
            raise StoreUnavailable(f"{self.location}: no connection in time")
        return attempt.result()

    def _connected(self, task: asyncio.Task[_Link]) -> None:
        self._connecting = None
        if task.cancelled() or task.exception() is not None:
            return
        self._link = task.result()
        self._links.add(self._link)
        self.generation += 1
        if not self._open:
            self._drop(self._link)

    async def _connect(self) -> _Link:
        """Tries each server once; the one that let us in is the first to be asked next time."""
        said: Exception = StoreUnavailable("no server was asked")
        for place, host in enumerate(self._hosts):
            try:
                link = await self._connect_to(host)
            except StoreUnavailable as error:
                said = error
                continue
            self._hosts.insert(0, self._hosts.pop(place))
            return link
        raise said

    async def _connect_to(self, host: tuple[str, int]) -> _Link:
        link, address = _Link(self._address, host), self._address
        name = f"[{host[0]}]" if ":" in host[0] else host[0]
        settings = _credentials(address) | _tls(address)
        try:
            async with asyncio.timeout(self._timeout_s * _CONNECT_SHARE / len(self._hosts)):
                await link.wire.connect(
                    [f"{'tls' if address.tls else 'nats'}://{name}:{host[1]}"],
                    name="anarchon",
                    error_cb=link.on_error,
                    disconnected_cb=link.on_end,
                    closed_cb=link.on_end,
                    allow_reconnect=False,
                    max_reconnect_attempts=1,  # 0 would be: again and again, without a pause
                    reconnect_time_wait=0,
                    pending_size=0,
                    flusher_queue_size=0,
                    ping_interval=_PING_S,
                    inbox_prefix=address.inbox,
                    dont_randomize=True,
                    **settings,
                )
                link.inbox = link.wire.new_inbox()
                await link.wire.subscribe(f"{link.inbox}.*", cb=link.on_answer)
                for subject, listener in self._listeners:
                    await _subscribe(link, subject, listener)
        except (Error, OSError, TimeoutError, ssl.SSLError) as error:
            await link.close()
            raise self._not_let_in(host, error, link.said) from None
        except BaseException:
            await link.close()
            raise
        return link

    def _not_let_in(self, host: tuple[str, int], error: Exception, said: str) -> StoreUnavailable:
        reason = str(error) or "no connection in time"
        if isinstance(error, NoServersError) and said:
            reason = said  # what the last attempt failed for
        text = f"{self.location}: {host[0]}:{host[1]}: {reason.removeprefix('nats: ')}"
        denied = isinstance(error, AuthorizationError) or _AUTHORIZATION.search(reason)
        if "timeout" in reason.lower():  # the server's, where it waited for our credentials
            denied = None
        return AccessDenied(text) if denied else StoreUnavailable(text)

    def _leave(self, link: _Link) -> None:
        """Goes to another server if there is one: this one may be cut off from the others."""
        if self._link is link:
            self._hosts.remove(link.host)
            self._hosts.append(link.host)
        self._retire(link)

    def _retire(self, link: _Link) -> None:
        """No further request goes out on it; it ends with the last answer that is awaited."""
        if self._link is link:
            self._link = None
        if not link.waiting:
            self._drop(link)

    def _drop(self, link: _Link) -> None:
        if self._link is link:
            self._link = None
        if link not in self._links:
            return
        self._links.remove(link)
        closing = asyncio.get_running_loop().create_task(link.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


async def _subscribe(link: _Link, subject: str, listener: Listener) -> None:
    async def heard(message: Msg) -> None:
        listener(message.data)

    await link.wire.subscribe(subject, cb=heard)


def _credentials(address: Address) -> dict[str, Any]:
    given = address.credentials
    if given.creds_file:
        return {"user_credentials": given.creds_file}
    if given.nkey_file:
        return {"nkeys_seed": given.nkey_file}
    if given.user:
        return {"user": given.user, "password": given.password}
    return {"token": given.token} if given.token else {}


def _tls(address: Address) -> dict[str, Any]:
    if not address.tls:
        return {}
    context = tls_context(address)
    return {"tls": context, "tls_handshake_first": address.tls_first}


def tls_context(address: Address) -> ssl.SSLContext:
    """Whom we trust, and who we are. Raises `StoreRefused` for files that cannot be used."""
    try:
        context = ssl.create_default_context(cafile=address.tls_ca or None)
        if address.tls_cert:
            context.load_cert_chain(address.tls_cert, address.tls_key or None)
    except (OSError, ssl.SSLError) as error:
        raise StoreRefused(
            f"{address.location}: the files of tls_ca, tls_cert and tls_key cannot be used: "
            f"{error.strerror or error}"
        ) from None
    if not address.tls_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
