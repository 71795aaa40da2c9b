"""The gRPC server: its services, its settings, its address. Imports grpc, `config`, `loop` and the
services.
"""

from __future__ import annotations

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from anarchon.v1 import admin_pb2, admin_pb2_grpc, session_pb2, session_pb2_grpc
from anarchon_server.config import Address, Config
from anarchon_server.core import limits
from anarchon_server.loop import Loop
from anarchon_server.rpc.admin import AdminServicer
from anarchon_server.rpc.auth import TokenFile, TokenInterceptor
from anarchon_server.rpc.health import HealthServicer
from anarchon_server.rpc.listening import ListenError, Place
from anarchon_server.rpc.sessions import SessionCalls, SessionServicer

METADATA_MAX_BYTES = 8 * 1024
CONCURRENT_CALLS_MAX = 1_024
STREAMS_MAX = 64
"""Calls at once on one connection: a client has one stream and a few calls."""

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", limits.MESSAGE_BYTES),
    ("grpc.max_send_message_length", limits.MESSAGE_BYTES),
    ("grpc.max_metadata_size", METADATA_MAX_BYTES),
    ("grpc.absolute_max_metadata_size", 2 * METADATA_MAX_BYTES),
    ("grpc.max_concurrent_streams", STREAMS_MAX),
    # Clients of other languages ping idle connections; unconfigured, they would be sent away.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
)

PING_EVERY_MS = 30_000
PING_TIMEOUT_MS = 20_000
"""A peer whose machine or network has vanished says nothing: one that does not answer a ping for so
long is cut off, and what its calls held, such as a place among those who watch runs, is free again.
"""


def options_at(address: Address) -> tuple[tuple[str, int], ...]:
    """Return the options of a server at `address`. Over a Unix socket no peer vanishes unnoticed."""
    if address.path is not None:
        return OPTIONS
    return (
        *OPTIONS,
        ("grpc.keepalive_time_ms", PING_EVERY_MS),
        ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),  # a minute otherwise, whatever the former
    )


class Server:
    """The services of one sidecar at one address.

    Needs a running event loop. `bind` raises `ListenError` and `TokenFileError`. `health` says
    whether sessions are served.
    """

    def __init__(self, config: Config, loop: Loop, version: str) -> None:
        self.health = HealthServicer()
        self._config = config
        self._loop = loop
        self._version = version
        self._place: Place | None = None
        self._server: aio.Server | None = None

    def bind(self) -> Address:
        """Take the address; return it, with the port that was given where 0 was asked for."""
        config = self._config
        interceptors = []
        if config.token_file is not None:
            interceptors.append(TokenInterceptor(TokenFile(config.token_file)))
        credentials = _credentials(config)
        server = aio.server(
            interceptors=interceptors,
            options=options_at(config.listen),
            maximum_concurrent_rpcs=CONCURRENT_CALLS_MAX,
        )
        self._add_services(server)

        def add_port(address: str) -> int:
            if credentials is None:
                return server.add_insecure_port(address)
            return server.add_secure_port(address, credentials)

        self._place = Place(config.listen)
        bound = self._place.bind(add_port)
        self._server = server
        return bound

    async def start(self) -> None:
        """Begin to serve."""
        assert self._server is not None, "bound first"
        await self._server.start()

    @property
    def address_is_ours(self) -> bool:
        """Whether callers of the address still reach this process."""
        return self._place is None or self._place.still_ours

    async def stop(self, grace_s: float) -> None:
        """End every call, after `grace_s` at the latest, and let go of the address."""
        self.health.close()
        if self._server is not None:
            await self._server.stop(grace_s)
        if self._place is not None:
            self._place.release()

    def _add_services(self, server: aio.Server) -> None:
        config = self._config
        calls = SessionCalls(self._loop, config.instance_id, self._version)
        session_pb2_grpc.add_SessionServiceServicer_to_server(SessionServicer(calls), server)
        admin = AdminServicer(self._loop, config.namespace)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, server)
        names = (
            session_pb2.DESCRIPTOR.services_by_name["SessionService"].full_name,
            admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name,
            health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
            reflection.SERVICE_NAME,
        )
        reflection.enable_server_reflection(names, server)


def _credentials(config: Config) -> grpc.ServerCredentials | None:
    if config.tls_certificate is None or config.tls_key is None:
        return None
    files = {}
    for name in ("tls_certificate", "tls_key", "tls_client_ca"):
        path = getattr(config, name)
        try:
            files[name] = None if path is None else path.read_bytes()
        except OSError as error:
            raise ListenError(f"{name} {path}: {error.strerror}") from None
    return grpc.ssl_server_credentials(
        [(files["tls_key"] or b"", files["tls_certificate"] or b"")],
        root_certificates=files["tls_client_ca"],
        require_client_auth=files["tls_client_ca"] is not None,
    )
