"""Runs that have ended and attempts that are past: what stands in the stream beside the jobs.

Nothing in it ever changes, so writing it again changes nothing. Imports JetStream, the call, the
records, the subjects, the errors, the model and the standard library.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from anarchon_backends.nats.jetstream import Entry, JetStream
from anarchon_backends.nats.records import decode, encode, plain, record_of
from anarchon_backends.nats_lease._calls import Call
from anarchon_backends.nats_lease._state import run_from, run_json
from anarchon_backends.nats_lease._subjects import Subjects, run_at
from anarchon_server.core import model
from anarchon_server.core.errors import StoreUnavailable

STALE_WAIT_S = 0.05


class History:
    """The history of one namespace."""

    def __init__(self, jetstream: JetStream, subjects: Subjects) -> None:
        self._jetstream = jetstream
        self._subjects = subjects

    async def copy(
        self,
        job: str,
        ended: Iterable[model.Run],
        past: Mapping[int, Iterable[model.Attempt]],
        call: Call,
    ) -> None:
        """Writes what is not there yet. Whoever else has written it wrote the same."""
        records = [(self._subjects.run(job, run.slot), encode(run_json(run))) for run in ended]
        records += [
            (self._subjects.attempt(job, slot, each.attempt), encode(plain(each)))
            for slot, attempts in past.items()
            for each in attempts
        ]
        await call.each(lambda record: self._put(*record, call), records)

    async def _put(self, subject: str, payload: bytes, call: Call) -> None:
        """Writes one record. None for an answer: somebody else has just written it, or is at it."""
        while True:
            stream = self._subjects.stream
            revision = await self._jetstream.publish(
                subject, payload, stream=stream, expected=0, until=call.until
            )
            if revision is not None or await self._last(subject, call) is not None:
                return
            await _again(call, f"{subject} is being written")

    async def runs(
        self, job: str, slots: Sequence[int], call: Call, *, as_of: int
    ) -> dict[int, model.Run | None]:
        """The rows of these slots; None where there was none at the revision `as_of` or later."""
        found = await call.each(lambda slot: self._run(job, slot, call, as_of), slots)
        return dict(zip(slots, found, strict=True))

    async def _run(self, job: str, slot: int, call: Call, as_of: int) -> model.Run | None:
        while True:
            run = await self.run(job, slot, call)
            if run is not None:
                return run
            if not await self._names(self._subjects.run(job, slot), call, as_of):
                return None

    async def run(self, job: str, slot: int, call: Call) -> model.Run | None:
        """A run that has ended. None: it is not there, for all that whoever answered knows."""
        entry = await self._last(self._subjects.run(job, slot), call)
        if entry is None:
            return None
        what = f"the run of {job!r} at {slot}"
        return decode(what, entry.payload, lambda shown: run_from(job, slot, shown))

    async def attempts(
        self, job: str, slot: int, numbers: Iterable[int], call: Call
    ) -> list[model.Attempt]:
        """Those of the attempts that are there, in that order."""

        async def attempt(number: int) -> model.Attempt | None:
            entry = await self._last(self._subjects.attempt(job, slot, number), call)
            if entry is None:
                return None
            what = f"an attempt of {job!r} at {slot}"
            return decode(what, entry.payload, lambda shown: record_of(model.Attempt, shown))

        found = await call.each(attempt, numbers)
        return [each for each in found if each is not None]

    async def slots(self, job: str, call: Call, *, as_of: int = 0) -> list[tuple[str, int]]:
        """The (job, slot) of every run that is there, of one job or (empty) of all jobs.

        What stood there at the revision `as_of` and still does is among them.
        """
        names = await self._names(self._subjects.ended_runs(job), call, as_of)
        return [run_at(each) for each in names]

    async def delete(self, job: str, slots: Iterable[int], call: Call) -> None:
        """Removes runs with their attempts."""

        async def purge(slot: int) -> None:
            subject = self._subjects.of_run(job, slot)
            await self._jetstream.purge(self._subjects.stream, subject, call.until)
            call.wrote = True

        await call.each(purge, slots)

    async def _last(self, subject: str, call: Call) -> Entry | None:
        return await self._jetstream.last(self._subjects.stream, subject, call.until)

    async def _names(self, pattern: str, call: Call, as_of: int) -> list[str]:
        """The subjects that match, as a leader sees them that knows the revision `as_of`.

        One that was deposed and has not noticed yet may know less: it is asked again.
        """
        names: list[str] = []
        while True:
            asked = {"subjects_filter": pattern, "offset": len(names)}
            answer = await self._jetstream.info(self._subjects.stream, call.until, asked)
            state = answer["state"]
            if state["last_seq"] < as_of:
                await _again(call, f"the stream's leader knows no revision {as_of}")
                continue
            page = state.get("subjects") or {}
            names += page
            if not page or len(names) >= answer.get("total", 0):
                return names


async def _again(call: Call, why: str) -> None:
    """Waits a little. Raises `StoreUnavailable` where the call's time is over."""
    if call.left_s() <= STALE_WAIT_S:
        raise StoreUnavailable(f"{why}, and so until the call's time was over")
    await asyncio.sleep(STALE_WAIT_S)
