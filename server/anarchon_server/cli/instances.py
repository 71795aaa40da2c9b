"""`anarchon instances`: the sidecars of the namespace, as they were last heard of."""

from __future__ import annotations

import argparse

from anarchon.admin import AdminClient
from anarchon.v1 import admin_pb2
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
    return _admin.with_admin("instances", args, lambda admin: _list(args, admin))


def _list(args: argparse.Namespace, admin: AdminClient) -> int:
    if args.json:
        for instance in admin.list_instances():
            # Only its own sessions a sidecar knows, and only GetInstance tells of them.
            _admin.print_json(instance, without="sessions")
    else:
        heads = (
            "INSTANCE",
            "STATE",
            "READY",
            "RUNNING",
            "SEEN (UTC)",
            "VERSION",
            "TZDATA",
            "NOTES",
        )
        _admin.print_table(heads, map(_row, admin.list_instances()))
    _admin.say_scope("instances", admin)
    return 0


def _row(instance: admin_pb2.Instance) -> tuple[str, ...]:
    return (
        instance.instance_id,
        _admin.word_of(instance, "state"),
        "yes" if instance.ready else "no",
        str(instance.running),
        _admin.shown_time(instance, "seen_time"),
        instance.version,
        instance.tzdata_version,
        "; ".join((*instance.reasons, *instance.doubts)),
    )
