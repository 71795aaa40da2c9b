"""Call tokens: who has none is refused, and the file may change."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from anarchon.v1 import admin_pb2, session_pb2
from anarchon_server.rpc.auth import TokenFile, TokenFileError
from tests.unit.server.sidecars import (
    error_of,
    every,
    start_sidecar,
    stop_sidecar,
    subscribe_request,
    trailer,
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("old-token\n")
    return path


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


def test_two_tokens_are_valid_while_one_replaces_the_other(file: Path) -> None:
    tokens = TokenFile(file)
    assert tokens.accepts("Bearer old-token")
    assert not tokens.accepts("Bearer new-token")
    file.write_text("old-token\n\n  new-token  \n")
    assert tokens.accepts("Bearer old-token")
    assert tokens.accepts("bearer new-token")
    file.write_text("new-token")
    assert not tokens.accepts("Bearer old-token")


@pytest.mark.parametrize(
    "authorization", ["", "Bearer", "Bearer ", "Basic old-token", "old-token", "Bearer old-toke"]
)
def test_anything_else_is_refused(file: Path, authorization: str) -> None:
    assert not TokenFile(file).accepts(authorization)


def test_a_file_without_tokens_or_without_access_is_refused_at_start(file: Path) -> None:
    file.write_text(" \n\n")
    with pytest.raises(TokenFileError, match="one token a line"):
        TokenFile(file)
    with pytest.raises(TokenFileError, match="No such file"):
        TokenFile(file.parent / "none")
    with pytest.raises(TokenFileError, match="Is a directory"):
        TokenFile(file.parent)


def test_the_tokens_before_stay_valid_while_the_file_is_being_replaced(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = TokenFile(file)
    file.unlink()
    assert tokens.accepts("Bearer old-token")
    assert [r.getMessage() for r in caplog.records] == ["token_file_unreadable"]
    file.write_text("new-token")
    assert tokens.accepts("Bearer new-token")
    assert not tokens.accepts("Bearer old-token")


def test_s27_a_file_that_cannot_be_read_is_told_once_and_again_when_that_changes(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def told() -> list[str]:
        for _ in range(3):
            assert tokens.accepts("Bearer old-token")
        errors = [vars(r)["fields"]["error"] for r in caplog.records]
        caplog.clear()
        return errors

    tokens = TokenFile(file)
    gone = f"token_file {file}: No such file or directory"
    file.unlink()
    assert told() == [gone]
    file.write_text("")
    assert told() == [f"token_file {file}: is empty: write one token a line"]
    file.write_text("old-token")
    assert told() == []
    file.unlink()
    assert told() == [gone]


async def test_every_call_but_health_needs_the_token(file: Path) -> None:
    sidecar = await start_sidecar(token_file=str(file))
    stub_of: Any = reflection_pb2_grpc.ServerReflectionStub
    reflection = stub_of(sidecar.channel)
    health: Any = health_pb2_grpc.HealthStub(sidecar.channel)
    session_id = str(uuid.uuid4())
    listing = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    try:
        for call in (
            sidecar.admin.ListJobs(admin_pb2.ListJobsRequest()),
            sidecar.admin.ListJobs(admin_pb2.ListJobsRequest(), metadata=bearer("wrong")),
            sidecar.sessions.Subscribe(subscribe_request(every("a"))).read(),
            sidecar.sessions.KeepAlive(session_pb2.KeepAliveRequest(session_id=session_id)),
            reflection.ServerReflectionInfo(listing).read(),
        ):
            error = await error_of(call)
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED
            assert trailer(error) == "BAD_CREDENTIALS"
            assert "ANARCHON_TOKEN_FILE" in (error.details() or "")
        await health.Check(health_pb2.HealthCheckRequest())
        token = bearer("old-token")
        await sidecar.admin.ListJobs(admin_pb2.ListJobsRequest(), metadata=token)
        stream = sidecar.sessions.Subscribe(subscribe_request(every("a")), metadata=token)
        assert (await stream.read()).WhichOneof("event") == "attached"
        stream.cancel()
    finally:
        await stop_sidecar(sidecar)
