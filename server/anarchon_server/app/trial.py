"""A live test of the claim: two tokens want one slot, on two connections, and one must win.

Imports the port, the model and the errors.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from anarchon_server.core.errors import StoreError
from anarchon_server.core.limits import MINUTE, SECOND
from anarchon_server.core.model import (
    Definition,
    EverySchedule,
    Instance,
    JobSpec,
    Outcome,
    OverlapPolicy,
)
from anarchon_server.core.store import (
    Beat,
    Claim,
    ClaimAnswer,
    ClaimOutcome,
    Completion,
    PrunePolicy,
    Store,
    StoreClock,
    TokenOutcome,
)

SAMPLES = 5
"""Claims that are timed; the shortest tells the most about the clocks."""

_JOB = "doctor"
_SCHEDULE = "every:1m"
_DEFINITION = Definition(
    JobSpec(_JOB, EverySchedule(MINUTE), overlap=OverlapPolicy.ALLOW), _SCHEDULE, MINUTE
)
_ROUNDS = 10  # other doctors may be at the same slots
_REPEATS = 3  # of a claim whose outcome is not known (S11)
_STEP_MS = 2  # between two clocks of one machine that are read one after the other
_KEPT = PrunePolicy(history_ms=MINUTE, history_max=0)


class NotTried(Exception):  # noqa: N818 - says what became of the test, not of the store
    """The test could not be carried out; the message says why."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One round trip: how long it took, and how far the store's clock is before ours."""

    took_us: int
    offset_us: int


@dataclass(frozen=True, slots=True)
class Tried:
    """What the test found: promises that were `broken`, and timed claims, the shortest first."""

    broken: tuple[str, ...]
    samples: tuple[Sample, ...]


@dataclass(slots=True)
class _Rival:
    """One side of the test: a connection, and the instance that it claims for."""

    store: Store
    instance: Instance

    async def ask(self, claim: Claim) -> ClaimAnswer:
        """The answer to a claim, asked again with the same token where it is not known."""
        for _ in range(_REPEATS):
            (answer,) = (await self.store.claim([claim])).answers
            if answer.outcome is not ClaimOutcome.UNKNOWN:
                return answer
        raise NotTried(f"what became of a claim stayed unknown, {_REPEATS} times in a row")


def namespace_for(backend: str) -> str:
    """Where claims are tried, so that nothing is touched that is anybody's.

    One for each backend: two of one server may lay their namespaces out differently.
    """
    return f"anarchon-doctor:{backend}"


async def try_claims(stores: Sequence[Store], clock: StoreClock) -> Tried:
    """Let two tokens claim one slot, and repeat their claims. `stores` are open, one or two.

    Raises `NotTried`, and what the stores raise.
    """
    rivals = [_rival(store, number) for number, store in enumerate((stores[0], stores[-1]), 1)]
    try:
        return await _contest(rivals, clock)
    finally:
        await _clean_up(rivals)


def _rival(store: Store, number: int) -> _Rival:
    incarnation = secrets.token_hex(16)
    return _Rival(
        store, Instance(f"doctor-{incarnation[:8]}:{number}", incarnation, lease_ms=MINUTE)
    )


async def _contest(rivals: Sequence[_Rival], clock: StoreClock) -> Tried:
    for _ in range(_ROUNDS):
        claims = await _claims(rivals)
        answers = await asyncio.gather(
            *(rival.ask(claim) for rival, claim in zip(rivals, claims, strict=True))
        )
        wins = [n for n, each in enumerate(answers) if each.outcome is ClaimOutcome.WON]
        if len(wins) == len(claims):
            return Tried(("two tokens won the same slot",), ())
        if wins:
            (won,) = wins
            order = (won, 1 - won)
            return await _judge(
                [rivals[n] for n in order],
                [claims[n] for n in order],
                answers[1 - won],
                clock,
            )
    said = ", ".join(sorted({str(each.outcome) for each in answers}))
    raise NotTried(f"no claim was won in {_ROUNDS} rounds (the last answers: {said})")


