"""The heartbeat: one call that renews, looks, sweeps, adopts and says that the instance lives.

Imports the core's leaves, `jobs`, `holding` and `claiming`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from anarchon_server.core import limits
from anarchon_server.core.claiming import Claiming, Key
from anarchon_server.core.context import Context
from anarchon_server.core.holding import Holding
from anarchon_server.core.jobs import Jobs
from anarchon_server.core.lanes import Call, Lane
from anarchon_server.core.messages import KeepAlive, Level, Method
from anarchon_server.core.model import Instance
from anarchon_server.core.store import (
    Beat,
    BeatAnswer,
    Renewal,
    Reply,
    TokenAnswer,
    TokenOutcome,
)


@dataclass(frozen=True, slots=True)
class Adoption:
    """Attempts that a client brought along, to be judged by the store (S26).

    `judged` is told the answers and when the request was sent; None: the store is away.
    """

    renewals: tuple[Renewal, ...]
    judged: Callable[[tuple[TokenAnswer, ...] | None, int], None]


@dataclass(frozen=True, slots=True)
class _Cargo:
    """What one beat carries besides the sweep."""

    renewals: tuple[Renewal, ...]
    adoptions: tuple[Adoption, ...]
    confirms: tuple[KeepAlive, ...]
    looks: tuple[Key, ...]
    swept: tuple[tuple[str, str], ...]

    @property
    def all_renewals(self) -> tuple[Renewal, ...]:
        return self.renewals + tuple(r for a in self.adoptions for r in a.renewals)


class Beating:
    """When to beat, with what, and what the answers mean.

    `confirmed` is told, for each KeepAlive that waited for this beat, which of its tokens
    the store has just renewed (S4, protocol `confirm`).
    """

    def __init__(
        self,
        context: Context,
        jobs: Jobs,
        holding: Holding,
        claiming: Claiming,
        confirmed: Callable[[KeepAlive, frozenset[str]], None],
    ) -> None:
        self._context = context
        self._jobs = jobs
        self._holding = holding
        self._claiming = claiming
        self._confirmed = confirmed
        self._wanted = True
        self._sweep = True
        self._adoptions: list[Adoption] = []
        self._confirms: list[KeepAlive] = []
        self._twins: tuple[str, ...] = ()

    def want(self) -> None:
        """Something should reach the store sooner than the next heartbeat."""
        self._wanted = True

    def want_sweep(self) -> None:
        """All unfinished runs are to be looked at: a heartbeat is due, or one was freed."""
        self._wanted = self._sweep = True

    def adopt(self, adoption: Adoption) -> None:
        """Asks the store about attempts that a client brought along."""
        self._adoptions.append(adoption)

    def confirm(self, request: KeepAlive) -> None:
        """Answers the request after a beat that goes from now on."""
        self._confirms.append(request)

    def pump(self, instance: Callable[[], Instance]) -> None:
        """Sends a beat, if one is wanted and may go."""
        context = self._context
        wanted = self._wanted or self._adoptions or self._confirms or self._claiming.has_looks
        if not wanted or not context.lanes.free(Lane.BEAT, context.now):
            return
        cargo = self._load()
        # A call that hangs must leave time to renew before the shortest lease's trust ends.
        within_ms = min(limits.OP_TIMEOUT, max(limits.BEAT_TIMEOUT_LEAST, self._interval_ms))
        beat = Beat(
            instance=instance(),
            renewals=cargo.all_renewals,
            looks=cargo.looks,
            sweep=cargo.swept,
            sweep_limit=limits.LOOKS_MAX,
            within_ms=within_ms,
        )
        context.out.append(
            context.lanes.call(
                Lane.BEAT,
                Method.BEAT,
                (beat,),
                context.now,
                lambda call, reply: self._answered(cargo, call, reply),
                lambda _: self._failed(cargo),
                within_ms,
            )
        )

    @property
    def _interval_ms(self) -> int:
        """Also as often as what is held wants whose job is not offered any more."""
        return min([self._jobs.heartbeat_ms, *(hold.heartbeat_ms for hold in self._holding)])

    def _load(self) -> _Cargo:
        interval = self._interval_ms
        swept: tuple[tuple[str, str], ...] = ()
        if self._sweep:
            swept = tuple((s.job.name, s.job.schedule_id) for s in self._jobs if s.registered)
            spread = self._context.draw(interval // 5) - interval // 10
            self._context.timers.set(("beat",), self._context.now + interval + spread)
        cargo = _Cargo(
            self._holding.renewals(interval // 2),
            tuple(self._adoptions),
            tuple(self._confirms),
            self._claiming.take_looks(),
            swept,
        )
        self._adoptions.clear()
        self._confirms.clear()
        self._wanted = self._sweep = False
        return cargo

    def _answered(self, cargo: _Cargo, call: Call, reply: Reply[BeatAnswer]) -> None:
        (answer,) = reply.answers
        answers = iter(answer.renewals)
        renewed: set[str] = set()
        for renewal in cargo.renewals:
            token_answer = next(answers)
            if token_answer.outcome is TokenOutcome.RENEWED:
                renewed.add(renewal.token)
            self._holding.renewed(renewal, token_answer, call.sent_at)
        for adoption in cargo.adoptions:
            judged = tuple(next(answers) for _ in adoption.renewals)
            unknown = any(each.outcome is TokenOutcome.UNKNOWN for each in judged)
            adoption.judged(None if unknown else judged, call.sent_at)
        if (
            answer.unheard
        ):  # those are asked again, while trust in their leases goes on running down
            again_at = self._context.now + limits.RETRY_MAX
            self._context.timers.set(("beat_again",), again_at)
        if not answer.known:
            self._jobs.unknown(call.sent_at)
        self._look_at(cargo, answer)
        self._warn_of_twins(answer.twins)
        for request in cargo.confirms:
            self._confirmed(request, frozenset(renewed.intersection(request.confirm)))

    def _look_at(self, cargo: _Cargo, answer: BeatAnswer) -> None:
        for key, view in zip(cargo.looks, answer.looks, strict=True):
            if key[0] in answer.unheard:
                again_at = self._context.now + limits.RETRY_MAX
                self._context.timers.set(("look", key), again_at)
            elif view is None:
                self._claiming.forget(key)
            else:
                self._claiming.observe(view)
        self._claiming.observe_all(answer.unfinished)
        if cargo.swept and len(answer.unfinished) < limits.LOOKS_MAX:
            seen = frozenset((v.run.job, v.run.slot) for v in answer.unfinished)
            swept = frozenset(name for name, _ in cargo.swept) - answer.unheard
            self._claiming.seen_all(swept, seen)
        for (name, schedule_id), settled in zip(cargo.swept, answer.settled, strict=True):
            if name not in answer.unheard:
                self._jobs.show_settled(name, schedule_id, settled)

    def _failed(self, cargo: _Cargo) -> None:
        self._holding.not_renewed(cargo.renewals)
        self._claiming.put_looks_back(cargo.looks)
        self._wanted = True
        self._sweep = self._sweep or bool(cargo.swept)
        for adoption in cargo.adoptions:
            adoption.judged(None, self._context.now)
        for request in cargo.confirms:
            self._confirmed(request, frozenset())

    def _warn_of_twins(self, twins: tuple[str, ...]) -> None:
        if twins and twins != self._twins:
            self._context.log(
                Level.WARNING,
                "instance_id_not_unique",
                instance_id=self._context.settings.instance_id,
                incarnations=twins,
            )
        self._twins = twins
