"""SessionService: what an application uses, on the wire's messages, in front of the loop.

Imports the stubs, core and `loop`. `SessionCalls` knows nothing of gRPC, so that it also serves a
client in the same process; `SessionServicer` is its gRPC form.
"""

# ruff: noqa: N802 - the methods have the protocol's names

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, NoReturn

from grpc import aio

from anarchon.v1 import session_pb2, session_pb2_grpc
from anarchon_server.core import limits, messages
from anarchon_server.core.errors import AnarchonError, InvalidError
from anarchon_server.core.model import JobSpec
from anarchon_server.loop import Event, Loop, Stream
from anarchon_server.rpc import conversion as wire
from anarchon_server.rpc.status import status_of
from anarchon_server.rpc.version import check_client

Context = aio.ServicerContext[Any, Any]

_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")

FLUSH_S = 1.0
"""How long a client may take to read what was sent before its stream was ended."""

_READ_ON_THE_LOOP = 100
"""So many schedules are read in a few milliseconds; more would keep other sessions waiting."""

ANSWER_BEFORE_DEADLINE_S = 0.25
"""By how much results that the store has not answered for are answered before the caller hangs up."""


class SessionCalls:
    """The four calls of the service. Each raises `AnarchonError`.

    `instance_id` and `version` are this sidecar's, as clients are told.
    """

    def __init__(self, loop: Loop, instance_id: str, version: str) -> None:
        self._loop = loop
        self._instance_id = instance_id
        self._version = version

    async def prepare(self, request: session_pb2.SubscribeRequest) -> None:
        """Read a large registration's schedules in a thread: every other session goes on meanwhile.

        What is read is remembered; what is wrong is said by `subscribe`.
        """
        if len(request.jobs) > _READ_ON_THE_LOOP:
            await asyncio.to_thread(self._read, wire.specs_in(request.jobs))

    def _read(self, specs: tuple[JobSpec, ...]) -> None:
        for spec in specs:
            with suppress(AnarchonError):
                self._loop.resolve(spec)

    def subscribe(self, request: session_pb2.SubscribeRequest) -> Stream:
        """Open the session's stream. Its owner calls `leave` when it is over."""
        _check_session_id(request.session_id)
        check_client(request.client.version, self._version)
        if not 1 <= request.max_concurrency <= limits.CONCURRENCY_MAX:
            expected = f"1 to {limits.CONCURRENCY_MAX}"
            raise InvalidError("max_concurrency", request.max_concurrency, expected)
        return self._loop.subscribe(
            session_id=request.session_id,
            client=wire.client_in(request.client),
            specs=wire.specs_in(request.jobs),
            max_concurrency=request.max_concurrency,
            in_flight=wire.tokens_in("in_flight", request.in_flight),
        )

    def leave(self, stream: Stream) -> None:
        """Let go of a stream."""
        self._loop.unsubscribe(stream)

    async def events(self, stream: Stream) -> AsyncIterator[session_pb2.SubscribeResponse]:
        """Iterate over a stream's events until it is ended. Raises nothing: see `Stream.error`."""
        async for event in stream:
            for response in self._responses(event):
                yield response

    async def keep_alive(
        self, request: session_pb2.KeepAliveRequest
    ) -> session_pb2.KeepAliveResponse:
        """Renew a session."""
        _check_session_id(request.session_id)
        answer = await self._loop.keep_alive(
            request.session_id,
            wire.tokens_in("in_flight", request.in_flight),
            draining=request.draining,
            confirm=wire.tokens_in("confirm", request.confirm),
        )
        return wire.keep_alive_out(answer)

    async def complete(
        self, request: session_pb2.CompleteRequest, time_left_s: float | None
    ) -> session_pb2.CompleteResponse:
        """Record results; those that the store has not answered for in time are to be repeated."""
        results = wire.results_in(request)
        patience_s = None
        if time_left_s is not None:
            patience_s = max(0.0, time_left_s - ANSWER_BEFORE_DEADLINE_S)
        try:
            async with asyncio.timeout(patience_s):
                receipts = (await self._loop.complete(results)).receipts
        except TimeoutError:
            later = messages.Receipt(
                messages.ReceiptStatus.STORE_UNAVAILABLE,
                message="the store has not answered yet: report it again",
            )
            receipts = (later,) * len(results)
        return session_pb2.CompleteResponse(receipts=[wire.receipt_out(r) for r in receipts])

    async def close_session(
        self, request: session_pb2.CloseSessionRequest
    ) -> session_pb2.CloseSessionResponse:
        """End a session at once."""
        _check_session_id(request.session_id)
        stopped = wire.tokens_in("stopped", request.stopped)
        await self._loop.close_session(request.session_id, stopped)
        return session_pb2.CloseSessionResponse()

    def _responses(self, event: Event) -> list[session_pb2.SubscribeResponse]:
        match event:
            case messages.Attached():
                attached = wire.attached_out(event, self._instance_id, self._version)
                return [session_pb2.SubscribeResponse(attached=attached)]
            case messages.Assigned(assignments):
                return [
                    session_pb2.SubscribeResponse(runs=batch)
                    for batch in _batches(
                        [wire.assignment_out(one, self._instance_id) for one in assignments]
                    )
                ]
            case messages.Cancelled():
                return [session_pb2.SubscribeResponse(cancel=wire.cancellation_out(event))]
            case messages.Draining(grace_ms):
                drain = session_pb2.Drain(grace=wire.duration(grace_ms))
                return [session_pb2.SubscribeResponse(drain=drain)]


