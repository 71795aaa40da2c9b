"""A store in a Redis or Valkey server that knows who won a slot, and no leases (claim-only).

Atomic here: what is asked of one run is one step of a Lua script (`lua/`), which holds the claim
and its row in history; how a slot is claimed is the strategy's: a key a slot (`script`), an id a
slot in a stream that takes no older one (`stream-id`), or the server's own table of ids seen
(`idmp`). No step touches keys of two jobs, or of a job and the namespace. Whose clock decides: the
server's `TIME`, read inside the script, for slots; there are no leases. Pause, resume, trigger and
cancel are decided in the same step. A failed attempt is followed by another of the instance that
reported it. What it cannot do: take a run over when its runner died, skip or queue runs that
overlap, catch up. What it can lose: with `appendonly no`, or in a fail-over to a replica that lags,
what was acknowledged last.
Imports the port, the model, what the backends of Redis share and the standard library.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from redis.exceptions import ResponseError

from anarchon_backends.redis import _checks, strategy_of
from anarchon_backends.redis._address import Address, address_of
from anarchon_backends.redis._cluster import Cluster, server_of
from anarchon_backends.redis._connection import AccessDenied, Answer, Call
from anarchon_backends.redis._script import Script
from anarchon_backends.redis._text import decode, encode
from anarchon_backends.redis_claim._batches import (
    Item,
    claim_answer,
    claim_item,
    completion_item,
    control_answer,
    control_item,
    look_answer,
    look_item,
    news_answer,
    parts_of,
    registration_items,
    registrations,
    release_item,
    renewal_item,
    since_answer,
    sweep_item,
    token_answer,
)
from anarchon_backends.redis_claim._reading import Keys, Reader
from anarchon_backends.redis_claim._rows import moment, noted_instance
from anarchon_backends.redis_claim._scripts import scripts_of
from anarchon_backends.redis_claim._strategies import STRATEGIES, Strategy
from anarchon_server.core import machine, model
from anarchon_server.core import store as port
from anarchon_server.core.claim_only import is_news
from anarchon_server.core.errors import (
    OutcomeUnknown,
    StoreError,
    StoreRefused,
    StoreUnavailable,
    UnsupportedError,
)

_T = TypeVar("_T")

_PRUNE_JOBS = 200  # jobs looked at by one call of `prune`
_PAGE = "redis-claim.md"


def open_store(url: str, options: port.OpenOptions) -> port.Store:
    """The store on the server that `redis://host:port/database?strategy=script` names (or
    `stream-id`, or `idmp`). Nothing is connected before `open`.
    """
    return RedisClaimStore(address_of(url), STRATEGIES[strategy_of(url)], options)


class RedisClaimStore:
    """One instance's connections to a server, or to the nodes of a cluster.

    `clock` stands in for the server's `TIME`, in tests that move the store's time by hand.
    """

    def __init__(
        self,
        address: Address,
        strategy: Strategy,
        options: port.OpenOptions,
        *,
        clock: port.StoreClock | None = None,
    ) -> None:
        self._address = address
        self._strategy = strategy
        self._scripts = scripts_of(strategy)
        self._options = options
        self._clock = clock
        self._server = server_of(address, options.op_timeout_ms)
        self._keys = Keys(f"anarchon:{{{len(options.namespace)}:{options.namespace}}}")
        self._reader = Reader(self._server, self._keys, clock)
        self._drawn_id = secrets.token_hex(8)
        self._store_id = ""
        self._pruned_to = ""
        self._closed = asyncio.Event()

    @property
    def capabilities(self) -> port.Capabilities:
        """What this backend can do."""
        return self._strategy.capabilities

    # Opening

    async def open(self) -> port.StoreReport:
        """Connects and checks. `StoreUnavailable` where the server cannot be reached."""
        self._server.start()
        self._closed.clear()
        try:
            found = await _checks.check(self._server, self._address, expires=self._strategy.expires)
            await self._probe()
        except AccessDenied as error:
            await self.close()
            raise _checks.denied(error, self._address.location, _PAGE) from None
        except BaseException:
            await self.close()
            raise
        found.verified.append("scripts run, and every command they use is permitted")
        return port.StoreReport(self._address.location, tuple(found.verified), tuple(found.doubts))

    async def _probe(self) -> None:
        """Makes the namespace, and tries every command: one that is not permitted would otherwise
        stop a script after its first write.
        """
        try:
            await self._ask_namespace("probe")
            for key in self._probe_keys():
                scripts = self._scripts
                for script in (scripts.runs, scripts.control, scripts.definitions):
                    batch = self._batch({"items": [{"act": "probe"}]})
                    said = json.loads(decode(await self._server.run(script, [key], batch)))
                    self._check_probe(said["answers"][0])
            await self._reader.probe()
        except StoreUnavailable as error:
            if "ANARCHONSCHEMA" in str(error):
                raise self._other_schema(str(error)) from None
            raise
        except OutcomeUnknown as error:
            if isinstance(error.__cause__, ResponseError):
                raise _checks.not_run(error.__cause__, self._address.location, _PAGE) from None
            raise

    def _probe_keys(self) -> Iterable[str]:
        """A key on every server, as a job would have it; no job has such a name."""
        if not isinstance(self._server, Cluster):
            return [self._keys.job("|")]
        named = (
            self._server.key_on(host, lambda n: self._keys.job(f"|{n}"))
            for host in self._server.nodes()
        )
        return [key for key in named if key is not None]

    def _check_probe(self, said: Mapping[str, Any]) -> None:
        if said.get("outcome") == "too_old":
            version = said["version"] or "older than 7.0"
            raise StoreRefused(
                f"the strategy {self._strategy.name} needs Redis {self._strategy.oldest} or newer, "
                f"and this server is {version} (Valkey calls itself 7.2.4, and does not have it): "
                "use strategy=script, or lease"
            )
        if said.get("outcome") != "fine":
            raise StoreRefused("the server's Lua does not keep numbers of 16 digits exactly")

    def _other_schema(self, said: str) -> StoreRefused:
        found = said.partition("ANARCHONSCHEMA")[2].strip()[:40]
        return StoreRefused(
            f"the namespace in the store has the layout {found!r}, and this version of Anarchon "
            f"with strategy={self._strategy.name} knows {self._scripts.schema!r}: use the strategy "
            "and the version that made it, or another namespace"
        )

    async def close(self) -> None:
        """Closes the connections, and ends the watches."""
        self._closed.set()
        await self._server.close()

    # Calls

    def _batch(self, batch: Mapping[str, object]) -> bytes:
        if self._clock is not None:
            batch = {**batch, "now_us": self._clock.wall_us()}
        return encode(json.dumps(batch, ensure_ascii=False, separators=(",", ":")))

    def _namespace_call(self, act: str, **request: object) -> Call:
        batch = self._batch({"act": act, "store_id": self._drawn_id, **request})
        return Call(self._scripts.namespace, [self._keys.namespace], batch)

    async def _ask_namespace(self, act: str, **request: object) -> dict[str, Any]:
        told = await self._server.run_each([self._namespace_call(act, **request)])
        _raise_failures(told)
        return self._namespace_said(told[0])

    def _namespace_said(self, answer: Answer) -> dict[str, Any]:
        said = _said(answer)
        self._store_id = said["store_id"]
        return said

    def _calls(
        self, script: Script, items: Sequence[Item], **batch: object
    ) -> list[tuple[int, Call]]:
        """The calls that carry out the items, in their order, each with how many it does.

        On one server a call does many, in a cluster one: their keys may be on different nodes.
        """
        parts = [[item] for item in items] if self._address.cluster else parts_of(items)
        return [
            (
                len(part),
                Call(
                    script,
                    [self._keys.job(item["job"]) for item in part],
                    self._batch({**batch, "items": part}),
                ),
            )
            for part in parts
        ]

    async def _carry_out(
        self,
        script: Script,
        items: Sequence[Item],
        *,
        durable: bool = False,
        whole: bool = True,
        **batch: object,
    ) -> tuple[machine.Moment, list[Item]]:
        """Carries out a batch in one round trip (in a cluster one to each node): the store's time,
        and an answer an item. Raises where a call was not answered; not `whole`: where none was,
        and what was not answered is "unknown".
        """
        if durable and (self._address.replicas or self._address.fsync):
            batch["durable"] = True
        calls = self._calls(script, items, **batch)
        if not calls:
            return await self._reader.now(), []
        told = await self._server.run_each([call for _, call in calls], durable=durable)
        if whole or all(isinstance(each, StoreError) for each in told):
            _raise_failures(told)
        return _answers([count for count, _ in calls], told)

    def _reply(self, now: machine.Moment, answers: Iterable[_T]) -> port.Reply[_T]:
        losses = self._server.losses
        return port.Reply(
            now.at, tuple(answers), {}, f"{self._store_id}+{losses}" if losses else self._store_id
        )

    # Runs

    async def claim(self, claims: Sequence[port.Claim]) -> port.Reply[port.ClaimAnswer]:
        """First attempts. A part of the batch that was not answered leaves its claims open."""
        items = [claim_item(claim) for claim in claims]
        now, answers = await self._carry_out(self._scripts.runs, items, durable=True, whole=False)
        return self._reply(now, (claim_answer(each, now) for each in answers))

    async def settle(self, plans: Sequence[port.Plan]) -> port.Reply[port.PlanAnswer]:
        """Nothing is caught up with here. Raises `UnsupportedError`."""
        del plans
        raise UnsupportedError("catch_up", self.capabilities.backend, port.LEASE_BACKENDS)

    async def control(self, acts: Sequence[port.Control]) -> port.Reply[port.ControlAnswer]:
        """Pauses, resumes, triggers and cancels, each in one step with the claims of its job."""
        live = await self._reader.live()
        items = [control_item(act) for act in acts]
        now, answers = await self._carry_out(self._scripts.control, items, durable=True, live=live)
        return self._reply(now, (control_answer(each, now) for each in answers))

    async def complete(
        self, completions: Sequence[port.Completion]
    ) -> port.Reply[port.TokenAnswer]:
        """Records results."""
        return await self._tokens([completion_item(each) for each in completions])

    async def release(self, releases: Sequence[port.Release]) -> port.Reply[port.TokenAnswer]:
        """Ends runs whose runner is gone."""
        return await self._tokens([release_item(each) for each in releases])

    async def _tokens(self, items: Sequence[Item]) -> port.Reply[port.TokenAnswer]:
        now, answers = await self._carry_out(self._scripts.runs, items, durable=True, whole=False)
        return self._reply(now, (token_answer(each, now) for each in answers))

    async def beat(self, beat: port.Beat) -> port.Reply[port.BeatAnswer]:
        """One heartbeat. What it says and asks of runs goes first."""
        items = [renewal_item(each) for each in beat.renewals]
        items += [look_item(job, slot) for job, slot in beat.looks]
        items += [sweep_item(job, schedule_id) for job, schedule_id in beat.sweep]
        calls = self._calls(self._scripts.runs, items)
        lives = self._namespace_call(
            "beat", instance=noted_instance(beat.instance), leaving=beat.leaving
        )
        asked = [*(call for _, call in calls), lives]
        told = await self._server.run_each(asked, within_s=beat.within_ms / 1_000)
        if beat.leaving or all(isinstance(each, StoreError) for each in told):
            _raise_failures(told)
        now, answers = _answers([count for count, _ in calls], told[:-1])
        about_us: dict[str, Any] = {"known": True, "twins": ()}
        if not isinstance(told[-1], StoreError):
            about_us = self._namespace_said(told[-1])
            now = moment(int(about_us["now_us"]))
        if beat.leaving:
            await self._let_go(beat.instance.incarnation, about_us["dropped"] or (), now.at)
        return self._reply(now, [_beat_answer(beat, items, answers, now, about_us)])

    # Registration

    async def register(
        self,
        instance: model.Instance,
        definitions: Sequence[model.Definition],
        let_go: Sequence[str] = (),
    ) -> port.Reply[port.Registration]:
        """Records what the instance holds of these jobs now.

        First it is known who lives, then every job learns what is held of it, and in the end the
        instance counts as registered. Cut off between, all of it is repeated.
        """
        noted = noted_instance(instance)
        begun = await self._ask_namespace("begin", instance=noted)
        items = registration_items(definitions)
        try:
            _, found = await self._carry_out(
                self._scripts.definitions,
                items,
                incarnation=instance.incarnation,
                live=begun["live"],
            )
            jobs = [item["job"] for item in items]
            if let_go:
                now = moment(int(begun["now_us"]))
                await self._let_go(instance.incarnation, let_go, now.at)
            said = await self._ask_namespace(
                "finish", instance=noted, jobs=jobs, dropped=list(let_go)
            )
            now = moment(int(said["now_us"]))
        except StoreUnavailable as error:
            raise OutcomeUnknown(f"{error}; a part of the registration was done before") from error
        answers: dict[int, port.Registration] = {}
        for item, each in zip(items, found, strict=True):
            answers |= registrations(item, each)
        return self._reply(now, (answers[place] for place in range(len(definitions))))

    async def _let_go(self, incarnation: str, jobs: Iterable[str], at: int) -> None:
        """Notes on the jobs that the instance held them until `at`, and holds them no more."""
        items = [{"act": "let_go", "job": job} for job in jobs]
        await self._carry_out(self._scripts.definitions, items, incarnation=incarnation, at=at)

    # Reading

    async def runs(self, query: port.RunQuery) -> port.Reply[model.RunView]:
        """History, newest slot first; equal slots by job name, last first."""
        now, page, looked_to = await self._in_time(self._reader.runs(query))
        return replace(self._reply(now, page), looked_to=looked_to)

    async def jobs(self, names: Sequence[str], after: str, limit: int) -> port.Reply[model.JobView]:
        """The named jobs, or a page of all."""

        async def work() -> tuple[machine.Moment, list[model.JobView]]:
            return await self._reader.jobs(names or await self._reader.job_names(after, limit))

        return self._reply(*await self._in_time(work()))

    async def instances(self) -> port.Reply[model.Instance]:
        """The instances seen lately, by label."""
        return self._reply(*await self._in_time(self._reader.instances()))

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

    # Pruning

    async def prune(self, policy: port.PrunePolicy) -> port.Reply[int]:
        """Deletes a batch of old runs, and definitions and instances long gone.

        One call looks at 200 jobs; the next goes on where it ended. In a cluster, where nobody
        counts over the nodes, the batch is one of each job.
        """
        said = await self._ask_namespace("forget")
        for each in said["gone"] or ():
            await self._let_go(each["incarnation"], each["jobs"] or (), int(each["at"]))
        names = await self._reader.job_names(self._pruned_to, _PRUNE_JOBS)
        now, answers = await self._carry_out(
            self._scripts.definitions,
            [{"act": "prune", "job": name} for name in names],
            instances={**said["live"], **said["lapsed"]},
            looked_at=moment(int(said["now_us"])).at,
            history_ms=policy.history_ms,
            history_max=policy.history_max,
            room=policy.batch,
        )
        pruned = dict(zip(names, answers, strict=True))
        await self._drop_names([name for name in names if pruned[name].get("forgotten")])
        looked_at = [name for name in names if not pruned[name].get("skipped")]
        finished = len(looked_at) == len(names) < _PRUNE_JOBS
        self._pruned_to = "" if finished or not looked_at else looked_at[-1]
        return self._reply(now, [sum(int(each.get("gone", 0)) for each in answers)])

    async def _drop_names(self, names: Sequence[str]) -> None:
        """Takes jobs out of the index; not those that somebody registers meanwhile."""
        if not names:
            return
        await self._ask_namespace("index", gone=names, there=[])
        known = await self._reader.have_definitions(names)
        if there := [name for name, has in zip(names, known, strict=True) if has]:
            await self._ask_namespace("index", gone=[], there=there)

    async def watch(self) -> AsyncIterator[None]:
        """Yields nothing, as no run is ever freed, and ends when the store is closed."""
        await self._closed.wait()
        for _ in ():
            yield


def _beat_answer(
    beat: port.Beat,
    items: Sequence[Item],
    answers: Sequence[Item],
    now: machine.Moment,
    about_us: Mapping[str, Any],
) -> port.BeatAnswer:
    """What became of a heartbeat of such items: renewals, looks, then sweeps."""
    renewed, looked = len(beat.renewals), len(beat.renewals) + len(beat.looks)
    swept, ours = answers[looked:], beat.instance.incarnation
    news = [seen for each in swept for seen in news_answer(each, now) if is_news(seen.run, ours)]
    pairs = zip(items, answers, strict=True)
    return port.BeatAnswer(
        renewals=tuple(token_answer(each, now) for each in answers[:renewed]),
        looks=tuple(look_answer(each, now) for each in answers[renewed:looked]),
        unfinished=tuple(news[: beat.sweep_limit]),
        settled=tuple(since_answer(each) for each in swept),
        known=about_us["known"],
        twins=tuple(about_us["twins"] or ()),
        unheard=frozenset(item["job"] for item, each in pairs if each.get("outcome") == "unknown"),
    )


def _said(answer: Answer) -> dict[str, Any]:
    assert not isinstance(answer, StoreError), "failures were raised before"
    said: dict[str, Any] = json.loads(decode(answer))
    return said


def _raise_failures(told: Sequence[Answer]) -> None:
    """Raises what keeps calls made together from being answered; nothing was done surely only
    where that is so of each.
    """
    failed = [each for each in told if isinstance(each, StoreError)]
    if not failed:
        return
    if len(failed) == len(told):
        unknown = [each for each in failed if isinstance(each, OutcomeUnknown)]
        raise (unknown or failed)[0]
    raise OutcomeUnknown(f"{failed[0]}; another part of the call was done") from failed[0]


def _answers(counts: Sequence[int], told: Sequence[Answer]) -> tuple[machine.Moment, list[Item]]:
    """What calls that did so many items each answered, and when."""
    answers: list[Item] = []
    now_us = 0
    for count, answer in zip(counts, told, strict=True):
        if isinstance(answer, StoreError):
            answers += [{"outcome": "unknown"}] * count
        else:
            said = _said(answer)
            now_us = max(now_us, int(said["now_us"]))
            answers += said["answers"]
    return moment(now_us), answers
