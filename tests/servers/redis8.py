"""The Redis 8.6.2 that `install-redis8` put into `.cache/redis8`: the kind `redis8` of `redis`.

It alone has `XADD IDMP`. `ANARCHON_TEST_REDIS8_URL` names a server to be used instead.
"""

from __future__ import annotations

from pathlib import Path

KIND = "redis8"
_PROGRAM = Path(__file__).parents[2] / ".cache/redis8/redis-server"


def executable() -> str | None:
    """The path of the server, which takes the arguments of `redis-server`; None: not there."""
    return str(_PROGRAM) if _PROGRAM.exists() else None
