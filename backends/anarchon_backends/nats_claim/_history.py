"""Claims, and the runs that they make: who won a slot, and what has become of it.

Imports the shared JetStream and records, the rules, the port and the standard library. A claim is
written once and never changed. A run's row is written after it, and by revision from then on; where
it is missing the claim says what it would be.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import TypeVar

from anarchon_backends.nats.jetstream import JetStream
from anarchon_backends.nats.records import Unreadable, decode, encode, plain, record_of
from anarchon_backends.nats_claim._batch import together
from anarchon_backends.nats_claim._subjects import Subjects
from anarchon_server.core import claim_only, machine, model
from anarchon_server.core import store as port
from anarchon_server.core.machine import Moment, Saved, TokenVerdict

_PAUSE_S = 0.005
_READ_AT_ONCE = 200
_WRITTEN_MAX = 10_000
_ROW_MAX = 240 << 10  # no server takes less than 256 KiB, of which headers have some

_T = TypeVar("_T")


class History:
    """The claims and runs of one namespace."""

    def __init__(self, jetstream: JetStream, subjects: Subjects) -> None:
        self._jetstream = jetstream
        self._subjects = subjects
        # Unfinished runs as this process wrote them last, with their revisions: a guess at what
        # is there, which saves a read and is corrected by the revision where it is wrong.
        self._written: dict[tuple[str, int], tuple[model.Run, int]] = {}

    async def make_claim(self, run: model.Run, until: float) -> bool:
        """Claims the slot of `run` with its token: the atomic step. False: it has a claim."""
        subjects = self._subjects
        revision = await self._jetstream.publish(
            subjects.claim(run.job, run.slot),
            _row_of(run),
            stream=subjects.claims,
            expected=0,
            until=until,
        )
        return revision is not None

    async def claimed(self, job: str, slot: int, until: float) -> model.Run | None:
        """The run as its claim made it. None: nobody has claimed the slot."""
        subject = self._subjects.claim(job, slot)
        entry = await self._jetstream.last(self._subjects.claims, subject, until)
        return _run_of(job, slot, entry.payload) if entry else None

    async def begin(self, run: model.Run, until: float) -> None:
        """Writes the row of a run just claimed, unless there is one."""
        await self._write(run, 0, until)

    async def present(self, run: model.Run, until: float) -> model.Run:
        """What has become of a claimed run."""
        row, _ = await self._row(run.job, run.slot, until)
        if row is None:
            await self.begin(run, until)
        return row or run

    async def decide(
        self, job: str, slot: int, judge: Callable[[model.Run | None], TokenVerdict], until: float
    ) -> port.TokenAnswer:
        """Has the run judged, and writes what that changes; again if somebody else wrote it.

        Of what somebody spoilt no token is known.
        """

        def judged(run: model.Run | None) -> tuple[port.TokenAnswer, Saved | None]:
            verdict = judge(run)
            return verdict.answer, verdict.saved

        try:
            return await self.decided(job, slot, judged, until)
        except Unreadable:
            return port.TokenAnswer(port.TokenOutcome.UNKNOWN_TOKEN)

    async def decided(
        self,
        job: str,
        slot: int,
        judge: Callable[[model.Run | None], tuple[_T, Saved | None]],
        until: float,
    ) -> _T:
        """The same for whatever is asked of one run. Raises `Unreadable`."""
        guess = self._written.get((job, slot))
        if guess is not None:
            answer, saved = judge(guess[0])
            if saved and await self._write(saved.run, guess[1], until):
                return answer
        async for _ in tries():
            run, revision = await self._row(job, slot, until)
            if run is None:
                run = await self.claimed(job, slot, until)
            answer, saved = judge(run)
            if saved is None or await self._write(saved.run, revision, until):
                return answer
        raise AssertionError("tries never end")

    async def run(self, job: str, slot: int, until: float) -> model.Run | None:
        """The row of a run. None: there is none."""
        run, _ = await self._row(job, slot, until)
        return run

    async def runs(self, places: Sequence[tuple[int, str]], until: float) -> list[model.Run | None]:
        """The rows at (slot, job). What somebody spoilt is as if it were not there."""

        async def readable(slot: int, job: str) -> model.Run | None:
            with suppress(Unreadable):
                return await self.run(job, slot, until)
            return None

        return await together(readable(*place) for place in places)

    async def places(self, until: float, job: str = "*") -> list[tuple[int, str]]:
        """Where there are rows, as (slot, job) in this order."""
        found = await self._jetstream.subjects(
            self._subjects.history, self._subjects.run(job), until
        )
        return sorted(self._subjects.run_of(subject) for subject in found)

    async def prune(
        self, policy: port.PrunePolicy, now: Moment, known: Container[str], until: float
    ) -> tuple[int, Collection[str]]:
        """Removes a batch of old runs, but for unfinished ones of the instances that are `known`, by
        their incarnations; how many went, and the jobs that may have others.
        """
        by_job: dict[str, list[int]] = {}
        for slot, job in await self.places(until):
            by_job.setdefault(job, []).append(slot)
        old: list[model.Run] = []
        for job, slots in by_job.items():
            if len(old) >= policy.batch:
                break
            found = await self._old(job, slots, policy, now, known, until)
            old += found[: policy.batch - len(old)]
        await together(
            (
                self._jetstream.purge(
                    self._subjects.history, self._subjects.run(run.job, run.slot), until
                )
                for run in old
            ),
            writes=True,
        )
        return len(old), by_job.keys()

    async def _old(
        self,
        job: str,
        slots: list[int],
        policy: port.PrunePolicy,
        now: Moment,
        known: Container[str],
        until: float,
    ) -> list[model.Run]:
        """Which of a job's runs may go, oldest first. Only those that might are read."""
        beyond = len(slots) - policy.history_max
        oldest = now.at - policy.history_ms
        candidates = [n for n, slot in enumerate(slots) if n < beyond or slot < oldest]
        rows = [
            model.Run(job, slot, model.Trigger.SCHEDULE, model.RunState.CLAIMED) for slot in slots
        ]
        going: list[model.Run] = []
        for first in range(0, len(candidates), _READ_AT_ONCE):
            chunk = candidates[first : first + _READ_AT_ONCE]
            found = await self.runs([(slots[n], job) for n in chunk], until)
            for place, row in zip(chunk, found, strict=True):
                rows[place] = row or rows[place]
            read = {slots[n] for n in candidates[: first + len(chunk)]}
            may_go = claim_only.prunable(rows, now, policy, known)
            going = [run for run in may_go if run.slot in read]
            if len(going) >= policy.batch:
                break
        return going

    async def _row(self, job: str, slot: int, until: float) -> tuple[model.Run | None, int]:
        """The row, with its revision (0: there is none)."""
        subject = self._subjects.run(job, slot)
        entry = await self._jetstream.last(self._subjects.history, subject, until)
        return (_run_of(job, slot, entry.payload), entry.revision) if entry else (None, 0)

    async def _write(self, run: model.Run, revision: int, until: float) -> bool:
        """Writes the row that follows `revision`. False: another was written meanwhile."""
        self._written.pop((run.job, run.slot), None)
        written = await self._jetstream.publish(
            self._subjects.run(run.job, run.slot),
            _row_of(run),
            stream=self._subjects.history,
            expected=revision,
            until=until,
        )
        if written is None:
            return False
        if not run.state.final:
            self._written[run.job, run.slot] = run, written
            if len(self._written) > _WRITTEN_MAX:
                del self._written[next(iter(self._written))]
        return True


