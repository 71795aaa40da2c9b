"""`anarchon resume`: run a paused job's slots again."""

from __future__ import annotations

import argparse

from anarchon.admin import AdminClient
from anarchon_server.cli import _admin


# The subparsers object has no public type.
def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand `resume`."""
    parser = subparsers.add_parser(
        "resume",
        help="run a paused job's slots again",
        description="Run a paused job's slots again, from now on. Those that fell due meanwhile are "
        "recorded as skipped, in one row.",
    )
    parser.add_argument("job", metavar="JOB", help="the job's name")
    _admin.add_address(parser)
    _admin.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Resume the job."""
    return _admin.with_admin("resume", args, lambda admin: _resume(args, admin))


def _resume(args: argparse.Namespace, admin: AdminClient) -> int:
    job = admin.resume_job(args.job)
    if args.json:
        _admin.print_json(job)
    else:
        coming = f"; next {_admin.shown_slot(job.next_slots[0])}" if job.next_slots else ""
        print(f"{args.job} is not paused{coming}")
    return 0
