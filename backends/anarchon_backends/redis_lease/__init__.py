"""A store in a Redis or Valkey server or cluster, by the strategy `lease`.

Atomic here: what one Lua script (`lua/`) does; the server runs nothing else meanwhile, so read,
decide and write are one step. The scripts say what `machine` says. On one server a batch is one
script, or one for every 250 items; in a cluster it is one a job, and whatever a claim depends on is
in its job's keys. Registering, leaving and pruning go in several steps, each of which may be the
last and may be done again. Whose clock decides: the `TIME` of the server that has the job, read
inside the script, for slots and for leases; it may be stepped, so a takeover needs the second
witness (S19, CLOCK_STEP). What it can lose: with `appendonly no`, or in a fail-over to a replica that lags, what was acknowledged
last; the URL's `durability` narrows it. Imports the port, the model, what the backends of Redis
share, the standard library and redis-py.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from redis.exceptions import RedisError, ResponseError

from anarchon_backends.redis import _checks
from anarchon_backends.redis._address import Address, address_of
from anarchon_backends.redis._cluster import Cluster, server_of
from anarchon_backends.redis._connection import AccessDenied
from anarchon_backends.redis._script import Script
from anarchon_backends.redis_lease import _scripts
from anarchon_backends.redis_lease._batches import (
    beat_answer,
    beat_form,
    beat_items,
    beat_said,
    claim_answer,
    claim_item,
    completion_item,
    control_answer,
    control_item,
    definition_item,
    fences_of,
    plan_answer,
    plan_item,
    registration,
    release_item,
    reply,
    token_answer,
)
from anarchon_backends.redis_lease._calls import Calls, Part, Reply, failure_of, replies_of
from anarchon_backends.redis_lease._reading import Reader
from anarchon_backends.redis_lease._rows import moment, noted_instance
from anarchon_server.core import machine, model
from anarchon_server.core import store as port
from anarchon_server.core.errors import (
    OutcomeUnknown,
    StoreError,
    StoreRefused,
    StoreUnavailable,
)

_T = TypeVar("_T")

_PRUNE_JOBS = 200  # jobs looked at by one call of `prune`


def open_store(url: str, options: port.OpenOptions) -> port.Store:
    """The store on the server that `redis://host:port/database` names (`rediss:` for TLS;
    `valkey:` and `valkeys:` are the same), or with `cluster=true` in the cluster. Nothing is
    connected before `open`.
    """
    return RedisLeaseStore(address_of(url), options)


class RedisLeaseStore:
    """One instance's connections to a server or a cluster.

    `clock` stands in for the servers' `TIME`, in tests that move the store's time by hand.
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
        self._server = server_of(address, options.op_timeout_ms)
        self._calls = Calls(self._server, options.namespace, clock, durable=address.durable)
        self._reader = Reader(self._server, self._calls, clock)
        self._capabilities = port.Capabilities(
            backend="redis:lease",
            notifies=True,
            overlap=frozenset(model.OverlapPolicy),
            catch_up=frozenset(model.CatchUpPolicy),
            retries=True,
            control=True,
        )
        self._news_before = 0
        self._pruned_to = ""
        self._watches: set[asyncio.Event] = set()

    @property
    def capabilities(self) -> port.Capabilities:
        """What this backend can do."""
        return self._capabilities

    # Opening

    async def open(self) -> port.StoreReport:
        """Connects and checks. `StoreUnavailable` where the server cannot be reached."""
        self._server.start()
        try:
            found = await _checks.check(self._server, self._address)
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
        """Tries every command, makes the namespace, and reads how often there were news."""
        namespace = self._calls.namespace
        batch = {"channel": f"{namespace}:news"}
        try:
            answers = [await self._calls.of_namespace(_scripts.PROBE, batch)]
            self._news_before = await self._reader.probe(namespace)
            for key in self._keys_elsewhere():
                answers.append(await self._calls.of_key(_scripts.PROBE, key, batch))
                await self._reader.probe(key)
        except StoreUnavailable as error:
            if "ANARCHONSCHEMA" in str(error):
                raise _other_schema(str(error)) from None
            raise
        except OutcomeUnknown as error:
            if isinstance(error.__cause__, ResponseError):
                raise _checks.not_run(error.__cause__, self._address.location) from None
            raise
        if not all(each["exact"] for each in answers):
            raise StoreRefused("the server's Lua does not keep numbers of 16 digits exactly")
        found.verified.append("scripts run, and every command they use is permitted")
        if not answers[0]["publishes"]:
            found.warn(
                "publishing is not permitted: others notice what is new only when they look",
                f"add +publish and &{namespace}:news to what the user may do",
            )

    def _keys_elsewhere(self) -> list[str]:
        """A key on every node of a cluster; no job has such a name."""
        if not isinstance(self._server, Cluster):
            return []
        begin = self._calls.namespace[:-1]
        found = [
            self._server.key_on(host, lambda number: f"{begin}|{number}}}")
            for host in self._server.nodes()
        ]
        return [key for key in found if key is not None]

    async def _check_subscribing(self, found: _checks.Findings) -> None:
        try:
            connection = await self._subscribe()
        except AccessDenied:
            found.warn(
                "subscribing is not permitted: this instance notices what is new when it looks",
                f"add +subscribe and &{self._calls.namespace}:news to what the user may do",
            )
        else:
            await self._server.discard(connection)

    async def close(self) -> None:
        """Closes the connections, and ends the watches."""
        for closed in self._watches:
            closed.set()
        await self._server.close()

    # Calls

    async def _replies(
        self,
        script: Script,
        items: Sequence[dict[str, Any]],
        batch: Mapping[str, object] | None = None,
        *,
        durable: bool = False,
    ) -> tuple[list[Part], list[Reply], dict[str, int]]:
        """Carries out a batch: its parts, what the scripts said, and the fences."""
        parts = await self._calls.of_jobs(script, items, batch, durable=durable)
        told = [part.reply for part in parts if part.reply is not None]
        if not items and not parts:
            told = [await self._calls.of_namespace(_scripts.MOMENT, {})]
        fences: dict[str, int] = {}
        for part in parts:
            if part.reply is not None:
                jobs = [items[place]["job"] for place in part.places]
                fences |= fences_of(jobs, part.reply["answers"])
        return parts, told, fences

    async def claim(self, claims: Sequence[port.Claim]) -> port.Reply[port.ClaimAnswer]:
        """First attempts and takeovers. What a part of the batch could not be asked is UNKNOWN."""
        items = [claim_item(claim) for claim in claims]
        parts, told, fences = await self._replies(_scripts.CLAIM, items, durable=True)
        if not told:
            raise failure_of(parts) or AssertionError("a call without parts was told the time")
        answers = [port.ClaimAnswer(port.ClaimOutcome.UNKNOWN)] * len(items)
        for place, answer, now in _placed(parts):
            answers[place] = claim_answer(answer, now)
        return reply(told, answers, fences)

    async def settle(self, plans: Sequence[port.Plan]) -> port.Reply[port.PlanAnswer]:
        """Records slots as missed."""
        items = [plan_item(plan) for plan in plans]
        parts, _, fences = await self._replies(_scripts.SETTLE, items)
        return _in_order(parts, lambda answer, _: plan_answer(answer), fences)

    async def control(self, acts: Sequence[port.Control]) -> port.Reply[port.ControlAnswer]:
        """Pauses, resumes, triggers and cancels.

        Who lives is asked first, where a job is to be resumed: what comes to be in use meanwhile is
        the current definition's, or was in use before.
        """
        items = [control_item(act) for act in acts]
        batch: dict[str, object] = {}
        if any(isinstance(act, port.Resume) for act in acts):
            told = await self._calls.of_namespace(_scripts.LIVE, {})
            batch = {"live": list(told["live"] or ())}
        parts, _, fences = await self._replies(_scripts.CONTROL, items, batch, durable=True)
        return _in_order(parts, control_answer, fences)

    async def beat(self, beat: port.Beat) -> port.Reply[port.BeatAnswer]:
        """One heartbeat. A long one goes in several parts; the last says that the instance lives."""
        items = beat_items(beat)
        parts, about_us = await self._beat(beat, items)
        told = [part.reply for part in parts if part.reply is not None]
        fences: dict[str, int] = {}
        for part in parts:
            if part.reply is not None:
                jobs = [items[place]["job"] for place in part.places]
                fences |= fences_of(jobs, beat_said(part.reply))
        answer = beat_answer(beat, items, [(part.places, part.reply) for part in parts], about_us)
        if beat.leaving:
            incarnation = beat.instance.incarnation
            with _begun():
                survey = await self._calls.of_namespace(_scripts.SURVEY, {"leaving": incarnation})
                await self._forget(survey["gone"] or (), leaving=True)
        return reply([*told, about_us] if about_us else told, [answer], fences)

    async def _beat(
        self, beat: port.Beat, items: Sequence[dict[str, Any]]
    ) -> tuple[list[Part], Reply | None]:
        """The parts of a heartbeat, and the reply to that which is about the instance.

        In a cluster some may have failed, where a node is away, and the last may be None.
        """
        instance = {"instance": noted_instance(beat.instance), "leaving": beat.leaving}
        common = {"sweep_limit": beat.sweep_limit}
        within_ms = beat.within_ms
        asked = self._calls.of_jobs(
            _scripts.BEAT, items, common, form=beat_form, last=instance, within_ms=within_ms
        )
        if self._calls.apart:
            lives = self._calls.of_namespace(_scripts.ALIVE, instance, within_ms=within_ms)
            return await _each(asked, lives, whole=beat.leaving)
        parts = await asked
        return parts, replies_of(parts)[-1]

    async def complete(
        self, completions: Sequence[port.Completion]
    ) -> port.Reply[port.TokenAnswer]:
        """Records results."""
        items = [completion_item(each) for each in completions]
        parts, told, fences = await self._replies(_scripts.COMPLETE, items, durable=True)
        return _of_tokens(parts, told, fences)

    async def release(self, releases: Sequence[port.Release]) -> port.Reply[port.TokenAnswer]:
        """Ends leases at once."""
        items = [release_item(each) for each in releases]
        parts, told, fences = await self._replies(_scripts.RELEASE, items)
        return _of_tokens(parts, told, fences)

    async def register(
        self,
        instance: model.Instance,
        definitions: Sequence[model.Definition],
        let_go: Sequence[str] = (),
    ) -> port.Reply[port.Registration]:
        """Records what the instance holds of these jobs now.

        In four steps: who lives; the jobs that it holds; those that it lets go of; and that it is
        known from now on. Where one fails all of them are repeated.
        """
        placed = sorted(enumerate(definitions), key=lambda each: each[1].job)
        items = [definition_item(each) for _, each in placed]
        noted, jobs = noted_instance(instance), sorted({each.job for each in definitions})
        first = await self._calls.of_namespace(_scripts.ENROL, {"instance": noted, "jobs": jobs})
        about_us = {"incarnation": instance.incarnation, "live": list(first["live"] or ())}
        with _begun():
            parts = await self._calls.of_jobs(_scripts.REGISTER, items, about_us, whole=True)
            replies_of(parts)
            letting = [{"job": job, "incarnation": instance.incarnation} for job in let_go]
            if letting:
                replies_of(await self._calls.of_jobs(_scripts.LET_GO, letting))
            batch = {"instance": noted, "jobs": jobs, "dropped": list(let_go)}
            last = await self._calls.of_namespace(_scripts.ENROLLED, batch)
        answers: dict[int, port.Registration] = {}
        fences: dict[str, int] = {}
        for part in parts:
            said = (part.reply or {}).get("answers") or ()
            fences |= fences_of([items[place]["job"] for place in part.places], said)
            for place, each in zip(part.places, said, strict=True):
                answers[placed[place][0]] = registration(items[place]["job"], each)
        return reply([last], (answers[place] for place in range(len(definitions))), fences)

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
        page = {"after": self._pruned_to, "limit": _PRUNE_JOBS}
        survey = await self._calls.of_namespace(_scripts.SURVEY, page)
        names = list(survey["names"] or ())
        left, waiting = policy.batch, names
        with _begun():
            await self._forget(survey["gone"] or (), leaving=False)
            while waiting and left > 0:
                gone, waiting = await self._prune_jobs(waiting, left, survey["live"] or (), policy)
                left -= gone
        if waiting:  # the first of which goes on then
            before = names.index(waiting[0])
            self._pruned_to = names[before - 1] if before else self._pruned_to
        else:
            self._pruned_to = names[-1] if len(names) == _PRUNE_JOBS else ""
        return reply([survey], [policy.batch - left], {})

    async def _prune_jobs(
        self, names: Sequence[str], room: int, live: Sequence[str], policy: port.PrunePolicy
    ) -> tuple[int, list[str]]:
        """Prunes jobs: how many runs went, and which of the jobs may have more.

        The calls of a cluster do not know of each other: each has its share of the room.
        """
        asked = names[:room] if self._calls.apart else names
        share = room // len(asked) if self._calls.apart else room
        batch = {
            "live": list(live),
            "history_ms": policy.history_ms,
            "history_max": policy.history_max,
            "room": share,
        }
        items = [{"job": name} for name in asked]
        parts = await self._calls.of_jobs(_scripts.PRUNE, items, batch)
        replies_of(parts)
        answers = {asked[place]: answer for place, answer, _ in _placed(parts)}
        if self._calls.apart:
            await self._unlist([name for name in asked if answers[name].get("forgotten")])
        gone = sum(int(each["gone"]) for each in answers.values())
        full = share if self._calls.apart else max(1, room)
        more = [
            name
            for name in names
            if name not in answers
            or "unvisited" in answers[name]
            or int(answers[name]["gone"]) >= full
        ]
        return gone, more

    async def _unlist(self, names: Sequence[str]) -> None:
        """In a cluster, takes jobs that nobody has any more off the list.

        One that was registered since is put on it again: it was listed after it was registered
        (`enrolled.lua`), and that may have been before it was taken off here.
        """
        if not names:
            return
        await self._calls.of_namespace(_scripts.LIST, {"remove": list(names), "add": []})
        back = await self._reader.defined(names)
        if back:
            await self._calls.of_namespace(_scripts.LIST, {"remove": [], "add": back})

    async def _forget(self, gone: Sequence[Mapping[str, Any]], *, leaving: bool) -> None:
        """Drops what instances held, and then the instances: if it ends in between, whoever prunes
        finds them still, and does it all again.
        """
        if not gone:
            return
        items: list[dict[str, Any]] = []
        for each in gone:
            item = {"incarnation": each["incarnation"]}
            if (
                not leaving
            ):  # what it held at its last heartbeat, and not what it holds if it is back
                item |= {"at": each["seen_at"], "until": each["seen_at"] + each["lease_ms"]}
            items += [{"job": job, **item} for job in each["jobs"] or ()]
        if items:
            replies_of(await self._calls.of_jobs(_scripts.LET_GO, items))
        seen = [{"incarnation": e["incarnation"], "seen_at": e["seen_at"]} for e in gone]
        await self._calls.of_namespace(_scripts.FORGOTTEN, {"gone": seen, "leaving": leaving})

    async def watch(self) -> AsyncIterator[None]:
        """Yields soon after there were news (`machine.Saved`), counted from `open`.

        Raises `StoreUnavailable` when the connection is lost; a new watch tells what was missed.
        """
        closed = asyncio.Event()
        self._watches.add(closed)
        ending = asyncio.create_task(closed.wait())
        connection = None
        try:
            connection = await self._subscribe()
            news = await self._reader.news()
            while True:
                if news != self._news_before:
                    self._news_before = news
                    yield
                reading = asyncio.create_task(connection.read_response(timeout=math.inf))
                await asyncio.wait({reading, ending}, return_when=asyncio.FIRST_COMPLETED)
                if not reading.done():
                    reading.cancel()
                    return
                said = reading.result()[2]
                news = int(said) if said.isdigit() else news
        except (RedisError, OSError) as error:
            if not closed.is_set():
                raise StoreUnavailable(f"{self._address.location}: {error}") from error
        finally:
            ending.cancel()
            self._watches.discard(closed)
            if connection is not None:
                await self._server.discard(connection)

    async def _subscribe(self) -> Any:
        """A connection on which the namespace's news come in."""
        connection = None
        try:
            async with asyncio.timeout(self._options.op_timeout_ms / 1_000):
                channel = f"{self._calls.namespace}:news"
                connection = await self._server.connect(self._calls.namespace)
                await connection.send_command("SUBSCRIBE", channel, check_health=False)
                await connection.read_response()
        except BaseException as error:
            if connection is not None:
                await self._server.discard(connection)
            if isinstance(error, ResponseError):
                raise AccessDenied(f"{self._address.location}: {error}") from error
            if isinstance(error, RedisError | OSError):  # a TimeoutError is one
                raise StoreUnavailable(f"{self._address.location}: {error}") from error
            raise
        return connection