async def tries() -> AsyncIterator[int]:
    """Tries without end, the first two at once: whoever tries is bounded by its call's time."""
    for number in count(1):
        yield number
        if number > 1:
            await asyncio.sleep(_PAUSE_S * min(number, 10))


def _row_of(run: model.Run) -> bytes:
    """The run as it is kept. Where the failures of many attempts are more than a message may hold,
    the stack traces of the earlier ones are left out, and where that does not do, what they say.
    """
    row = _encoded(run)
    for shortened in (machine.without_trace, _without_message):
        if len(row) <= _ROW_MAX:
            break
        run = replace(run, earlier=tuple(map(shortened, run.earlier)))
        row = _encoded(run)
    return row


def _without_message(attempt: model.Attempt) -> model.Attempt:
    if attempt.failure is None:
        return attempt
    return replace(attempt, failure=replace(attempt.failure, message=""))


def _encoded(run: model.Run) -> bytes:
    shown = plain(run)
    del shown["job"], shown["slot"]
    return encode(shown)


def _run_of(job: str, slot: int, payload: bytes) -> model.Run:
    return decode(
        f"the run of {job!r} at {slot}",
        payload,
        lambda shown: record_of(model.Run, shown, job=job, slot=slot),
    )


def chunks(places: Sequence[tuple[int, str]], size: int) -> Iterator[Sequence[tuple[int, str]]]:
    """The places, at most `size` at a time."""
    for first in range(0, len(places), size):
        yield places[first : first + size]
