"""A real gRPC server that speaks with a `FakeSidecar`'s voice."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc import aio

import anarchon
from anarchon.testing import FakeSidecar
from anarchon.v1 import session_pb2, session_pb2_grpc

CODES: dict[type[anarchon.SidecarError], grpc.StatusCode] = {
    anarchon.SidecarUnavailableError: grpc.StatusCode.UNAVAILABLE,
    anarchon.SessionNotFoundError: grpc.StatusCode.NOT_FOUND,
    anarchon.SessionReplacedError: grpc.StatusCode.ABORTED,
    anarchon.RefusedError: grpc.StatusCode.INVALID_ARGUMENT,
    anarchon.UnsupportedError: grpc.StatusCode.FAILED_PRECONDITION,
}
Context = aio.ServicerContext[Any, Any]


class PuppetServer(session_pb2_grpc.SessionServiceServicer):
    """Serves one puppet on a free port of the loopback, or on a Unix socket."""

    def __init__(self, sidecar: FakeSidecar) -> None:
        self.sidecar = sidecar
        self.metadata: list[dict[str, str]] = []
        self.times_left_s: dict[str, float] = {}
        self.address = ""
        self._server: aio.Server | None = None

    async def start(self, address: str = "127.0.0.1:0") -> str:
        self._server = aio.server(options=[("grpc.so_reuseport", 0)])
        session_pb2_grpc.add_SessionServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(address)
        await self._server.start()
        self.address = address if address.startswith("unix:") else f"127.0.0.1:{port}"
        return self.address

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    async def Subscribe(  # noqa: N802
        self, request: session_pb2.SubscribeRequest, context: Context
    ) -> AsyncIterator[session_pb2.SubscribeResponse]:
        self._note("Subscribe", context)
        try:
            async for event in self.sidecar.subscribe(request):
                yield event
        except anarchon.SidecarError as error:
            await self._abort(context, error)

    async def KeepAlive(  # noqa: N802
        self, request: session_pb2.KeepAliveRequest, context: Context
    ) -> session_pb2.KeepAliveResponse:
        self._note("KeepAlive", context)
        try:
            return await self.sidecar.keep_alive(request, 60)
        except anarchon.SidecarError as error:
            await self._abort(context, error)
            raise

    async def Complete(  # noqa: N802
        self, request: session_pb2.CompleteRequest, context: Context
    ) -> session_pb2.CompleteResponse:
        self._note("Complete", context)
        try:
            return await self.sidecar.complete(request, 60)
        except anarchon.SidecarError as error:
            await self._abort(context, error)
            raise

    async def CloseSession(  # noqa: N802
        self, request: session_pb2.CloseSessionRequest, context: Context
    ) -> session_pb2.CloseSessionResponse:
        self._note("CloseSession", context)
        try:
            return await self.sidecar.close_session(request, 60)
        except anarchon.SidecarError as error:
            await self._abort(context, error)
            raise

    def _note(self, method: str, context: Context) -> None:
        pairs = context.invocation_metadata() or ()
        self.metadata.append({str(key): str(value) for key, value in pairs})
        left_s = context.time_remaining()
        if left_s is not None:
            self.times_left_s[method] = left_s

    @staticmethod
    async def _abort(context: Context, error: anarchon.SidecarError) -> None:
        trailers = (("anarchon-reason", error.reason),) if error.reason else ()
        await context.abort(CODES[type(error)], str(error), trailers)
