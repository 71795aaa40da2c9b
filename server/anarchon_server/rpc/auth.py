"""Who may call: a bearer token, read from a file that may change. Imports grpc and the standard
library.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
from grpc import aio

from anarchon_server.core.errors import AnarchonError, RefusedError
from anarchon_server.rpc.status import status_of

_log = logging.getLogger("anarchon")

_HEALTH_PREFIX = "/grpc.health.v1.Health/"
_FILE_MAX_BYTES = 64 * 1024


class TokenFileError(AnarchonError):
    """The file of call tokens cannot be used."""


class TokenFile:
    """The tokens of a file, one a line: two can be valid while one replaces the other.

    Raises `TokenFileError` if it cannot be read at first. If that happens later, the tokens before
    stay valid, and the log says so once, until it can be read again (S27).
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = self._look()
        self._tokens = self._read()
        self._said = ""

    def accepts(self, authorization: str) -> bool:
        """Whether this is `Bearer` and a valid token."""
        self._refresh()
        scheme, _, token = authorization.partition(" ")
        given = token.strip().encode()
        # Every token is compared, so that the time taken does not tell which one was close.
        matches = [hmac.compare_digest(given, valid) for valid in self._tokens]
        return scheme.lower() == "bearer" and any(matches)

    def _refresh(self) -> None:
        try:
            stamp = self._look()
            if stamp != self._stamp:
                self._tokens, self._stamp = self._read(), stamp
            self._said = ""
        except TokenFileError as error:
            self._say_once(str(error))

    def _say_once(self, error: str) -> None:
        if error != self._said:
            self._said = error
            _log.warning("token_file_unreadable", extra={"fields": {"error": error}})

    def _look(self) -> tuple[int, int, int]:
        try:
            stat = self._path.stat()
        except OSError as error:
            raise TokenFileError(f"token_file {self._path}: {error.strerror}") from None
        return stat.st_ino, stat.st_mtime_ns, stat.st_size

    def _read(self) -> tuple[bytes, ...]:
        try:
            content = self._path.read_bytes()[:_FILE_MAX_BYTES]
        except OSError as error:
            raise TokenFileError(f"token_file {self._path}: {error.strerror}") from None
        tokens = tuple(filter(None, (line.strip() for line in content.splitlines())))
        if not tokens:
            raise TokenFileError(f"token_file {self._path}: is empty: write one token a line")
        return tokens


class TokenInterceptor(aio.ServerInterceptor):
    """Refuses calls without a valid token; health checks need none, since probes send none."""

    def __init__(self, tokens: TokenFile) -> None:
        self._tokens = tokens

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Pass the call on, or put a refusal in its place."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(_HEALTH_PREFIX):
            return handler
        metadata = dict(handler_call_details.invocation_metadata)
        if self._tokens.accepts(str(metadata.get("authorization", ""))):
            return handler
        return _refusal_like(handler)


def _refusal_like(handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
    async def refuse(_request: Any, context: aio.ServicerContext[Any, Any]) -> None:
        status = status_of(
            RefusedError(
                "BAD_CREDENTIALS",
                "the call token is missing or wrong: set ANARCHON_TOKEN_FILE to a file with the "
                "sidecar's token",
            )
        )
        await context.abort(status.code, status.message, status.trailers())

    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming, handler.response_streaming]
    return make(refuse, handler.request_deserializer, handler.response_serializer)
