"""`python -m anarchon_server`: the same as the command `anarchon`."""

from __future__ import annotations

import sys

from anarchon_server.cli import main

if __name__ == "__main__":
    sys.exit(main())
