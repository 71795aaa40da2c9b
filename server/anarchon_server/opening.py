"""A store's URL to the backend that opens it, found by entry point: no driver is imported here.

Imports the standard library, the port and core's errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import cast

from anarchon_server.core.errors import StoreRefused
from anarchon_server.core.store import OpenOptions, Store

GROUP = "anarchon.backends"

OpenStore = Callable[[str, OpenOptions], Store]

# The schemes of our own backends, with the extra that brings the driver.
EXTRAS: Mapping[str, str] = {
    "memory": "server",
    "sqlite": "sqlite",
    "redis": "redis",
    "rediss": "redis",
    "valkey": "redis",
    "valkeys": "redis",
    "postgres": "postgres",
    "postgresql": "postgres",
    "amqp": "rabbitmq",
    "amqps": "rabbitmq",
    "nats": "nats",
    "tls": "nats",
}


def open_store(url: str, options: OpenOptions) -> Store:
    """Return the store that `url` names, not opened yet.

    Raises `StoreRefused`, without showing the URL, for a scheme nobody serves, a driver that is
    not installed, and a URL that the backend cannot read.
    """
    scheme, colon, rest = url.partition(":")
    if not colon:
        raise StoreRefused(f"the store's URL has no scheme; known ones: {_named(known_schemes())}")
    point = _backends().get(scheme)
    if point is None:
        raise StoreRefused(
            f"no backend serves store URLs that begin with {scheme[:40]!a}; known ones: "
            f"{_named(known_schemes())}"
        )
    if _cuts_a_password(rest):
        raise StoreRefused(
            f"the store's URL has an @ in its path: write each special character of the user, the "
            f"password and the path as %XX, a / as %2F and an @ as %40; it begins with {scheme}:"
        )
    return _load(scheme, point)(url, options)


def _cuts_a_password(rest: str) -> bool:
    """Whether a / in the password makes what follows it the path, which errors show."""
    authority, _, path = rest.removeprefix("//").partition("/")
    return rest.startswith("//") and bool(authority) and "@" in path.partition("?")[0]


def known_schemes() -> tuple[str, ...]:
    """Return the URL schemes for which a backend is installed."""
    return tuple(sorted(_backends()))


def _backends() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def _load(scheme: str, point: EntryPoint) -> OpenStore:
    try:
        return cast("OpenStore", point.load())
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == point.module.partition(".")[0]:
            raise
        extra = EXTRAS.get(scheme)
        remedy = (
            f'pip install "anarchon[{extra}]", or pip install ".[{extra}]" in a clone'
            if extra
            else f"pip install {error.name}"
        )
        raise StoreRefused(
            f"the driver for {scheme}: is not installed (no module {error.name}): {remedy}"
        ) from None


def _named(schemes: tuple[str, ...]) -> str:
    return ", ".join(f"{scheme}:" for scheme in schemes)
