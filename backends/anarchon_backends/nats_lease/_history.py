"""What stands in the stream beside the jobs: runs that have ended, attempts that are past, payloads.

Nothing of it ever changes, so writing it again changes nothing. Imports JetStream, the call, the
records, the subjects, the errors, the model and the standard library.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Mapping, Sequence

from anarchon_backends.nats.jetstream import Entry, JetStream
from anarchon_backends.nats.records import Unreadable, decode, encode, plain, record_of
from anarchon_backends.nats_lease._calls import Call
from anarchon_backends.nats_lease._state import run_from, run_json
from anarchon_backends.nats_lease._subjects import Subjects, payload_at, requested_at, run_at
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
        ended = list(ended)
        records = [(self._subjects.run(job, run.slot), encode(run_json(run))) for run in ended]
        records += [
            (self._subjects.request(job, run.slot, run.request_id), b"")
            for run in ended
            if run.request_id
        ]
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
        entry = await self._surely(self._subjects.run(job, slot), call, as_of)
        return _run_of(job, slot, entry) if entry else None

    async def _surely(self, subject: str, call: Call, as_of: int) -> Entry | None:
        """What the subject has; None where it had nothing at the revision `as_of` or later."""
        while True:
            entry = await self._last(subject, call)
            if entry is not None:
                return entry
            if not await self._names(subject, call, as_of):
                return None

    async def run(self, job: str, slot: int, call: Call) -> model.Run | None:
        """A run that has ended. None: it is not there, for all that whoever answered knows."""
        entry = await self._last(self._subjects.run(job, slot), call)
        return _run_of(job, slot, entry) if entry else None

    async def requested(
        self, job: str, request_id: str, call: Call, *, as_of: int
    ) -> model.Run | None:
        """The run that the request triggered; None where there was none at `as_of` or later."""
        names = await self._names(self._subjects.requests(job, request_id), call, as_of)
        for slot in map(requested_at, names):
            run = await self._run(job, slot, call, as_of)
            if run is not None and run.request_id == request_id:
                return run
        return None

    async def attempts(
        self, job: str, slot: int, numbers: Iterable[int], call: Call
    ) -> list[model.Attempt]:
        """Those of the attempts that are there, in that order."""

        async def attempt(number: int) -> model.Attempt | None:
            entry = await self._last(self._subjects.attempt(job, slot, number), call)
            return _attempt_of(job, slot, entry) if entry else None

        found = await call.each(attempt, numbers)
        return [each for each in found if each is not None]

    async def attempt(
        self, job: str, slot: int, number: int, call: Call, *, as_of: int
    ) -> model.Attempt:
        """The attempt, which was there at the revision `as_of`."""
        entry = await self._surely(self._subjects.attempt(job, slot, number), call, as_of)
        if entry is None:
            raise Unreadable(f"the attempt {number} of {job!r} at {slot} is gone from the store")
        return _attempt_of(job, slot, entry)

    async def slots(self, job: str, call: Call, *, as_of: int = 0) -> list[tuple[str, int]]:
        """The (job, slot) of every run that is there, of one job or (empty) of all jobs.

        What stood there at the revision `as_of` and still does is among them.
        """
        names = await self._names(self._subjects.ended_runs(job), call, as_of)
        return [run_at(each) for each in names]

    # Payloads

    async def put_payload(self, job: str, slot: int, payload: bytes, call: Call) -> str:
        """Writes a payload, before its run. The name by which it is found."""
        name = secrets.token_hex(8)
        await self._jetstream.publish(
            self._subjects.payload(job, slot, name),
            payload,
            stream=self._subjects.stream,
            expected=None,
            until=call.until,
        )
        return name

    async def payload(self, job: str, slot: int, name: str, call: Call, *, as_of: int) -> bytes:
        """The payload, which was there at the revision `as_of`."""
        entry = await self._surely(self._subjects.payload(job, slot, name), call, as_of)
        if entry is None:
            raise Unreadable(f"the payload of {job!r} at {slot} is gone from the store")
        return entry.payload

    async def payloads(self, job: str, call: Call, *, as_of: int) -> list[tuple[int, str]]:
        """The slots and names of all payloads of the job that stood there at `as_of` and still do."""
        names = await self._names(self._subjects.payloads(job), call, as_of)
        return [payload_at(each) for each in names]

    async def delete_payloads(
        self, job: str, payloads: Iterable[tuple[int, str]], call: Call
    ) -> None:
        """Removes payloads that no run needs."""

        async def purge(place: tuple[int, str]) -> None:
            subject = self._subjects.payload(job, *place)
            await self._jetstream.purge(self._subjects.stream, subject, call.until)
            call.wrote = True

        await call.each(purge, payloads)

    async def delete(self, job: str, slots: Iterable[int], call: Call) -> None:
        """Removes runs with all that stands of them."""

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


def _run_of(job: str, slot: int, entry: Entry) -> model.Run:
    what = f"the run of {job!r} at {slot}"
    return decode(what, entry.payload, lambda shown: run_from(job, slot, shown))


def _attempt_of(job: str, slot: int, entry: Entry) -> model.Attempt:
    what = f"an attempt of {job!r} at {slot}"
    return decode(what, entry.payload, lambda shown: record_of(model.Attempt, shown))


async def _again(call: Call, why: str) -> None:
    """Waits a little. Raises `StoreUnavailable` where the call's time is over."""
    if call.left_s() <= STALE_WAIT_S:
        raise StoreUnavailable(f"{why}, and so until the call's time was over")
    await asyncio.sleep(STALE_WAIT_S)
