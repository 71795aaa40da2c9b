"""`anarchon exec`: a command as a job's handler, for services in no supported language and crontabs."""

from __future__ import annotations

import argparse
import logging
import re
import shutil
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from anarchon import (
    AnarchonClient,
    ClientError,
    Cron,
    Every,
    Job,
    JobError,
    OnTrigger,
    RefusedError,
)
from anarchon_server.cli import USAGE_ERROR, _admin
from anarchon_server.cli._command import Command, can_die_with_us
from anarchon_server.core import limits
from anarchon_server.core.slots import ScheduleError, parse_duration_ms

_DURATIONS = (
    ("jitter", "the longest random wait before a slot is claimed"),
    ("timeout", "how long one attempt may take"),
    ("lease", "how long a runner is believed after its last heartbeat"),
    ("start-deadline", "a slot that nobody claimed for so long is missed"),
    ("catch-up-window", "no slot older than this is caught up"),
    ("retry-delay", "the pause before the first retry"),
    ("retry-max-delay", "no pause is longer than this"),
    ("cancel-grace", "how long after SIGTERM the command is killed (default: 5s)"),
    ("stop-grace", "how long a running command may go on when this program is stopped"),
)
_NUMBERS = (
    ("catch-up-limit", "no more slots than this are caught up"),
    ("max-attempts", "attempts a run may have because its runners died"),
    ("retries", "attempts that follow failed ones"),
    ("concurrency", "runs of the job that this program executes at once"),
)

NOT_FOUND, NOT_EXECUTABLE = 127, 126
"""The exit statuses of a shell that cannot run a command."""


