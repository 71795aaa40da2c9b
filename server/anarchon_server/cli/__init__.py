"""The command `anarchon`. Imports the standard library only, until a subcommand is chosen: so it is
there, and says what to install, where only the client is.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import NoReturn

FAILED = 1
USAGE_ERROR = 2

_COMMANDS = {
    "serve": "run a sidecar",
    "next": "print the next slots of a schedule",
    "jobs": "list the jobs",
    "runs": "list the runs, newest first",
    "instances": "list the instances",
    "pause": "stop running a job's slots, everywhere",
    "resume": "run a paused job's slots again",
    "trigger": "run a job now",
    "cancel": "ask a run to stop",
    "health": "say whether a sidecar is ready, by the exit status",
    "exec": "run a command as a job",
    "import-crontab": "print the jobs that a crontab would become",
    "doctor": "look at a store as serve would, without serving",
    "demo": "see three instances share jobs, and a takeover",
}
"""Subcommand -> what it is for. Each is a module here with `add_parser(subparsers)` and
`run(args) -> int`.
"""

_MEANT = {
    "--address": "--listen",
    "--count": "-n",
    "--host": "--listen",
    "--limit": "-n",
    "--port": "--listen",
    "--time-zone": "--tz",
    "--timezone": "--tz",
    "--zone": "--tz",
}
"""What other programs call a flag -> what it is called here, in the subcommands that have it."""

_NOT_WRITTEN = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF})
"""What is the matter with standard output, not with us: a full disk, mostly."""

_OURS = ("anarchon_server", "anarchon_backends", "anarchon")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    # Standard error is for our lines: gRPC's C core otherwise tells of every connection that ends.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    _open_closed_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    # The builtin `next` is hidden here once the subcommand of that name is imported.
    command = ([a for a in arguments if not a.startswith("-")] or [""])[0]
    try:
        try:
            return _run(command, arguments)
        finally:
            sys.stdout.flush()  # here, where a reader that has gone is no error
    except ModuleNotFoundError as error:
        return _say_what_to_install(command, error)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader has had enough, as in `anarchon runs | head`.
        _drop_what_is_left()
        return 0
    except OSError as error:
        if error.errno not in _NOT_WRITTEN or error.filename is not None:
            raise
        _drop_what_is_left()
        print(f"anarchon {command}: cannot write its output: {error.strerror}", file=sys.stderr)
        return FAILED


def _open_closed_streams() -> None:
    """Let what goes to a closed standard stream (`>&-`) go nowhere.

    Its number would otherwise be given to the next file or socket, which would be printed into.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115 - stays open
            setattr(sys, name, stream)


def _drop_what_is_left() -> None:
    """Let what standard output still holds go nowhere, where Python would fail to write it again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _run(command: str, arguments: list[str]) -> int:
    module = _module_of(command)
    parser, subparsers = _parser(command, module)
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        # Not by the parser of all: its usage says nothing about the subcommand.
        _refuse(subparsers.get(command, parser), unknown)
    if module is None:
        parser.print_help()
        return USAGE_ERROR
    status: int = module.run(args)
    return status


def _module_of(command: str) -> ModuleType | None:
    name = command.replace("-", "_")
    return import_module(f"anarchon_server.cli.{name}") if command in _COMMANDS else None


def _parser(
    command: str, module: ModuleType | None
) -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """Return the parser, and that of each subcommand."""
    width = max(map(len, _COMMANDS))
    parser = argparse.ArgumentParser(
        prog="anarchon",
        usage="%(prog)s [-h] [--version] COMMAND ...",
        description="Scheduled jobs in services with many instances, each scheduled time on one.",
        epilog="commands:\n"
        + "".join(f"  {name:<{width}}  {about}\n" for name, about in _COMMANDS.items())
        + "\nanarchon COMMAND --help says more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"anarchon {version('anarchon')}")
    # Not listed by argparse, which breaks the line after the longest name.
    subparsers = parser.add_subparsers(
        prog="anarchon", metavar="COMMAND", dest="command", help=argparse.SUPPRESS
    )
    for name in _COMMANDS:
        if name == command and module is not None:
            module.add_parser(subparsers)
        else:
            subparsers.add_parser(name, add_help=False)
    return parser, subparsers.choices


def _refuse(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> NoReturn:
    """Exit with 2: the subcommand's usage, what is wrong, and what may have been meant."""
    # argparse has no public list of a parser's flags.
    flags = [flag for action in parser._actions for flag in action.option_strings]
    wrong = ([text for text in unknown if text.startswith("-")] or unknown)[0]
    name = wrong.partition("=")[0]
    if not name.startswith("-"):
        hint = f": did you mean --job {wrong}?" if "--job" in flags else ""
        parser.error(f"{wrong!r} is one argument too many{hint}")
    close = [_MEANT[name]] if _MEANT.get(name) in flags else get_close_matches(name, flags, n=1)
    hint = f": did you mean {close[0]}?" if close else ""
    parser.error(f"there is no flag {name}{hint}")


def _say_what_to_install(command: str, error: ModuleNotFoundError) -> int:
    missing = (error.name or "").partition(".")[0]
    if missing in _OURS:
        if error.name != f"anarchon_server.cli.{command}":
            raise error
        print(f"anarchon {command}: is not in this version", file=sys.stderr)
        return USAGE_ERROR
    print(
        f'anarchon {command}: needs the extra "server": pip install "anarchon[server]", '
        'or pip install ".[server]" in a clone',
        file=sys.stderr,
    )
    return USAGE_ERROR
