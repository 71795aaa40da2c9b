"""How a session's calls reach the sidecar: the `Transport` protocol and its gRPC form. Imports the
standard library, grpc, the wire's messages and the errors.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import stat
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import grpc
from grpc import aio

from anarchon._errors import ClientError, SidecarError, SidecarUnavailableError, error_from_status
from anarchon._session import BACKOFF_FIRST_MS, BACKOFF_MAX_MS, MESSAGE_MAX_BYTES
from anarchon.v1 import session_pb2, session_pb2_grpc

DEFAULT_ADDRESS = "127.0.0.1:7420"
# What a socket address of the system can hold, with its closing zero.
_UNIX_PATH_MAX_BYTES = 107
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_TOKEN_MAX_BYTES = 4_096
_log = logging.getLogger("anarchon")


class Transport(Protocol):
    """The calls of the protocol's SessionService. Every method raises `SidecarError`.

    Used by one event loop only. Timeouts are seconds.
    """

    def subscribe(
        self, request: session_pb2.SubscribeRequest
    ) -> AsyncGenerator[session_pb2.SubscribeResponse, None]:
        """Open the session's stream, waiting for a sidecar as long as it takes."""
        ...

    async def keep_alive(
        self, request: session_pb2.KeepAliveRequest, timeout_s: float
    ) -> session_pb2.KeepAliveResponse:
        """Renew the session, without waiting for a sidecar that is not there."""
        ...

    async def complete(
        self, request: session_pb2.CompleteRequest, timeout_s: float
    ) -> session_pb2.CompleteResponse:
        """Report results, waiting for a sidecar until the timeout."""
        ...

    async def close_session(
        self, request: session_pb2.CloseSessionRequest, timeout_s: float
    ) -> session_pb2.CloseSessionResponse:
        """End the session."""
        ...

    async def close(self) -> None:
        """Let go of everything."""
        ...


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a sidecar is, and what opens its door.

    `address` is "host:port" or "unix:/path". Over a network `credentials` are needed; the loopback
    and Unix sockets work without. `token_file` holds the call token, and is read again when it
    changes. Raises `ClientError`.
    """

    address: str
    credentials: grpc.ChannelCredentials | None = None
    token_file: Path | None = None

    def __post_init__(self) -> None:
        if not _is_local(self.address) and self.credentials is None:
            raise ClientError(
                f"address {self.address!r}: is not on this machine, so calls to it need TLS: give "
                "credentials=grpc.ssl_channel_credentials(...), or the address of a local sidecar"
            )

    @classmethod
    def of(
        cls,
        address: str | None,
        credentials: grpc.ChannelCredentials | None,
        token_file: str | os.PathLike[str] | None,
    ) -> Endpoint:
        """Return the endpoint of what was given, else of ANARCHON_ADDRESS, ANARCHON_TOKEN_FILE."""
        address = address or os.environ.get("ANARCHON_ADDRESS") or DEFAULT_ADDRESS
        file = token_file or os.environ.get("ANARCHON_TOKEN_FILE") or None
        return cls(address, credentials, Path(file) if file else None)

    def check_socket(self) -> None:
        """Raise `ClientError` if somebody else than the sidecar's user could have put a socket here.

        A sidecar makes its socket in a directory that belongs to its user and that nobody else may
        write, so a socket that lies otherwise is not a sidecar's. One that is not there is no error.
        """
        if not self.address.startswith("unix:"):
            return
        path = Path(_socket_path(self.address))
        try:
            socket, directory = path.lstat(), path.parent.stat()
        except OSError:
            return  # nor is one that cannot be seen: connecting says what is wrong
        mode = stat.S_IMODE(directory.st_mode)
        if socket.st_uid != directory.st_uid or mode & _OTHERS_WRITE:
            raise ClientError(
                f"address {self.address!r}: the socket belongs to user {socket.st_uid} and lies in a "
                f"directory of user {directory.st_uid}, mode {mode:04o}, so it may be somebody "
                "else's than the sidecar's: both must belong to one user, and nobody else may write "
                "in the directory"
            )

    @property
    def absence(self) -> str:
        """What to say where no sidecar answers, and what to do about it."""
        advice = "; start one with `anarchon serve`, or give the address of another"
        return f"no sidecar answers at {self.address}{advice if _is_local(self.address) else ''}"

    def options(self) -> list[tuple[str, int]]:
        """Return the settings of every channel to a sidecar."""
        return [
            ("grpc.initial_reconnect_backoff_ms", BACKOFF_FIRST_MS),
            ("grpc.min_reconnect_backoff_ms", 1_000),
            ("grpc.max_reconnect_backoff_ms", BACKOFF_MAX_MS),
            ("grpc.max_send_message_length", MESSAGE_MAX_BYTES),
            ("grpc.max_receive_message_length", MESSAGE_MAX_BYTES),
            # A sidecar is never behind the proxy that the environment names.
            ("grpc.enable_http_proxy", 0),
            # A client's connection is its own, and goes with it.
            ("grpc.use_local_subchannel_pool", 1),
        ]

    def sync_channel(self) -> grpc.Channel:
        """Return a channel for blocking calls; it connects when it is first used."""
        if self.credentials is None:
            return grpc.insecure_channel(self.address, self.options())
        return grpc.secure_channel(self.address, self.credentials, self.options())

    def error(self, error: grpc.RpcError) -> SidecarError:
        """Return what a failed call means."""
        code = error.code().name
        message = error.details() or ""
        # Pairs of key and value, whatever the two stacks of grpc call their types.
        trailers = cast("Iterable[tuple[str, object]]", error.trailing_metadata() or ())
        reason = next((str(value) for key, value in trailers if key == "anarchon-reason"), "")
        if not reason and code == "UNIMPLEMENTED":
            message = f"the server at {self.address} does not speak anarchon.v1: {message}"
        elif not reason and code == "UNAVAILABLE":
            message = self._unavailable(message)
        elif not reason and code == "DEADLINE_EXCEEDED":
            message = f"the sidecar at {self.address} did not answer in time"
        return error_from_status(code, reason, message)

    def _unavailable(self, details: str) -> str:
        """What gRPC says of a connection, in words for people where it is only that none was made.

        With credentials there are more ways to fail than one, and only gRPC's words tell them apart.
        """
        if not details.startswith("failed to connect"):
            return f"the connection to the sidecar at {self.address} is lost: {details}"
        return self.absence if self.credentials is None else f"{self.absence}: {details}"


class CallToken:
    """The token in a file, as the metadata of a call. Raises `ClientError` if it cannot be read."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._seen: tuple[int, int, int] | None = None
        self._metadata: tuple[tuple[str, str], ...] = ()
        if file is not None:
            self._seen = self._stamp(file)
            self._metadata = self._read(file)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata, read again if the file has changed.

        A file that is just being replaced changes nothing: the token before goes on being used.
        """
        if self._file is None:
            return ()
        try:
            stamp = self._stamp(self._file)
            if stamp != self._seen:
                self._metadata = self._read(self._file)
                self._seen = stamp
        except ClientError as error:
            _log.warning("the call token stays as it was: %s", error)
        return self._metadata

    @staticmethod
    def _stamp(file: Path) -> tuple[int, int, int]:
        try:
            status = file.stat()
        except OSError as error:
            raise ClientError(f"token file {str(file)!r}: {error.strerror}") from None
        return status.st_ino, status.st_mtime_ns, status.st_size

    @staticmethod
    def _read(file: Path) -> tuple[tuple[str, str], ...]:
        try:
            lines = file.read_text("ascii").split("\n")
        except OSError as error:
            raise ClientError(f"token file {str(file)!r}: {error.strerror}") from None
        except UnicodeDecodeError:
            lines = []
        # The sidecar's own file may hold two while one replaces the other: the first is sent.
        token = next(filter(None, (line.strip() for line in lines)), "")
        if not re.fullmatch(r"[!-~]+", token) or len(token) > _TOKEN_MAX_BYTES:
            raise ClientError(
                f"token file {str(file)!r}: must begin with one line of printable ASCII without spaces"
            )
        return (("authorization", f"Bearer {token}"),)


class GrpcTransport:
    """The calls over one gRPC channel, made on the running loop."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._token = CallToken(endpoint.token_file)
        if endpoint.credentials is None:
            self._channel = aio.insecure_channel(endpoint.address, endpoint.options())
        else:
            self._channel = aio.secure_channel(
                endpoint.address, endpoint.credentials, endpoint.options()
            )
        self._stub = session_pb2_grpc.SessionServiceStub(self._channel)
        self._was_reached = False

    async def subscribe(
        self, request: session_pb2.SubscribeRequest
    ) -> AsyncGenerator[session_pb2.SubscribeResponse, None]:
        """See `Transport`. Says once, in the log, that there is no sidecar yet."""
        await self._reach()
        call = self._stub.Subscribe(request, metadata=self._metadata(), wait_for_ready=True)
        try:
            async for event in call:
                yield event
        except grpc.RpcError as error:
            raise self._endpoint.error(error) from None
        finally:
            call.cancel()

    async def keep_alive(
        self, request: session_pb2.KeepAliveRequest, timeout_s: float
    ) -> session_pb2.KeepAliveResponse:
        """See `Transport`."""
        try:
            return await self._stub.KeepAlive(
                request, timeout=timeout_s, metadata=self._metadata(), wait_for_ready=False
            )
        except grpc.RpcError as error:
            raise self._endpoint.error(error) from None

    async def complete(
        self, request: session_pb2.CompleteRequest, timeout_s: float
    ) -> session_pb2.CompleteResponse:
        """See `Transport`."""
        try:
            return await self._stub.Complete(
                request, timeout=timeout_s, metadata=self._metadata(), wait_for_ready=True
            )
        except grpc.RpcError as error:
            raise self._endpoint.error(error) from None

    async def close_session(
        self, request: session_pb2.CloseSessionRequest, timeout_s: float
    ) -> session_pb2.CloseSessionResponse:
        """See `Transport`."""
        try:
            return await self._stub.CloseSession(
                request, timeout=timeout_s, metadata=self._metadata(), wait_for_ready=False
            )
        except grpc.RpcError as error:
            raise self._endpoint.error(error) from None

    async def close(self) -> None:
        """See `Transport`."""
        await self._channel.close()

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with every call, if what listens may be told it."""
        try:
            self._endpoint.check_socket()
        except ClientError as error:
            raise SidecarUnavailableError(str(error)) from None
        return self._token.metadata()

    async def _reach(self) -> None:
        """Wait for the connection, and say once that one has to wait."""
        said = self._was_reached  # later losses are the session's to report
        state = self._channel.get_state(try_to_connect=True)
        while state is not grpc.ChannelConnectivity.READY:
            if state is grpc.ChannelConnectivity.SHUTDOWN:
                raise SidecarUnavailableError("the client has stopped")
            if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE and not said:
                said = True
                _log.warning("%s; trying again until one answers", self._endpoint.absence)
            await self._channel.wait_for_state_change(state)
            state = self._channel.get_state(try_to_connect=True)
        self._was_reached = True


def _socket_path(address: str) -> str:
    return re.sub(r"^unix:(//)?", "", address)


def _is_local(address: str) -> bool:
    """Whether `address` is on this machine. Raises `ClientError` for what is no address."""
    if address.startswith("unix:"):
        path = _socket_path(address)
        if not path.startswith("/"):
            raise ClientError(f"address {address!r}: must be unix:/absolute/path")
        if len(path.encode()) > _UNIX_PATH_MAX_BYTES:
            raise ClientError(
                f"address {address!r}: a socket's path has at most {_UNIX_PATH_MAX_BYTES} bytes"
            )
        return True
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})", address)
    if match is None or not 1 <= int(match[2]) <= 65_535:
        raise ClientError(
            f'address {address!r}: must be "host:port" such as "{DEFAULT_ADDRESS}", or "unix:/path"'
        )
    host = match[1].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