# The subparsers object has no public type.
def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand `exec`."""
    parser = subparsers.add_parser(
        "exec",
        help="run a command as a job",
        usage="anarchon exec --job NAME (--every DURATION | --cron EXPRESSION | --on-trigger | "
        "--by-name) [policies] -- COMMAND [ARG ...]",
        description="Run a command as the handler of a job, beside a sidecar, until stopped. The "
        "exit status is the result: 0 is success, everything else a failure; the end of the "
        "output is kept in history. The command finds ANARCHON_JOB, ANARCHON_SLOT, "
        "ANARCHON_ATTEMPT, ANARCHON_RUN_TOKEN, ANARCHON_FENCE and ANARCHON_TRIGGER in its environment, "
        "and the payload of a run that was triggered on its standard input. A cancel is SIGTERM to its process group, and after --cancel-grace SIGKILL to all that it started. The "
        "exit status is 127 for a command that is not there and 126 for one that cannot be run.",
    )
    parser.add_argument("--job", metavar="NAME", required=True, help="the job's name")
    schedule = parser.add_mutually_exclusive_group(required=True)
    schedule.add_argument("--every", metavar="DURATION", help='a grid: "10m"')
    schedule.add_argument("--cron", metavar="EXPRESSION", help='a calendar: "0 3 * * *"')
    schedule.add_argument(
        "--on-trigger", action="store_true", help="no schedule: run when it is triggered"
    )
    schedule.add_argument(
        "--by-name", action="store_true", help="the sidecar's configuration has the job"
    )
    parser.add_argument("--offset", metavar="DURATION", help="moves the grid")
    parser.add_argument("--tz", metavar="ZONE", help="the calendar's time zone (default: UTC)")
    for name, about in _DURATIONS:
        parser.add_argument(f"--{name}", metavar="DURATION", help=about)
    for name, about in _NUMBERS:
        parser.add_argument(f"--{name}", metavar="N", type=int, help=about)
    parser.add_argument(
        "--retry-factor", metavar="F", type=float, help="each pause is so much longer"
    )
    parser.add_argument("--overlap", choices=("skip", "allow", "queue", "cancel"))
    parser.add_argument("--catch-up", choices=("none", "latest", "all"))
    parser.add_argument(
        "command_line", metavar="COMMAND", nargs=argparse.REMAINDER, help="after --: what to run"
    )
    _admin.add_address(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command whenever its slot comes, until SIGINT or SIGTERM."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    line = args.command_line[1:] if args.command_line[:1] == ["--"] else args.command_line
    if not line:
        print("anarchon exec: name a command after --", file=sys.stderr)
        return USAGE_ERROR
    if (problem := _cannot_run(line[0])) is not None:
        status, why = problem
        print(f"anarchon exec: {line[0]}: {why}", file=sys.stderr)
        return status
    return _admin.in_one_line("exec", lambda: _serve(args, line))


def _cannot_run(program: str) -> tuple[int, str] | None:
    """The status that a shell gives, and why, where the program cannot be run as things are now."""
    if shutil.which(program) is not None:
        return None
    if "/" not in program:
        return NOT_FOUND, "there is no such program in PATH"
    if Path(program).exists():
        return NOT_EXECUTABLE, "is no program that this user may run"
    return NOT_FOUND, "there is no such program"


def _serve(args: argparse.Namespace, line: list[str]) -> int:
    command = Command(line, _grace_of(args))
    job = _job_of(args, command)
    endpoint = _admin.endpoint_of(args)
    client = AnarchonClient(
        endpoint.address,
        token_file=endpoint.token_file,
        credentials=endpoint.credentials,
        watched=can_die_with_us(),
    )
    try:
        client.run([job])
    except RefusedError as error:
        raise RefusedError(_said_by_flag(str(error)), error.reason) from None
    finally:
        command.flush()
    return 0


def _grace_of(args: argparse.Namespace) -> timedelta:
    """How long a command that was asked to stop may take."""
    if args.cancel_grace is None:
        return timedelta(milliseconds=limits.CANCEL_GRACE)
    try:
        return timedelta(milliseconds=parse_duration_ms(args.cancel_grace))
    except ScheduleError as error:
        raise ClientError(f"--cancel-grace {args.cancel_grace!r}: {error.expected}") from None


def _job_of(args: argparse.Namespace, command: Command) -> Job:
    """Return the job. Raises `ClientError`, which names the flag that was given."""
    for flag, wants in (("offset", "every"), ("tz", "cron")):
        if getattr(args, flag) and getattr(args, wants) is None:
            raise ClientError(f"--{flag} goes with --{wants}")
    keys = [name for name, _ in (*_DURATIONS, *_NUMBERS)]
    policies: dict[str, Any] = {}
    for key in (*keys, "overlap", "catch-up", "retry-factor"):
        name = key.replace("-", "_")
        if (value := getattr(args, name)) is not None:
            policies[name] = value
    schedule: Every | Cron | OnTrigger | None = OnTrigger() if args.on_trigger else None
    try:
        if args.every is not None:
            schedule = Every(args.every, *([args.offset] if args.offset else []))
        elif args.cron is not None:
            schedule = Cron(args.cron, *([args.tz] if args.tz else []))
        return Job(command, schedule, name=args.job, **policies)
    except JobError as error:
        raise ClientError(_by_flag(args, error)) from None


# ── Errors by the flags ─────────────────────────────────────────────────────────────────────────

_FLAGS = {
    "name": "job",
    "period": "every",
    "expression": "cron",
    "time zone": "tz",
    "catch_up.window": "catch-up-window",
    "catch_up.limit": "catch-up-limit",
    "retry.delay": "retry-delay",
    "retry.factor": "retry-factor",
    "retry.max_delay": "retry-max-delay",
}
"""What the client or the sidecar calls otherwise than we do."""

_CRON_FIELDS = ("second", "minute", "hour", "day of month", "month", "day of week")
_POLICIES = {name.replace("-", "_") for name, _ in (*_DURATIONS, *_NUMBERS)}
_FIELDS = {*_FLAGS, *_POLICIES, "offset", "overlap", "catch_up"}


def _flag_of(field: str) -> str:
    return "--" + _FLAGS.get(field, field.replace("_", "-"))


def _by_flag(args: argparse.Namespace, error: JobError) -> str:
    """What is wrong with a job, with the flag and the value as they were typed."""
    if not error.field:
        return str(error)
    flag = _flag_of(error.field)
    given = getattr(args, flag.removeprefix("--").replace("-", "_"))
    return f"{flag} {given!r}: {_in_flags(error.expected)}"


def _in_flags(text: str) -> str:
    """A text with the policies that it names as flags."""
    return re.sub(r"\b(\w+_\w+|retries)(?:=|\b)", lambda found: _flag_of(found[1]), text)


def _said_by_flag(said: str) -> str:
    """A refusal of the sidecar, with its field as a flag: "job 'a': jitter is ..."."""
    match = re.match(r"(job '[^']*': )([a-z_. ]+?)( is .*)", said, re.DOTALL)
    if match is None:
        return said
    job, field, rest = match.groups()
    if field in _CRON_FIELDS:
        return f"{job}--cron: {field}{rest}"
    return f"{job}{_flag_of(field)}{rest}" if field in _FIELDS else said
