"""A history, indexed: what several rules look up in it, and what a rule finds.

Pure: imports the events and the standard library only.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest

from tests.checker.events import (
    AbleFrom,
    AppDied,
    AppFroze,
    AppThawed,
    ClockStepped,
    Event,
    HandlerEnded,
    HandlerStarted,
    HandlerTold,
    HistoryEnded,
    InstanceDied,
    JobKnown,
    JobPaused,
    JobResumed,
    LeasesEnded,
    ResultReceipt,
    RunSaved,
    ServedFrom,
    ServedUntil,
    SlotDue,
    UnableFrom,
)

Key = tuple[str, int]
"""A job and a slot: one run."""

FOREVER = 1 << 62


@dataclass(frozen=True, slots=True)
class Violation:
    """A promise that was not kept: which (by its number), when, for which run, and how."""

    rule: str
    at: int
    job: str
    slot: int
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.text} (job {self.job}, slot {self.slot}, at {self.at} ms)"


@dataclass(slots=True)
class Handler:
    """What is known of one handler's life."""

    start: HandlerStarted
    told_at: int | None = None
    ended_at: int | None = None
    ended: HandlerEnded | None = None
    receipt_at: int | None = None


class History:
    """The events, with what several rules look up in them."""

    def __init__(self, events: list[Event]) -> None:
        self.events = events
        self.jobs = {e.job: e for e in events if isinstance(e, JobKnown)}
        self.slots = [e for e in events if isinstance(e, SlotDue)]
        self.end_at = max((e.at for e in events if isinstance(e, HistoryEnded)), default=0)
        self.boots = [e.at for e in events if isinstance(e, LeasesEnded)]
        self.saved: dict[Key, list[RunSaved]] = defaultdict(list)
        self.handlers: dict[str, Handler] = {}
        self.died_at: dict[str, int] = {}
        self.frozen: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self.paused: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self.deaths = [e for e in events if isinstance(e, AppDied)]
        self.processes = [e for e in events if isinstance(e, InstanceDied)]
        for event in events:
            self._take_in(event)
        self.deadlines: dict[Key, list[int]] = defaultdict(list)
        for due in self.slots:
            self.deadlines[due.job, due.slot].append(due.deadline_ms)
        kinds = (AbleFrom, UnableFrom)
        self.able = Able((e for e in events if isinstance(e, kinds)), self.end_at)
        self.served = Able((e for e in events if not isinstance(e, kinds)), self.end_at)

    def _take_in(self, event: Event) -> None:
        match event:
            case RunSaved():
                self.saved[event.job, event.slot].append(event)
            case HandlerStarted():
                self.handlers.setdefault(event.token, Handler(event))
            case HandlerTold() if event.token in self.handlers:
                handler = self.handlers[event.token]
                handler.told_at = event.at if handler.told_at is None else handler.told_at
            case HandlerEnded() if event.token in self.handlers:
                self.handlers[event.token].ended_at = event.at
                self.handlers[event.token].ended = event
            case ResultReceipt() if event.token in self.handlers:
                self.handlers[event.token].receipt_at = event.at
            case JobPaused():
                self.paused[event.job].append((event.at, FOREVER))
            case JobResumed() if self.paused[event.job]:
                self.paused[event.job][-1] = (self.paused[event.job][-1][0], event.at)
            case AppDied():
                self.died_at.setdefault(event.app, event.at)
            case AppFroze():
                self.frozen[event.app].append((event.at, FOREVER))
            case AppThawed() if self.frozen[event.app]:
                self.frozen[event.app][-1] = (self.frozen[event.app][-1][0], event.at)
            case _:
                pass

    def lease_end(self, run: RunSaved) -> int:
        """When the lease that this state shows is over; the earliest of its end and a new boot."""
        if run.lease_until is None:
            return FOREVER
        boot = next((at for at in self.boots if at >= run.at), FOREVER)
        return min(run.lease_until, boot)

    def comes_at(self, slot: int) -> int:
        """The true time of a slot, by the store's clock as it is in the end."""
        ahead_ms = 0
        for event in self.events:
            match event:
                case RunSaved():
                    ahead_ms = event.store_at - event.at
                case ClockStepped():
                    ahead_ms += event.by_ms
                case _:
                    pass
        return slot - ahead_ms

    def goes_first(self, key: Key, start: int, end: int) -> bool:
        """Whether another run of the job was unfinished at any time from `start` to `end`, where runs
        may not overlap (S18).
        """
        if self.jobs[key[0]].overlap:
            return False
        return any(
            since <= end and start <= until
            for other, spans in self._unfinished_of(key[0], older_than=0)
            if other != key[1]
            for since, until in spans
        )

    def free_since(self, key: Key) -> int:
        """Since when no other run of the job has been unfinished, nor has an older one waited."""
        if self.jobs[key[0]].overlap:
            return 0
        return max(
            (
                until
                for other, spans in self._unfinished_of(key[0], older_than=key[1])
                if other != key[1]
                for _, until in spans
            ),
            default=0,
        )

    def _unfinished_of(
        self, job: str, older_than: int
    ) -> Iterator[tuple[int, list[tuple[int, int]]]]:
        """The spans in which each run of the job was unfinished, or waited and is older."""
        for (name, slot), states in self.saved.items():
            if name != job:
                continue
            spans = []
            for run, after in zip_longest(states, states[1:]):
                counts = not run.final and (run.state != "due" or slot < older_than)
                if counts:
                    spans.append((run.at, after.at if after is not None else FOREVER))
            yield slot, spans

    def was_paused(self, job: str, start: int, end: int) -> bool:
        """Whether the job was paused at any time from `start` to `end`."""
        return any(since <= end and start <= until for since, until in self.paused[job])

    def gone_by(self, moment: int) -> set[str]:
        """The instances' processes that were gone by then, as their successors show."""
        return {e.incarnation for e in self.processes if e.at <= moment}

    def lost_an_app(self, instance: str, start: int, end: int) -> bool:
        """Whether an application of the instance died in this time."""
        return any(e.instance == instance and start <= e.at <= end for e in self.deaths)

    def thawed(self, app: str, moment: int) -> int:
        """The first moment from `moment` on at which the application was not frozen."""
        for froze_at, thawed_at in self.frozen[app]:
            if froze_at <= moment < thawed_at:
                moment = thawed_at
        return moment

    def stopped_at(self, handler: Handler) -> int:
        """When the handler surely ran no more."""
        ends = (handler.ended_at, self.died_at.get(handler.start.app))
        return min((at for at in ends if at is not None), default=FOREVER)


