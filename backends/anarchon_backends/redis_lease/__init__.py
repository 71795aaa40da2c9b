"""A store in a Redis or Valkey server, by the strategy `lease`.

Atomic here: each call of the port is one Lua script (`lua/`), or one for every 500 items of a long
batch; the server runs nothing else meanwhile, so read, decide and write are one step. The scripts
say what `machine` says. Whose clock decides: the server's `TIME`, read inside the script, for slots
and for leases; it may be stepped, so a takeover needs the second witness (S19, CLOCK_STEP). What it
cannot do: Redis Cluster, and catch-up or queues, which no backend has yet. What it can lose: with
`appendonly no`, or in a fail-over to a replica that lags, what was acknowledged last.
Imports the port, the machine, the model, the standard library and redis-py.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeVar

from redis.exceptions import RedisError

from anarchon_backends.redis_lease import _checks, _scripts
from anarchon_backends.redis_lease._address import Address, address_of
from anarchon_backends.redis_lease._connection import AccessDenied, Command, Pool
from anarchon_backends.redis_lease._history import History
from anarchon_backends.redis_lease._rows import (
    decode,
    decoded,
    encode,
    failure_text,
    holds_of,
    instance_of,
    kept_definition,
    moment,
    noted_instance,
    run_of,
    spec_of,
)
from anarchon_backends.redis_lease._scripts import Script
from anarchon_server.core import machine, model
from anarchon_server.core import store as port
from anarchon_server.core.errors import OutcomeUnknown, StoreRefused, StoreUnavailable

_T = TypeVar("_T")

_ITEMS = 500  # a script blocks the server while it runs: at most so many items a call ...
_BYTES = 1 << 20  # ... and about so much text
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
            cause = error.__cause__
            if isinstance(cause, RedisError):
                raise StoreRefused(f"the server does not run the scripts: {error}") from error
            raise
        if not answer["exact"]:
            raise StoreRefused("the server's Lua does not keep numbers of 16 digits exactly")
        (freed,) = await self._pool.read(["HGET", self._namespace, "freed"])
        self._freed_before = int(freed or 0)
        found.verified.append("scripts run, and every command they use is permitted")
        if not answer["publishes"]:
            found.doubts.append(
                "publishing is not permitted: others notice a freed run only when they look"
            )

    async def _check_subscribing(self, found: _checks.Findings) -> None:
        try:
            async with asyncio.timeout(self._options.op_timeout_ms / 1_000):
                connection = await self._subscribe()
        except (AccessDenied, TimeoutError):
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
        self, script: Script, batch: Mapping[str, object], jobs: Iterable[str]
    ) -> dict[str, Any]:
        """Carries out one script; its answer is JSON."""
        batch = {**batch, "store_id": self._drawn_id}
        if self._clock is not None:
            batch["now_us"] = self._clock.wall_us()
        keys = [self._namespace, *(self._key(job) for job in jobs)]
        text = json.dumps(batch, ensure_ascii=False, separators=(",", ":"))
        answer: dict[str, Any] = json.loads(
            decode(await self._pool.run(script, keys, encode(text)))
        )
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
        for part in _parts(items) or [[]]:
            jobs = [each["job"] for each in part]
            last = await self._run(script, {"items": part}, jobs)
            answers += last["answers"] or []
            fences |= _fences(jobs, last["answers"])
        return answers, last, fences

    async def claim(self, claims: Sequence[port.Claim]) -> port.Reply[port.ClaimAnswer]:
        """First attempts and takeovers."""
        items = [_claim_item(claim) for claim in claims]
        answers, last, fences = await self._run_all(_scripts.CLAIM, items)
        now = moment(int(last["now_us"]))
        return _reply(last, (_claim_answer(each, now) for each in answers), fences)

    async def settle(self, plans: Sequence[port.Plan]) -> port.Reply[port.PlanAnswer]:
        """Records slots as missed."""
        answers, last, fences = await self._run_all(_scripts.SETTLE, [_plan_item(p) for p in plans])
        return _reply(last, (_plan_answer(each) for each in answers), fences)

    async def beat(self, beat: port.Beat) -> port.Reply[port.BeatAnswer]:
        """One heartbeat. A long one goes in several parts; the last says that the instance lives."""
        renewals: list[dict[str, Any]] = []
        looks: list[dict[str, Any]] = []
        settled: list[int | None] = []
        unfinished: list[dict[str, str]] = []
        fences: dict[str, int] = {}
        parts = list(_beat_parts(beat))
        for number, part in enumerate(parts, 1):
            jobs = [each["job"] for kind in _BEAT_KINDS for each in part[kind]]
            batch: dict[str, object] = {**part, "sweep_limit": beat.sweep_limit}
            if number == len(parts):
                batch |= {"instance": noted_instance(beat.instance), "leaving": beat.leaving}
            last = await self._run(_scripts.BEAT, batch, jobs)
            answers = [each for kind in _BEAT_KINDS for each in last[kind] or ()]
            fences |= _fences(jobs, answers)
            renewals += last["renewals"] or ()
            looks += last["looks"] or ()
            settled += [_int(each.get("settled")) for each in last["sweep"] or ()]
            unfinished += last["unfinished"] or ()
        now = moment(int(last["now_us"]))
        views = [machine.view(run_of(each), now) for each in unfinished]
        views.sort(key=lambda seen: (not seen.takeable, seen.run.slot, seen.run.job))
        answer = port.BeatAnswer(
            renewals=tuple(_token_answer(each, now) for each in renewals),
            looks=tuple(_view(each, now) for each in looks),
            unfinished=tuple(views[: beat.sweep_limit]),
            settled=tuple(settled),
            known=last["known"],
            twins=tuple(last["twins"] or ()),
        )
        return _reply(last, [answer], fences)

    async def complete(
        self, completions: Sequence[port.Completion]
    ) -> port.Reply[port.TokenAnswer]:
        """Records results."""
        items = [_completion_item(each) for each in completions]
        return await self._tokens(_scripts.COMPLETE, items)

    async def release(self, releases: Sequence[port.Release]) -> port.Reply[port.TokenAnswer]:
        """Ends leases at once."""
        items = [
            {
                "job": each.job,
                "slot": each.slot,
                "token": each.token,
                "incarnation": each.incarnation,
                "reason": each.reason,
            }
            for each in releases
        ]
        return await self._tokens(_scripts.RELEASE, items)

    async def _tokens(
        self, script: Script, items: Sequence[Mapping[str, Any]]
    ) -> port.Reply[port.TokenAnswer]:
        answers, last, fences = await self._run_all(script, items)
        now = moment(int(last["now_us"]))
        return _reply(last, (_token_answer(each, now) for each in answers), fences)

    async def register(
        self, instance: model.Instance, definitions: Sequence[model.Definition]
    ) -> port.Reply[port.Registration]:
        """Records all that the instance holds now.

        A long registration goes in several parts, each whole for its jobs; the last lets go of
        what the instance held besides, and makes it known.
        """
        by_job = sorted(enumerate(definitions), key=lambda each: each[1].job)
        grouped = [
            [(place, _definition_item(each)) for place, each in group]
            for _, group in groupby(by_job, key=lambda each: each[1].job)
        ]
        answers: dict[int, port.Registration] = {}
        fences: dict[str, int] = {}
        batch: dict[str, object] = {"instance": noted_instance(instance)}
        parts = _parts(grouped) or [[]]
        for number, part in enumerate(parts, 1):
            placed = [each for group in part for each in group]
            jobs = [item["job"] for _, item in placed]
            batch["items"] = [item for _, item in placed]
            if number == len(parts):
                batch["all_jobs"] = [group[0][1]["job"] for group in grouped]
            last = await self._run(_scripts.REGISTER, batch, jobs)
            batch["own_live"] = last["own_live"]
            fences |= _fences(jobs, last["answers"])
            for (place, item), each in zip(placed, last["answers"] or (), strict=True):
                answers[place] = _registration(item["job"], each)
        return _reply(last, (answers[place] for place in range(len(definitions))), fences)

    # Reading

    def _now(self, time: Sequence[bytes]) -> machine.Moment:
        """The moment of an answer to `TIME`."""
        if self._clock is not None:
            return moment(self._clock.wall_us())
        return moment(int(time[0]) * 1_000_000 + int(time[1]))

    async def _read(self, *commands: Command) -> tuple[machine.Moment, str, list[Any]]:
        """Reads as one step: the store's moment, its identity, and the answers."""
        time, store_id, *answers = await self._pool.read(
            ["TIME"], ["HGET", self._namespace, "store_id"], *commands
        )
        return self._now(time), decode(store_id or b""), answers

    async def runs(self, query: port.RunQuery) -> port.Reply[model.RunView]:
        """History, newest slot first; equal slots by job name, last first."""
        history = History(self._namespace, self._key, self._read)
        return await self._in_time(history.page(query))

    async def _in_time(self, work: Any) -> Any:
        """Bounds what reads in several steps."""
        try:
            async with asyncio.timeout(self._options.op_timeout_ms / 1_000):
                return await work
        except TimeoutError:
            raise StoreUnavailable(
                f"{self._address.location}: not found within {self._options.op_timeout_ms} ms; "
                "ask for one job, or for a span of slots"
            ) from None

    async def jobs(self, names: Sequence[str], after: str, limit: int) -> port.Reply[model.JobView]:
        """The named jobs, or a page of all."""
        return await self._in_time(self._jobs(names, after, limit))  # type: ignore[no-any-return]

    async def _jobs(
        self, names: Sequence[str], after: str, limit: int
    ) -> port.Reply[model.JobView]:
        if not names:
            start = f"({after}" if after else "-"
            index = f"{self._namespace}:jobs"
            _, _, (page,) = await self._read(["ZRANGEBYLEX", index, start, "+", "LIMIT", 0, limit])
            names = [decode(each) for each in page]
        keys = [self._key(name) for name in names]
        _, _, found = await self._read(
            *(["HGET", key, "definition_id"] for key in keys),
            *(["ZREVRANGE", f"{key}:runs", 0, 0] for key in keys),
        )
        ids = [decode(each or b"") for each in found[: len(keys)]]
        last = [decode(each[0]) if each else "0" for each in found[len(keys) :]]
        now, store_id, answers = await self._read(
            ["HGETALL", f"{self._namespace}:instances"],
            *(
                command
                for key, definition_id, slot in zip(keys, ids, last, strict=True)
                for command in (
                    ["HMGET", key, "fence", "definition_at", "definition_id"],
                    ["HGET", f"{key}:definitions", definition_id],
                    ["HGETALL", f"{key}:holds"],
                    ["HGETALL", f"{key}:{slot}"],
                )
            ),
        )
        live = {
            each.incarnation: each.instance_id
            for each in _instances_of(answers[0])
            if machine.is_live(each, now)
        }
        views: list[model.JobView] = []
        fences: dict[str, int] = {}
        for place, name in enumerate(names):
            record, kept, held, run = answers[1 + 4 * place : 5 + 4 * place]
            if not record[2] or not kept:
                continue  # there is no such job
            fences[name] = int(record[0] or 0)
            fields = decoded(run) | {"job": name, "slot": last[place]}
            shown = machine.view(run_of(fields), now) if run else None
            views.append(_job_view(name, record, decode(kept), decoded(held), live, shown))
        return port.Reply(now.at, tuple(views), fences, store_id)

    async def instances(self) -> port.Reply[model.Instance]:
        """The instances seen lately, by label."""
        now, store_id, (noted,) = await self._read(["HGETALL", f"{self._namespace}:instances"])
        lately = [
            machine.shown_instance(each, now)
            for each in _instances_of(noted)
            if not machine.is_forgotten(each, now)
        ]
        lately.sort(key=lambda instance: (instance.instance_id, instance.incarnation))
        return port.Reply(now.at, tuple(lately), {}, store_id)

    # Pruning and news

    async def prune(self, policy: port.PrunePolicy) -> port.Reply[int]:
        """Deletes a batch of old final runs, and definitions and instances long gone.

        One call looks at 200 jobs; the next goes on where it ended.
        """
        start = f"({self._pruned_to}" if self._pruned_to else "-"
        _, _, (page,) = await self._read(
            ["ZRANGEBYLEX", f"{self._namespace}:jobs", start, "+", "LIMIT", 0, _PRUNE_JOBS]
        )
        names = [decode(each) for each in page]
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
        return _reply(answer, [int(answer["gone"])], {})

    async def watch(self) -> AsyncIterator[None]:
        """Yields soon after a run was freed, counted from `open`.

        Raises `StoreUnavailable` when the connection is lost; a new watch tells what was missed.
        """
        closed = asyncio.Event()
        self._watches.add(closed)
        ending = asyncio.create_task(closed.wait())
        connection = await self._subscribe()
        try:
            (freed,) = await self._pool.read(["HGET", self._namespace, "freed"])
            while True:
                if freed is not None and int(freed) != self._freed_before:
                    self._freed_before = int(freed)
                    yield
                reading = asyncio.create_task(connection.read_response(timeout=float("inf")))
                await asyncio.wait({reading, ending}, return_when=asyncio.FIRST_COMPLETED)
                if not reading.done():
                    reading.cancel()
                    return
                message = reading.result()
                freed = message[2] or None
        except (RedisError, OSError) as error:
            if not closed.is_set():
                raise StoreUnavailable(f"{self._address.location}: {error}") from error
        finally:
            ending.cancel()
            self._watches.discard(closed)
            await self._pool.discard(connection)

    async def _subscribe(self) -> Any:
        """A connection on which the namespace's news come in."""
        connection = await self._pool.connect()
        try:
            await connection.send_command(
                "SUBSCRIBE", f"{self._namespace}:news", check_health=False
            )
            await connection.read_response()
        except RedisError as error:
            await self._pool.discard(connection)
            raise AccessDenied(f"{self._address.location}: {error}") from error
        except BaseException:
            await self._pool.discard(connection)
            raise
        return connection


