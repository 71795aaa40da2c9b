"""Cron schedules: an expression on the wall clock of a zone, with Debian's rule for clock changes
(S7, S8). Pure: whole milliseconds in, whole milliseconds out.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy

from anarchon_server.core.slots.errors import ScheduleError
from anarchon_server.core.slots.grammar import parse_expression
from anarchon_server.core.slots.identity import identity_of
from anarchon_server.core.slots.wall import Wall
from anarchon_server.core.slots.words import (
    change_in_words,
    clock,
    moved_in_words,
    notes_on,
    times_in_words,
)
from anarchon_server.core.slots.zones import ClockChange, Offsets, Stretch, zone_named

HORIZON_S = 7_258_118_400
"""2200-01-01T00:00:00Z. Cron slots are from the epoch to before this."""

CAUGHT_UP_S = 3 * 3600
"""The largest clock change after which fixed times are made up for, or not repeated."""

_NEARBY_S = 2 * 86_400
"""More than an offset and a clock change together: farther away, neither brings a match nearer."""

_HOUR_S = 3600
_YEAR_MS = 365 * 86_400_000
_EVERY_SECOND = (1 << _HOUR_S) - 1


class Cron:
    """A cron expression of five fields, or six with seconds first, in a time zone.

    `time_zone` is an IANA name; empty means UTC. `job` is the job's name, which `H` is drawn from
    and needs. Raises `ScheduleError` for what is not in the grammar, for an unknown zone, and for
    a schedule that never fires (S9). Slots are whole seconds from 1970 to the end of 2199.

    Two objects are equal where their `identity` is. One object may serve several threads.
    """

    __slots__ = ("_identity", "_wall", "_wildcard", "_zone", "expression", "job", "time_zone")

    def __init__(self, expression: str, time_zone: str = "", job: str | None = None) -> None:
        times = parse_expression(expression, job)
        self.expression = expression
        self.time_zone = time_zone or "UTC"
        self.job = job
        self._zone: Offsets = zone_named(self.time_zone)
        self._wall = Wall(times)
        self._wildcard = times.wildcard
        self._identity: str | None = None
        if self._wall.never_matches():
            raise ScheduleError(
                "expression", expression, "it never fires: no month in it has such a day"
            )

    @property
    def identity(self) -> str:
        """What two instances compare: one text for all spellings of one schedule.

        The version of the time zone database is not in it.
        """
        if self._identity is None:
            self._identity = identity_of(self._wall, self.time_zone)
        return self._identity

    def next_after(self, after_ms: int) -> int | None:
        """Return the first slot later than `after_ms`; None where there is none before 2200."""
        second = max(after_ms // 1000 + 1, 0)
        wall, searched_from = None, 0
        while second < HORIZON_S:
            stretch = self._zone.stretch_at(second)
            if stretch.start_s == second and self._made_up_for(stretch):
                return second * 1000
            earliest = max(second + stretch.offset_s, self._first_new_wall(stretch))
            if wall is None or not searched_from <= earliest <= wall:
                wall, searched_from = self._wall.at_or_after(earliest), earliest
                if wall is None:
                    return None
            if wall - stretch.offset_s < stretch.end_s:
                return (wall - stretch.offset_s) * 1000
            second = _later(second, stretch, wall)
        return None

    def previous_upto(self, upto_ms: int) -> int | None:
        """Return the last slot not later than `upto_ms`; None where there is none since 1970."""
        second = min(upto_ms // 1000, HORIZON_S - 1)
        while second >= 0:
            stretch = self._zone.stretch_at(second)
            wall = self._wall.at_or_before(second + stretch.offset_s)
            if wall is not None and wall >= self._first_new_wall(stretch):
                return (wall - stretch.offset_s) * 1000
            if self._made_up_for(stretch):
                return stretch.start_s * 1000
            if wall is None:
                return None
            second = _earlier(second, stretch, wall)
        return None

    def between(self, start_ms: int, end_ms: int) -> Iterator[int]:
        """Iterate over the slots later than `start_ms` and not later than `end_ms`, in order."""
        slot = self.next_after(start_ms)
        while slot is not None and slot <= end_ms:
            yield slot
            slot = self.next_after(slot)

    def is_slot(self, ms: int) -> bool:
        """Say whether `ms` is a slot."""
        return self.next_after(ms - 1) == ms

    def shortest_gap_ms(self, from_ms: int, count: int = 1000) -> int:
        """Return the shortest gap between neighbours among the `count` slots after `from_ms`.

        Where fewer than two are left before 2200: the time until then.
        """
        shortest = max(0, HORIZON_S * 1000 - from_ms)
        least = self._wall.least_gap_s() * 1000
        slot, left = self.next_after(from_ms), count - 1
        while slot is not None and left > 0:
            following = self.next_after(slot)
            if following is None:
                break
            shortest = min(shortest, following - slot)
            slot, left = following, left - 1
            if shortest <= least:
                slot, left = self._last_of_stretch(slot, left)
        return shortest

    def clock_changes(self, start_ms: int, end_ms: int) -> Iterator[ClockChange]:
        """Iterate over the zone's changes after `start_ms` and not after `end_ms`."""
        return self._zone.changes(start_ms // 1000, end_ms // 1000)

    def elsewhere(self, offsets: Offsets) -> Cron:
        """Return this schedule as it is where the zone is `offsets`: in another database."""
        there = copy(self)
        there._zone = offsets
        return there

    def hides(self, shift_s: int) -> bool:
        """Say whether clocks that are `shift_s` wrong give the same slots, whenever that is.

        So it is where all hours and days are alike: of `*/15 * * * *` with whole hours.
        """
        if not self._wildcard or not self._wall.is_alike_each_hour():
            return False
        hour, shift_s = self._wall.hour_mask(), shift_s % _HOUR_S
        return (hour >> shift_s | hour << _HOUR_S - shift_s) & _EVERY_SECOND == hour

    @property
    def description(self) -> str:
        """The schedule in words: "at 08:00 on Mondays, Europe/Athens"."""
        return f"{times_in_words(self._wall.times)}, {self.time_zone}"

    def forecast(self, from_ms: int) -> tuple[str, ...]:
        """Return the clock changes of the year after `from_ms`, in words."""
        return tuple(map(change_in_words, self.clock_changes(from_ms, from_ms + _YEAR_MS)))

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader might not expect, because other programs read the text otherwise."""
        return notes_on(self._wall.times)

    def remark(self, slot_ms: int) -> str:
        """Say what a clock change did to this slot; empty: nothing.

        It made up for skipped times ("moved" or "merged"), or its local time shows twice.
        """
        second = slot_ms // 1000
        stretch = self._zone.stretch_at(second)
        wall = second + stretch.offset_s
        if stretch.start_s == second and self._made_up_for(stretch):
            return self._moved(wall - stretch.change_s, wall)
        if (
            stretch.change_s < 0
            and wall < stretch.changed_at_s + stretch.offset_s - stretch.change_s
        ):
            return f"{clock(wall)} shows twice: this is the second time"
        following = self._zone.stretch_at(stretch.end_s)
        if following.change_s < 0 and wall >= stretch.end_s + following.offset_s:
            return f"{clock(wall)} shows twice: this is the first time"
        return ""

    def __eq__(self, other: object) -> bool:
        return self.identity == other.identity if isinstance(other, Cron) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.identity)

    def __repr__(self) -> str:
        job = "" if self.job is None else f", job={self.job!r}"
        return f"Cron({self.expression!r}, {self.time_zone!r}{job})"

    # ── The rule for clock changes ──────────────────────────────────────────────────────────────

    def _first_new_wall(self, stretch: Stretch) -> int:
        """Return the first wall time of `stretch` that counts.

        Times shown a second time do not count for a fixed schedule, unless the clock went back by
        more than it makes up for.
        """
        first = stretch.start_s + stretch.offset_s
        if self._wildcard or not -CAUGHT_UP_S <= stretch.change_s < 0:
            return first
        return max(first, stretch.changed_at_s + stretch.offset_s - stretch.change_s)

    def _made_up_for(self, stretch: Stretch) -> bool:
        """Say whether the start of `stretch` makes up for times that the clock skipped there."""
        if self._wildcard or not 0 < stretch.change_s <= CAUGHT_UP_S:
            return False
        if stretch.changed_at_s != stretch.start_s:
            return False
        skipped_until = stretch.start_s + stretch.offset_s
        wall = self._wall.at_or_after(skipped_until - stretch.change_s)
        return wall is not None and wall < skipped_until

    def _moved(self, skipped_from: int, skipped_until: int) -> str:
        skipped = []
        wall = self._wall.at_or_after(skipped_from)
        while wall is not None and wall < skipped_until:
            skipped.append(wall)
            wall = self._wall.at_or_after(wall + 1)
        return moved_in_words(
            skipped, skipped_until, merged=len(skipped) > 1 or wall == skipped_until
        )

    def _last_of_stretch(self, slot: int, left: int) -> tuple[int, int]:
        """Skip slots that lie evenly: return the last one before the offset changes, and how many
        of `left` remain.
        """
        stretch = self._zone.stretch_at(slot // 1000)
        wall = slot // 1000 + stretch.offset_s
        last = self._wall.at_or_before(stretch.end_s - 1 + stretch.offset_s)
        # The first slot of a stretch may be one that was moved, and then the next is nearer.
        if last is None or last <= wall or stretch.start_s * 1000 == slot:
            return slot, left
        return (last - stretch.offset_s) * 1000, max(0, left - self._wall.count(wall, last))


def _later(second: int, stretch: Stretch, wall: int) -> int:
    """Return where to look next, when `stretch` has no slot from `second` and `wall` is next.

    No wall time from `second` to `wall` matches, and so neither does one that shows in between,
    unless a change near `second` shows earlier ones again.
    """
    if stretch.end_s < second + _NEARBY_S:
        return stretch.end_s
    return max(stretch.end_s, wall - _NEARBY_S)


def _earlier(second: int, stretch: Stretch, wall: int) -> int:
    """The mirror image of `_later`: `wall` is the last match before `stretch`."""
    if stretch.start_s > second - _NEARBY_S:
        return stretch.start_s - 1
    return min(stretch.start_s - 1, wall + _NEARBY_S)