class Able:
    """When which instance could have run what (by schedule), or had a client for it."""

    def __init__(self, events: Iterable[Event], end_at: int) -> None:
        self._spans: dict[tuple[str, str, str], list[tuple[int, int]]] = defaultdict(list)
        since: dict[tuple[str, str, str], int] = {}
        for event in events:
            match event:
                case AbleFrom():
                    since.setdefault((event.instance, event.job, event.schedule_id), event.at)
                case ServedFrom():
                    since.setdefault((event.instance, event.job, ""), event.at)
                case UnableFrom():
                    self._end((event.instance, event.job, event.schedule_id), since, event.at)
                case ServedUntil():
                    self._end((event.instance, event.job, ""), since, event.at)
                case _:
                    pass
        for key, start in since.items():
            self._spans[key].append((start, end_at))

    def _end(
        self, key: tuple[str, str, str], since: dict[tuple[str, str, str], int], end: int
    ) -> None:
        if key in since:
            self._spans[key].append((since.pop(key), end))

    def throughout(self, job: str, start: int, end: int, schedule_id: str = "") -> str | None:
        """An instance that was able from `start` to `end` without a break; None: none was."""
        for key in self._spans:
            if key[1] == job and schedule_id in ("", key[2]) and self._covers(key, start, end):
                return key[0]
        return None

    def spans(self, instance: str, job: str, start: int, end: int) -> bool:
        """Whether this instance was able from `start` to `end` without a break."""
        return any(
            key[:2] == (instance, job) and self._covers(key, start, end) for key in self._spans
        )

    def spans_of(self, instance: str, job: str) -> list[tuple[int, int]]:
        """When this instance was able, under any schedule."""
        return [
            span for key in self._spans if key[:2] == (instance, job) for span in self._spans[key]
        ]

    def _covers(self, key: tuple[str, str, str], start: int, end: int) -> bool:
        spans = self._spans[key]
        place = bisect_right(spans, (start, FOREVER)) - 1
        return place >= 0 and spans[place][0] <= start and end <= spans[place][1]
