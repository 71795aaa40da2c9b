"""Zones as stretches of one offset, computed year by year."""

from __future__ import annotations

from datetime import UTC, datetime

from anarchon_server.core.slots.zones import zone_named

HOUR_S = 3_600


def test_a_change_on_the_last_day_of_a_year_is_known_in_the_next() -> None:
    """Kiritimati went from ten hours behind UTC to fourteen ahead as 1994 ended."""
    zone = zone_named("Pacific/Kiritimati")
    changed_at = datetime(1994, 12, 31, 10, tzinfo=UTC)
    stretch = zone.stretch_at(int(datetime(1995, 1, 2, tzinfo=UTC).timestamp()))
    assert (stretch.offset_s, stretch.change_s) == (14 * HOUR_S, 24 * HOUR_S)
    assert stretch.changed_at_s == changed_at.timestamp()
    assert stretch.start_s == datetime(1995, 1, 1, tzinfo=UTC).timestamp()