def _other_schema(said: str) -> StoreRefused:
    found = said.partition("ANARCHONSCHEMA")[2].strip()[:40]
    return StoreRefused(
        f"the namespace in the store has the layout {found!r}, and this version of Anarchon knows "
        f"{_scripts.SCHEMA}: run the version that made it, or use another namespace"
    )


# Batches -----------------------------------------------------------------------------------


def _parts(items: Sequence[_T]) -> list[list[_T]]:
    """The items in runs that one script may carry out. Lists of items stay whole."""
    parts: list[list[_T]] = []
    count = size = 0
    for item in items:
        weight = len(item) if isinstance(item, list) else 1
        length = _length(item)
        if not parts or count + weight > _ITEMS or size + length > _BYTES:
            parts.append([])
            count = size = 0
        parts[-1].append(item)
        count += weight
        size += length
    return parts


def _length(value: object) -> int:
    """About how many bytes of JSON a value takes."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_length, value.values())) + 20 * len(value)
    if isinstance(value, list | tuple):
        return 16 * len(value) if value and isinstance(value[0], int) else sum(map(_length, value))
    return 16


_BEAT_KINDS = ("renewals", "looks", "sweep")


def _beat_parts(beat: port.Beat) -> Iterator[dict[str, list[dict[str, Any]]]]:
    tagged: list[tuple[str, dict[str, Any]]] = [
        *(("renewals", _renewal_item(each)) for each in beat.renewals),
        *(("looks", {"job": job, "slot": slot}) for job, slot in beat.looks),
        *(("sweep", {"job": job, "schedule_id": name}) for job, name in beat.sweep),
    ]
    for part in _parts(tagged) or [[]]:
        yield {kind: [item for tag, item in part if tag == kind] for kind in _BEAT_KINDS}


def _fences(jobs: Sequence[str], answers: Sequence[Mapping[str, Any]] | None) -> dict[str, int]:
    return {job: int(answer["fence"]) for job, answer in zip(jobs, answers or (), strict=True)}


def _reply(
    last: Mapping[str, Any], answers: Iterable[_T], fences: Mapping[str, int]
) -> port.Reply[_T]:
    at = int(last["now_us"]) // 1_000
    return port.Reply(at, tuple(answers), fences, last["store_id"])


def _claim_item(claim: port.Claim) -> dict[str, Any]:
    item = {
        "job": claim.job,
        "slot": claim.slot,
        "token": claim.token,
        "instance_id": claim.instance_id,
        "incarnation": claim.incarnation,
        "schedule_id": claim.schedule_id,
        "overlap": claim.overlap.value,
        "start_deadline_ms": claim.start_deadline_ms,
        "lease_ms": claim.lease_ms,
        "cancel_grace_ms": claim.cancel_grace_ms,
        "max_attempts": claim.max_attempts,
        "window_ms": claim.window_ms,
        "expected_at": claim.expected_at,
        "vouched": claim.vouched,
        "may_run": claim.may_run,
        "seen_attempt": claim.seen_attempt,
        "seen_token": claim.seen_token,
    }
    if claim.previous_slot is not None:
        item["previous_slot"] = claim.previous_slot
    return item


def _plan_item(plan: port.Plan) -> dict[str, Any]:
    return {
        "job": plan.job,
        "schedule_id": plan.schedule_id,
        "settled": plan.settled,
        "slots": [missed.slot for missed in plan.slots],
        "deadlines": [missed.start_deadline_ms for missed in plan.slots],
        "more": plan.more,
        "limit": plan.limit,
    }


def _renewal_item(renewal: port.Renewal) -> dict[str, Any]:
    item: dict[str, Any] = {
        "job": renewal.job,
        "slot": renewal.slot,
        "token": renewal.token,
        "instance_id": renewal.instance_id,
        "incarnation": renewal.incarnation,
        "lease_ms": renewal.lease_ms,
        "adopt": renewal.adopt,
    }
    if renewal.started_at is not None:
        item["started_at"] = renewal.started_at
    if renewal.cancel is not None:
        item["cancel"] = renewal.cancel.value
    return item


def _completion_item(completion: port.Completion) -> dict[str, Any]:
    outcome = completion.outcome
    item: dict[str, Any] = {
        "job": completion.job,
        "slot": completion.slot,
        "token": completion.token,
        "result": outcome.result,
        "elapsed_ms": outcome.elapsed_ms,
    }
    if outcome.failure is not None:
        item["failure"] = failure_text(outcome.failure)
    if outcome.stopped is not None:
        item["stopped"] = outcome.stopped.value
    return item


def _definition_item(definition: model.Definition) -> dict[str, Any]:
    return {
        "job": definition.job,
        "definition_id": definition.definition_id,
        "schedule_id": definition.schedule_id,
        "kept": kept_definition(definition),
    }


# Answers -----------------------------------------------------------------------------------


def _int(text: str | None) -> int | None:
    return None if text is None else int(text)


def _view(answer: Mapping[str, Any], now: machine.Moment) -> model.RunView | None:
    fields = answer.get("run")
    return machine.view(run_of(fields), now) if fields else None


def _claim_answer(answer: Mapping[str, Any], now: machine.Moment) -> port.ClaimAnswer:
    if answer["outcome"] == "broken":
        return port.ClaimAnswer(port.ClaimOutcome.UNKNOWN)
    return port.ClaimAnswer(port.ClaimOutcome(answer["outcome"]), _view(answer, now))


def _token_answer(answer: Mapping[str, Any], now: machine.Moment) -> port.TokenAnswer:
    if answer["outcome"] == "broken":  # nobody can hold what nobody can read
        return port.TokenAnswer(port.TokenOutcome.UNKNOWN_TOKEN)
    return port.TokenAnswer(port.TokenOutcome(answer["outcome"]), _view(answer, now))


def _plan_answer(answer: Mapping[str, Any]) -> port.PlanAnswer:
    done = answer["outcome"] == "done"
    return port.PlanAnswer(done, _int(answer.get("settled")), answer.get("missed", 0))


def _registration(job: str, answer: Mapping[str, Any]) -> port.Registration:
    return port.Registration(
        job=job,
        current=answer["current"],
        since=int(answer["since"]),
        settled=_int(answer.get("settled")),
        definitions_differ=answer["differ"],
    )


def _instances_of(noted: Iterable[bytes]) -> list[model.Instance]:
    return [instance_of(incarnation, record) for incarnation, record in decoded(noted).items()]


def _job_view(
    name: str,
    record: Sequence[bytes | None],
    kept: str,
    held: Mapping[str, str],
    live: Mapping[str, str],
    last_run: model.RunView | None,
) -> model.JobView:
    holds = [
        hold
        for incarnation, text in held.items()
        if incarnation in live
        for hold in holds_of(name, incarnation, text)
    ]
    return model.JobView(
        name=name,
        spec=spec_of(name, kept),
        definition_at=int(record[1] or 0),
        definitions_differ=machine.definitions_differ(holds),
        instance_ids=tuple(sorted({live[hold.incarnation] for hold in holds})),
        last_run=machine.without_traces(last_run) if last_run else None,
    )
