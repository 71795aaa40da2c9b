"""What operators ask of a job: what it depends on beside the job, and a triggered run's payload (S29).

A payload is written before its run, by a name of its own: where the run is never written, by a crash
or since another came between, it belongs to no run, and pruning removes it. Imports the call, the
history, the jobs, the judging, the members, the port and the standard library.
"""

from __future__ import annotations

from collections.abc import Sequence

from anarchon_backends.nats_lease._calls import Call
from anarchon_backends.nats_lease._history import History
from anarchon_backends.nats_lease._jobs import Jobs, Sitting
from anarchon_backends.nats_lease._judging import Known, judge_control
from anarchon_backends.nats_lease._members import Members
from anarchon_server.core import store as port


class Operating:
    """What operators ask of one namespace."""

    def __init__(self, history: History, jobs: Jobs, members: Members) -> None:
        self._history = history
        self._jobs = jobs
        self._members = members

    async def judge(
        self, sitting: Sitting, acts: Sequence[port.Control], call: Call
    ) -> list[port.ControlAnswer]:
        """Decides acts of one job, in their order, until the case is full."""
        answers: list[port.ControlAnswer] = []
        payloads: dict[int, bytes] = {}
        for act in acts:
            if sitting.full or (isinstance(act, port.Resume) and sitting.is_crowded()):
                break
            known = await self._known(sitting, act, call)
            before = set(sitting.state.runs)
            answer = judge_control(sitting, act, known)
            answers.append(answer)
            if isinstance(act, port.TriggerRun) and act.payload and answer.run is not None:
                slot = answer.run.run.slot
                made = slot not in before and slot in sitting.state.runs
                if made and answer.run.run.waits:
                    payloads[slot] = act.payload
        await self._put(sitting, payloads, call)
        return answers

    async def _known(self, sitting: Sitting, act: port.Control, call: Call) -> Known:
        state = sitting.state
        match act:
            case port.CancelRun():
                await self._jobs.look_up(sitting, [act.slot], call)
                return Known()
            case port.Resume():
                roll = await self._members.roll(call)
                named = [slot for each in act.passed for slot in each.slots]
                named += [missed.slot for plan in act.plans for missed in plan.slots]
                taken = await self._taken(sitting, call) if state.lacks(named) else ()
                return Known(held=roll.live(act.job), taken=taken)
            case port.TriggerRun():
                return await self._known_of_trigger(sitting, act, call)
        return Known()

    async def _known_of_trigger(self, sitting: Sitting, act: port.TriggerRun, call: Call) -> Known:
        """Where a run of the present or the future has moved, also which slots are taken there."""
        state = sitting.state
        here = state.requested(act.request_id)
        if here is not None:
            await self._jobs.look_up(sitting, [here.slot], call)
        if here is not None or state.moved < 0:
            return Known()
        before = None
        if act.request_id:
            before = await self._history.requested(
                act.job, act.request_id, call, as_of=sitting.revision
            )
        late = before is None and state.moved >= sitting.now.at
        return Known(taken=await self._taken(sitting, call) if late else (), before=before)

    async def _taken(self, sitting: Sitting, call: Call) -> set[int]:
        """The slots that have a row in the history."""
        job = sitting.state.job
        return {slot for _, slot in await self._history.slots(job, call, as_of=sitting.revision)}

    async def _put(self, sitting: Sitting, payloads: dict[int, bytes], call: Call) -> None:
        job = sitting.state.job

        async def put(slot: int) -> None:
            name = await self._history.put_payload(job, slot, payloads[slot], call)
            sitting.state.payloads[slot] = name

        await call.each(put, payloads)
