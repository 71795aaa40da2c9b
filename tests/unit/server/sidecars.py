"""A whole sidecar but for its process: the real engine on the memory store, served on a free port."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc import aio

from anarchon.v1 import admin_pb2_grpc, job_pb2, session_pb2, session_pb2_grpc
from anarchon_server.clock import SystemClock
from anarchon_server.config import Config, load
from anarchon_server.core import limits
from anarchon_server.core.engine import Engine, Status
from anarchon_server.core.settings import Settings
from anarchon_server.core.store import OpenOptions, Store
from anarchon_server.loop import Loop
from anarchon_server.opening import open_store
from anarchon_server.rpc.server import Server

VERSION = "0.1.0"


@dataclass
class Sidecar:
    """What a test can reach: the parts, and stubs connected to the address."""

    loop: Loop
    server: Server
    store: Store
    address: str
    channel: aio.Channel
    sessions: Any
    admin: Any


def make_config(**flags: str) -> Config:
    return load({"store": "memory:", "listen": "127.0.0.1:0", "instance_id": "test:1", **flags}, {})


def make_loop(
    store: Store,
    on_status: Callable[[Status], None] = lambda _: None,
    op_timeout_ms: int = limits.OP_TIMEOUT,
) -> Loop:
    numbers = itertools.count(1)
    engine = Engine(
        Settings(instance_id="test:1", incarnation="f" * 32, version=VERSION),
        store.capabilities,
        draw=lambda _: 0,
        new_nonce=lambda: f"{next(numbers):032x}",
    )
    return Loop(engine, store, SystemClock(), on_status=on_status, op_timeout_ms=op_timeout_ms)


async def start_sidecar(*, leases: bool = True, **flags: str) -> Sidecar:
    store = open_store("memory:", OpenOptions("default", SystemClock(), leases=leases))
    await store.open()
    loop = make_loop(store)
    server = Server(make_config(**flags), loop, VERSION)
    address = str(server.bind())
    loop.start()
    await server.start()
    await loop.settled()
    channel = aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
    return Sidecar(
        loop=loop,
        server=server,
        store=store,
        address=address,
        channel=channel,
        sessions=session_pb2_grpc.SessionServiceStub(channel),
        admin=admin_pb2_grpc.AdminServiceStub(channel),
    )


async def stop_sidecar(sidecar: Sidecar) -> None:
    await sidecar.channel.close()
    await sidecar.server.stop(0)
    await sidecar.loop.close()
    await sidecar.store.close()


def every(name: str, period_ms: int = 3_600_000) -> job_pb2.JobSpec:
    seconds, rest_ms = divmod(period_ms, 1_000)
    period = Duration(seconds=seconds, nanos=rest_ms * 1_000_000)
    return job_pb2.JobSpec(name=name, every=job_pb2.EverySchedule(period=period))


def subscribe_request(
    *jobs: job_pb2.JobSpec,
    session_id: str | None = None,
    version: str = VERSION,
    max_concurrency: int = 10,
    in_flight: tuple[str, ...] = (),
) -> session_pb2.SubscribeRequest:
    return session_pb2.SubscribeRequest(
        session_id=session_id or str(uuid.uuid4()),
        client=session_pb2.ClientInfo(language="python", version=version),
        jobs=jobs,
        max_concurrency=max_concurrency,
        in_flight=in_flight,
    )


def trailer(error: aio.AioRpcError, key: str = "anarchon-reason") -> Any:
    return dict(error.trailing_metadata() or ()).get(key)


async def error_of(call: Any) -> Any:
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is not grpc.StatusCode.UNKNOWN, caught.value.details()
    return caught.value
