"""The command `anarchon`. Imports the standard library only, until a subcommand is chosen: so it is
there, and says what to install, where only the client is.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from types import ModuleType

USAGE_ERROR = 2

_COMMANDS = {
    "serve": "run a sidecar",
    "next": "print the next slots of a schedule",
    "jobs": "list the jobs",
    "runs": "list the runs, newest first",
    "instances": "list the instances",
    "health": "say whether a sidecar is ready, by the exit status",
    "demo": "see three instances share jobs, and a takeover",
}
"""Subcommand -> what it is for. Each is a module here with `add_parser(subparsers)` and
`run(args) -> int`.
"""

_OURS = ("anarchon_server", "anarchon_backends", "anarchon")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    # Standard error is for our lines: gRPC's C core otherwise tells of every connection that ends.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
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
        # The reader has had enough, as in `anarchon runs | head`. What is left goes nowhere.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        return 0


def _run(command: str, arguments: list[str]) -> int:
    module = _module_of(command)
    parser = _parser(command, module)
    args = parser.parse_args(arguments)
    if module is None:
        parser.print_help()
        return USAGE_ERROR
    status: int = module.run(args)
    return status


def _module_of(command: str) -> ModuleType | None:
    return import_module(f"anarchon_server.cli.{command}") if command in _COMMANDS else None


def _parser(command: str, module: ModuleType | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="anarchon",
        description="Scheduled jobs in services with many instances, each scheduled time on one.",
    )
    parser.add_argument("--version", action="version", version=f"anarchon {version('anarchon')}")
    subparsers = parser.add_subparsers(metavar="COMMAND")
    for name, about in _COMMANDS.items():
        if name == command and module is not None:
            module.add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=about, add_help=False)
    return parser


def _say_what_to_install(command: str, error: ModuleNotFoundError) -> int:
    missing = (error.name or "").partition(".")[0]
    if missing in _OURS:
        if error.name != f"anarchon_server.cli.{command}":
            raise error
        print(f"anarchon {command}: is not in this version", file=sys.stderr)
        return USAGE_ERROR
    print(
        f"anarchon {command}: needs a part that is not installed (no module {missing}): "
        'pip install "anarchon[server]"',
        file=sys.stderr,
    )
    return USAGE_ERROR
