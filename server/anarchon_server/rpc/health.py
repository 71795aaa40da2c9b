"""`grpc.health.v1`, without ever waiting for a watcher. Imports grpc's health messages.

The servicer that comes with grpc writes to watchers while it holds the lock that setting a status
needs, so one watcher that does not read would freeze the health of all.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

SESSION_SERVICE = "anarchon.v1.SessionService"
PROCESS = ""

_Response = health_pb2.HealthCheckResponse
_Context = aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]


class HealthServicer(health_pb2_grpc.HealthServicer):
    """Answers for the process, and for whether sessions are served: the store can be reached and
    the sidecar is not draining.
    """

    def __init__(self) -> None:
        self._ready = False
        self._closed = False
        self._changed = asyncio.Event()

    @property
    def ready(self) -> bool:
        """Whether sessions are served."""
        return self._ready

    def set_ready(self, ready: bool) -> None:
        """Change the answer for sessions."""
        if ready != self._ready:
            self._ready = ready
            self._notify()

    def close(self) -> None:
        """End all watching: the process is about to end."""
        self._closed = True
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Check(  # noqa: N802 - the protocol's name
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> health_pb2.HealthCheckResponse:
        """Say how a service is now."""
        status = self._status(request.service)
        if status == _Response.SERVICE_UNKNOWN:
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                f'no service {request.service[:80]!a} here; there are "" and "{SESSION_SERVICE}"',
            )
        return _Response(status=status)

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, _context: _Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Say how a service is, now and whenever that changes."""
        said = None
        while not self._closed:
            changed, status = self._changed, self._status(request.service)
            if status != said:
                said = status
                yield _Response(status=status)
            await changed.wait()

    def _status(self, service: str) -> int:
        if service == PROCESS:
            return _Response.SERVING
        if service != SESSION_SERVICE:
            return _Response.SERVICE_UNKNOWN
        return _Response.SERVING if self._ready else _Response.NOT_SERVING
