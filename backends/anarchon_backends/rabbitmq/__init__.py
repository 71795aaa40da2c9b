"""A store in a RabbitMQ broker: claims alone, each the declaration of a queue.

Atomic here: `queue.declare`. The queue of a slot carries 62 bits of the winner's token among its
arguments; to declare it with the same is to have won, also when repeated, and with others it is
refused. Whose clock decides: this machine's, just before the declaration is sent, as RabbitMQ has
none. What it cannot do: leases and all that needs them, and history; what is shown of runs, jobs
and instances is this instance's own. What it can lose, where the broker keeps its declarations in
Mnesia: claims younger than `retention`, where a cluster is partitioned without `pause_minority`; and
claims of the last moments before the broker was killed, where their winner is not back soon.
Imports the port, the rules, the model, the standard library and aiormq.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from typing import TypeVar

from anarchon_backends.rabbitmq import _checks
from anarchon_backends.rabbitmq._address import Address, address_of
from anarchon_backends.rabbitmq._claims import Claims, Holder, number_of, queue_of
from anarchon_backends.rabbitmq._connection import AccessDenied, Link, Refused
from anarchon_backends.rabbitmq._news import News, Win
from anarchon_backends.rabbitmq._own import Own
from anarchon_backends.rabbitmq._restarts import Restarts
from anarchon_server.core import claim_only, model
from anarchon_server.core import store as port
from anarchon_server.core.errors import (
    OutcomeUnknown,
    StoreError,
    StoreUnavailable,
    UnsupportedError,
)
from anarchon_server.core.machine import JobRecord, Moment, view

_T = TypeVar("_T")

LEAST_GAP_MS = 5_000
_UNANSWERED_MAX = 10_000
_FORGOTTEN_EARLY_MS = 60_000  # before its retention is over by any clock; no deadline is so late


def open_store(url: str, options: port.OpenOptions) -> port.Store:
    """The store on the broker that `amqp://host:port/virtual-host` names (`amqps:` for TLS).

    Nothing is connected before `open`.
    """
    return RabbitmqStore(address_of(url), options)


class RabbitmqStore:
    """One instance's connections to a broker, and what it knows of itself."""

    def __init__(self, address: Address, options: port.OpenOptions) -> None:
        self._address = address
        self._options = options
        timeout_ms = options.op_timeout_ms
        self._link = Link(address, f"anarchon {options.namespace}: claims", timeout_ms)
        self._claims = Claims(self._link, address.queue_type, address.retention_ms)
        self._restarts = Restarts(self._link, self._claims, options.clock)
        self._link.greet = self._restarts.greet
        self._news = News(address, options.namespace, options.clock, timeout_ms)
        self._own = Own(address.retention_ms)
        self._unanswered: dict[tuple[str, int], port.Claim] = {}
        self._closed = asyncio.Event()
        self._capabilities = port.Capabilities(
            backend="rabbitmq",
            leases=False,
            retries=True,
            overlap=port.CLAIM_ONLY_OVERLAP,
            history=False,
            least_gap_ms=LEAST_GAP_MS,
            kept_ms=address.retention_ms,
        )

    @property
    def capabilities(self) -> port.Capabilities:
        """What this backend can do."""
        return self._capabilities

    # Opening

    async def open(self) -> port.StoreReport:
        """Connects and checks. `StoreUnavailable` where the broker cannot be reached."""
        self._closed.clear()
        self._link.start()
        self._restarts.start()
        location = self._address.location
        try:
            found = await _checks.check(self._link, self._address, self._options.namespace)
            await self._start_news(found)
        except AccessDenied as error:
            await self.close()
            raise _checks.denied(error, location) from None
        except BaseException:
            await self.close()
            raise
        return port.StoreReport(location, tuple(found.verified), tuple(found.doubts))

    async def _start_news(self, found: _checks.Findings) -> None:
        try:
            await self._news.start()
        except (StoreError, Refused) as error:
            found.doubts.append(
                port.Doubt(
                    f"instances do not hear who won ({error}): every loser asks the broker, and "
                    "clocks that differ are not noticed",
                    "give the user the permissions that docs/stores/rabbitmq.md lists",
                )
            )
        else:
            found.verified.append("winners are announced: clocks are compared, and losers know")

    async def close(self) -> None:
        """Closes the connections, and ends the watches."""
        self._closed.set()
        await self._restarts.close()
        await self._news.close()
        await self._link.close()

    # Calls

    def _now(self) -> Moment:
        clock = self._options.clock
        return Moment(clock.wall_us(), clock.boot_ms(), clock.boot_id, steady=True)

    def _reply(self, answers: Iterable[_T]) -> port.Reply[_T]:
        return port.Reply(self._now().at, tuple(answers), store_id=self._link.cluster_name)

    def _queue(self, job: str, slot: int) -> str:
        return queue_of(self._options.namespace, job, slot)

    async def claim(self, claims: Sequence[port.Claim]) -> port.Reply[port.ClaimAnswer]:
        """First attempts. What a broken connection leaves unanswered of a batch is UNKNOWN."""
        deadline = self._link.deadline()
        wins: list[Win] = []
        said = await asyncio.gather(
            *(self._claim(claim, deadline, wins) for claim in claims), return_exceptions=True
        )
        self._news.tell(wins)
        answers = _answered(said, port.ClaimAnswer(port.ClaimOutcome.UNKNOWN))
        return self._reply(answers)

    async def _claim(self, claim: port.Claim, deadline: float, wins: list[Win]) -> port.ClaimAnswer:
        own = self._own_answer(claim)
        if own is not None:
            return own
        number = number_of(claim.token)
        heard = self._news.winner(claim.job, claim.slot)
        if heard is not None and heard.number != number:
            return self._lost(claim, heard.number, heard.instance_id)
        try:
            holder = await self._declared(claim, number, deadline)
        except (OutcomeUnknown, asyncio.CancelledError):
            self._remember(claim)
            raise
        if isinstance(holder, port.ClaimOutcome):
            return port.ClaimAnswer(holder)
        if not holder.mine:
            return self._lost(claim, holder.number)
        wins.append(Win(claim.job, claim.slot, number, claim.instance_id))
        self._restarts.won(claim.job, claim.slot, self._queue(claim.job, claim.slot), number)
        return self._own_answer(claim) or self._won(claim)

    def _own_answer(self, claim: port.Claim) -> port.ClaimAnswer | None:
        """The answer where this instance knows what became of the slot, as of all that it retries."""
        run = self._own.run(claim.job, claim.slot)
        if run is None and not claim.seen_attempt:
            return None
        job = JobRecord(claim.job)
        verdict = claim_only.judge_claim(claim, self._now(), job, None, run)
        for saved in verdict.saved:
            self._own.save(saved.run)
        return verdict.answer

    async def _declared(
        self, claim: port.Claim, number: int, deadline: float
    ) -> Holder | port.ClaimOutcome:
        """Who holds the slot now, or why the claim may not be made of a slot that nobody holds."""
        queue = self._queue(claim.job, claim.slot)
        if claim.may_run:
            holder = await self._claims.declare(
                queue, number, deadline, lambda: self._may_declare(claim)
            )
            if holder is not None:
                return holder
        otherwise = port.ClaimOutcome.UNKNOWN if claim.may_run else port.ClaimOutcome.UNCHANGED
        why_not = self._untimely(claim) or otherwise  # the clock may have been set meanwhile
        return await self._claims.look(queue, number, deadline) or why_not

    def _may_declare(self, claim: port.Claim) -> bool:
        return self._untimely(claim) is None and not self._restarts.holds_back(claim.slot)

    def _untimely(self, claim: port.Claim) -> port.ClaimOutcome | None:
        """By this machine's clock; and late by the clock of another, if it was forgotten by that."""
        forgotten_before = self._news.latest() - self._address.retention_ms + _FORGOTTEN_EARLY_MS
        if claim.slot < forgotten_before:
            return port.ClaimOutcome.LATE
        return claim_only.untimely(claim, self._now().at)

    def _won(self, claim: port.Claim) -> port.ClaimAnswer:
        self._unanswered.pop((claim.job, claim.slot), None)
        now = self._now()
        run = claim_only.won_run(claim, now.at)
        self._own.save(run)
        return port.ClaimAnswer(port.ClaimOutcome.WON, view(run, now))

    def _lost(
        self, claim: port.Claim, number: int | None, instance_id: str = ""
    ) -> port.ClaimAnswer:
        run = _run_of_another(claim.job, claim.slot, number, instance_id)
        return port.ClaimAnswer(port.ClaimOutcome.LOST, view(run, self._now()))

    def _remember(self, claim: port.Claim) -> None:
        """That the claim may have been won, in case that it is released before that is known."""
        self._unanswered[claim.job, claim.slot] = claim
        while len(self._unanswered) > _UNANSWERED_MAX:
            del self._unanswered[next(iter(self._unanswered))]

    async def settle(self, plans: Sequence[port.Plan]) -> port.Reply[port.PlanAnswer]:
        """Refused: without leases there is no catch-up, and nothing to record."""
        del plans
        raise UnsupportedError("catch_up", self._capabilities.backend, port.LEASE_BACKENDS)

    async def control(self, acts: Sequence[port.Control]) -> port.Reply[port.ControlAnswer]:
        """Nothing is paused or triggered here. Raises `UnsupportedError`."""
        del acts
        raise UnsupportedError("control", self._capabilities.backend, port.CONTROL_BACKENDS)

    # Tokens

    async def beat(self, beat: port.Beat) -> port.Reply[port.BeatAnswer]:
        """One heartbeat: shows that the broker answers. What it notes is this instance's own."""
        deadline = self._link.deadline()
        await self._ping(deadline)
        runs = await _all(self._renewed(renewal, deadline) for renewal in beat.renewals)
        now = self._now()
        verdicts = [
            claim_only.judge_renewal(renewal, now, self._own.run(renewal.job, renewal.slot) or run)
            for renewal, run in zip(beat.renewals, runs, strict=True)
        ]
        for verdict in verdicts:
            if verdict.saved is not None:
                self._own.save(verdict.saved.run)
        looked = [self._own.run(job, slot) for job, slot in beat.looks]
        answer = port.BeatAnswer(
            renewals=tuple(verdict.answer for verdict in verdicts),
            looks=tuple(view(run, now) if run else None for run in looked),
            unfinished=(),
            settled=tuple(self._own.settled(job, schedule) for job, schedule in beat.sweep),
            known=self._own.seen(beat, now),
        )
        return self._reply([answer])

    async def _ping(self, deadline: float) -> None:
        try:
            await self._link.ask(lambda channel: channel.basic_qos(), deadline)
        except Refused as refused:
            raise StoreUnavailable(refused.text) from None

    async def _renewed(self, renewal: port.Renewal, deadline: float) -> model.Run | None:
        job, slot, token = renewal.job, renewal.slot, renewal.token
        if not renewal.adopt:
            return await self._foreign(job, slot, deadline)
        by = renewal.instance_id, renewal.incarnation
        return await self._found(job, slot, token, *by, deadline)

    async def complete(
        self, completions: Sequence[port.Completion]
    ) -> port.Reply[port.TokenAnswer]:
        """Records results."""
        deadline = self._link.deadline()
        own = self._own
        runs = await _all(
            self._found(c.job, c.slot, c.token, own.label, own.incarnation, deadline)
            for c in completions
        )
        answers: list[port.TokenAnswer] = []
        for completion, run in zip(completions, runs, strict=True):
            run = own.run(completion.job, completion.slot) or run  # noqa: PLW2901
            verdict = claim_only.judge_completion(completion, self._now(), run)
            if verdict.saved is not None:
                own.save(verdict.saved.run)
            answers.append(verdict.answer)
        return self._reply(answers)

    async def release(self, releases: Sequence[port.Release]) -> port.Reply[port.TokenAnswer]:
        """Ends runs whose runner is gone."""
        deadline = self._link.deadline()
        own = self._own
        runs = await _all(self._released(release, deadline) for release in releases)
        answers: list[port.TokenAnswer] = []
        for release, run in zip(releases, runs, strict=True):
            run = own.run(release.job, release.slot) or run  # noqa: PLW2901
            verdict = claim_only.judge_release(release, self._now(), run)
            if verdict.saved is not None:
                own.save(verdict.saved.run)
            answers.append(verdict.answer)
        return self._reply(answers)

    async def _released(self, release: port.Release, deadline: float) -> model.Run | None:
        """What is released is this process's, or was asked for by it: others' it cannot end."""
        job, slot, token = release.job, release.slot, release.token
        asked = self._unanswered.get((job, slot))
        if asked is None or asked.token != token:
            return await self._foreign(job, slot, deadline)
        by = asked.instance_id, asked.incarnation
        found = await self._found(job, slot, token, *by, deadline)
        self._unanswered.pop((job, slot), None)
        return found

    async def _found(
        self,
        job: str,
        slot: int,
        token: str,
        instance_id: str,
        incarnation: str,
        deadline: float,
    ) -> model.Run | None:
        """The run that this process does not know, as the broker tells: whose token it is.

        Where it is this token's, the process that won it left nothing behind (S17, S26): the run
        is this instance's from now on.
        """
        known = self._own.run(job, slot)
        if known is not None:
            return known
        number = number_of(token)
        holder = await self._claims.look(self._queue(job, slot), number, deadline)
        if holder is None:
            return None
        if not holder.mine:
            return _run_of_another(job, slot, holder.number)
        return _run(job, slot, token, instance_id, incarnation, self._now().at)

    async def _foreign(self, job: str, slot: int, deadline: float) -> model.Run | None:
        """The run that this process does not hold: somebody else's, if there is one."""
        known = self._own.run(job, slot)
        if known is not None:
            return known
        exists = await self._claims.exists(self._queue(job, slot), deadline)
        return _run_of_another(job, slot, None) if exists else None

    # What this instance knows of itself

    async def register(
        self,
        instance: model.Instance,
        definitions: Sequence[model.Definition],
        let_go: Sequence[str] = (),
    ) -> port.Reply[port.Registration]:
        """Notes what the instance holds of these jobs now."""
        return self._reply(self._own.register(instance, definitions, let_go, self._now()))

    async def runs(self, query: port.RunQuery) -> port.Reply[model.RunView]:
        """The runs that this instance won, newest slot first."""
        return self._reply(self._own.found(query, self._now()))

    async def jobs(self, names: Sequence[str], after: str, limit: int) -> port.Reply[model.JobView]:
        """The jobs that this instance holds."""
        return self._reply(self._own.jobs(names, after, limit, self._now()))

    async def instances(self) -> port.Reply[model.Instance]:
        """This instance."""
        return self._reply(self._own.instances(self._now()))

    async def prune(self, policy: port.PrunePolicy) -> port.Reply[int]:
        """Drops a batch of this instance's old runs. Claims go by themselves, after `retention`."""
        return self._reply([self._own.prune(policy, self._now())])

    async def watch(self) -> AsyncIterator[None]:
        """Never yields, as nothing is ever freed, and ends with the store."""
        await self._closed.wait()
        for _ in range(0):
            yield


