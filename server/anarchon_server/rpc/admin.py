"""AdminService: what people and dashboards use. Reads from the store, so any instance answers for
the whole namespace; where the backend keeps no history it answers for itself, and says so in the
trailing metadata and in what is not found.

Imports the stubs, core and `loop`.
"""

# ruff: noqa: N802 - the methods have the protocol's names

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing
from functools import wraps
from itertools import islice
from typing import Any, TypeVar
from urllib.parse import quote

from google.protobuf.message import Message

from anarchon.v1 import admin_pb2, admin_pb2_grpc, run_pb2
from anarchon_server.core import limits, model
from anarchon_server.core.engine import SessionView
from anarchon_server.core.errors import (
    AnarchonError,
    InvalidError,
    InvalidScheduleError,
    NotFoundError,
)
from anarchon_server.core.policy import read_schedule
from anarchon_server.core.slots import Every, Schedule
from anarchon_server.core.slots.cron import HORIZON_S
from anarchon_server.core.store import RunQuery
from anarchon_server.loop import Loop
from anarchon_server.rpc import conversion as wire
from anarchon_server.rpc.operating import Operator
from anarchon_server.rpc.sessions import Context, refuse
from anarchon_server.rpc.watching import Watches

PREVIEW_DEFAULT = 10

_SLOT_MOST = 2**53 - 1
"""Beyond it a store could not compare slots exactly, and there are none."""

SCOPE_KEY = "anarchon-scope"
"""In the trailing metadata of an answer that is an instance's own, and in the initial metadata of a
watch: which one's, percent-encoded.
"""

_FROM_STORE = frozenset(
    {"ListJobs", "GetJob", "ListRuns", "GetRun", "ListInstances", "GetInstance"}
)

R = TypeVar("R")
M = TypeVar("M", bound=Message)