class SessionServicer(session_pb2_grpc.SessionServiceServicer):
    """`SessionCalls` as gRPC serves them."""

    def __init__(self, calls: SessionCalls) -> None:
        self._calls = calls

    async def Subscribe(  # type: ignore[override]
        self,
        request: session_pb2.SubscribeRequest,
        context: Context,
    ) -> None:
        """Write a stream's events. A client that does not read holds up its own writer only."""
        try:
            await self._calls.prepare(request)
            stream = self._calls.subscribe(request)
        except AnarchonError as error:
            await refuse(context, error)
        writer = asyncio.create_task(self._write(stream, context))
        ended = asyncio.create_task(stream.ended())
        try:
            await asyncio.wait((writer, ended), return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait((writer,), timeout=FLUSH_S)
        finally:
            self._calls.leave(stream)
            ended.cancel()
            writer.cancel()
        if stream.error is not None:
            await refuse(context, stream.error)

    async def KeepAlive(
        self,
        request: session_pb2.KeepAliveRequest,
        context: Context,
    ) -> session_pb2.KeepAliveResponse:
        """Answer a keep-alive."""
        try:
            return await self._calls.keep_alive(request)
        except AnarchonError as error:
            await refuse(context, error)

    async def Complete(
        self,
        request: session_pb2.CompleteRequest,
        context: Context,
    ) -> session_pb2.CompleteResponse:
        """Answer a report of results, before the caller's deadline."""
        try:
            return await self._calls.complete(request, context.time_remaining())
        except AnarchonError as error:
            await refuse(context, error)

    async def CloseSession(
        self,
        request: session_pb2.CloseSessionRequest,
        context: Context,
    ) -> session_pb2.CloseSessionResponse:
        """End a session."""
        try:
            return await self._calls.close_session(request)
        except AnarchonError as error:
            await refuse(context, error)

    async def _write(
        self,
        stream: Stream,
        context: Context,
    ) -> None:
        try:
            async for response in self._calls.events(stream):
                await context.write(response)
        except (aio.AioRpcError, aio.UsageError, asyncio.InvalidStateError):
            pass  # the client has gone; the engine is told when the stream is left


async def refuse(context: Context, error: AnarchonError) -> NoReturn:
    """End a call with what `error` means to its caller."""
    status = status_of(error)
    await context.abort(status.code, status.message, status.trailers())


def _batches(assignments: list[session_pb2.Assignment]) -> list[session_pb2.Assignments]:
    """At most 500 and 2 MiB in a message."""
    batches: list[session_pb2.Assignments] = []
    size = limits.BATCH_BYTES
    for assignment in assignments:
        own = assignment.ByteSize() + 8
        full = size + own > limits.BATCH_BYTES
        if full or len(batches[-1].assignments) >= limits.ASSIGNMENTS_MAX:
            batches.append(session_pb2.Assignments())
            size = 0
        batches[-1].assignments.append(assignment)
        size += own
    return batches


def _check_session_id(session_id: str) -> None:
    if not _UUID.fullmatch(session_id):
        raise InvalidError("session_id", session_id, "a UUID in its usual text form")
