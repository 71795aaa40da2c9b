"""The claim-only strategies: what each can keep, and what it needs of a server.

Imports the port, the limits and the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass

from anarchon_server.core import limits
from anarchon_server.core import store as port

WINDOW_S = 86_400  # of `idmp`: the longest that a server keeps ids for ...
WINDOW_SLOTS = 10_000  # ... and the most of one job


@dataclass(frozen=True, slots=True)
class Strategy:
    """A way to claim. `oldest` is the oldest version of Redis that has it (empty: any).

    `expires`: its records have an expiry, so that a server that evicts such keys throws claims
    away. `kept_ms` and `kept_slots` are as in `Capabilities`.
    """

    name: str
    expires: bool = False
    oldest: str = ""
    kept_ms: int | None = None
    kept_slots: int | None = None

    @property
    def capabilities(self) -> port.Capabilities:
        """What a store with this strategy can do."""
        return port.Capabilities(
            backend=f"redis:{self.name}",
            leases=False,
            overlap=port.CLAIM_ONLY_OVERLAP,
            retries=True,
            control=True,
            kept_ms=self.kept_ms,
            kept_slots=self.kept_slots,
        )


_ALL = (
    Strategy("script", expires=True),
    Strategy("stream-id"),
    Strategy("idmp", oldest="8.6.2", kept_ms=WINDOW_S * limits.SECOND, kept_slots=WINDOW_SLOTS),
)

STRATEGIES = {each.name: each for each in _ALL}
