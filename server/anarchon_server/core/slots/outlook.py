"""What instances compare whose time zone databases have different versions: the offsets of a zone
in the weeks to come, and by them the slots (S5). Pure, but for zone files.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise

from anarchon_server.core.slots.cron import Cron
from anarchon_server.core.slots.zones import Offsets, Stretch, zone_named

_COMPARED = 3_600
_AFTERMATH_MS = 86_400_000
"""For at most so long after a change its repeated times matter."""

_FOREVER_S = 1 << 40
_TEXT = re.compile(r"([^ ]+) ([+-][0-9]{1,6}(?:, [+-][0-9]{1,6} from [0-9]{1,14})*)")


def outlook_on(time_zone: str, from_ms: int, until_ms: int) -> str:
    """Return the zone's offsets from `from_ms` to `until_ms` as a text to compare.

    Such as "Europe/Athens +10800, +7200 from 1792890000000". Two instances whose texts are equal
    have equal slots then, whatever the versions of their databases.
    """
    zone = zone_named(time_zone)
    changes = zone.changes(from_ms // 1000, until_ms // 1000)
    offsets = [f"{change.after_s:+} from {change.at_ms}" for change in changes]
    return f"{time_zone} {', '.join([f'{zone.offset_s(from_ms // 1000):+}', *offsets])}"


class Outlook(Offsets):
    """A zone as an outlook has it. Before and after that its offset does not change."""

    __slots__ = ("_starts", "_stretches", "time_zone")

    def __init__(self, text: str) -> None:
        """Read what `outlook_on` wrote. Raises `ValueError`."""
        read = _TEXT.fullmatch(text)
        if read is None:
            raise ValueError(f"no outlook on a zone: {text[:200]!r}")
        self.time_zone, offsets = read.groups()
        self._stretches = tuple(_stretches(offsets.split(", ")))
        self._starts = [stretch.start_s for stretch in self._stretches]

    def stretch_at(self, second: int) -> Stretch:
        """Return the stretch that `second` (since the epoch) is in."""
        return self._stretches[bisect_right(self._starts, second) - 1]


def _stretches(offsets: Sequence[str]) -> Iterator[Stretch]:
    """The stretches of "+10800", "+7200 from 1792890000000" and so on."""
    parts = (offset.partition(" from ") for offset in offsets)
    read = [(int(at or 0) // 1000, int(offset)) for offset, _, at in parts]
    before = read[0][1]
    for (start, offset), (end, _) in pairwise([*read, (_FOREVER_S, 0)]):
        yield Stretch(start, end, offset, offset - before, start)
        before = offset


def first_difference(here: Cron, there: Outlook, after_ms: int, until_ms: int) -> int | None:
    """Return from when on a schedule's slots differ where its zone is as `there`; None: not then.

    `after_ms` to `until_ms` must be within the outlook, and a day after its beginning, so that what
    a change before that does to slots is known. Exact, but where more than 3,600 slots on end are
    the same although the offsets differ: for such a schedule it is when these begin to.
    """
    elsewhere = here.elsewhere(there)
    for start, end, shift_s in _apart(zone_named(here.time_zone), there, after_ms, until_ms):
        if here.hides(shift_s):
            continue
        slot, last = start - 1, min(end + _AFTERMATH_MS, until_ms)
        for _ in range(_COMPARED):
            ours, theirs = here.next_after(slot), elsewhere.next_after(slot)
            slot = min((s for s in (ours, theirs) if s is not None), default=last + 1)
            if slot > last:
                break
            if ours != theirs:
                return slot
        else:
            return start
    return None


def _apart(
    here: Offsets, there: Offsets, after_ms: int, until_ms: int
) -> Iterator[tuple[int, int, int]]:
    """Iterate over (start, end, seconds): spans in which the offsets are so much apart."""
    changes = {
        change.at_ms
        for offsets in (here, there)
        for change in offsets.changes(after_ms // 1000, until_ms // 1000)
    }
    for start, end in pairwise([after_ms, *sorted(changes), until_ms]):
        shift_s = there.offset_s(start // 1000) - here.offset_s(start // 1000)
        if shift_s:
            yield start, end, shift_s
