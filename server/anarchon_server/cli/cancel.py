"""`anarchon cancel`: ask a run to stop."""

from __future__ import annotations

import argparse

from anarchon.admin import AdminClient
from anarchon_server.cli import _admin


# The subparsers object has no public type.
def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand `cancel`."""
    parser = subparsers.add_parser(
        "cancel",
        help="ask a run to stop",
        description="Ask a run to stop. One that waits, or that no instance runs now, ends at once; "
        "a handler has the job's cancel_grace to obey.",
    )
    parser.add_argument("job", metavar="JOB", help="the job's name")
    parser.add_argument(
        "slot",
        metavar="SLOT",
        type=_admin.slot_of,
        help="the run's slot as it is listed, or in milliseconds",
    )
    parser.add_argument("--reason", metavar="TEXT", default="", help="handed to the handler")
    _admin.add_address(parser)
    _admin.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Cancel the run."""
    return _admin.with_admin("cancel", args, lambda admin: _cancel(args, admin))


def _cancel(args: argparse.Namespace, admin: AdminClient) -> int:
    cancelled = admin.cancel_run(args.job, args.slot, reason=args.reason)
    if args.json:
        _admin.print_json(cancelled)
        return 0
    state = _admin.word_of(cancelled, "state")
    name = f"{args.job} {_admin.shown_slot(cancelled.slot)}"
    if state in ("failed", "skipped"):
        print(f"{name}: {', '.join(filter(None, (state, cancelled.reason)))}")
    else:
        print(f"{name}: {state}, asked to stop")
    return 0
