"""`anarchon runs`: history, and what runs now."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Iterator

from anarchon.admin import AdminClient
from anarchon.v1 import run_pb2
from anarchon_server.cli import _admin

LIMIT_DEFAULT = 20
WATCH_EVERY_S = 1.0

_WATCHED_MAX = 500
_PREFIX = "RUN_STATE_"
_STATES = [name.removeprefix(_PREFIX).lower() for name in run_pb2.RunState.keys()[1:]]
_HEADS = ("JOB", "SLOT (UTC)", "STATE", "REASON", "ATTEMPT", "INSTANCE", "STARTED", "ENDED")


# The subparsers object has no public type.
def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand `runs`."""
    parser = subparsers.add_parser(
        "runs",
        help="list the runs, newest first",
        description="List the runs of the namespace, newest slot first.",
    )
    parser.add_argument("--job", metavar="NAME", default="", help="only of this job")
    parser.add_argument(
        "--state",
        metavar="STATE",
        action="append",
        default=[],
        choices=_STATES,
        help=f"only in this state; may be given again: {', '.join(_STATES)}",
    )
    parser.add_argument(
        "--limit",
        metavar="N",
        type=_positive,
        default=LIMIT_DEFAULT,
        help=f"at most so many (default: {LIMIT_DEFAULT})",
    )
    parser.add_argument(
        "--watch", action="store_true", help="go on printing runs as they change, until stopped"
    )
    _admin.add_address(parser)
    _admin.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """List the runs."""
    return _admin.with_admin("runs", args, lambda admin: _list(args, admin))


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r}: write a whole number from 1")
    return int(text)


def _list(args: argparse.Namespace, admin: AdminClient) -> int:
    if args.watch:
        _watch(args, admin)
    elif args.json:
        for found in _runs(args, admin, args.limit):
            _admin.print_json(found)
    else:
        _admin.print_table(_HEADS, map(_row, _runs(args, admin, args.limit)))
    return 0


def _watch(args: argparse.Namespace, admin: AdminClient) -> None:
    """Print the newest runs, oldest first, and then every one that is new or has changed."""
    seen: dict[tuple[str, int], bytes] = {}
    limit = args.limit
    while True:
        for found in reversed(list(_runs(args, admin, limit))):
            key = (found.job, found.slot)
            # A lease moves on with every heartbeat, which is no change for people.
            now = run_pb2.Run()
            now.CopyFrom(found)
            now.ClearField("lease_end_time")
            content = now.SerializeToString(deterministic=True)
            if seen.pop(key, None) != content:
                _show_change(args, found)
            seen[key] = content
        while len(seen) > 2 * _WATCHED_MAX:
            del seen[next(iter(seen))]
        limit = _WATCHED_MAX
        _pause(WATCH_EVERY_S)


def _pause(seconds: float) -> None:
    threading.Event().wait(seconds)


def _show_change(args: argparse.Namespace, found: run_pb2.Run) -> None:
    if args.json:
        _admin.print_json(found)
    else:
        print("  ".join(filter(None, _row(found))), flush=True)


def _runs(args: argparse.Namespace, admin: AdminClient, limit: int) -> Iterator[run_pb2.Run]:
    return admin.list_runs(job=args.job, states=map(_state, args.state), limit=limit)


def _state(word: str) -> run_pb2.RunState:
    # The stubs type a value's number and its name alike; only the lookup by name is untyped.
    value: run_pb2.RunState = getattr(run_pb2, _PREFIX + word.upper())
    return value


def _row(found: run_pb2.Run) -> tuple[str, ...]:
    last = found.attempts[-1] if found.attempts else run_pb2.Attempt()
    return (
        found.job,
        _admin.shown_slot(found.slot),
        _admin.word_of(found, "state"),
        found.reason,
        str(last.attempt or ""),
        last.instance_id,
        _admin.shown_time(last, "start_time"),
        _admin.shown_time(last, "end_time"),
    )
