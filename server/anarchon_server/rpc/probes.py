"""`/livez` and `/readyz` over plain HTTP, for probes that speak nothing else. Imports the standard
library and `config`.

Read-only: GET only, one answer a connection, everything bounded.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable

from anarchon_server.config import Address
from anarchon_server.rpc.listening import ListenError

REQUEST_TIMEOUT_S = 5.0
REQUEST_MAX_BYTES = 8 * 1024
CONNECTIONS_MAX = 64

Readiness = Callable[[], tuple[str, ...]]
"""Why the instance is not ready, one sentence each; empty: it is."""


class Probes:
    """A tiny HTTP server that says whether the process lives and whether it is ready."""

    def __init__(self, address: Address, not_ready: Readiness) -> None:
        self._address = address
        self._not_ready = not_ready
        self._server: asyncio.Server | None = None
        self._connections = 0

    async def start(self) -> Address:
        """Serve; return the address, its port known. Raises `ListenError`."""
        host, port = self._address.host, self._address.port
        try:
            self._server = await asyncio.start_server(
                self._serve, host, port, limit=REQUEST_MAX_BYTES, reuse_port=False
            )
        except OSError as error:
            raise ListenError(
                f"cannot serve probes on {self._address}: {_why(error)}: choose another address "
                "with --http"
            ) from None
        return Address(host, self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Stop serving."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        try:
            if self._connections <= CONNECTIONS_MAX:
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    writer.write(await self._answer(reader))
                    await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            pass  # whoever it was has gone, or says nothing
        finally:
            self._connections -= 1
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return _response("431 Request Header Fields Too Large", "too large\n")
        method, _, rest = head.split(b"\r\n", 1)[0].decode("latin-1").partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if path not in ("/livez", "/readyz"):
            return _response("404 Not Found", "there are /livez and /readyz\n")
        if method not in ("GET", "HEAD"):
            return _response("405 Method Not Allowed", "GET only\n", "Allow: GET, HEAD\r\n")
        reasons = self._not_ready() if path == "/readyz" else ()
        status = "503 Service Unavailable" if reasons else "200 OK"
        text = "".join(f"{reason}\n" for reason in reasons) or "ok\n"
        response = _response(status, text)
        return response.partition(b"\r\n\r\n")[0] + b"\r\n\r\n" if method == "HEAD" else response


def _why(error: OSError) -> str | None:
    """Return the system's words: asyncio's own text has the address once more."""
    if error.errno is None or isinstance(error, socket.gaierror):
        return error.strerror
    return os.strerror(error.errno)


def _response(status: str, text: str, more: str = "") -> bytes:
    body = text.encode()
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\n{more}"
        f"Content-Length: {len(body)}\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
