"""`python -m anarchon`: the same as the command `anarchon`, found as that is, by its entry point."""

from __future__ import annotations

import sys
from importlib.metadata import distribution

if __name__ == "__main__":
    scripts = distribution("anarchon").entry_points.select(group="console_scripts")
    sys.exit(scripts["anarchon"].load()())
