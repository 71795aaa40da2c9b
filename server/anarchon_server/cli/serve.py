"""`anarchon serve`: run a sidecar."""

from __future__ import annotations

import argparse
import os
import re
import sys

from anarchon_server import app
from anarchon_server.config import SETTINGS, ConfigError, flag_of, load, variable_of

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
    parser.add_argument("--config", metavar="FILE", help="a TOML file with any of these settings")
    for name in SETTINGS:
        add_setting(parser, name)


def add_setting(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the flag of a setting."""
    setting = SETTINGS[name]
    default = setting.default_words or str(setting.default)
    about = re.sub(r"[`%]", "", f"{setting.about} Default: {default}.")
    if setting.metavar:
        parser.add_argument(flag_of(name), dest=name, metavar=setting.metavar, help=about)
    else:
        parser.add_argument(
            flag_of(name), dest=name, action="store_const", const="true", help=about
        )


def run(args: argparse.Namespace) -> int:
    """Run a sidecar until it is told to stop."""
    flags = {name: getattr(args, name) for name in ("config", *SETTINGS)}
    try:
        config = load(flags, os.environ)
    except ConfigError as error:
        print(f"anarchon serve: {error}", file=sys.stderr)
        return app.REFUSED
    if args.store is not None and config.store.parts:
        print(
            "anarchon serve: warning: other users of this machine can see the password in --store; "
            "give it as ANARCHON_STORE or in the file of --config",
            file=sys.stderr,
        )
    # Not for whatever this process, or a debugger of it, prints of its environment.
    os.environ.pop(variable_of("store"), None)
    return app.run(config)
