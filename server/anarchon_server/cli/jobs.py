"""`anarchon jobs`: what is registered in the namespace."""

from __future__ import annotations

import argparse

from anarchon.admin import AdminClient
from anarchon.v1 import admin_pb2
from anarchon_server.cli import _admin


# The subparsers object has no public type.
def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand `jobs`."""
    parser = subparsers.add_parser(
        "jobs", help="list the jobs", description="List the jobs of the namespace by name."
    )
    _admin.add_address(parser)
    _admin.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """List the jobs."""
    return _admin.with_admin("jobs", args, lambda admin: _list(args, admin))


def _list(args: argparse.Namespace, admin: AdminClient) -> int:
    if args.json:
        for job in admin.list_jobs():
            _admin.print_json(job)
    else:
        heads = ("JOB", "SCHEDULE", "NEXT (UTC)", "LAST RUN", "INSTANCES", "NOTES")
        _admin.print_table(heads, map(_row, admin.list_jobs()))
    _admin.say_scope("jobs", admin)
    return 0


def _row(job: admin_pb2.Job) -> tuple[str, ...]:
    notes = ["definitions differ"] if job.definitions_differ else []
    if job.paused:
        notes.append(f"paused: {job.pause_reason}" if job.pause_reason else "paused")
    handled = bool(job.instance_ids)
    if not handled:
        notes.append("no instance handles it")
    last = ""
    if job.HasField("last_run"):
        state = _admin.word_of(job.last_run, "state")
        last = f"{state} {_admin.shown_slot(job.last_run.slot)}"
    return (
        job.spec.name,
        job.description,
        _admin.shown_slot(job.next_slots[0]) if job.next_slots and handled else "-",
        last,
        str(len(job.instance_ids)),
        ", ".join(notes),
    )
