"""What a mixed fleet's witnesses say together: the store's history, and what the applications told.

Pure. `judge` lists every promise that was not kept; what slots became is left to `account`.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from anarchon.v1 import run_pb2
from tests.integration.account import INTERRUPTED, SUCCESS, Account, Grid, account

Line = Mapping[str, Any]
Which = tuple[str, int, int]
"""A job, a slot and an attempt."""


@dataclass(frozen=True, slots=True)
class Kill:
    """An application's process was killed: the how-manieth of its lives, from 0, and when: just before
    the signal, on the clock of what applications tell.
    """

    who: str
    life: int
    at_ms: int


@dataclass(frozen=True, slots=True)
class Life:
    """What one process of an application told, and how it was killed, if it was."""

    who: str
    lines: Sequence[Line]
    kill: Kill | None = None


@dataclass(frozen=True, slots=True)
class Start:
    """A handler began."""

    who: str
    at_ms: int
    job: str
    slot: int
    attempt: int
    token: str
    fence: int
    end_ms: int | None
    """When it ended, was told that the attempt is not ours any more, or its process was killed."""
    killed: bool

    @property
    def which(self) -> Which:
        return self.job, self.slot, self.attempt

    def __str__(self) -> str:
        return f"{self.job} {self.slot} attempt {self.attempt} on {self.who}"


@dataclass(slots=True)
class Takeover:
    """An attempt that ended with its process, and who went on."""

    before: Start
    after: Start

    @property
    def delay_ms(self) -> int:
        """From the kill to the start of the next handler."""
        assert self.before.end_ms is not None
        return self.after.at_ms - self.before.end_ms


@dataclass(slots=True)
class Witnessed:
    """Everything together, and what is wrong with it, in words."""

    account: Account
    wins: Counter[str] = field(default_factory=Counter)
    """First attempts, by whose sidecar won them."""
    takeovers: list[Takeover] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def judge(
    grids: Mapping[str, Grid], runs: Sequence[run_pb2.Run], lives: Sequence[Life], until: int
) -> Witnessed:
    """All of the history and all that was told; what slots became, up to `until`."""
    attempts = {(r.job, r.slot, a.attempt): a for r in runs for a in r.attempts}
    starts = sorted(
        (start for life in lives for start in _starts_of(life)), key=lambda s: (s.at_ms, s.fence)
    )
    events = list(_events(starts, lives, attempts))
    found = Witnessed(account(grids, runs, events, until))
    found.wins.update(r.attempts[0].instance_id for r in runs if r.attempts)
    found.takeovers = list(_takeovers(starts))
    found.wrong += found.account.lost
    found.wrong += found.account.doubled
    found.wrong += _unlike_the_history(starts, attempts)
    found.wrong += _beside_each_other(grids, starts)
    found.wrong += _falling_fences(runs, starts)
    found.wrong += _unfinished(runs, starts)
    found.wrong += _not_taken_over(starts, attempts)
    return found


def _starts_of(life: Life) -> Iterator[Start]:
    ends: dict[str, int] = {}
    for line in life.lines:
        if line["what"] == "ended" or (line["what"] == "cancelled" and line["lost"]):
            ends.setdefault(line["token"], line["at_ms"])
    killed_at = life.kill.at_ms if life.kill is not None else None
    for line in life.lines:
        if line["what"] == "started":
            token = line["token"]
            yield Start(
                who=life.who,
                at_ms=line["at_ms"],
                job=line["job"],
                slot=line["slot"],
                attempt=line["attempt"],
                token=token,
                fence=int(line["fence"]),
                end_ms=ends.get(token, killed_at),
                killed=token not in ends and killed_at is not None,
            )


def _events(
    starts: Iterable[Start], lives: Iterable[Life], attempts: Mapping[Which, run_pb2.Attempt]
) -> Iterator[dict[str, Any]]:
    """As `account` reads them. A handler whose process was killed before its result was taken has
    not succeeded, though it may have ended: it is run again.
    """
    stopped = {
        line["token"] for life in lives for line in life.lines if line["what"] == "cancelled"
    }
    with_killed = {s["token"] for life in lives if life.kill for s in life.lines if "token" in s}
    for start in starts:
        facts = {"job": start.job, "slot": start.slot, "attempt": start.attempt, "who": start.who}
        facts["token"] = start.token
        yield {"what": "start", "boot_ms": start.at_ms, **facts}
        attempt = attempts.get(start.which)
        taken = attempt is not None and attempt.state == SUCCESS
        success = start.token not in stopped and (taken or start.token not in with_killed)
        if start.end_ms is not None:
            outcome = "success" if success else "stopped"
            yield {"what": "end", "boot_ms": start.end_ms, **facts, "outcome": outcome}


def _unlike_the_history(
    starts: Iterable[Start], attempts: Mapping[Which, run_pb2.Attempt]
) -> Iterator[str]:
    """I1, I2: an attempt has one winner, one token and one fence, and is begun by its winner only."""
    by_which: dict[Which, Start] = {}
    by_token: dict[str, Start] = {}
    for start in starts:
        for other in (
            by_which.setdefault(start.which, start),
            by_token.setdefault(start.token, start),
        ):
            if other is not start:
                yield f"{start}: the same attempt or token as {other}"
        attempt = attempts.get(start.which)
        if attempt is None:
            yield f"{start}: the history has no such attempt"
        elif (attempt.instance_id, attempt.fence) != (start.who, start.fence):
            yield (
                f"{start}, fence {start.fence}: the history has {attempt.instance_id} and "
                f"{attempt.fence}"
            )


def _beside_each_other(grids: Mapping[str, Grid], starts: Iterable[Start]) -> Iterator[str]:
    """F16: of a job that may not overlap one handler runs at a time."""
    for job, mine in _by_job(starts).items():
        if not grids[job].overlaps:
            for earlier, later in pairwise(mine):
                if earlier.end_ms is None or earlier.end_ms > later.at_ms:
                    yield f"{later}, from {later.at_ms}: beside {earlier}, until {earlier.end_ms}"


def _falling_fences(runs: Iterable[run_pb2.Run], starts: Iterable[Start]) -> Iterator[str]:
    """F2, F4: fences are told apart by claims, rise with them, and with what handlers do."""
    claims: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for run in runs:
        for attempt in run.attempts:
            name = f"{run.job} {run.slot} attempt {attempt.attempt}"
            claimed = attempt.claim_time.ToMilliseconds()
            claims[run.job].append((attempt.fence, claimed, name))
        for before, after in pairwise(run.attempts):
            if after.fence <= before.fence:
                yield f"{run.job} {run.slot}: fence {after.fence} after {before.fence}"
    for mine in claims.values():
        for (fence, claimed, name), (next_fence, next_claimed, next_name) in pairwise(sorted(mine)):
            if next_fence == fence or next_claimed < claimed:
                yield f"{next_name}: fence {next_fence}; {name}: {fence}, claimed {claimed}"
    for begun in _by_job(starts).values():
        for earlier, later in pairwise(begun):
            if later.fence <= earlier.fence:
                yield f"{later}, fence {later.fence}: begun after {earlier}, {earlier.fence}"


def _unfinished(runs: Iterable[run_pb2.Run], starts: Iterable[Start]) -> Iterator[str]:
    """What was begun came to its end, as the history has it."""
    states = {(run.job, run.slot): run.state for run in runs}
    for start in starts:
        state = states.get((start.job, start.slot))
        if state not in (SUCCESS, None):
            yield f"{start}: its run is {run_pb2.RunState.Name(state)}"
        if start.end_ms is None:
            yield f"{start}: it never ended, and its process was not killed"


def _not_taken_over(
    starts: Iterable[Start], attempts: Mapping[Which, run_pb2.Attempt]
) -> Iterator[str]:
    """S24: what a killed process ran was released, and another attempt followed."""
    for start in starts:
        attempt = attempts.get(start.which)
        if not start.killed or attempt is None:
            continue
        if (attempt.state, attempt.reason) != (INTERRUPTED, "runner_lost"):
            state = run_pb2.RunState.Name(attempt.state)
            yield f"{start}: its process was killed, and it is {state} {attempt.reason}"
        if (start.job, start.slot, start.attempt + 1) not in attempts:
            yield f"{start}: its process was killed, and no attempt followed"


def _takeovers(starts: Sequence[Start]) -> Iterator[Takeover]:
    by_which = {start.which: start for start in starts}
    for start in starts:
        after = by_which.get((start.job, start.slot, start.attempt + 1))
        if start.killed and after is not None:
            yield Takeover(start, after)


def _by_job(starts: Iterable[Start]) -> dict[str, list[Start]]:
    found: dict[str, list[Start]] = defaultdict(list)
    for start in starts:
        found[start.job].append(start)
    return found


# ── For people ──────────────────────────────────────────────────────────────────────────────────


def report(found: Witnessed, all_lived: Mapping[str, int], names: Mapping[str, str]) -> str:
    """What came about, in a few lines. `all_lived`: the wins while nobody was killed."""
    sums = found.account
    total, lived = sum(found.wins.values()), sum(all_lived.values())
    skipped = f"{sums.overlap} skipped for a run that was unfinished"
    lines = [
        f"slots: {sums.slots}, of them {sums.success} run, {skipped}, {len(sums.lost)} lost",
        f"violations: {len(found.wrong)}",
        f"{'':8} {'wins while all lived':>21} {'wins in all':>14} {'took over':>10}",
    ]
    for key, name in names.items():
        mine, ever = all_lived[key], found.wins[key]
        took = sum(takeover.after.who == key for takeover in found.takeovers)
        lines.append(
            f"{name:8} {mine:>12} ({mine / lived:>4.0%}) {ever:>8} ({ever / total:>4.0%}) {took:>10}"
        )
    for takeover in found.takeovers:
        before, after = takeover.before, takeover.after
        lines.append(
            f"killed: {names[before.who]} in {before.job}, attempt {before.attempt}; "
            f"{names[after.who]} went on after {takeover.delay_ms} ms"
        )
    delays = [takeover.delay_ms for takeover in found.takeovers]
    if delays:
        lines.append(
            f"from the kill to the next handler's start: median {statistics.median(delays):.0f} ms, "
            f"longest {max(delays)} ms, of {len(delays)}"
        )
    return "\n".join(lines)
