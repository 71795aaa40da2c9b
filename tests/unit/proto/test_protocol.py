"""The protocol's files, its stubs and its README agree with one another."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from anarchon.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    error_pb2,
    job_pb2,
    run_pb2,
    session_pb2,
    session_pb2_grpc,
)

ROOT = Path(__file__).parents[3]
README = (ROOT / "proto" / "README.md").read_text()
STUBS = [admin_pb2, error_pb2, job_pb2, run_pb2, session_pb2]


def test_every_proto_file_has_its_stub_and_every_stub_its_file() -> None:
    protos = {path.stem for path in (ROOT / "proto" / "anarchon" / "v1").glob("*.proto")}
    stubs = {module.DESCRIPTOR.name.split("/")[-1].removesuffix(".proto") for module in STUBS}
    assert stubs == protos


def test_a_proto_files_path_is_its_import_path() -> None:
    for module in STUBS:
        assert module.DESCRIPTOR.name.startswith("anarchon/v1/")
        assert module.DESCRIPTOR.package == "anarchon.v1"


@pytest.mark.parametrize("name", error_pb2.ErrorReason.keys()[1:])
def test_the_readme_explains_every_error_reason(name: str) -> None:
    assert f"`{name.removeprefix('ERROR_REASON_')}`" in README


@pytest.mark.parametrize("name", session_pb2.ReceiptStatus.keys()[1:])
def test_the_readme_explains_every_receipt(name: str) -> None:
    assert f"`{name.removeprefix('RECEIPT_STATUS_')}`" in README


def test_the_readme_names_no_reason_that_is_not_there() -> None:
    table = README.split("## Errors")[1].split("## Limits")[0]
    rows = [row.split("|")[2] for row in table.splitlines() if row.startswith("| `")]
    named = {reason for cell in rows for reason in re.findall(r"`([A-Z_]+)`", cell)}
    assert named == {
        name.removeprefix("ERROR_REASON_") for name in error_pb2.ErrorReason.keys()[1:]
    }


def test_the_stubs_ask_for_no_newer_grpc_than_the_oldest_supported() -> None:
    assert session_pb2_grpc.GRPC_GENERATED_VERSION == "1.72.2"
    assert admin_pb2_grpc.GRPC_GENERATED_VERSION == "1.72.2"


def test_zero_of_every_enum_is_unspecified() -> None:
    for module in STUBS:
        for name, enum in module.DESCRIPTOR.enum_types_by_name.items():
            zero = enum.values_by_number[0].name
            assert zero.endswith("_UNSPECIFIED"), f"{name}: {zero}"


def test_a_service_without_its_methods_written_answers_unimplemented() -> None:
    """A stub and a servicer meet over a real channel, so that the service's name is right."""
    code = """
import asyncio, grpc
from anarchon.v1 import session_pb2, session_pb2_grpc

async def main():
    server = grpc.aio.server()
    session_pb2_grpc.add_SessionServiceServicer_to_server(
        session_pb2_grpc.SessionServiceServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = session_pb2_grpc.SessionServiceStub(channel)
        try:
            await stub.KeepAlive(session_pb2.KeepAliveRequest(), timeout=10)
        except grpc.aio.AioRpcError as error:
            print(error.code().name)
    await server.stop(None)

asyncio.run(main())
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert result.stdout.strip() == grpc.StatusCode.UNIMPLEMENTED.name
