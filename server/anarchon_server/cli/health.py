"""`anarchon health`: whether a sidecar is ready, by the exit status, for probes that run commands."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from anarchon_server.cli import _admin

SERVICE = "anarchon.v1.SessionService"
TIMEOUT_S = 3.0


# The subparsers object has no public type.
def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand `health`."""
    parser = subparsers.add_parser(
        "health",
        help="say whether a sidecar is ready, by the exit status",
        description="Exit with 0 when the sidecar is ready: it reaches its store and is not "
        "stopping. Otherwise say why not, and exit with 1.",
    )
    _admin.add_address(parser)


def run(args: argparse.Namespace) -> int:
    """Ask a sidecar."""
    return _admin.in_one_line("health", lambda: _ask(args))


def _ask(args: argparse.Namespace) -> int:
    endpoint = _admin.endpoint_of(args)
    request = health_pb2.HealthCheckRequest(service=SERVICE)
    with endpoint.sync_channel() as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(request, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            raise endpoint.error(error) from None
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        print("ready")
        return 0
    print("anarchon health: not ready: the sidecar's log says why", file=sys.stderr)
    return _admin.FAILED
