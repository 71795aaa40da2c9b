"""Pause, resume, trigger and cancel, from a request to what the store is asked (S29).

Imports core and `loop`. Every one of them is safe to repeat, a trigger by its request id.
"""

from __future__ import annotations

import asyncio
from uuid import uuid4

from anarchon_server.core import limits
from anarchon_server.core.asking import resume_of, trigger_of
from anarchon_server.core.errors import (
    InvalidError,
    NotFoundError,
    RefusedError,
    StoreError,
    StoreUnavailable,
    UnsupportedError,
)
from anarchon_server.core.model import JobView, RunView
from anarchon_server.core.store import (
    CONTROL_BACKENDS,
    CancelRun,
    Control,
    ControlAnswer,
    ControlOutcome,
    Pause,
    RunQuery,
)
from anarchon_server.loop import Loop
from anarchon_server.rpc.conversion import slot_text

_NO_JOB = "it is there once an instance has subscribed with it"


class Operator:
    """Carries out what operators ask of the namespace of `loop`'s store."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._store = loop.store

    async def pause(self, job: str, reason: str) -> None:
        """From when this returns no slot of the job is claimed. Raises `NotFoundError`."""
        self._can("pause")
        _within("reason", reason.encode(), limits.REASON_MAX_BYTES)
        self._found(await self._ask(Pause(job, reason)), job)

    async def resume(self, job: str) -> None:
        """Slots that come are claimed again. Raises `NotFoundError`."""
        self._can("resume")
        for _ in range(limits.ASKED_AGAIN):
            view, at = await self._job(job)
            if view.paused_at is None:
                return
            act = await asyncio.to_thread(resume_of, view, self._loop.resolve_stored, at)
            if self._found(await self._ask(act), job).outcome is ControlOutcome.DONE:
                return
        raise _changing(job)

    async def trigger(self, job: str, request_id: str, payload: bytes) -> RunView:
        """Make a run that is due now; the one that `request_id` made before, if it did."""
        self._can("trigger")
        _within("payload", payload, limits.PAYLOAD_MAX_BYTES)
        _within("request_id", request_id.encode(), limits.NAME_MAX)
        request_id = request_id or str(uuid4())
        for _ in range(limits.ASKED_AGAIN):
            view, at = await self._job(job)
            act = await asyncio.to_thread(
                trigger_of, view, self._loop.resolve_stored, request_id, payload, at
            )
            answer = self._found(await self._ask(act), job)
            if answer.outcome is ControlOutcome.FULL:
                most = limits.TRIGGERED_WAITING_MAX
                raise RefusedError(
                    "LIMIT_EXCEEDED", f"{most} triggered runs of {job} wait already, its limit"
                )
            if answer.outcome is ControlOutcome.DONE:
                assert answer.run is not None, "a trigger shows its run"
                return await self._whole(answer.run)
        raise _changing(job)

    async def cancel(self, job: str, slot: int, reason: str) -> RunView:
        """Ask a run to stop. Raises `NotFoundError`, and `RefusedError` for one that has ended."""
        self._can("cancel")
        _within("reason", reason.encode(), limits.REASON_MAX_BYTES)
        answer = await self._ask(CancelRun(job, slot, reason))
        if answer.outcome is ControlOutcome.NOT_FOUND:
            raise NotFoundError("run", f"{job} {slot_text(slot)}")
        assert answer.run is not None, "a cancel shows its run"
        if answer.outcome is ControlOutcome.FINAL:
            state = answer.run.run.state
            raise RefusedError("RUN_FINAL", f"the run {job} {slot_text(slot)} has ended: {state}")
        return await self._whole(answer.run)

    # ── The store ───────────────────────────────────────────────────────────────────────────────

    def _can(self, feature: str) -> None:
        """S1, S29. What the backend has not, and what a clock that is far off must not decide."""
        capabilities = self._store.capabilities
        if not capabilities.control:
            raise UnsupportedError(feature, capabilities.backend, CONTROL_BACKENDS)
        status = self._loop.status()
        if feature in ("resume", "trigger") and not status.clock_usable:
            raise StoreUnavailable("; ".join(status.reasons) or "the store has not answered yet")

    async def _ask(self, act: Control) -> ControlAnswer:
        reply = await self._loop.read(lambda: self._store.control([act]))
        self._loop.tell_news()
        return reply.answers[0]

    async def _whole(self, view: RunView) -> RunView:
        """The run with all its attempts; as it is where the store cannot be read just now, for what was
        asked is done.
        """
        run = view.run
        if run.current is None:
            return view
        query = RunQuery(job=run.job, slot=run.slot, limit=1)
        try:
            reply = await self._loop.read(lambda: self._store.runs(query))
        except StoreError:
            return view
        return next(iter(reply.answers), view)

    async def _job(self, name: str) -> tuple[JobView, int]:
        reply = await self._loop.read(lambda: self._store.jobs((name,), "", 1))
        if not reply.answers:
            raise NotFoundError("job", name, _NO_JOB)
        return reply.answers[0], reply.store_at

    def _found(self, answer: ControlAnswer, job: str) -> ControlAnswer:
        if answer.outcome is ControlOutcome.NOT_FOUND:
            raise NotFoundError("job", job, _NO_JOB)
        return answer


def _within(field: str, value: bytes, most: int) -> None:
    if len(value) > most:
        raise InvalidError(field, f"{len(value)} bytes", f"at most {most} bytes")


def _changing(job: str) -> StoreUnavailable:
    return StoreUnavailable(f"the job {job} kept changing meanwhile; ask again")
