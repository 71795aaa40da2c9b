"""A store in a Redis or Valkey server, by the strategy `lease`.

Atomic here: each call of the port is one Lua script (`lua/`), or one for every 250 items of a long
batch; the server runs nothing else meanwhile, so read, decide and write are one step. The scripts
say what `machine` says. Whose clock decides: the server's `TIME`, read inside the script, for slots
and for leases; it may be stepped, so a takeover needs the second witness (S19, CLOCK_STEP). What it
cannot do: Redis Cluster, and catch-up or queues, which no backend has yet. What it can lose: with
`appendonly no`, or in a fail-over to a replica that lags, what was acknowledged last.
Imports the port, the model, the standard library and redis-py.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeVar

from redis.exceptions import RedisError, ResponseError

from anarchon_backends.redis import _checks
from anarchon_backends.redis._address import Address, address_of
from anarchon_backends.redis._connection import AccessDenied, Pool
from anarchon_backends.redis._script import Script
from anarchon_backends.redis._text import decode, encode
from anarchon_backends.redis_lease import _scripts
from anarchon_backends.redis_lease._batches import (
    BEAT_KINDS,
    beat_parts,
    claim_answer,
    claim_item,
    completion_item,
    definition_item,
    fences_of,
    look_answer,
    number_of,
    parts_of,
    plan_answer,
    plan_item,
    registration,
    release_item,
    reply,
    token_answer,
)
from anarchon_backends.redis_lease._reading import Reader
from anarchon_backends.redis_lease._rows import moment, noted_instance
from anarchon_server.core import model
from anarchon_server.core import store as port
from anarchon_server.core.errors import OutcomeUnknown, StoreRefused, StoreUnavailable

_T = TypeVar("_T")

_PRUNE_JOBS = 200  # jobs looked at by one call of `prune`


def open_store(url: str, options: port.OpenOptions) -> port.Store:
    """The store on the server that `redis://host:port/database` names (`rediss:` for TLS;
    `valkey:` and `valkeys:` are the same). Nothing is connected before `open`.
    """
    return RedisLeaseStore(address_of(url), options)


class RedisLeaseStore:
    """One instance's connections to a server.

    `clock` stands in for the server's `TIME`, in tests that move the store's time by hand.
    """

    def __init__(
        self,
        address: Address,
        options: port.OpenOptions,
        *,
        clock: port.StoreClock | None = None,
    ) -> None:
        self._address = address
        self._options = options
        self._clock = clock
        self._pool = Pool(address, options.op_timeout_ms)
        self._namespace = f"anarchon:{{{len(options.namespace)}:{options.namespace}}}"
        self._reader = Reader(self._pool, self._namespace, self._key, clock)
        self._capabilities = port.Capabilities(backend="redis:lease", notifies=True)
        self._drawn_id = secrets.token_hex(8)
        self._freed_before = 0
        self._pruned_to = ""
        self._watches: set[asyncio.Event] = set()

    @property
    def capabilities(self) -> port.Capabilities:
        """What this backend can do."""
        return self._capabilities

    # Opening

    async def open(self) -> port.StoreReport:
        """Connects and checks. `StoreUnavailable` where the server cannot be reached."""
        self._pool.start()
        try:
            found = await _checks.check(self._pool, self._address.location)
            await self._probe(found)
            await self._check_subscribing(found)
        except AccessDenied as error:
            await self.close()
            raise _checks.denied(error, self._address.location) from None
        except BaseException:
            await self.close()
            raise
        return port.StoreReport(self._address.location, tuple(found.verified), tuple(found.doubts))

    async def _probe(self, found: _checks.Findings) -> None:
        """Tries every command, makes the namespace, and reads how often runs were freed."""
        try:
            answer = await self._run(_scripts.PROBE, {}, ())
        except StoreUnavailable as error:
            if "ANARCHONSCHEMA" in str(error):
                raise _other_schema(str(error)) from None
            raise
        except OutcomeUnknown as error:
            if isinstance(error.__cause__, ResponseError):
                raise _checks.not_run(error.__cause__, self._address.location) from None
            raise
        if not answer["exact"]:
            raise StoreRefused("the server's Lua does not keep numbers of 16 digits exactly")
        self._freed_before = await self._reader.probe()
        found.verified.append("scripts run, and every command they use is permitted")
        if not answer["publishes"]:
            found.doubts.append(
                "publishing is not permitted: others notice a freed run only when they look"
            )

    async def _check_subscribing(self, found: _checks.Findings) -> None:
        try:
            connection = await self._subscribe()
        except AccessDenied:
            found.doubts.append(
                "subscribing is not permitted: this instance notices a freed run when it looks"
            )
        else:
            await self._pool.discard(connection)

    async def close(self) -> None:
        """Closes the connections, and ends the watches."""
        for closed in self._watches:
            closed.set()
        await self._pool.close()

    # Calls

    async def _run(
        self,
        script: Script,
        batch: Mapping[str, object],
        jobs: Iterable[str],
        *,
        begun: bool = False,
    ) -> dict[str, Any]:
        """Carries out one script; its answer is JSON. `begun`: another part was done before."""
        batch = {**batch, "store_id": self._drawn_id}
        if self._clock is not None:
            batch["now_us"] = self._clock.wall_us()
        keys = [self._namespace, *(self._key(job) for job in jobs)]
        text = json.dumps(batch, ensure_ascii=False, separators=(",", ":"))
        try:
            said = await self._pool.run(script, keys, encode(text))
        except StoreUnavailable as error:
            if begun:
                raise OutcomeUnknown(f"{error}; a part of the call was done before") from error
            raise
        answer: dict[str, Any] = json.loads(decode(said))
        return answer

    def _key(self, job: str) -> str:
        """The job's key, whose hash tag tells all keys of the job from those of all others."""
        return f"{self._namespace[:-1]}:{job}}}"

    async def _run_all(
        self, script: Script, items: Sequence[Mapping[str, Any]]
    ) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, int]]:
        """Carries out a batch: its answers, what the last reply says besides, and the fences."""
        answers: list[dict[str, Any]] = []
        fences: dict[str, int] = {}
        for number, part in enumerate(parts_of(items) or [[]]):
            jobs = [each["job"] for each in part]
            last = await self._run(script, {"items": part}, jobs, begun=number > 0)
            answers += last["answers"] or []
            fences |= fences_of(jobs, last["answers"])
        return answers, last, fences

    async def claim(self, claims: Sequence[port.Claim]) -> port.Reply[port.ClaimAnswer]:
        """First attempts and takeovers."""
        items = [claim_item(claim) for claim in claims]
        answers, last, fences = await self._run_all(_scripts.CLAIM, items)
        now = moment(int(last["now_us"]))
        return reply(last, (claim_answer(each, now) for each in answers), fences)

    async def settle(self, plans: Sequence[port.Plan]) -> port.Reply[port.PlanAnswer]:
        """Records slots as missed."""
        answers, last, fences = await self._run_all(_scripts.SETTLE, [plan_item(p) for p in plans])
        return reply(last, (plan_answer(each) for each in answers), fences)

    async def beat(self, beat: port.Beat) -> port.Reply[port.BeatAnswer]:
        """One heartbeat. A long one goes in several parts; the last says that the instance lives."""
        renewals: list[dict[str, Any]] = []
        looks: list[dict[str, Any]] = []
        settled: list[int | None] = []
        unfinished: dict[tuple[str, str], dict[str, str]] = {}  # by job and slot
        fences: dict[str, int] = {}
        parts = list(beat_parts(beat))
        for number, part in enumerate(parts, 1):
            jobs = [each["job"] for kind in BEAT_KINDS for each in part[kind]]
            batch: dict[str, object] = {**part, "sweep_limit": beat.sweep_limit}
            if number == len(parts):
                batch |= {"instance": noted_instance(beat.instance), "leaving": beat.leaving}
            last = await self._run(_scripts.BEAT, batch, jobs, begun=number > 1)
            answers = [each for kind in BEAT_KINDS for each in last[kind] or ()]
            fences |= fences_of(jobs, answers)
            renewals += last["renewals"] or ()
            looks += last["looks"] or ()
            settled += [number_of(each.get("settled")) for each in last["sweep"] or ()]
            unfinished |= {(each["job"], each["slot"]): each for each in last["unfinished"] or ()}
        now = moment(int(last["now_us"]))
        found = (look_answer({"run": each}, now) for each in unfinished.values())
        views = [seen for seen in found if seen is not None]
        views.sort(key=lambda seen: (not seen.takeable, seen.run.slot, seen.run.job))
        answer = port.BeatAnswer(
            renewals=tuple(token_answer(each, now) for each in renewals),
            looks=tuple(look_answer(each, now) for each in looks),
            unfinished=tuple(views[: beat.sweep_limit]),
            settled=tuple(settled),
            known=last["known"],
            twins=tuple(last["twins"] or ()),
        )
        return reply(last, [answer], fences)

    async def complete(
        self, completions: Sequence[port.Completion]
    ) -> port.Reply[port.TokenAnswer]:
        """Records results."""
        items = [completion_item(each) for each in completions]
        return await self._tokens(_scripts.COMPLETE, items)

    async def release(self, releases: Sequence[port.Release]) -> port.Reply[port.TokenAnswer]:
        """Ends leases at once."""
        items = [release_item(each) for each in releases]
        return await self._tokens(_scripts.RELEASE, items)

    async def _tokens(
        self, script: Script, items: Sequence[Mapping[str, Any]]
    ) -> port.Reply[port.TokenAnswer]:
        answers, last, fences = await self._run_all(script, items)
        now = moment(int(last["now_us"]))
        return reply(last, (token_answer(each, now) for each in answers), fences)

    async def register(
        self, instance: model.Instance, definitions: Sequence[model.Definition]
    ) -> port.Reply[port.Registration]:
        """Records all that the instance holds now.

        A long registration goes in several parts, each whole for its jobs; the last lets go of
        what the instance held besides, and makes it known.
        """
        by_job = sorted(enumerate(definitions), key=lambda each: each[1].job)
        grouped = [
            [(place, definition_item(each)) for place, each in group]
            for _, group in groupby(by_job, key=lambda each: each[1].job)
        ]
        answers: dict[int, port.Registration] = {}
        fences: dict[str, int] = {}
        batch: dict[str, object] = {"instance": noted_instance(instance)}
        parts = parts_of(grouped) or [[]]
        for number, part in enumerate(parts, 1):
            placed = [each for group in part for each in group]
            jobs = [item["job"] for _, item in placed]
            batch["items"] = [item for _, item in placed]
            if number == len(parts):
                batch["all_jobs"] = [group[0][1]["job"] for group in grouped]
            last = await self._run(_scripts.REGISTER, batch, jobs, begun=number > 1)
            batch["own_live"] = last["own_live"]
            fences |= fences_of(jobs, last["answers"])
            for (place, item), each in zip(placed, last["answers"] or (), strict=True):
                answers[place] = registration(item["job"], each)
        return reply(last, (answers[place] for place in range(len(definitions))), fences)

    # Reading

    async def runs(self, query: port.RunQuery) -> port.Reply[model.RunView]:
        """History, newest slot first; equal slots by job name, last first."""
        return await self._in_time(self._reader.runs(query))

    async def jobs(self, names: Sequence[str], after: str, limit: int) -> port.Reply[model.JobView]:
        """The named jobs, or a page of all."""

        async def work() -> port.Reply[model.JobView]:
            return await self._reader.jobs(names or await self._reader.job_names(after, limit))

        return await self._in_time(work())

    async def instances(self) -> port.Reply[model.Instance]:
        """The instances seen lately, by label."""
        return await self._in_time(self._reader.instances())

    async def _in_time(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Bounds what reads in several steps."""
        try:
            async with asyncio.timeout(self._options.op_timeout_ms / 1_000):
                return await work
        except TimeoutError:
            raise StoreUnavailable(
                f"{self._address.location}: not read within {self._options.op_timeout_ms} ms; "
                "ask for less: one job, or a span of slots"
            ) from None

    # Pruning and news

    async def prune(self, policy: port.PrunePolicy) -> port.Reply[int]:
        """Deletes a batch of old final runs, and definitions and instances long gone.

        One call looks at 200 jobs; the next goes on where it ended.
        """
        names = await self._reader.job_names(self._pruned_to, _PRUNE_JOBS)
        batch = {
            "jobs": names,
            "history_ms": policy.history_ms,
            "history_max": policy.history_max,
            "room": policy.batch,
        }
        answer = await self._run(_scripts.PRUNE, batch, names)
        done: int = answer["done"]
        finished = done == len(names) < _PRUNE_JOBS
        self._pruned_to = "" if finished or not done else names[done - 1]
        return reply(answer, [int(answer["gone"])], {})

    async def watch(self) -> AsyncIterator[None]:
        """Yields soon after a run was freed, counted from `open`.

        Raises `StoreUnavailable` when the connection is lost; a new watch tells what was missed.
        """
        closed = asyncio.Event()
        self._watches.add(closed)
        ending = asyncio.create_task(closed.wait())
        connection = None
        try:
            connection = await self._subscribe()
            freed = await self._reader.freed()
            while True:
                if freed != self._freed_before:
                    self._freed_before = freed
                    yield
                reading = asyncio.create_task(connection.read_response(timeout=math.inf))
                await asyncio.wait({reading, ending}, return_when=asyncio.FIRST_COMPLETED)
                if not reading.done():
                    reading.cancel()
                    return
                said = reading.result()[2]
                freed = int(said) if said.isdigit() else freed
        except (RedisError, OSError) as error:
            if not closed.is_set():
                raise StoreUnavailable(f"{self._address.location}: {error}") from error
        finally:
            ending.cancel()
            self._watches.discard(closed)
            if connection is not None:
                await self._pool.discard(connection)

    async def _subscribe(self) -> Any:
        """A connection on which the namespace's news come in."""
        connection = None
        try:
            async with asyncio.timeout(self._options.op_timeout_ms / 1_000):
                connection = await self._pool.connect()
                channel = f"{self._namespace}:news"
                await connection.send_command("SUBSCRIBE", channel, check_health=False)
                await connection.read_response()
        except BaseException as error:
            if connection is not None:
                await self._pool.discard(connection)
            if isinstance(error, ResponseError):
                raise AccessDenied(f"{self._address.location}: {error}") from error
            if isinstance(error, RedisError | OSError):  # a TimeoutError is one
                raise StoreUnavailable(f"{self._address.location}: {error}") from error
            raise
        return connection


def _other_schema(said: str) -> StoreRefused:
    found = said.partition("ANARCHONSCHEMA")[2].strip()[:40]
    return StoreRefused(
        f"the namespace in the store has the layout {found!r}, and this version of Anarchon knows "
        f"{_scripts.SCHEMA}: run the version that made it, or use another namespace"
    )
