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
    return _admin.with_channel("health", args, _ask)


def _ask(channel: grpc.Channel, token: _admin.Metadata) -> int:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service=SERVICE)
    answer = stub.Check(request, timeout=TIMEOUT_S, metadata=token)
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        print("ready")
        return 0
    print("anarchon health: not ready: the sidecar's log says why", file=sys.stderr)
    return _admin.FAILED
