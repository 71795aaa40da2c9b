"""A Redis or Valkey URL to the backend of its strategy (`?strategy=`, by default `lease`).

Beside it stands what these backends share: addresses, connections, checks. Imports no backend
before it is chosen, and no driver: the standard library, the port and its errors.
"""

from __future__ import annotations

from importlib import import_module
from typing import cast
from urllib.parse import parse_qs, urlsplit

from anarchon_server.core.errors import StoreRefused
from anarchon_server.core.store import OpenOptions, Store

# Strategy -> the module beside this one that has it.
_STRATEGIES = {
    "lease": "redis_lease",
    "script": "redis_claim",
    "stream-id": "redis_claim",
    "idmp": "redis_claim",
}


def open_store(url: str, options: OpenOptions) -> Store:
    """The store that `redis://host:port/database` names, by the strategy that it asks for.

    Raises `StoreRefused`, without showing the URL, for a strategy that is not known, a driver that
    is not installed, and for what the backend cannot read.
    """
    module = _STRATEGIES.get(strategy := strategy_of(url))
    if module is None:
        raise StoreRefused(
            f"the Redis URL's option strategy is {strategy[:40]!r}: use one of: "
            f"{', '.join(_STRATEGIES)}"
        )
    try:
        opener = import_module(f"anarchon_backends.{module}").open_store
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "redis":
            raise
        raise StoreRefused(
            'the driver for Redis is not installed (no module redis): pip install "anarchon[redis]", '
            'or pip install ".[redis]" in a clone'
        ) from None
    return cast("Store", opener(url, options))


def strategy_of(url: str) -> str:
    """What the URL's option `strategy` says."""
    try:
        given = parse_qs(urlsplit(url).query, keep_blank_values=True).get("strategy", ["lease"])
    except ValueError:  # the backend says what is wrong with the rest of it
        return "lease"
    return given[-1]