def _answered(
    method: Callable[[AdminServicer, M], Coroutine[Any, Any, R]],
) -> Callable[[AdminServicer, M, Context], Coroutine[Any, Any, R]]:
    """Make of a method that takes a request, and raises `AnarchonError`, one that gRPC serves."""

    @wraps(method)
    async def served(self: AdminServicer, request: M, context: Context) -> R:
        if method.__name__ in _FROM_STORE:
            context.set_trailing_metadata(self._scope())
        try:
            return await method(self, request)
        except AnarchonError as error:
            await refuse(context, error)

    return served


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """The service's methods."""

    def __init__(self, loop: Loop, namespace: str) -> None:
        self._loop = loop
        self._store = loop.store
        self._operator = Operator(loop)
        self._watches = Watches(loop)
        self._namespace = namespace

    @property
    def _answers_for_itself(self) -> bool:
        """Whether this instance knows nothing of others, as the store keeps nothing of them."""
        return not self._store.capabilities.history

    def _scope(self) -> tuple[tuple[str, str], ...]:
        """The metadata of an answer that is this instance's own; of any other there is none."""
        if not self._answers_for_itself:
            return ()
        return ((SCOPE_KEY, f"instance={quote(self._label, safe=':')}"),)

    @property
    def _label(self) -> str:
        return self._loop.status().instance.instance_id

    def _hint(self, usual: str, own: str) -> str:
        """What to do where something is not found; `own`: what this instance alone knows of."""
        if not self._answers_for_itself:
            return usual
        backend = self._store.capabilities.backend
        return f"{backend} keeps no history of the namespace: {self._label} knows only {own}"

    # ── Jobs ────────────────────────────────────────────────────────────────────────────────────

    @_answered
    async def ListJobs(self, request: admin_pb2.ListJobsRequest) -> admin_pb2.ListJobsResponse:
        """Lists jobs by name."""
        size = _page_size(request.page_size)
        (after,) = _page_read(request.page_token, 1) or ("",)
        reply = await self._loop.read(lambda: self._store.jobs((), after, size + 1))
        jobs = [self._job_out(view, reply.store_at) for view in reply.answers]
        page, more = _page_cut(jobs, size)
        token = _page_token(page[-1].spec.name) if more else ""
        return admin_pb2.ListJobsResponse(jobs=page, next_page_token=token)

    @_answered
    async def GetJob(self, request: admin_pb2.GetJobRequest) -> admin_pb2.GetJobResponse:
        """Gets one job."""
        view, store_at = await self._job(request.job)
        return admin_pb2.GetJobResponse(job=self._job_out(view, store_at))

    @_answered
    async def PreviewSlots(
        self, request: admin_pb2.PreviewSlotsRequest
    ) -> admin_pb2.PreviewSlotsResponse:
        """Computes slots without touching anything."""
        count = request.count or PREVIEW_DEFAULT
        if not 1 <= count <= limits.PREVIEW_MAX:
            raise InvalidError("count", request.count, f"1 to {limits.PREVIEW_MAX}")
        now = self._loop.wall_ms()
        match request.WhichOneof("of"):
            case "job":
                view, now = await self._job(request.job)
                spec = view.spec
            case "spec":
                spec = self._loop.resolve(wire.spec_in(request.spec)).spec
            case _:
                raise InvalidError("of", "unset", "set job or spec")
        after = now
        if request.HasField("after_time"):
            after = wire.timestamp_to_ms("after_time", request.after_time)
        slots = _slots_after(read_schedule(spec), after, count)
        return admin_pb2.PreviewSlotsResponse(slots=slots)

    async def _job(self, name: str) -> tuple[model.JobView, int]:
        _name_in("job", name)
        reply = await self._loop.read(lambda: self._store.jobs((name,), "", 1))
        if not reply.answers:
            usual = "it is there once an instance has subscribed with it"
            raise NotFoundError("job", name, self._hint(usual, "the jobs of its own sessions"))
        return reply.answers[0], reply.store_at

    def _job_out(self, view: model.JobView, store_at: int) -> admin_pb2.Job:
        job = admin_pb2.Job(
            spec=wire.spec_out(view.spec),
            paused=view.paused_at is not None,
            pause_reason=view.pause_reason,
            definition_time=wire.timestamp(view.definition_at),
            definitions_differ=view.definitions_differ,
            instance_ids=view.instance_ids,
        )
        if view.last_run is not None:
            job.last_run.CopyFrom(wire.run_out(view.last_run))
        self._schedule_out(view, job, store_at)
        return job

    def _schedule_out(self, view: model.JobView, job: admin_pb2.Job, store_at: int) -> None:
        try:
            schedule = read_schedule(view.spec)
        except InvalidScheduleError as error:
            # Registered by another version, whose zones or grammar this one does not know.
            job.description = f"not readable here: {error}"
            return
        job.description = _described(schedule)
        if not job.paused:
            job.next_slots.extend(_slots_after(schedule, store_at, limits.NEXT_SLOTS))

    # ── Runs ────────────────────────────────────────────────────────────────────────────────────

    @_answered
    async def ListRuns(self, request: admin_pb2.ListRunsRequest) -> admin_pb2.ListRunsResponse:
        """Lists runs, newest slot first."""
        size = _page_size(request.page_size)
        after = _page_read(request.page_token, 2)
        query = RunQuery(
            job=_name_in("job", request.job),
            states=frozenset(_state_in(f"states[{n}]", s) for n, s in enumerate(request.states)),
            instance_id=_name_in("instance_id", request.instance_id),
            from_slot=_slot_in("from_slot", request.from_slot) or None,
            until_slot=_slot_in("until_slot", request.until_slot) or None,
            after=(_slot_read(after[0]), after[1]) if after else None,
            limit=size + 1,
        )
        reply = await self._loop.read(lambda: self._store.runs(query))
        page, more = _page_cut([wire.run_out(view) for view in reply.answers], size)
        goes_on = (page[-1].slot, page[-1].job) if more else reply.looked_to
        token = _page_token(str(goes_on[0]), goes_on[1]) if goes_on else ""
        return admin_pb2.ListRunsResponse(runs=page, next_page_token=token)

    @_answered
    async def GetRun(self, request: admin_pb2.GetRunRequest) -> admin_pb2.GetRunResponse:
        """Gets one run, with stack traces."""
        if not request.job:
            raise InvalidError("job", request.job, "name the run's job")
        job, slot = _name_in("job", request.job), _slot_in("slot", request.slot)
        query = RunQuery(job=job, slot=slot, limit=1, traces=True)
        reply = await self._loop.read(lambda: self._store.runs(query))
        if not reply.answers:
            hint = self._hint("", "the runs that it won")
            raise NotFoundError("run", f"{job} {wire.slot_text(slot)}", hint)
        return admin_pb2.GetRunResponse(run=wire.run_out(reply.answers[0]))

    async def WatchRuns(  # type: ignore[override] # written to, not iterated over
        self, request: admin_pb2.WatchRunsRequest, context: Context
    ) -> None:
        """Streams changes, without stack traces; the initial metadata says that it has begun."""
        scope = self._scope()
        context.set_trailing_metadata(scope)
        try:
            query = RunQuery(
                job=_name_in("job", request.job),
                from_slot=_slot_in("from_slot", request.from_slot) or None,
                until_slot=_slot_in("until_slot", request.until_slot) or None,
            )
            async with aclosing(self._watches.follow(query)) as changes:
                async for view in changes:
                    if view is None:
                        await context.send_initial_metadata(scope)
                    else:
                        await context.write(admin_pb2.WatchRunsResponse(run=wire.run_out(view)))
        except AnarchonError as error:
            await refuse(context, error)

    # ── Instances ───────────────────────────────────────────────────────────────────────────────

    @_answered
    async def ListInstances(
        self, request: admin_pb2.ListInstancesRequest
    ) -> admin_pb2.ListInstancesResponse:
        """Lists the instances seen lately, by label."""
        size = _page_size(request.page_size)
        after = _page_read(request.page_token, 2) or ("", "")
        reply = await self._loop.read(lambda: self._store.instances())
        rest = sorted(
            (i for i in reply.answers if (i.instance_id, i.incarnation) > (after[0], after[1])),
            key=lambda i: (i.instance_id, i.incarnation),
        )
        instances = [wire.instance_out(i, self._namespace) for i in rest[: size + 1]]
        page, more = _page_cut(instances, size)
        token = _page_token(page[-1].instance_id, page[-1].incarnation) if more else ""
        return admin_pb2.ListInstancesResponse(instances=page, next_page_token=token)

    @_answered
    async def GetInstance(
        self, request: admin_pb2.GetInstanceRequest
    ) -> admin_pb2.GetInstanceResponse:
        """Gets one instance: this one with its sessions, others as the store has them."""
        status = self._loop.status()
        if request.instance_id in ("", status.instance.instance_id):
            own = wire.instance_out(status.instance, self._namespace)
            own.sessions.extend(_sessions_out(status.sessions))
            return admin_pb2.GetInstanceResponse(instance=own)
        reply = await self._loop.read(lambda: self._store.instances())
        for instance in reply.answers:
            if instance.instance_id == request.instance_id:
                found = wire.instance_out(instance, self._namespace)
                return admin_pb2.GetInstanceResponse(instance=found)
        hint = self._hint("anarchon instances lists them", "itself: ask that one")
        raise NotFoundError("instance", request.instance_id, hint)

    # ── Control ─────────────────────────────────────────────────────────────────────────────────

    @_answered
    async def PauseJob(self, request: admin_pb2.PauseJobRequest) -> admin_pb2.PauseJobResponse:
        """Stops running the job's slots everywhere."""
        job = _job_in(request.job)
        await self._operator.pause(job, request.reason)
        view, store_at = await self._job(job)
        return admin_pb2.PauseJobResponse(job=self._job_out(view, store_at))

    @_answered
    async def ResumeJob(self, request: admin_pb2.ResumeJobRequest) -> admin_pb2.ResumeJobResponse:
        """Runs the job's slots again, from now on."""
        job = _job_in(request.job)
        await self._operator.resume(job)
        view, store_at = await self._job(job)
        return admin_pb2.ResumeJobResponse(job=self._job_out(view, store_at))

    @_answered
    async def TriggerRun(
        self, request: admin_pb2.TriggerRunRequest
    ) -> admin_pb2.TriggerRunResponse:
        """Makes a run that is due now."""
        view = await self._operator.trigger(
            _job_in(request.job), request.request_id, request.payload
        )
        return admin_pb2.TriggerRunResponse(run=wire.run_out(view))

    @_answered
    async def CancelRun(self, request: admin_pb2.CancelRunRequest) -> admin_pb2.CancelRunResponse:
        """Asks for a run to stop."""
        job, slot = _job_in(request.job), _slot_in("slot", request.slot)
        view = await self._operator.cancel(job, slot, request.reason)
        return admin_pb2.CancelRunResponse(run=wire.run_out(view))


