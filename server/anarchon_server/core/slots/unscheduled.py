"""No schedule at all: a job that runs only when it is triggered (S29)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Unscheduled:
    """Never due by itself. What a schedule is asked for, and has not: slots, gaps, an identity."""

    identity: ClassVar[str] = ""
    description: ClassVar[str] = "only when triggered"
    notes: ClassVar[tuple[str, ...]] = ()

    def next_after(self, after_ms: int) -> None:
        """Return None: there is no slot."""

    def previous_upto(self, upto_ms: int) -> None:
        """Return None: there is no slot."""

    def between(self, start_ms: int, end_ms: int) -> Iterator[int]:  # noqa: ARG002
        """Iterate over no slots."""
        return iter(())