def _placed(parts: Sequence[Part]) -> Iterator[tuple[int, dict[str, Any], machine.Moment]]:
    """The answers that there are, each with its place in the batch, and by whose time it is so."""
    for part in parts:
        if part.reply is not None:
            now = moment(int(part.reply["now_us"]))
            for place, answer in zip(part.places, part.reply["answers"] or (), strict=True):
                yield place, answer, now


def _in_order(
    parts: Sequence[Part],
    read: Callable[[dict[str, Any], machine.Moment], _T],
    fences: Mapping[str, int],
) -> port.Reply[_T]:
    """The reply to a batch. Raises where a part of it failed."""
    told = replies_of(parts)
    answers = {place: read(answer, now) for place, answer, now in _placed(parts)}
    return reply(told, (answers[place] for place in range(len(answers))), fences)


def _of_tokens(
    parts: Sequence[Part], told: Sequence[Reply], fences: Mapping[str, int]
) -> port.Reply[port.TokenAnswer]:
    """The reply to results or releases: what was not answered is UNKNOWN. Raises where all is."""
    if not told:
        replies_of(parts)
    answers = {place: token_answer(answer, now) for place, answer, now in _placed(parts)}
    unknown = port.TokenAnswer(port.TokenOutcome.UNKNOWN)
    places = sorted(place for part in parts for place in part.places)
    return reply(told, (answers.get(place, unknown) for place in places), fences)


