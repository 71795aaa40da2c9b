"""`anarchon runs`: history, and what runs now."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import chain

from anarchon.admin import AdminClient
from anarchon.v1 import run_pb2
from anarchon_server.cli import USAGE_ERROR, _admin

LIMIT_DEFAULT = 20

_SEEN_MAX = 10_000
_Seen = dict[tuple[str, int], tuple[int | None, bool]]
"""Of each run a digest of what was shown, and whether it had ended."""

_OUTCOME_SHOWN = 100
_COVERED_MOST = 10_000
"""From here on the number of slots that a row stands for is not exact."""

_PREFIX = "RUN_STATE_"
_STATES = [name.removeprefix(_PREFIX).lower() for name in run_pb2.RunState.keys()[1:]]
_HEADS = ("JOB", "SLOT (UTC)", "STATE", "ATTEMPT", "INSTANCE", "STARTED", "DURATION", "OUTCOME")


# The subparsers object has no public type.
def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand `runs`."""
    parser = subparsers.add_parser(
        "runs",
        help="list the runs, newest first",
        description="List the runs of the namespace, newest slot first. With --job and --slot show "
        "one run in full, with the stack traces of its attempts.",
    )
    parser.add_argument("--job", metavar="NAME", default="", help="only of this job")
    parser.add_argument(
        "--slot",
        metavar="SLOT",
        type=_admin.slot_of,
        help="one run in full: its slot as it is listed, or in milliseconds; needs --job",
    )
    parser.add_argument(
        "--state",
        metavar="STATE",
        action="extend",
        type=_states,
        default=[],
        help=f"only in these states, separated by commas: {', '.join(_STATES)}",
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
    if args.slot is None:
        return _admin.with_admin("runs", args, lambda admin: _list(args, admin))
    if not args.job:
        print("anarchon runs: --slot needs the job too: --job NAME", file=sys.stderr)
        return USAGE_ERROR
    return _admin.with_admin("runs", args, lambda admin: _show(args, admin))


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r}: write a whole number from 1")
    return int(text)


def _states(text: str) -> list[str]:
    words = [word.strip().lower() for word in text.split(",")]
    for word in words:
        if word not in _STATES:
            raise argparse.ArgumentTypeError(f"{word!r}: there are {', '.join(_STATES)}")
    return words


# ── Several runs ────────────────────────────────────────────────────────────────────────────────


def _list(args: argparse.Namespace, admin: AdminClient) -> int:
    if args.watch:
        return _watch(args, admin)
    found = _newest(args, admin)
    first = next(found, None)
    _admin.say_scope("runs", admin)
    if first is None:
        _say_none(args, admin, "no runs")
        return 0
    runs = chain([first], found)
    if args.json:
        for one in runs:
            _admin.print_json(one)
    else:
        _admin.print_table(_HEADS, map(_row, runs))
    return 0


def _newest(args: argparse.Namespace, admin: AdminClient) -> Iterator[run_pb2.Run]:
    return admin.list_runs(job=args.job, states=map(_state, args.state), limit=args.limit)


def _say_none(args: argparse.Namespace, admin: AdminClient, words: str) -> None:
    if args.job:
        admin.get_job(args.job)  # raises where there is none of that name
    print(words, file=sys.stderr)


def _watch(args: argparse.Namespace, admin: AdminClient) -> int:
    """Print the newest runs, oldest first, and then every one that is new or has changed."""
    table = _admin.Table(_HEADS)
    seen: _Seen = {}
    # Begun before the list is asked for: what changes meanwhile comes with it.
    with admin.watch_runs(job=args.job) as changes:
        newest = list(_newest(args, admin))
        _admin.say_scope("runs", admin)
        if not newest:
            _say_none(args, admin, "no runs yet")
        for found in chain(reversed(newest), changes):
            if _is_news(found, seen) and _is_wanted(args, found):
                _print_change(args, table, found)
    return 0


def _is_news(found: run_pb2.Run, seen: _Seen) -> bool:
    """Whether the run was not shown as it is. A lease moves on with every heartbeat, which is no
    change for people; and what has ended is not what the watch saw of it before it was listed.
    """
    key = (found.job, found.slot)
    now = run_pb2.Run()
    now.CopyFrom(found)
    now.ClearField("lease_end_time")
    content: int | None = hash(now.SerializeToString(deterministic=True))
    before, ended = seen.pop(key, (None, False))
    if ended:
        content = before
    seen[key] = content, ended or found.state in _admin.FINAL
    if len(seen) > _SEEN_MAX:
        del seen[next(iter(seen))]
    return before != content