# ── Names ───────────────────────────────────────────────────────────────────────────────────────


def _name_in(field: str, name: str) -> str:
    """Return a name to look for. No name has a zero character, and not every store can be asked."""
    if "\0" in name:
        raise InvalidError(field, name, "a name has no zero character")
    return name


def _job_in(name: str) -> str:
    if not name:
        raise InvalidError("job", name, "name the job")
    return _name_in("job", name)


# ── Sessions ────────────────────────────────────────────────────────────────────────────────────


def _sessions_out(views: Sequence[SessionView]) -> Iterator[admin_pb2.Session]:
    """Show sessions so that they fit into one message: each may name jobs of an equal share of it."""
    for view in views:
        session = admin_pb2.Session(
            session_id=view.session_id,
            client=wire.client_out(view.client),
            jobs=_first_of(view.jobs, limits.BATCH_BYTES // len(views)),
            jobs_total=len(view.jobs),
            max_concurrency=view.max_concurrency,
            running=view.running,
        )
        if view.kept_alive_at is not None:
            session.keep_alive_time.CopyFrom(wire.timestamp(view.kept_alive_at))
        yield session


def _first_of(names: Sequence[str], most_bytes: int) -> Iterator[str]:
    for name in names:
        most_bytes -= len(name.encode()) + 3  # with its tag and length
        if most_bytes < 0:
            return
        yield name


# ── Slots ───────────────────────────────────────────────────────────────────────────────────────


def _slots_after(schedule: Schedule, after: int, count: int) -> list[int]:
    """Return the first slots after a moment, of those from 1970 to the end of 2199."""
    return list(islice(schedule.between(max(after, -1), HORIZON_S * 1_000 - 1), count))


def _slot_in(field: str, slot: int) -> int:
    if abs(slot) > _SLOT_MOST:
        raise InvalidError(field, slot, f"milliseconds since 1970, at most {_SLOT_MOST}")
    return slot


def _described(schedule: Schedule) -> str:
    return schedule.identity if isinstance(schedule, Every) else schedule.description


# ── Pages ───────────────────────────────────────────────────────────────────────────────────────


def _page_size(asked: int) -> int:
    if not 0 <= asked <= limits.PAGE_MAX:
        expected = f"1 to {limits.PAGE_MAX}, or 0 for {limits.PAGE_DEFAULT}"
        raise InvalidError("page_size", asked, expected)
    return asked or limits.PAGE_DEFAULT


def _page_cut(items: Sequence[M], size: int) -> tuple[list[M], bool]:
    """Return the items of a page of at most 2 MiB, and whether there are more."""
    page: list[M] = []
    left = limits.BATCH_BYTES
    for item in items[:size]:
        left -= item.ByteSize() + 8
        if left < 0 and page:
            break
        page.append(item)
    return page, len(page) < len(items)


def _page_token(*parts: str) -> str:
    return base64.urlsafe_b64encode("\n".join(parts).encode()).decode()


def _page_read(token: str, parts: int) -> tuple[str, ...] | None:
    if not token:
        return None
    try:
        found = tuple(base64.urlsafe_b64decode(token.encode()).decode().split("\n"))
    except (binascii.Error, UnicodeError):
        found = ()
    if len(found) != parts or any("\0" in part for part in found):
        raise _bad_page_token(token)
    return found


def _slot_read(text: str) -> int:
    try:
        return _slot_in("page_token", int(text))
    except (ValueError, InvalidError):
        raise _bad_page_token(text) from None


def _bad_page_token(token: str) -> InvalidError:
    return InvalidError("page_token", token, "send next_page_token of the page before, as it was")


def _state_in(field: str, value: int) -> model.RunState:
    state = wire.enum_in(field, value, run_pb2.RunState, "RUN_STATE_", model.RunState)
    if state is None:
        raise InvalidError(field, "unset", "name a state, or leave the list empty for all")
    return state
