"""/livez and /readyz: read-only, bounded, and never in the way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from anarchon_server.config import Address
from anarchon_server.rpc import probes as rpc_probes
from anarchon_server.rpc.listening import ListenError
from anarchon_server.rpc.probes import Probes


@dataclass
class Served:
    reasons: tuple[str, ...] = ()
    address: Address = field(default_factory=Address)

    async def ask(self, raw: bytes) -> tuple[str, str]:
        """The status line and the body of the answer to a request."""
        reader, writer = await asyncio.open_connection(self.address.host, self.address.port)
        writer.write(raw)
        answer = (await reader.read()).decode()
        writer.close()
        await writer.wait_closed()
        head, _, body = answer.partition("\r\n\r\n")
        return head.split("\r\n")[0], body

    async def get(self, path: str) -> tuple[str, str]:
        return await self.ask(f"GET {path} HTTP/1.1\r\nHost: probe\r\n\r\n".encode())


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    made = Served()
    probes = Probes(Address("127.0.0.1", 0), lambda: made.reasons)
    made.address = await probes.start()
    yield made
    await probes.stop()


async def test_a_ready_process_lives_and_is_ready(served: Served) -> None:
    assert await served.get("/livez") == ("HTTP/1.1 200 OK", "ok\n")
    assert await served.get("/readyz?verbose=1") == ("HTTP/1.1 200 OK", "ok\n")


async def test_a_process_that_is_not_ready_lives_and_says_why(served: Served) -> None:
    served.reasons = ("the store does not answer", "stopping")
    status, body = await served.get("/readyz")
    assert status == "HTTP/1.1 503 Service Unavailable"
    assert body == "the store does not answer\nstopping\n"
    assert (await served.get("/livez"))[0] == "HTTP/1.1 200 OK"


async def test_head_is_answered_without_a_body(served: Served) -> None:
    status, body = await served.ask(b"HEAD /readyz HTTP/1.1\r\n\r\n")
    assert (status, body) == ("HTTP/1.1 200 OK", "")


@pytest.mark.parametrize("method", [b"POST", b"PUT", b"DELETE", b"nonsense"])
async def test_nothing_can_be_changed(served: Served, method: bytes) -> None:
    status, _ = await served.ask(method + b" /livez HTTP/1.1\r\n\r\n")
    assert status == "HTTP/1.1 405 Method Not Allowed"


async def test_other_paths_are_not_found(served: Served) -> None:
    assert (await served.get("/"))[0] == "HTTP/1.1 404 Not Found"
    assert (await served.ask(b"\x16\x03\x01 junk\r\n\r\n"))[0] == "HTTP/1.1 404 Not Found"


async def test_a_request_that_is_too_large_is_refused(served: Served) -> None:
    raw = b"GET /livez HTTP/1.1\r\nX: " + b"x" * rpc_probes.REQUEST_MAX_BYTES + b"\r\n\r\n"
    status, _ = await served.ask(raw)
    assert status.startswith("HTTP/1.1 431")


async def test_whoever_says_nothing_is_let_go(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_probes, "REQUEST_TIMEOUT_S", 0.01)
    assert await served.ask(b"GET /livez HTT") == ("", "")


async def test_connections_beyond_the_bound_are_closed(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_probes, "CONNECTIONS_MAX", 0)
    reader, writer = await asyncio.open_connection(served.address.host, served.address.port)
    assert await reader.read() == b""
    writer.close()


async def test_an_address_in_use_is_refused(served: Served) -> None:
    with pytest.raises(ListenError, match=r"cannot serve probes on .*--http"):
        await Probes(served.address, tuple).start()