async def _all(questions: Iterable[Awaitable[_T]]) -> list[_T]:
    """Asks all at once. Where one has no answer, the call has none: it changed nothing yet."""
    return _answered(await asyncio.gather(*questions, return_exceptions=True), None)


def _answered(said: Sequence[_T | BaseException], instead: _T | None) -> list[_T]:
    """The answers, with `instead` in the place of missing ones where there is one such.

    Raises the error of the call where there is no answer, or an error that is a mistake of ours.
    """
    errors = [each for each in said if isinstance(each, BaseException)]
    for error in errors:
        if not isinstance(error, StoreError):
            raise error
    answers = [each for each in said if not isinstance(each, BaseException)]
    if errors and (instead is None or not answers):
        unknown = [error for error in errors if isinstance(error, OutcomeUnknown)]
        raise (unknown or errors)[0]
    return [
        instead if isinstance(each, BaseException) and instead is not None else each  # type: ignore[misc]
        for each in said
    ]


def _run(
    job: str, slot: int, token: str, instance_id: str, incarnation: str, claimed_at: int
) -> model.Run:
    attempt = model.Attempt(
        attempt=1,
        token=token,
        fence=claim_only.fence_of(slot),
        instance_id=instance_id,
        incarnation=incarnation,
        cause=model.AttemptCause.CLAIM,
        state=model.RunState.CLAIMED,
        claimed_at=claimed_at,
    )
    return model.Run(
        job,
        slot,
        model.Trigger.SCHEDULE,
        model.RunState.CLAIMED,
        current=attempt,
        max_attempts=1,
    )


def _run_of_another(job: str, slot: int, number: int | None, instance_id: str = "") -> model.Run:
    """What is known of a run that another won: its token's number stands for its token."""
    token = "" if number is None else f"#{number}"
    return _run(job, slot, token, instance_id, "", slot)
