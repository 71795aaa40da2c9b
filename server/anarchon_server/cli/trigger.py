"""`anarchon trigger`: run a job now, outside its schedule."""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

from anarchon import ClientError, SidecarError, SidecarUnavailableError
from anarchon.admin import PAYLOAD_MAX_BYTES, AdminClient
from anarchon.v1 import run_pb2
from anarchon_server.cli import FAILED, _admin
from anarchon_server.core.slots import ScheduleError, parse_duration_ms

WAIT_EVERY_S = 0.5
AWAY_MAX_S = 60.0
"""How long a sidecar may be away while its run is waited for: it restarts, and the run goes on."""

TIMED_OUT = 124
"""The exit status of a wait that `--timeout` has ended, as that of timeout(1)."""

_HELD = (run_pb2.RUN_STATE_CLAIMED, run_pb2.RUN_STATE_RUNNING)
"""The states in which an instance has the run, also one that takes no more of the job."""


# The subparsers object has no public type.
def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand `trigger`."""
    parser = subparsers.add_parser(
        "trigger",
        help="run a job now",
        description="Make a run of a job that is due now, outside its schedule. It obeys the job's "
        "overlap policy: with skip it is recorded as skipped where another run is unfinished. With "
        "--wait the exit status is 0 if it succeeded and 1 if not; 124 if it had not ended when "
        "--timeout was over, and 130 after Ctrl-C: neither stops the run.",
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
        help="wait until the run has ended, and say where no instance handles the job",
    )
    parser.add_argument(
        "--timeout",
        metavar="DURATION",
        help='how long --wait waits at most, such as "90s" or "1h30m" (default: until it has ended)',
    )
    _admin.add_address(parser)
    _admin.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Trigger a run."""
    return _admin.with_admin("trigger", args, lambda admin: _trigger(args, admin))


def _trigger(args: argparse.Namespace, admin: AdminClient) -> int:
    timeout_s = _timeout_s(args)
    made = admin.trigger_run(args.job, payload=_payload(args.payload), request_id=args.request_id)
    if args.wait:
        try:
            made = _Wait(admin, made, args.timeout).until_ended(timeout_s)
        except (SidecarError, KeyboardInterrupt):
            _say_left(made)
            raise
    if args.json:
        _admin.print_json(made)
    else:
        print(f"{args.job} {_admin.shown_slot(made.slot)}: {_outcome(made)}")
    if args.wait and made.state not in _admin.FINAL:
        _say(f"it had not ended when --timeout {args.timeout} was over")
        _say_left(made)
        return TIMED_OUT
    succeeded = made.state == run_pb2.RUN_STATE_SUCCESS
    skipped = made.state == run_pb2.RUN_STATE_SKIPPED
    return FAILED if skipped or (args.wait and not succeeded) else 0


def _timeout_s(args: argparse.Namespace) -> float:
    """How long to wait at most. Raises `ClientError`, before anything is triggered."""
    if args.timeout is None:
        return math.inf
    if not args.wait:
        raise ClientError("--timeout goes with --wait")
    try:
        timeout_ms = parse_duration_ms(args.timeout)
    except ScheduleError as error:
        raise ClientError(f"--timeout {args.timeout!r}: {error.expected}") from None
    if timeout_ms == 0:
        raise ClientError(f"--timeout {args.timeout!r}: must be more than 0")
    return timeout_ms / 1_000


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


class _Wait:
    """Until a run has ended. What holds it up is said on standard error, each time that changes."""

    def __init__(self, admin: AdminClient, made: run_pb2.Run, timeout: str | None) -> None:
        self._admin = admin
        self._made = made
        self._most = f"; waiting {timeout} at most" if timeout else ""
        self._answered_at = time.monotonic()
        self._handled = True
        self._said_away = False

    def until_ended(self, timeout_s: float) -> run_pb2.Run:
        """Return the run as it is in the end, or when the time is over. Raises `SidecarError`."""
        ends_at = time.monotonic() + timeout_s
        while True:
            try:
                self._look()
            except SidecarUnavailableError as error:
                self._bear(error)
            left_s = ends_at - time.monotonic()
            if self._made.state in _admin.FINAL or left_s <= 0:
                return self._made
            time.sleep(min(WAIT_EVERY_S, left_s))

    def _look(self) -> None:
        self._made = self._admin.get_run(self._made.job, self._made.slot)
        if self._made.state not in (*_HELD, *_admin.FINAL):
            self._say_who_handles(self._made.job)
        self._answered_at = time.monotonic()

    def _say_who_handles(self, job: str) -> None:
        who = self._admin.get_job(job).instance_ids
        if self._handled and not who:
            _say(f"no instance handles {job} now; it runs when one does{self._most}")
        elif who and not self._handled:
            _say(_admin.printable(f"{who[0]} handles {job} now"))
        self._handled = bool(who)

    def _bear(self, error: SidecarUnavailableError) -> None:
        """Wait on for a sidecar that is away. Raises its error where that lasts."""
        if time.monotonic() - self._answered_at > AWAY_MAX_S:
            raise error
        if not self._said_away:
            _say(f"{error}; asking again for {AWAY_MAX_S:g} s")
        self._said_away = True


def _say_left(made: run_pb2.Run) -> None:
    """Name the run that goes on, and how to see what becomes of it."""
    slot = _admin.shown_slot(made.slot)
    _say(
        f"{made.job} {slot} was triggered, and is not waited for: anarchon runs --job {made.job} "
        f"--slot {slot} shows it"
    )


def _say(line: str) -> None:
    print(f"anarchon trigger: {line}", file=sys.stderr, flush=True)


def _outcome(made: run_pb2.Run) -> str:
    """The state, and why: the protocol's reason, else what was raised."""
    failure = made.attempts[-1].failure if made.attempts else run_pb2.Failure()
    raised = ": ".join(filter(None, (failure.type, failure.message)))
    words = filter(None, (_admin.word_of(made, "state"), made.reason or raised))
    return _admin.printable(", ".join(words))