@contextmanager
def _begun() -> Iterator[None]:
    """For the steps after the first of a call: where one is not done, some of the call is."""
    try:
        yield
    except StoreUnavailable as error:
        raise OutcomeUnknown(f"{error}; a part of the call was done before") from error


async def _each(
    parts: Coroutine[Any, Any, list[Part]], other: Coroutine[Any, Any, Reply], *, whole: bool
) -> tuple[list[Part], Reply | None]:
    """Waits for both, whatever becomes of either. Raises where none was answered, or, if it is to be
    `whole`, where one was not.
    """
    done, said = await asyncio.gather(parts, other, return_exceptions=True)
    for each in (done, said):
        if isinstance(each, BaseException) and not isinstance(each, StoreError):
            raise each
    assert isinstance(done, list), "of the jobs' part errors are answers"
    last = Part((), error=said) if isinstance(said, StoreError) else Part((), reply=said)
    if whole or all(part.error is not None for part in (*done, last)):
        replies_of([*done, last])
    return done, last.reply


def _other_schema(said: str) -> StoreRefused:
    found = said.partition("ANARCHONSCHEMA")[2].strip()[:40]
    return StoreRefused(
        f"the namespace in the store has the layout {found!r}, and this version of Anarchon knows "
        f"{_scripts.SCHEMA}: run the version that made it, or use another namespace"
    )