def _is_wanted(args: argparse.Namespace, found: run_pb2.Run) -> bool:
    return not args.state or found.state in map(_state, args.state)


def _print_change(args: argparse.Namespace, table: _admin.Table, found: run_pb2.Run) -> None:
    if args.json:
        _admin.print_json(found)
    else:
        table.print([_row(found)])


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
        str(last.attempt or ""),
        last.instance_id,
        _admin.shown_time(last, "start_time"),
        _admin.shown_duration(last, "start_time", "end_time"),
        _outcome(found, last),
    )


def _outcome(found: run_pb2.Run, last: run_pb2.Attempt) -> str:
    """Why the run is where it is: the protocol's reason, what was raised, what was returned."""
    reason = found.reason or last.reason
    if found.slots_covered > 1:
        reason += f" ({found.slots_covered:,} slots)"
    elif found.blocking_slot:
        reason += f" ({_admin.shown_slot(found.blocking_slot)})"
    asked = found.cancel_requested and found.state not in _admin.FINAL and "asked to stop"
    parts = [reason, asked or "", _raised(last), last.result]
    text = "; ".join(filter(None, parts))
    return text if len(text) <= _OUTCOME_SHOWN else f"{text[: _OUTCOME_SHOWN - 3]}..."


def _raised(attempt: run_pb2.Attempt) -> str:
    failure = attempt.failure
    return ": ".join(filter(None, (failure.type, failure.message)))


# ── One run ─────────────────────────────────────────────────────────────────────────────────────


def _show(args: argparse.Namespace, admin: AdminClient) -> int:
    found = admin.get_run(args.job, args.slot)
    if args.json:
        _admin.print_json(found)
        return 0
    because = f" ({found.reason})" if found.reason else ""
    _print_facts(
        "",
        ("job", found.job),
        ("slot", f"{_admin.shown_slot(found.slot)}  {found.slot}"),
        ("covers", _covered(found.slots_covered)),
        ("trigger", _admin.word_of(found, "trigger")),
        ("request", found.request_id),
        ("state", _admin.word_of(found, "state") + because),
        ("blocked", _blocked(found.blocking_slot)),
        ("cancel", _cancel(found)),
        ("retry", _due(found, "next_attempt_time", "due")),
        ("lease", _due(found, "lease_end_time", "until")),
    )
    for attempt in found.attempts:
        _show_attempt(attempt)
    return 0


def _covered(slots: int) -> str:
    """How many slots a skipped row stands for, where it is more than its own."""
    if slots <= 1:
        return ""
    least = "at least " if slots >= _COVERED_MOST else ""
    return f"{least}{slots:,} slots, the newest of which is this"


def _blocked(slot: int) -> str:
    return f"by the run of {_admin.shown_slot(slot)}" if slot else ""


def _due(found: run_pb2.Run, field: str, word: str) -> str:
    return f"{word} {_admin.shown_time(found, field)}" if found.HasField(field) else ""


def _cancel(found: run_pb2.Run) -> str:
    if not found.cancel_requested:
        return ""
    by_itself = found.reason in ("timeout", "superseded")
    return ": ".join(
        filter(None, (found.reason if by_itself else "requested", found.cancel_message))
    )


def _show_attempt(attempt: run_pb2.Attempt) -> None:
    because = f" ({attempt.reason})" if attempt.reason else ""
    print(f"\nattempt {attempt.attempt} on {attempt.instance_id}")
    _print_facts(
        "  ",
        ("state", _admin.word_of(attempt, "state") + because),
        ("cause", _admin.word_of(attempt, "cause")),
        ("fence", str(attempt.fence)),
        ("claimed", _admin.shown_time(attempt, "claim_time")),
        ("started", _admin.shown_time(attempt, "start_time")),
        ("ended", _admin.shown_time(attempt, "end_time")),
        ("took", _admin.shown_duration(attempt, "start_time", "end_time")),
        ("result", attempt.result),
        ("raised", _raised(attempt)),
    )
    for line in _admin.shown_text(attempt.failure.stack_trace).splitlines():
        print(f"    {line}")


def _print_facts(indent: str, *facts: tuple[str, str]) -> None:
    for name, text in facts:
        if text:
            print(f"{indent}{name:<9}{_admin.shown_text(text)}")
