"""`anarchon trigger`: run a job now, outside its schedule."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from anarchon import ClientError, SidecarError, SidecarUnavailableError
from anarchon.admin import PAYLOAD_MAX_BYTES, AdminClient
from anarchon.v1 import run_pb2
from anarchon_server.cli import FAILED, _admin

WAIT_EVERY_S = 0.5
AWAY_MAX_S = 60.0
"""How long a sidecar may be away while its run is waited for: it restarts, and the run goes on."""


# The subparsers object has no public type.
def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand `trigger`."""
    parser = subparsers.add_parser(
        "trigger",
        help="run a job now",
        description="Make a run of a job that is due now, outside its schedule. It obeys the job's "
        "overlap policy: with skip it is recorded as skipped where another run is unfinished. With "
        "--wait the exit status is 0 if it succeeded and 1 if not.",
    )
    parser.add_argument("job", metavar="JOB", help="the job's name")
    parser.add_argument(
        "--payload", metavar="FILE", help="handed to the handler, at most 64 KiB; -: standard input"
    )
    parser.add_argument(
        "--request-id",
        metavar="ID",
        default="",
        help="makes it safe to repeat: the same id gives the same run (default: one is drawn)",
    )
    parser.add_argument(
        "--wait",
        action="store_true",
        help="wait until the run has ended; while no instance handles the job, that is never",
    )
    _admin.add_address(parser)
    _admin.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Trigger a run."""
    return _admin.with_admin("trigger", args, lambda admin: _trigger(args, admin))


def _trigger(args: argparse.Namespace, admin: AdminClient) -> int:
    made = admin.trigger_run(args.job, payload=_payload(args.payload), request_id=args.request_id)
    if args.wait:
        try:
            made = _ended(admin, made)
        except (SidecarError, KeyboardInterrupt):
            _say(f"{args.job} {_admin.shown_slot(made.slot)} was triggered, and is not waited for")
            raise
    if args.json:
        _admin.print_json(made)
    else:
        print(f"{args.job} {_admin.shown_slot(made.slot)}: {_outcome(made)}")
    succeeded = made.state == run_pb2.RUN_STATE_SUCCESS
    skipped = made.state == run_pb2.RUN_STATE_SKIPPED
    return FAILED if skipped or (args.wait and not succeeded) else 0


def _payload(file: str | None) -> bytes:
    """What the handler is handed. No more is read than can be."""
    if file is None:
        return b""
    try:
        if file == "-":
            payload = sys.stdin.buffer.read(PAYLOAD_MAX_BYTES + 1)
        else:
            with Path(file).open("rb") as opened:
                payload = opened.read(PAYLOAD_MAX_BYTES + 1)
    except OSError as error:
        raise ClientError(f"--payload {file}: {error.strerror}") from None
    if len(payload) > PAYLOAD_MAX_BYTES:
        raise ClientError(
            f"--payload {file}: more than {PAYLOAD_MAX_BYTES} bytes, the most; hand over where the "
            "data is instead"
        )
    return payload


def _ended(admin: AdminClient, made: run_pb2.Run) -> run_pb2.Run:
    answered = time.monotonic()
    said = False
    while made.state not in _admin.FINAL:
        time.sleep(WAIT_EVERY_S)
        try:
            made = admin.get_run(made.job, made.slot)
            answered = time.monotonic()
        except SidecarUnavailableError as error:
            if time.monotonic() - answered > AWAY_MAX_S:
                raise
            if not said:
                _say(f"{error}; asking again for {AWAY_MAX_S:g} s")
            said = True
    return made


def _say(line: str) -> None:
    print(f"anarchon trigger: {line}", file=sys.stderr, flush=True)


def _outcome(made: run_pb2.Run) -> str:
    """The state, and why: the protocol's reason, else what was raised."""
    failure = made.attempts[-1].failure if made.attempts else run_pb2.Failure()
    raised = ": ".join(filter(None, (failure.type, failure.message)))
    words = filter(None, (_admin.word_of(made, "state"), made.reason or raised))
    return _admin.printable(", ".join(words))
