"""`anarchon instances`: the sidecars of the namespace, as they were last heard of."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import grpc

from anarchon.v1 import admin_pb2, admin_pb2_grpc
from anarchon_server.cli import _admin


# The subparsers object has no public type.
def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand `instances`."""
    parser = subparsers.add_parser(
        "instances",
        help="list the instances",
        description="List the sidecars of the namespace that were heard of lately.",
    )
    _admin.add_address(parser)
    _admin.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """List the instances."""
    return _admin.with_channel(
        "instances", args, lambda channel, token: _list(args, channel, token)
    )


def _list(args: argparse.Namespace, channel: grpc.Channel, token: _admin.Metadata) -> int:
    instances = _instances(admin_pb2_grpc.AdminServiceStub(channel), token)
    if args.json:
        for instance in instances:
            _admin.print_json(instance)
    else:
        heads = ("INSTANCE", "STATE", "READY", "RUNNING", "SEEN (UTC)", "VERSION", "NOTES")
        _admin.print_table(heads, map(_row, instances))
    return 0


def _instances(
    stub: admin_pb2_grpc.AdminServiceStub, token: _admin.Metadata
) -> Iterator[admin_pb2.Instance]:
    page_token = ""
    while True:
        request = admin_pb2.ListInstancesRequest(page_token=page_token)
        page = stub.ListInstances(request, timeout=_admin.TIMEOUT_S, metadata=token)
        yield from page.instances
        page_token = page.next_page_token
        if not page_token:
            return


def _row(instance: admin_pb2.Instance) -> tuple[str, ...]:
    return (
        instance.instance_id,
        _admin.word_of(instance, "state"),
        "yes" if instance.ready else "no",
        str(instance.running),
        _admin.shown_time(instance, "seen_time"),
        instance.version,
        "; ".join((*instance.reasons, *instance.doubts)),
    )