async def _claims(rivals: Sequence[_Rival]) -> list[Claim]:
    """Claims of one slot that nobody is likely to have: that of the next millisecond."""
    slot = 0
    for rival in rivals:
        reply = await rival.store.register(rival.instance, [_DEFINITION])
        slot = max(slot, reply.store_at, reply.answers[0].settled or 0) + 1
    return [_claim(rival.instance, slot) for rival in rivals]


def _claim(instance: Instance, slot: int) -> Claim:
    return Claim(
        job=_JOB,
        slot=slot,
        token=secrets.token_hex(16),
        instance_id=instance.instance_id,
        incarnation=instance.incarnation,
        schedule_id=_SCHEDULE,
        previous_slot=None,  # so that none before it counts as unsettled
        overlap=OverlapPolicy.ALLOW,
        start_deadline_ms=MINUTE,
        lease_ms=MINUTE,
        cancel_grace_ms=SECOND,
        max_attempts=1,
        window_ms=MINUTE,
        expected_at=slot,
        vouched=False,
    )


async def _judge(
    rivals: Sequence[_Rival], claims: Sequence[Claim], lost: ClaimAnswer, clock: StoreClock
) -> Tried:
    """What is wrong, if anything. The winner and its claim come first; `lost` is for the other."""
    (winner, loser), (won, other) = rivals, claims
    broken = []
    if lost.outcome is not ClaimOutcome.LOST:
        broken.append(f"the token that did not win was answered {lost.outcome}, not lost")
    elif not _shows_another(lost, won, other, loser.store):
        broken.append("the token that lost was not shown the winner's")
    for rival, claim, expected in (
        (winner, won, ClaimOutcome.WON),
        (loser, other, ClaimOutcome.LOST),
    ):
        again = (await rival.ask(claim)).outcome
        if again is not expected:
            broken.append(f"a token that had {expected} was answered {again} when it asked again")
    samples, more = await _time(winner, won.slot, clock)
    results = [Completion(c.job, c.slot, c.token, Outcome(result="tried")) for c in (won, *more)]
    said = {each.outcome for each in (await winner.store.complete(results)).answers}
    if said != {TokenOutcome.RECORDED}:
        broken.append(f"the winner's results were answered {', '.join(sorted(said))}, not recorded")
    return Tried(tuple(broken), tuple(sorted(samples, key=lambda sample: sample.took_us)))


def _shows_another(lost: ClaimAnswer, won: Claim, other: Claim, store: Store) -> bool:
    """Whether a loss shows whose the slot is: by its token, where the store keeps more than that."""
    if lost.run is None:
        return False
    shown = lost.run.run.token
    return shown == won.token if store.capabilities.history else shown != other.token


async def _time(rival: _Rival, slot: int, clock: StoreClock) -> tuple[list[Sample], list[Claim]]:
    """Times claims of the slots after this one; those that won, and the claims."""
    samples, won = [], []
    for number in range(1, SAMPLES + 1):
        claim = _claim(rival.instance, slot + number)
        sent_us, boot = clock.wall_us(), clock.boot_ms()
        reply = await rival.store.claim([claim])
        took_us = clock.wall_us() - sent_us
        if reply.answers[0].outcome is not ClaimOutcome.WON:
            continue  # somebody else is trying too
        won.append(claim)
        if abs(took_us / 1_000 - (clock.boot_ms() - boot)) < _STEP_MS:  # else our clock was set
            store_us = reply.store_at * 1_000 + 500  # told in whole milliseconds, cut off
            samples.append(Sample(took_us, store_us - sent_us - took_us // 2))
    return samples, won


async def _clean_up(rivals: Sequence[_Rival]) -> None:
    """Say that the instances are gone, and delete what earlier tests left, as far as may be."""
    with suppress(StoreError):  # what it was for is known by now, or has its own error
        for rival in rivals:
            await rival.store.beat(Beat(rival.instance, leaving=True))
        await rivals[0].store.prune(_KEPT)
