"""`anarchon demo`: three instances, one killed in mid-run, the takeover to be seen.

Imports the standard library and its siblings; the rest when it is run.
"""

from __future__ import annotations

import argparse

_DESCRIPTION = """\
Run a small service of several instances on this machine, each a sidecar and an application in
processes of their own, from one store; kill one of them while it works, stop another politely,
and show what becomes of their runs. At the end the history is checked: the command fails if any
slot had two winners or was lost.
"""


# The subparsers object has no public type.
def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand `demo`."""
    parser = subparsers.add_parser(
        "demo",
        help="see it work: several instances, one killed, its run taken over",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--instances", metavar="N", type=int, default=3, help="how many, 1 to 20 (default: 3)"
    )
    parser.add_argument(
        "--seconds",
        metavar="N",
        type=int,
        default=45,
        help="how long, 10 to 3600 (default: 45; the whole story takes about 45)",
    )
    parser.add_argument(
        "--store", metavar="URL", help="a store's URL (default: a new SQLite file, removed after)"
    )
    parser.add_argument("--no-kill", action="store_true", help="kill and stop nobody")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry the subcommand out. Returns the exit status: 1 if the self-check failed."""
    from anarchon_server.cli.demo.show import main  # noqa: PLC0415 - it needs the extra

    return main(args)
