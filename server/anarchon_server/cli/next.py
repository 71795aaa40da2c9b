"""`anarchon next`: the next slots of a schedule, computed without any store."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone

from anarchon_server.core.slots import (
    TZDATA_VERSION,
    Cron,
    Every,
    ScheduleError,
    Zone,
    format_duration,
    parse_duration_ms,
    parse_schedule,
    zone_named,
)

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_EARLIEST = datetime(1900, 1, 1, tzinfo=UTC)
_HORIZON = datetime(2200, 1, 1, tzinfo=UTC)
_MOST_SLOTS = 1_000_000
_DAY_MS = 86_400_000
_ANY_JOB = "job"

_DESCRIPTION = """\
Print the next slots of a schedule, as every instance computes them: local time with its offset
(with --tz), UTC, milliseconds since the epoch, the gap since the slot before, and what a clock
change did to it.

SCHEDULE is a grid such as 10s or 1h30m, or a cron expression in quotes such as "0 8 * * *".
"""


# The subparsers object has no public type.
def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand `next`."""
    parser = subparsers.add_parser(
        "next",
        help="print the next slots of a schedule",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "schedule", metavar="SCHEDULE", nargs="+", help="a grid or a cron expression"
    )
    parser.add_argument(
        "--tz",
        metavar="ZONE",
        help="IANA time zone of a cron expression, and to show (default: UTC)",
    )
    parser.add_argument(
        "--after",
        metavar="ISO",
        help="show slots later than this, as in 2026-10-25T00:30:00Z; without an offset it is UTC "
        "(default: now)",
    )
    parser.add_argument(
        "-n", metavar="N", default="10", help=f"how many slots, 1 to {_MOST_SLOTS} (default: 10)"
    )
    parser.add_argument("--job", metavar="NAME", help="the job's name, which H is drawn from")
    parser.add_argument("--json", action="store_true", help="print one object a line")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry the subcommand out. Returns the exit status: 2 for bad input."""
    try:
        zone = zone_named("UTC" if args.tz is None else args.tz)
        schedule = _parse_schedule(_one_text(args.schedule), zone, args.job)
        after_ms = _parse_after(args.after)
        count = _parse_count(args.n)
    except ScheduleError as error:
        print(f"anarchon next: {error}", file=sys.stderr)
        return 2
    slots = _next_slots(schedule, after_ms, count)
    if args.json:
        for slot in slots:
            print(json.dumps(_as_object(schedule, zone, slot)))
    else:
        _print_heading(schedule, after_ms)
        _print_table(schedule, None if args.tz is None else zone, slots, count)
    return 0


# ── Input ───────────────────────────────────────────────────────────────────────────────────────


def _one_text(texts: list[str]) -> str:
    if len(texts) > 1:
        raise ScheduleError(
            "schedule",
            " ".join(texts[:3]) + " ...",
            "put a cron expression in quotes, as one argument",
        )
    return texts[0]


def _parse_schedule(text: str, zone: Zone, job: str | None) -> Every | Cron:
    """Return the schedule; what is given beside the text here is asked for by its flag."""
    if "TZ=" in text:
        expected = "the zone is not part of the text: give it with --tz ZONE"
        raise ScheduleError("schedule", text, expected)
    grid = re.fullmatch(r"@?every\s+(\S+)", text.strip(), re.IGNORECASE)
    if grid and _is_duration(grid[1]):
        raise ScheduleError("schedule", text, f"a grid is its period alone: write {grid[1]}")
    try:
        return parse_schedule(text, zone.name, job)
    except ScheduleError:
        if job is None:
            parse_schedule(text, zone.name, _ANY_JOB)  # raises what is wrong for every job
            expected = "H is drawn from the job's name: give it with --job NAME"
            raise ScheduleError("schedule", text, expected) from None
        raise


def _is_duration(text: str) -> bool:
    try:
        parse_duration_ms(text)
    except ScheduleError:
        return False
    return True


def _parse_after(text: str | None) -> int:
    if text is None:
        return time.time_ns() // 1_000_000
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ScheduleError("--after", text, "write a time such as 2026-10-25T00:30:00Z") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    if not _EARLIEST <= moment < _HORIZON:
        raise ScheduleError("--after", text, "a time from 1900 to 2199")
    return (moment - _EPOCH) // timedelta(milliseconds=1)


def _parse_count(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,7}", text, re.ASCII) or not 1 <= int(text) <= _MOST_SLOTS:
        raise ScheduleError("-n", text, f"a whole number from 1 to {_MOST_SLOTS}")
    return int(text)


# ── Output ──────────────────────────────────────────────────────────────────────────────────────


def _next_slots(schedule: Every | Cron, after_ms: int, count: int) -> Iterator[int]:
    horizon_ms = (_HORIZON - _EPOCH) // timedelta(milliseconds=1)
    for _, slot in zip(range(count), schedule.between(after_ms, horizon_ms), strict=False):
        yield slot


def _as_object(schedule: Every | Cron, zone: Zone, slot: int) -> dict[str, int | str]:
    shown: dict[str, int | str] = {"slot": slot, "utc": _utc(slot), "local": _local(zone, slot)}
    if remark := schedule.remark(slot):
        shown["note"] = remark
    return shown


def _print_heading(schedule: Every | Cron, after_ms: int) -> None:
    print(schedule.description)
    for note in schedule.notes:
        print(f"note: {note}")
    if isinstance(schedule, Cron):
        for change in schedule.forecast(after_ms):
            print(change)
        print(f"time zone database {TZDATA_VERSION}")
    print()


def _print_table(
    schedule: Every | Cron, zone: Zone | None, slots: Iterator[int], count: int
) -> None:
    """Print the slots, with the local time where a zone was asked for."""
    local = "" if zone is None else f"{'local':<25}  "
    print(f"{local}{'UTC':<20}  {'slot':>13}  gap")
    shown, before = 0, None
    for slot in slots:
        gap = "" if before is None else _gap(slot - before)
        local = "" if zone is None else f"{_local(zone, slot):<25}  "
        remark = schedule.remark(slot)
        print(f"{local}{_utc(slot):<20}  {slot:>13}  {gap:<8}  {remark}".rstrip())
        shown, before = shown + 1, slot
    if shown < count:
        print("no further slot before 2200")


def _gap(gap_ms: int) -> str:
    """Return a gap in days, since nobody counts years in weeks."""
    days, rest_ms = divmod(gap_ms, _DAY_MS)
    rest = format_duration(rest_ms) if rest_ms else ""
    return f"{days}d{rest}" if days else rest


def _utc(slot: int) -> str:
    return _text(_EPOCH + timedelta(milliseconds=slot)).removesuffix("+00:00") + "Z"


def _local(zone: Zone, slot: int) -> str:
    offset = timezone(timedelta(seconds=zone.offset_s(slot // 1000)))
    return _text((_EPOCH + timedelta(milliseconds=slot)).astimezone(offset))


def _text(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds" if moment.microsecond else "seconds")
