"""How far apart a client and a sidecar may be. Imports core's errors."""

from __future__ import annotations

import re

from anarchon_server.core.errors import RefusedError

_VERSION = re.compile(r"v?([0-9]{1,6})\.([0-9]{1,6})([.\-+a-z].*)?")
_SHOWN = 40


def check_client(client: str, server: str) -> None:
    """Refuse a client that is too far from this sidecar in version.

    The major version must be the same; while it is 0, the minor one may differ by one. Raises
    `RefusedError` with the reason VERSION.
    """
    ours, theirs = _parsed(server), _parsed(client)
    assert ours is not None, f"our own version {server!r} cannot be read"
    if theirs is None:
        raise RefusedError(
            "VERSION",
            f"client.version is {client[:_SHOWN]!a}: send the client library's version, as in "
            f"{server}",
        )
    near = theirs[0] == ours[0] and (ours[0] > 0 or abs(theirs[1] - ours[1]) <= 1)
    if not near:
        raise RefusedError(
            "VERSION",
            f"the client library is {client[:_SHOWN]} and this sidecar is {server}: "
            f"use versions {_range(ours)} of both",
        )


def _parsed(version: str) -> tuple[int, int] | None:
    match = _VERSION.fullmatch(version)
    return (int(match[1]), int(match[2])) if match else None


def _range(version: tuple[int, int]) -> str:
    major, minor = version
    if major > 0:
        return f"{major}.x"
    return f"0.{max(0, minor - 1)} to 0.{minor + 1}"
