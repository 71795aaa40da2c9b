"""`anarchon import-crontab`: the jobs that a crontab would become, with what differs."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path

from anarchon_server.cli import FAILED, USAGE_ERROR
from anarchon_server.core import limits
from anarchon_server.core.slots import Cron, ScheduleError

_ASSIGNMENT = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(.*?)\s*")
_ALIASES = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_SHELL = "/bin/sh"
_ZONE_VARIABLES = ("CRON_TZ", "TZ")

_IN_GENERAL = """\
# What differs for every job: each time runs on one instance of all that have the job, not on each
# machine. A run that is still going when the next is due makes it skip that one, where cron starts a
# second: --overlap allow for the same. After an outage the newest missed time is run: --catch-up none
# for the same. Output goes to history (its end) and to anarchon exec's own output; nothing is mailed.
# A command runs in the directory of anarchon exec, as its user, with its environment. What a command
# leaves running when it ends is killed, unless it is in a session of its own.
"""


@dataclass(slots=True)
class Entry:
    """One line of a crontab: what it becomes, or why it becomes nothing."""

    number: int
    text: str
    name: str = ""
    expression: str = ""
    zone: str = "UTC"
    command: tuple[str, ...] = ()
    differs: list[str] = field(default_factory=list)
    refused: str = ""


# The subparsers object has no public type.
def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand `import-crontab`."""
    parser = subparsers.add_parser(
        "import-crontab",
        help="print the jobs that a crontab would become",
        description="Print, for each line of a crontab, the anarchon exec that would do the same, "
        "with what differs. Nothing is changed or run. The exit status is 1 if a line becomes no "
        "job.",
    )
    parser.add_argument("file", metavar="FILE", help="a crontab; -: standard input")
    parser.add_argument(
        "--tz", metavar="ZONE", help="the zone that cron ran in (default: this machine's)"
    )
    parser.add_argument(
        "--system",
        action="store_true",
        help="the lines have a user's name before the command, as those of /etc/crontab do",
    )


def run(args: argparse.Namespace) -> int:
    """Print the jobs."""
    try:
        text = sys.stdin.read() if args.file == "-" else Path(args.file).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        said = error.strerror if isinstance(error, OSError) else "is not text in UTF-8"
        print(f"anarchon import-crontab: {args.file}: {said}", file=sys.stderr)
        return USAGE_ERROR
    zone, doubt = (args.tz, "") if args.tz else machine_zone()
    entries = list(read_crontab(text, zone, system=args.system))
    print(_IN_GENERAL, end="")
    if doubt:
        print(f"# {doubt}")
    for entry in entries:
        print()
        print("\n".join(shown(entry)))
    return FAILED if any(entry.refused for entry in entries) else 0


def machine_zone() -> tuple[str, str]:
    """The zone of this machine, and what is to be said of it."""
    target = os.path.realpath("/etc/localtime")
    _, found, zone = target.partition("/zoneinfo/")
    if found:
        return zone.removeprefix("posix/").removeprefix("right/"), ""
    return "UTC", "this machine's zone could not be told: UTC is taken; --tz names another"


def shown(entry: Entry) -> Iterator[str]:
    """The lines that say what becomes of an entry."""
    yield f"# line {entry.number}: {entry.text}"
    if entry.refused:
        yield f"# becomes no job: {entry.refused}"
        return
    for each in entry.differs:
        yield f"# differs: {each}"
    flags = ["--job", entry.name, "--cron", entry.expression, "--tz", entry.zone]
    yield shlex.join(["anarchon", "exec", *flags, "--", *entry.command])


def read_crontab(text: str, zone: str, *, system: bool = False) -> Iterator[Entry]:
    """The entries of a crontab. What a variable says counts from its line on."""
    variables: dict[str, str] = {}
    names: set[str] = set()
    # Not splitlines(): to cron a form feed or a line separator of Unicode ends no line.
    for number, line in enumerate(text.split("\n"), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        if (assignment := _ASSIGNMENT.fullmatch(line)) is not None:
            variables[assignment[1]] = _unquoted(assignment[2])
            continue
        entry = Entry(number, stripped, zone=zone)
        _read_entry(entry, variables, system=system)
        if not entry.refused:
            entry.name = _not_in(names, entry.name)
            names.add(entry.name)
        yield entry


def _not_in(names: Collection[str], name: str) -> str:
    """The name, or with the first number that makes it another: two jobs of one name would be one."""
    numbered = (f"{name}-{number}" for number in count(2))
    return next(each for each in chain([name], numbered) if each not in names)


def _unquoted(value: str) -> str:
    quoted = len(value) >= 2 and value[0] == value[-1] and value[0] in "'\""
    return value[1:-1] if quoted else value


def _read_entry(entry: Entry, variables: dict[str, str], *, system: bool) -> None:
    fields = 1 if entry.text.startswith("@") else 5
    parts = entry.text.split(None, fields + system)
    if len(parts) < fields + system + 1:
        entry.refused = "it has too few fields"
        return
    expression = " ".join(parts[:fields])
    if expression == "@reboot":
        entry.refused = (
            "@reboot is no time: start the command where the machine starts its services"
        )
        return
    entry.expression = _ALIASES.get(expression, expression)
    _read_zone(entry, variables)
    try:
        schedule = Cron(entry.expression, entry.zone, "job")
    except ScheduleError as error:
        entry.refused = f"{error.field} {error.value!r}: {error.expected}"
        return
    entry.differs += schedule.notes
    if system:
        entry.differs.append(f"cron ran it as {parts[fields]}: run anarchon exec as that user")
    command = parts[-1]
    entry.name = _name_of(command)
    _read_command(entry, command, variables)


def _read_zone(entry: Entry, variables: dict[str, str]) -> None:
    for variable in _ZONE_VARIABLES:
        if variable in variables:
            entry.zone = variables[variable]
            if variable == "TZ":
                entry.differs.append(
                    "TZ is taken for the zone of the times; some crons give it to the command only"
                )
            return


def _read_command(entry: Entry, command: str, variables: dict[str, str]) -> None:
    line, given = _split_at_percent(command)
    if given is not None:
        entry.differs.append("what stood after % is piped to the command")
        line = f"printf %s {shlex.quote(given)} | {{ {line}; }}"
    given_away = {"SHELL", "MAILTO", "MAILFROM", *_ZONE_VARIABLES}
    environment = [f"{k}={v}" for k, v in variables.items() if k not in given_away]
    if variables.get("MAILTO"):
        entry.differs.append(f"its output was mailed to {variables['MAILTO']}, and is not")
    shell = variables.get("SHELL", _SHELL)
    prefix = ("env", *environment) if environment else ()
    entry.command = (*prefix, shell, "-c", line)


def _split_at_percent(command: str) -> tuple[str, str | None]:
    r"""The command, and what cron would write to its standard input. A \% is a plain one."""
    parts = re.split(r"(?<!\\)%", command)
    plain = [part.replace("\\%", "%") for part in parts]
    return plain[0].rstrip(), "\n".join(plain[1:]) + "\n" if len(plain) > 1 else None


def _name_of(command: str) -> str:
    """A job's name, of the first word that is a program."""
    command = re.sub(r"^cd\s+\S+\s*(&&|;)\s*", "", command.partition("%")[0])
    words = [word for word in command.split() if not re.fullmatch(r"\w+=.*", word)]
    program = words[0].rpartition("/")[2] if words else ""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", program).strip("-._")
    return name[: limits.NAME_MAX - 8] or "job"
