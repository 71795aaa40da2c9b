"""Whether the live instances agree on time zones, and which slots differ where they do not (S5).

Imports the core's leaves, `slots` and `jobs`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from anarchon_server.core import limits
from anarchon_server.core.context import Context
from anarchon_server.core.jobs import Jobs
from anarchon_server.core.lanes import Lane
from anarchon_server.core.messages import Level, Method
from anarchon_server.core.model import Instance, InstanceState
from anarchon_server.core.slots import Cron
from anarchon_server.core.slots.outlook import Outlook, first_difference, outlook_on


@dataclass(slots=True)
class _Version:
    """Another version of the zone database: what was compared last, and whom the log named."""

    compared: tuple[int, int, dict[str, tuple[int, str]]] | None = None
    named: dict[str, set[str]] = field(default_factory=dict)


class Comparing:
    """Looks at the other instances after each registration, and once a minute.

    Only an instance with cron jobs does: grids know no zone. What it finds is logged once.
    """

    def __init__(self, context: Context, jobs: Jobs) -> None:
        self._context = context
        self._jobs = jobs
        self._wanted = False
        self._generation = -1
        self._crons: dict[str, list[tuple[str, Cron]]] = {}
        self._outlook: tuple[tuple[int, int], tuple[str, ...]] = ((-1, 0), ())
        self._versions: dict[str, _Version] = {}

    # --- What this instance reports ------------------------------------------------------

    def outlook(self) -> tuple[int, tuple[str, ...]]:
        """From when on, and what, the zones of its jobs are like by its database.

        One short text a zone; from a day ago, so that others can compare from now on.
        """
        if not self._context.store_time.known or not self._by_zone():
            return 0, ()
        begins_at = self._begins_at()
        seen = (self._jobs.generation, begins_at)
        if self._outlook[0] != seen:
            ends_at = begins_at + limits.OUTLOOK_SPAN
            texts = tuple(outlook_on(zone, begins_at, ends_at) for zone in sorted(self._by_zone()))
            self._outlook = (seen, texts)
        return begins_at, self._outlook[1]

    def _begins_at(self) -> int:
        return self._context.store_now // limits.DAY * limits.DAY - limits.DAY

    def _by_zone(self) -> dict[str, list[tuple[str, Cron]]]:
        """The names and schedules of the cron jobs of each zone."""
        if self._generation != self._jobs.generation:
            self._generation = self._jobs.generation
            self._crons = {}
            for state in self._jobs:
                if isinstance(schedule := state.job.schedule, Cron):
                    crons = self._crons.setdefault(schedule.time_zone, [])
                    crons.append((state.job.name, schedule))
        return self._crons

    # --- Looking at the others -----------------------------------------------------------

    def due(self) -> None:
        """A registration was answered, or a minute has passed since the last look."""
        context = self._context
        if context.settings.tzdata_version and self._by_zone():
            self._wanted = True
            context.timers.set(("compare",), context.now + limits.COMPARE_EVERY)

    def pump(self) -> None:
        """Asks for the instances, if that is due and may go. A look that fails is left out."""
        context = self._context
        if (
            not self._wanted
            or context.stopping
            or not context.lanes.free(Lane.INSTANCES, context.now)
        ):
            return
        self._wanted = False
        context.out.append(
            context.lanes.call(
                Lane.INSTANCES,
                Method.INSTANCES,
                (),
                context.now,
                lambda _, reply: self._compare(reply.answers),
                lambda _: None,
            )
        )

    def _compare(self, instances: Iterable[Instance]) -> None:
        ours = self._context.settings.tzdata_version
        others: dict[str, list[Instance]] = {}
        for other in instances:
            live = other.state is not InstanceState.LOST
            if live and other.tzdata_version not in ("", ours):
                others.setdefault(other.tzdata_version, []).append(other)
        for version in [v for v in self._versions if v not in others]:
            del self._versions[version]
            self._context.log(Level.INFO, "tzdata_agrees_again", ours=ours, theirs=version)
        for version, holders in sorted(others.items()):
            if version not in self._versions:
                self._versions[version] = _Version()
                self._context.log(
                    Level.WARNING,
                    "tzdata_differs",
                    ours=ours,
                    theirs=version,
                    instances=_labels(holders),
                )
            self._compare_slots(version, holders)

    def _compare_slots(self, version: str, holders: Sequence[Instance]) -> None:
        """Where offsets differ, looks for slots that do; anew when something has changed."""
        context, known = self._context, self._versions[version]
        outlooks = self._newest(holders)
        now = context.store_now
        seen = (self._jobs.generation, now // limits.DAY, outlooks)
        if known.compared == seen:
            return
        known.compared = seen
        for zone, (begins_at, text) in sorted(outlooks.items()):
            ends_at = begins_at + limits.OUTLOOK_SPAN
            if text == outlook_on(zone, begins_at, ends_at):
                continue
            try:
                there = Outlook(text)
            except ValueError:
                continue  # a later Anarchon's; the versions differ, and that was said
            after = max(now, begins_at + limits.DAY)
            until = min((now // limits.DAY + 1) * limits.DAY + limits.OUTLOOK, ends_at)
            self._warn_of(version, holders, there, (after, until))

    def _newest(self, holders: Iterable[Instance]) -> dict[str, tuple[int, str]]:
        """What the instances say of the zones that our jobs have too, where it is of these days."""
        newest: dict[str, tuple[int, str]] = {}
        for other in holders:
            if abs(other.outlook_at - self._begins_at()) > limits.DAY:
                continue
            for text in other.outlook:
                zone = text.partition(" ")[0]
                if zone in self._by_zone():
                    newest[zone] = max(newest.get(zone, (0, "")), (other.outlook_at, text))
        return newest

    def _warn_of(
        self, version: str, holders: Iterable[Instance], there: Outlook, span: tuple[int, int]
    ) -> None:
        """Loudly, once, names the jobs of a zone whose slots differ within the span."""
        crons = sorted(self._by_zone()[there.time_zone], key=lambda cron: cron[0])
        known: dict[str, int | None] = {}
        differ: dict[str, int] = {}
        looked_at = 0
        for name, schedule in crons:
            looked_at += 1
            if schedule.identity not in known:
                known[schedule.identity] = first_difference(schedule, there, *span)
            first = known[schedule.identity]
            if first is not None:
                differ[name] = first
            if len(differ) == limits.JOBS_NAMED:
                break
        named = self._versions[version].named.setdefault(there.time_zone, set())
        if not differ.keys() - named:
            return
        named |= differ.keys()
        self._context.log(
            Level.ERROR,
            "slots_differ",
            time_zone=there.time_zone,
            first_at=_iso(min(differ.values())),
            jobs=tuple(differ),
            jobs_not_looked_at=len(crons) - looked_at,
            ours=self._context.settings.tzdata_version,
            theirs=version,
            instances=_labels(holders),
        )


def _labels(instances: Iterable[Instance]) -> tuple[str, ...]:
    labels = sorted(instance.instance_id for instance in instances)
    more = len(labels) - limits.INSTANCES_NAMED
    return (*labels[: limits.INSTANCES_NAMED], *([f"and {more} more"] if more > 0 else []))


def _iso(ms: int) -> str:
    return datetime.fromtimestamp(ms // 1000, UTC).isoformat().replace("+00:00", "Z")
