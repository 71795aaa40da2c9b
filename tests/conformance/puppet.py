"""The puppet: a gRPC server that is the sidecar, as far as a scenario has it act like one.

What no step has a say in it does by itself: KeepAlive is answered with what stands in `keep_alive`,
Complete with the receipt that stands in `complete`, CloseSession always. At every call it looks at
what holds in every scenario (`faults`): one session, deadlines, tokens in flight named in full,
limits of a batch.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import grpc
from google.protobuf.message import Message
from grpc import aio

from anarchon._duration import to_ms, to_timedelta, wire_to_ms
from anarchon.v1 import session_pb2, session_pb2_grpc
from tests.conformance.matching import Bound, made
from tests.conformance.scenario import ScenarioError

INTERVAL, TTL = "200ms", "15s"
"""What Attached says where a scenario does not."""
MESSAGE_MAX_BYTES = 4 * 1024 * 1024
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_FINAL = {
    session_pb2.RECEIPT_STATUS_RECORDED,
    session_pb2.RECEIPT_STATUS_FENCED,
    session_pb2.RECEIPT_STATUS_UNKNOWN_TOKEN,
    session_pb2.RECEIPT_STATUS_ALREADY_COMPLETED,
}
# gRPC sends a deadline rounded up to few digits.
_ROUNDED = 1.05
Context = aio.ServicerContext[Any, Any]


@dataclass(slots=True)
class Call:
    """A call that came, and was not asked for by a step yet."""

    method: str
    request: Message
    metadata: dict[str, str]


@dataclass(slots=True)
class Ending:
    """How a stream ends: with a status."""

    code: str = "OK"
    reason: str = ""
    message: str = "said by the puppet"


@dataclass(slots=True)
class _Stream:
    events: asyncio.Queue[session_pb2.SubscribeResponse | Ending] = field(
        default_factory=asyncio.Queue
    )


class Puppet(session_pb2_grpc.SessionServiceServicer):
    """Serves at one address. `changed` is set whenever something has come."""

    def __init__(
        self,
        address: str,
        changed: asyncio.Event,
        bound: Bound,
        *,
        token: str = "",
        tls: tuple[Path, Path] | None = None,
    ) -> None:
        self.address = address
        self.calls: list[Call] = []
        self.results: list[session_pb2.Result] = []
        self.faults: list[str] = []
        self.keep_alive: dict[str, Any] = {}
        self.complete: str | int | dict[str, Any] = "RECORDED"
        self.refusal: Ending | None = None
        self.token = token
        self._tls = tls
        self._changed = changed
        self._bound = bound
        self._server: aio.Server | None = None
        self._stream: _Stream | None = None
        self._answers_changed = asyncio.Event()
        self._held: list[asyncio.Future[dict[str, Any]]] = []
        # What the client was told, and has said.
        self._session_id = ""
        self._was_attached = False
        self._interval_ms = 0
        self._knows_session = False
        self._in_flight: set[str] = set()
        self._receipted: set[str] = set()
        self._completes = 0
        self._is_draining = False

    # ── Strings to pull ─────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Listen, for the first time or again, as a new process that knows no session."""
        server = aio.server(
            options=[("grpc.so_reuseport", 0), ("grpc.max_send_message_length", -1)]
        )
        session_pb2_grpc.add_SessionServiceServicer_to_server(self, server)
        if self._tls is None:
            port = server.add_insecure_port(self.address)
        else:
            certificate, key = (file.read_bytes() for file in self._tls)
            credentials = grpc.ssl_server_credentials([(key, certificate)])
            port = server.add_secure_port(self.address, credentials)
        await server.start()
        if not self.address.startswith("unix:"):
            self.address = f"127.0.0.1:{port}"
        self._server = server

    async def stop(self) -> None:
        """Be gone: calls break off, and nobody listens."""
        server, self._server, self._stream = self._server, None, None
        self._knows_session = False
        if server is not None:
            await server.stop(0)

    def send(self, event: session_pb2.SubscribeResponse) -> None:
        """Put an event on the stream."""
        if event.HasField("attached"):
            self._was_attached = True
            self._allow(wire_to_ms(event.attached.keep_alive_interval))
        self._open_stream().events.put_nowait(event)

    def end(self, ending: Ending) -> None:
        """End the stream."""
        self._open_stream().events.put_nowait(ending)
        self._stream = None

    def _open_stream(self) -> _Stream:
        if self._stream is None:
            raise ScenarioError("there is no open stream, as the scenario has it here")
        return self._stream

    def answer(self, *, keep_alive: dict[str, Any] | None = None, complete: Any = None) -> None:
        """Set what is answered from now on, also to calls that are held."""
        if keep_alive is not None:
            self.keep_alive = keep_alive
            if not keep_alive.get("hold"):
                self.answer_held(keep_alive)
        if complete is not None:
            self.complete = complete
        self._answers_changed.set()
        self._answers_changed = asyncio.Event()

    def answer_held(self, keep_alive: dict[str, Any]) -> None:
        """Answer the KeepAlive calls that are held, and leave it at that."""
        for held in self._held:
            if not held.done():
                held.set_result(keep_alive)
        self._held = []

    # ── Calls ───────────────────────────────────────────────────────────────────────────────────

    async def Subscribe(  # noqa: N802
        self, request: session_pb2.SubscribeRequest, context: Context
    ) -> AsyncIterator[session_pb2.SubscribeResponse]:
        """Stream what the scenario sends."""
        await self._called(request, context)
        self._check_in_flight(request.in_flight)
        self._check_left(context, None)
        if self.refusal is not None:
            await _abort(context, self.refusal)
        self._knows_session = True
        before, stream = self._stream, _Stream()
        self._stream = stream
        if before is not None:
            before.events.put_nowait(Ending("ABORTED", "SESSION_REPLACED"))
        try:
            while True:
                event = await stream.events.get()
                if isinstance(event, Ending):
                    if event.code != "OK":
                        await _abort(context, event)
                    return
                yield event
        finally:
            if self._stream is stream:
                self._stream = None

    async def KeepAlive(  # noqa: N802
        self, request: session_pb2.KeepAliveRequest, context: Context
    ) -> session_pb2.KeepAliveResponse:
        """Answer what stands in `keep_alive`."""
        await self._called(request, context)
        self._require(self._was_attached, "KeepAlive before the first Attached")
        self._require(request.draining or not self._is_draining, "KeepAlive is no longer draining")
        self._is_draining = request.draining
        self._check_in_flight(request.in_flight)
        self._check_left(context, min(self._interval_ms, 5_000))
        answer = self.keep_alive
        if answer.get("hold"):
            held = asyncio.get_running_loop().create_future()
            self._held.append(held)
            answer = await held
        if delay := answer.get("delay"):
            await asyncio.sleep(to_timedelta(delay).total_seconds())
        if error := answer.get("error"):
            await _abort(context, Ending(**error))
        if not self._knows_session:
            await _abort(context, Ending("NOT_FOUND", "SESSION_NOT_FOUND"))
        told = {key: value for key, value in answer.items() if key not in _NO_FIELDS}
        if "lost" in told:
            told["lost"] = [each for each in told["lost"] if each["token"] in request.in_flight]
        if "keep_alive_interval" in told:
            self._allow(to_ms(to_timedelta(told["keep_alive_interval"])))
        standing = {
            "session_ttl": TTL,
            "stream_open": self._stream is not None,
            "confirmed": list(request.confirm),
        }
        response = made(session_pb2.KeepAliveResponse, {**standing, **told}, self._bound)
        assert isinstance(response, session_pb2.KeepAliveResponse)
        return response

    async def Complete(  # noqa: N802
        self, request: session_pb2.CompleteRequest, context: Context
    ) -> session_pb2.CompleteResponse:
        """Answer what stands in `complete`."""
        self._completes += 1
        self._require(self._completes == 1, "two Complete at a time")
        try:
            await self._called(request, context)
            self._check_left(context, 10_000)
            self._require(1 <= len(request.results) <= 1_000, "a Complete has 1 to 1,000 results")
            self._require(request.ByteSize() <= 2 << 20, "a Complete has more than 2 MiB")
            for result in request.results:
                self._require(result.outcome.HasField("elapsed"), "a result without elapsed")
                self._require(bool(result.outcome.WhichOneof("result")), "a result without one")
            self.results += request.results
            self._changed.set()
            while self.complete == "hold":
                await self._answers_changed.wait()
            return await self._receipts(request, context)
        finally:
            self._completes -= 1

    async def _receipts(
        self, request: session_pb2.CompleteRequest, context: Context
    ) -> session_pb2.CompleteResponse:
        answer = self.complete
        if isinstance(answer, dict) and "code" in answer:
            if answer["code"] in _REFUSALS and len(request.results) == 1:
                self._forget(request.results[0].token)  # it is given up
            await _abort(context, Ending(**answer))
        response = session_pb2.CompleteResponse()
        if answer == "none":
            return response
        for result in request.results:
            status = answer.get(result.token, "RECORDED") if isinstance(answer, dict) else answer
            receipt = made(session_pb2.Receipt, {"status": status}, self._bound)
            assert isinstance(receipt, session_pb2.Receipt)
            response.receipts.append(receipt)
            if receipt.status in _FINAL:
                self._forget(result.token)
        return response

    async def CloseSession(  # noqa: N802
        self, request: session_pb2.CloseSessionRequest, context: Context
    ) -> session_pb2.CloseSessionResponse:
        """Say good-bye."""
        await self._called(request, context)
        self._check_left(context, 5_000)
        return session_pb2.CloseSessionResponse()

    # ── What holds always ───────────────────────────────────────────────────────────────────────

    async def _called(self, request: Any, context: Context) -> None:
        pairs = context.invocation_metadata() or ()
        metadata = {str(key): str(value) for key, value in pairs}
        sent = metadata.get("authorization", "")
        if self.token and sent != f"Bearer {self.token}":
            await _abort(
                context, Ending("UNAUTHENTICATED", "BAD_CREDENTIALS", "no such call token")
            )
        self._require(bool(self.token) or not sent, "a call token that no file has")
        if hasattr(request, "session_id"):
            self._require(bool(_UUID.fullmatch(request.session_id)), "session_id is no UUID")
            self._session_id = self._session_id or request.session_id
            self._require(request.session_id == self._session_id, "another session_id")
        self.calls.append(Call(type(request).__name__.removesuffix("Request"), request, metadata))
        self._changed.set()

    def _check_in_flight(self, tokens: Any) -> None:
        named = set(tokens)
        self._require(len(named) == len(tokens), "a token is twice in flight")
        missing = sorted(self._in_flight - named)
        self._require(not missing, f"in flight, without a receipt, and not named: {missing}")
        # One that was under way when a token got its receipt may still name it.
        self._in_flight |= named - self._receipted

    def _forget(self, token: str) -> None:
        self._receipted.add(token)
        self._in_flight.discard(token)

    def _allow(self, interval_ms: int) -> None:
        """An interval was told: deadlines may be as long. One told before may still be in use."""
        self._interval_ms = max(self._interval_ms, interval_ms, 200)

    def _check_left(self, context: Context, wanted_ms: int | None) -> None:
        left_s = context.time_remaining()
        if wanted_ms is None:
            self._require(left_s is None, "Subscribe has a deadline")
            return
        self._require(left_s is not None, "a call without a deadline")
        if left_s is not None:
            self._require(
                left_s * 1_000 <= wanted_ms * _ROUNDED,
                f"a deadline of {left_s * 1_000:.0f} ms, not {wanted_ms} ms",
            )

    def _require(self, condition: bool, otherwise: str) -> None:
        if not condition and otherwise not in self.faults:
            self.faults.append(otherwise)
            self._changed.set()


_REFUSALS = {"INVALID_ARGUMENT", "FAILED_PRECONDITION"}
_NO_FIELDS = {"hold", "delay", "error"}


async def _abort(context: Context, ending: Ending) -> NoReturn:
    trailers = (("anarchon-reason", ending.reason),) if ending.reason else ()
    await context.abort(grpc.StatusCode[ending.code], ending.message, trailers)
    raise AssertionError("abort raises")
