"""A NATS URL to the backend of its strategy (`?strategy=`, by default `claim`).

Imports no backend before it is chosen, and no driver: the standard library and the port's errors.

Beside it lies what both backends share, each in a module of its own that they import:

- `address`     `address_of(url, own_options) -> Address`: servers, credentials, TLS, replicas.
- `connection`  `Connection(address, timeout_ms)`: one request, one answer, bounded in time.
- `jetstream`   `JetStream(connection, address, time)`: publish by expected revision, reads from the
                leader, subjects of a stream, purge; which answer means "surely not done".
- `time`        `StoreTime(clock)`: the store's time between two measurements.
- `streams`     `StreamPlan`, `ensure(...)`: streams made on first use and checked at every start.
- `monitoring`  what only the servers' monitoring pages tell.
- `names`       names as tokens of subjects, and back.
- `records`     the machine's and the model's records as JSON, and back.

Every call takes `until`, a moment of the running event loop (`connection.until()`), after which it
gives up: `StoreUnavailable` where surely nothing was done, `OutcomeUnknown` where something was
sent that may have been done. `AccessDenied` (a `StoreUnavailable`) is what the server forbids.
"""

from __future__ import annotations

from importlib import import_module
from typing import cast
from urllib.parse import parse_qs, urlsplit

from anarchon_server.core.errors import StoreRefused
from anarchon_server.core.store import OpenOptions, Store

# Strategy -> the module beside this one that has it.
_STRATEGIES = {"claim": "nats_claim", "lease": "nats_lease"}


def open_store(url: str, options: OpenOptions) -> Store:
    """The store that `nats://host:port` names, by the strategy that it asks for.

    Raises `StoreRefused`, without showing the URL, for a strategy that is not known, a driver that
    is not installed, and for what the backend cannot read.
    """
    strategy = strategy_of(url)
    if strategy not in _STRATEGIES:
        raise StoreRefused(
            f"the NATS URL's option strategy is {strategy[:40]!r}: use one of: "
            f"{', '.join(_STRATEGIES)}"
        )
    try:
        backend = import_module(f"anarchon_backends.{_STRATEGIES[strategy]}")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("nats", "nkeys"):
            raise
        raise StoreRefused(
            f"the driver for NATS is not installed (no module {missing}): "
            'pip install "anarchon[nats]", or pip install ".[nats]" in a clone'
        ) from None
    return cast("Store", backend.open_store(url, options))


def strategy_of(url: str) -> str:
    """What the URL's option `strategy` says."""
    try:
        given = parse_qs(urlsplit(url).query, keep_blank_values=True).get("strategy", ["claim"])
    except ValueError:  # the backend says what is wrong with the rest of it
        return "claim"
    return given[-1]
