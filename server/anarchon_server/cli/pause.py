"""`anarchon pause`: stop running a job's slots, everywhere."""

from __future__ import annotations

import argparse

from anarchon.admin import AdminClient
from anarchon_server.cli import _admin


# The subparsers object has no public type.
def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand `pause`."""
    parser = subparsers.add_parser(
        "pause",
        help="stop running a job's slots",
        description="Stop running a job's slots, everywhere. What runs goes on, and so do runs "
        "that are triggered. Slots that come are passed over until the job is resumed.",
    )
    parser.add_argument("job", metavar="JOB", help="the job's name")
    parser.add_argument(
        "--reason", metavar="TEXT", default="", help="kept with the job, for people"
    )
    _admin.add_address(parser)
    _admin.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Pause the job."""
    return _admin.with_admin("pause", args, lambda admin: _pause(args, admin))


def _pause(args: argparse.Namespace, admin: AdminClient) -> int:
    job = admin.pause_job(args.job, reason=args.reason)
    if args.json:
        _admin.print_json(job)
    else:
        print(
            f"{args.job} is paused: none of its slots runs until anarchon resume {args.job}; "
            "what is triggered does"
        )
    return 0
