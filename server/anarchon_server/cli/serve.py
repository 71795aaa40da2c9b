"""`anarchon serve`: run a sidecar."""

from __future__ import annotations

import argparse

from anarchon_server import app
from anarchon_server.cli import _settings
from anarchon_server.config import SETTINGS

_EPILOG = """\
Every flag is also a variable (--listen: ANARCHON_LISTEN) and a key of the TOML file (listen = "...").
Flags count over variables, and those over the file. A store's URL with a password is better given
by variable or file: other users of the machine can see flags.
"""


# The subparsers object has no public type.
def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand `serve`."""
    parser = subparsers.add_parser(
        "serve",
        help="run a sidecar",
        description="Run a sidecar beside an application.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _settings.add_flags(parser, *SETTINGS)


def run(args: argparse.Namespace) -> int:
    """Run a sidecar until it is told to stop."""
    config = _settings.read("serve", args, *SETTINGS)
    return app.REFUSED if config is None else app.run(config)
