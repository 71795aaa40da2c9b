"""Settings as flags of a command: how they are added, and how a configuration is read with them."""

from __future__ import annotations

import argparse
import os
import re
import sys

from anarchon_server.config import SETTINGS, Config, ConfigError, flag_of, load, variable_of


def add_flags(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add `--config`, and a flag for each of these settings."""
    parser.add_argument("--config", metavar="FILE", help="a TOML file with any of these settings")
    for name in names:
        setting = SETTINGS[name]
        default = setting.default_words or str(setting.default)
        about = re.sub(r"[`%]", "", f"{setting.about} Default: {default}.")
        if setting.metavar:
            parser.add_argument(flag_of(name), dest=name, metavar=setting.metavar, help=about)
        else:
            parser.add_argument(
                flag_of(name), dest=name, action="store_const", const="true", help=about
            )


def read(command: str, args: argparse.Namespace, *names: str) -> Config | None:
    """Return the configuration, by these flags, the variables and the file.

    None where it is wrong, which is said. The store's URL is taken out of the environment.
    """
    flags = {name: getattr(args, name) for name in ("config", *names)}
    try:
        config = load(flags, os.environ)
    except ConfigError as error:
        print(f"anarchon {command}: {error}", file=sys.stderr)
        return None
    if args.store is not None and config.store.parts:
        print(
            f"anarchon {command}: warning: other users of this machine can see the password in "
            "--store; give it as ANARCHON_STORE or in the file of --config",
            file=sys.stderr,
        )
    # Not for whatever this process, or a debugger of it, prints of its environment.
    os.environ.pop(variable_of("store"), None)
    return config
