"""grpc.health.v1: the process, the sessions, and watchers that are never waited for."""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from anarchon_server.rpc.health import SESSION_SERVICE
from tests.unit.server.sidecars import Sidecar, error_of

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def stub(sidecar: Sidecar) -> Any:
    return health_pb2_grpc.HealthStub(sidecar.channel)


async def check(sidecar: Sidecar, service: str) -> Any:
    answer = await stub(sidecar).Check(health_pb2.HealthCheckRequest(service=service))
    return answer.status


async def test_the_process_is_healthy_whatever_its_store(sidecar: Sidecar) -> None:
    assert await check(sidecar, "") == SERVING
    sidecar.server.health.set_ready(False)
    assert await check(sidecar, "") == SERVING


async def test_sessions_are_served_while_the_sidecar_is_ready(sidecar: Sidecar) -> None:
    assert await check(sidecar, SESSION_SERVICE) == NOT_SERVING
    sidecar.server.health.set_ready(True)
    assert await check(sidecar, SESSION_SERVICE) == SERVING
    assert sidecar.server.health.ready


async def test_an_unknown_service_is_not_found(sidecar: Sidecar) -> None:
    error = await error_of(check(sidecar, "some.Service"))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert SESSION_SERVICE in error.details()


async def test_a_watcher_is_told_of_every_change_that_lasts(sidecar: Sidecar) -> None:
    watch = stub(sidecar).Watch(health_pb2.HealthCheckRequest(service=SESSION_SERVICE))
    assert (await watch.read()).status == NOT_SERVING
    sidecar.server.health.set_ready(True)
    sidecar.server.health.set_ready(True)
    assert (await watch.read()).status == SERVING
    sidecar.server.health.set_ready(False)
    assert (await watch.read()).status == NOT_SERVING
    watch.cancel()


async def test_a_watcher_of_an_unknown_service_is_told_so(sidecar: Sidecar) -> None:
    watch = stub(sidecar).Watch(health_pb2.HealthCheckRequest(service="some.Service"))
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    watch.cancel()


async def test_reflection_lists_the_services(sidecar: Sidecar) -> None:
    stub_of: Any = reflection_pb2_grpc.ServerReflectionStub
    reflection = stub_of(sidecar.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    answer = await reflection.ServerReflectionInfo(iter([request])).read()
    names = {service.name for service in answer.list_services_response.service}
    assert {SESSION_SERVICE, "anarchon.v1.AdminService", "grpc.health.v1.Health"} <= names
