"""The atomic step: a job is read, judged, and written where nobody has written it meanwhile.

Imports JetStream, the call, the history, the judging, the state, the subjects, the errors and the
standard library.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import TypeVar

from anarchon_backends.nats.jetstream import JetStream
from anarchon_backends.nats_lease._calls import Call
from anarchon_backends.nats_lease._history import History
from anarchon_backends.nats_lease._judging import Case
from anarchon_backends.nats_lease._state import JobState, state_bytes, state_from
from anarchon_backends.nats_lease._subjects import Subjects
from anarchon_server.core import machine, model
from anarchon_server.core.errors import StoreUnavailable

_T = TypeVar("_T")
_R = TypeVar("_R")

_COPIED_AT_ONCE = 500  # runs that one write takes along to the history
_BACK_OFF_S = 0.002  # doubled with each conflict
_BACK_OFF_MAX_S = 0.1
_DISTRUST_S = 15.0  # longer than a deposed leader takes to notice


@dataclass(slots=True)
class Sitting(Case):
    """A case, with where it was read and what is to be copied before it is written.

    `conflicts` counts how often it was judged in vain, as others had written the job meanwhile.
    """

    revision: int = 0
    conflicts: int = 0
    ended: tuple[model.Run, ...] = ()
    past: tuple[tuple[int, model.Attempt], ...] = ()
    too_long: tuple[tuple[int, model.Attempt], ...] = ()


class Jobs:
    """The jobs of one namespace."""

    def __init__(
        self, jetstream: JetStream, subjects: Subjects, history: History, tell: Callable[[], None]
    ) -> None:
        self._jetstream = jetstream
        self._subjects = subjects
        self._history = history
        self._tell = tell
        self._known: dict[str, tuple[int, float]] = {}  # job -> newest revision seen, and when

    async def read(self, job: str, call: Call) -> Sitting:
        """The job, as the stream's leader has it, with the store's time.

        A revision that is older than one that was seen lately comes from a leader that was deposed
        and has not noticed yet: it is asked for again. Where the store has lost what it had, the
        older one is believed after a while.
        """
        while True:
            entry = await self._jetstream.last(
                self._subjects.stream, self._subjects.job(job), call.until
            )
            revision = entry.revision if entry else 0
            newest, seen_at = self._known.get(job, (0, 0.0))
            if revision >= newest or _now_s() - seen_at > _DISTRUST_S:
                break
            await self._back_off(call, 5, f"the leader does not know what {job!r} is by now")
        self._note(job, revision)
        state = state_from(job, entry.payload) if entry else JobState(machine.JobRecord(job))
        return _sitting(state, await call.moment(), revision)

    async def transact(
        self, job: str, call: Call, work: Callable[[Sitting], Awaitable[_R]]
    ) -> tuple[_R, Sitting]:
        """Reads the job, works on it and writes it, again until nobody came between.

        `work` may be called several times, and only the last one counts.
        """
        for conflicts in count():
            sitting = await self.read(job, call)
            sitting.conflicts = conflicts
            answer = await work(sitting)
            if not sitting.changed or await self._write(sitting, call):
                return answer, sitting
            await self._back_off(call, conflicts, f"others keep writing the job {job!r}")
        raise AssertionError("counting ends")

    async def judge(
        self,
        job: str,
        items: Sequence[_T],
        call: Call,
        judge: Callable[[Sitting, Sequence[_T]], Awaitable[list[_R]]],
    ) -> tuple[list[_R], Sitting]:
        """Judges all items of a job: in one write, or in several where they would not fit into one."""
        answers: list[_R] = []
        while True:

            async def work(
                sitting: Sitting, rest: Sequence[_T] = items[len(answers) :]
            ) -> list[_R]:
                return await judge(sitting, rest)

            some, sitting = await self.transact(job, call, work)
            answers += some
            if len(answers) == len(items):
                return answers, sitting

    async def look_up(self, sitting: Sitting, slots: Sequence[int], call: Call) -> None:
        """Finds the rows of those of the slots that stand in the history alone."""
        state = sitting.state
        lacking = state.lacks(slots)
        if lacking:
            sitting.found = await self._history.runs(
                state.job, lacking, call, as_of=sitting.revision
            )
        for slot in state.aside.intersection(slots):
            whole = await self.whole(sitting, state.runs[slot], call)
            assert whole.current is not None
            sitting.whole[slot] = whole.current

    async def whole(self, sitting: Sitting, run: model.Run, call: Call) -> model.Run:
        """One of the sitting's runs, with its failure where that stands aside."""
        if run.slot not in sitting.state.aside:
            return run
        attempt = await self._history.attempt(
            run.job, run.slot, run.attempt, call, as_of=sitting.revision
        )
        return replace(run, current=attempt)

    async def _write(self, sitting: Sitting, call: Call) -> bool:
        """Writes the job where it still is as it was read; whether it did."""
        await self._move(sitting, call)
        revision = await self._jetstream.publish(
            self._subjects.job(sitting.state.job),
            state_bytes(sitting.state),
            stream=self._subjects.stream,
            expected=sitting.revision,
            until=call.until,
        )
        if revision is None:
            return False
        call.wrote = True
        self._note(sitting.state.job, revision)
        if sitting.news:
            self._tell()
        return True

    async def _move(self, sitting: Sitting, call: Call) -> None:
        """Copies to the history what had come to its end when the job was read, and leaves it out of
        what will be written.
        """
        state = sitting.state
        ended = [run for run in sitting.ended if run.slot in state.runs]
        past: dict[int, list[model.Attempt]] = {}
        for slot, attempt in sitting.past:
            if slot in state.runs:
                past.setdefault(slot, []).append(attempt)
        waiting = [each for each in sitting.too_long if each in state.too_long()]
        copied = {slot: [*attempts] for slot, attempts in past.items()}
        for slot, attempt in waiting:
            copied.setdefault(slot, []).append(attempt)
        whole = [await self.whole(sitting, run, call) for run in ended]
        await self._history.copy(state.job, whole, copied, call)
        for slot, attempts in past.items():
            for attempt in attempts:
                del state.past[slot][attempt.attempt]
            if not state.past[slot]:
                del state.past[slot]
        for slot, _ in waiting:
            state.set_aside(slot)
        for run in ended:
            state.drop(run.slot)

    def _note(self, job: str, revision: int) -> None:
        self._known[job] = revision, _now_s()

    async def _back_off(self, call: Call, conflicts: int, why: str) -> None:
        pause_s = random.uniform(0, min(_BACK_OFF_MAX_S, _BACK_OFF_S * 2 ** min(conflicts, 10)))
        if call.left_s() <= pause_s:
            raise StoreUnavailable(f"{why}, and so until the call's time was over")
        await asyncio.sleep(pause_s)


def _sitting(state: JobState, now: machine.Moment, revision: int) -> Sitting:
    ended = [run for run in state.runs.values() if run.state.final][:_COPIED_AT_ONCE]
    past = [(slot, each) for slot, attempts in state.past.items() for each in attempts.values()]
    return Sitting(
        state,
        now,
        revision=revision,
        ended=tuple(ended),
        past=tuple(past),
        too_long=tuple(state.too_long()),
    )


def _now_s() -> float:
    return asyncio.get_running_loop().time()
