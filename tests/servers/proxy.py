"""A TCP proxy on the loopback that loses, holds and cuts what passes through it.

For any store: a client is given the proxy's port in the place of the server's.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

_CHUNK = 65_536


class Proxy:
    """What goes to the server and back, until a test says otherwise.

    `drop_replies`: what the server says is swallowed. `hold_replies`, `hold_requests`: it waits
    until `resume`. `cut`: every connection is reset now. `cut_after_requests`: the next thing that
    a client sends reaches the server, whose answer is awaited, and then the connection is reset.
    `refuse`: new connections are reset, until `resume`. What stands in `rewrites` is replaced on
    its way, either way, where it comes in one piece.
    """

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._target = host, port
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._requests = asyncio.Event()
        self._replies = asyncio.Event()
        self._dropping = self._refusing = self._cutting = False
        self.dropped = asyncio.Event()  # set when a reply was swallowed, or cut off
        self.held = asyncio.Event()  # set when something waits
        self.port = 0
        self.bytes_sent = self.bytes_received = 0
        self.requests = 0
        self.rewrites: dict[bytes, bytes] = {}

    async def __aenter__(self) -> Self:
        self.resume()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def resume(self) -> None:
        """Everything passes again; what was held goes on."""
        self._dropping = self._refusing = self._cutting = False
        self._requests.set()
        self._replies.set()
        self.dropped.clear()
        self.held.clear()

    def drop_replies(self) -> None:
        self._dropping = True

    def hold_replies(self) -> None:
        self._replies.clear()

    def hold_requests(self) -> None:
        self._requests.clear()

    def refuse(self) -> None:
        self._refusing = True

    def cut_after_requests(self) -> None:
        self._cutting = True

    def cut(self) -> None:
        """Resets every connection."""
        for writer in list(self._writers):
            _reset(writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            _reset(writer)
            return
        try:
            to_server = await asyncio.open_connection(*self._target)
        except OSError:
            _reset(writer)
            return
        there_reader, there = to_server
        self._writers |= {writer, there}
        pumps = [
            asyncio.create_task(self._pump(reader, there, self._pass_request)),
            asyncio.create_task(self._pump(there_reader, writer, self._pass_reply)),
        ]
        self._tasks.update(pumps)
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            self._tasks.difference_update(pumps)
            for each in (writer, there):
                each.close()
                self._writers.discard(each)

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        passes: Callable[[bytes], asyncio.Event | None],
    ) -> None:
        with suppress(OSError):
            while chunk := await reader.read(_CHUNK):
                gate = passes(chunk)
                if gate is None:
                    continue
                if not gate.is_set():
                    self.held.set()
                    await gate.wait()
                for old, new in self.rewrites.items():
                    chunk = chunk.replace(old, new)
                writer.write(chunk)
                await writer.drain()

    def _pass_request(self, chunk: bytes) -> asyncio.Event:
        self.requests += 1
        self.bytes_sent += len(chunk)
        return self._requests

    def _pass_reply(self, chunk: bytes) -> asyncio.Event | None:
        self.bytes_received += len(chunk)
        if self._cutting:
            self._cutting = False
            self.dropped.set()
            self.cut()
            return None
        if self._dropping:
            self.dropped.set()
            return None
        return self._replies


def _reset(writer: asyncio.StreamWriter) -> None:
    """Ends the connection with an RST, as a host that forgot it would."""
    connection = writer.get_extra_info("socket")
    if connection is not None:
        with suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
