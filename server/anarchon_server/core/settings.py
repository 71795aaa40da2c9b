"""What an engine is told at its start. Imports `limits` and `model` only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from anarchon_server.core import limits
from anarchon_server.core.model import JobSpec


@dataclass(frozen=True, slots=True)
class Settings:
    """The engine's configuration; durations in milliseconds.

    `instance_id` is the label that history shows, `incarnation` the identity behind it,
    drawn at random at each start (S32). `doubts` are the store's, for `GetInstance`.
    `tzdata_version` is that of the zone database that slots are computed with (empty: not known,
    and then instances are not compared, S5). `jobs` are those of the sidecar's configuration, by
    name: what they say wins over what clients state.
    """

    instance_id: str
    incarnation: str
    version: str = ""
    tzdata_version: str = ""
    lease_ms: int = limits.LEASE_DEFAULT
    stop_grace_ms: int = limits.STOP_GRACE
    max_clock_offset_ms: int = limits.CLOCK_OFFSET_MAX
    history_ms: int = limits.HISTORY_DAYS * limits.DAY
    history_max: int = limits.HISTORY_MAX
    prune_every_ms: int = limits.PRUNE_EVERY
    doubts: tuple[str, ...] = ()
    jobs: Mapping[str, JobSpec] = field(default_factory=dict)
