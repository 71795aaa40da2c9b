"""The store that a configuration names: found, opened, and refused where it is not trusted enough.

Imports the opening, the configuration, the clock and the port.
"""

from __future__ import annotations

import asyncio
import os

from anarchon_server import opening
from anarchon_server.clock import SystemClock
from anarchon_server.config import Config, ConfigError, default_store, state_directory
from anarchon_server.core import limits
from anarchon_server.core.errors import StoreRefused
from anarchon_server.core.store import OpenOptions, Store, StoreReport

OPEN_TIMEOUT_S = 10.0
"""How long opening may take, as a whole."""


def find_store(config: Config, clock: SystemClock) -> Store:
    """Return the store, not opened yet. Raises `StoreRefused` for a URL that nobody can open."""
    options = OpenOptions(config.namespace, clock, op_timeout_ms=limits.OP_TIMEOUT)
    url = config.store.reveal()
    store = opening.open_store(url, options)
    if _is_default(url):
        # Ours to make; a path that somebody chose is theirs.
        directory = state_directory(os.environ)
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StoreRefused(
                f"the directory for the default store, {directory}, cannot be created: "
                f"{error.strerror}: choose another store with --store"
            ) from None
    return store


async def open_store(store: Store, *, strict: bool) -> StoreReport:
    """Open it, within `OPEN_TIMEOUT_S`, and return what was found.

    Raises `StoreRefused` also for doubts where `strict`, other `StoreError`s where the store is
    away, and `TimeoutError`. A store that is refused must still be closed.
    """
    async with asyncio.timeout(OPEN_TIMEOUT_S):
        report = await store.open()
    if strict and report.doubts:
        raise StoreRefused(_strictly(report))
    return report


def _strictly(report: StoreReport) -> str:
    listed = "; ".join(f"({n}) {doubt.in_full}" for n, doubt in enumerate(report.doubts, 1))
    some = "a doubt" if len(report.doubts) == 1 else f"{len(report.doubts)} doubts"
    return f"strict is set, and {report.location} leaves {some}: {listed}"


def _is_default(url: str) -> bool:
    try:
        return url == default_store(os.environ)
    except ConfigError:
        return False
