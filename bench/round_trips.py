"""How many round trips and bytes a run costs on each store: counted between us and the real server.

    python -m bench.round_trips [--write] [BACKEND ...]

Every backend of the contract suite is opened on a server of the tests' harness, through a proxy on
the loopback that counts. `--write` puts the table into docs/stores/README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import re
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import _pytest.outcomes

from anarchon_server.clock import SystemClock
from anarchon_server.core.model import Instance, Outcome, OverlapPolicy
from anarchon_server.core.store import (
    Beat,
    Claim,
    ClaimOutcome,
    Completion,
    OpenOptions,
    Renewal,
    Store,
    TokenOutcome,
)
from anarchon_server.opening import open_store
from tests.contract.harness import BACKENDS, CLAIM_ONLY, DAY, PERIOD, SECOND, definition
from tests.docs import guarantees
from tests.servers.proxy import Proxy

SINGLES = 20
BATCH = 100
TABLE = "round-trips"

_NO_SERVER = ("memory", "memory-wall", "memory-claim", "sqlite")
"""Backends whose store is this process, or a file: nothing travels."""


class Counter(Proxy):
    """Counts round trips: something was sent after something had come back, or at first."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.trips = 0
        self._answered = True

    def reset(self) -> None:
        """Begin to count anew."""
        self.trips = self.bytes_sent = self.bytes_received = 0
        self._answered = True

    def _pass_request(self, chunk: bytes) -> asyncio.Event:
        if self._answered:
            self.trips += 1
        self._answered = False
        return super()._pass_request(chunk)

    def _pass_reply(self, chunk: bytes) -> asyncio.Event | None:
        self._answered = True
        return super()._pass_reply(chunk)


class PastTheProxy(Exception):  # noqa: N818 - a fact about the store
    """Not all that is said to the store goes through the proxy; the message says why."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a call costs: round trips for the call, and bytes for each of its items."""

    trips: float
    sent: float
    received: float

    def __str__(self) -> str:
        return f"{self.trips:g}, {self.sent:.0f} + {self.received:.0f} B"


# ── One instance ────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Side:
    """An instance, its connection, and what passes on it."""

    name: str
    store: Store
    counters: Sequence[Counter]
    instance: Instance
    numbers: int = 0

    def wish(self, job: str, slot: int) -> Claim:
        self.numbers += 1
        return Claim(
            job=job,
            slot=slot,
            token=f"{self.name}-{self.numbers:026x}",
            instance_id=self.instance.instance_id,
            incarnation=self.instance.incarnation,
            schedule_id="every:10s",
            previous_slot=slot - PERIOD,
            overlap=OverlapPolicy.ALLOW,
            start_deadline_ms=60 * SECOND,
            lease_ms=30 * SECOND,
            cancel_grace_ms=5 * SECOND,
            max_attempts=3,
            window_ms=DAY,
            expected_at=slot,
            vouched=True,
        )

    async def claim(self, wishes: Sequence[Claim], expected: ClaimOutcome) -> None:
        answers = (await self.store.claim(wishes)).answers
        said = {answer.outcome for answer in answers}
        assert said == {expected}, f"{self.name}: claims were answered {said}, not {expected}"

    async def beat(self, claims: Sequence[Claim], *, leases: bool) -> None:
        renewals = tuple(
            Renewal(c.job, c.slot, c.token, c.instance_id, c.incarnation, c.lease_ms)
            for c in claims
        )
        await self.store.beat(Beat(self.instance, renewals=renewals if leases else ()))

    async def complete(self, claims: Sequence[Claim]) -> None:
        completions = [Completion(c.job, c.slot, c.token, Outcome(result="done")) for c in claims]
        answers = (await self.store.complete(completions)).answers
        assert {a.outcome for a in answers} == {TokenOutcome.RECORDED}, answers


async def costs_of(side: Side, call: Callable[[], Awaitable[None]], items: int) -> Cost:
    for counter in side.counters:
        counter.reset()
    await call()
    return Cost(
        sum(counter.trips for counter in side.counters),
        sum(counter.bytes_sent for counter in side.counters) / items,
        sum(counter.bytes_received for counter in side.counters) / items,
    )


def mean(costs: Sequence[Cost]) -> Cost:
    count = len(costs)
    return Cost(
        round(sum(c.trips for c in costs) / count, 2),
        sum(c.sent for c in costs) / count,
        sum(c.received for c in costs) / count,
    )


# ── One backend ─────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured on one backend."""

    won: Cost
    lost: Cost
    beat: Cost
    result: Cost
    won_in_batch: Cost
    results_in_batch: Cost

    def __str__(self) -> str:
        cells = (
            self.won,
            self.lost,
            self.beat,
            self.result,
            self.won_in_batch,
            self.results_in_batch,
        )
        trips = self.won.trips + self.result.trips
        return " | ".join([f"{trips:g}", *map(str, cells)])


async def measure(name: str, factory: Callable[[Path], object], stack: AsyncExitStack) -> Row:
    directory = stack.enter_context(tempfile.TemporaryDirectory())
    url: str = factory(Path(directory)).url  # type: ignore[attr-defined]
    winner = await open_side("winner", url, stack)
    rival = await open_side("rival", url, stack)
    leases = winner.store.capabilities.leases
    jobs = [f"job-{n:04}" for n in range(BATCH)]
    for side in (winner, rival):
        await side.store.register(
            side.instance, [definition(job, overlap=OverlapPolicy.ALLOW) for job in jobs]
        )
    await one_run(winner, rival, jobs[0], leases=leases)  # connections and statements are made
    singles = [await one_run(winner, rival, jobs[0], leases=leases) for _ in range(SINGLES)]
    slot = await now(winner)
    batch = [winner.wish(job, slot) for job in jobs]
    won = await costs_of(winner, lambda: winner.claim(batch, ClaimOutcome.WON), BATCH)
    results = await costs_of(winner, lambda: winner.complete(batch), BATCH)
    return Row(*map(mean, zip(*singles, strict=True)), won, results)


async def one_run(winner: Side, rival: Side, job: str, *, leases: bool) -> list[Cost]:
    slot = await now(winner)
    claim = [winner.wish(job, slot)]
    against = [rival.wish(job, slot)]
    return [
        await costs_of(winner, lambda: winner.claim(claim, ClaimOutcome.WON), 1),
        await costs_of(rival, lambda: rival.claim(against, ClaimOutcome.LOST), 1),
        await costs_of(winner, lambda: winner.beat(claim, leases=leases), 1),
        await costs_of(winner, lambda: winner.complete(claim), 1),
    ]


_last = 0


async def now(side: Side) -> int:
    """A slot that is due and that nobody has: the store's time, and later than the one before."""
    global _last  # noqa: PLW0603
    _last = max(_last + 1, (await side.store.beat(Beat(side.instance))).store_at)
    return _last


async def open_side(name: str, url: str, stack: AsyncExitStack) -> Side:
    address, _, prefix = url.partition("#")
    if "cluster=true" in address:
        raise PastTheProxy("the servers lead their clients past the proxy")
    counters = {
        int(port): await stack.enter_async_context(Counter(int(port)))
        for port in re.findall(r"127\.0\.0\.1:(\d+)", address)
    }
    through = re.sub(
        r"(?<=127\.0\.0\.1:)\d+", lambda port: str(counters[int(port[0])].port), address
    )
    through = re.sub(r",(127\.0\.0\.1|localhost):\d+", "", through)  # or it may go past the proxy
    store = open_store(through, OpenOptions(f"{prefix}bench", SystemClock(), op_timeout_ms=20_000))
    stack.push_async_callback(store.close)
    await store.open()
    incarnation = f"{name}{'0' * 32}"[:32]
    instance = Instance(f"bench:{name}", incarnation, lease_ms=30 * SECOND)
    return Side(name, store, list(counters.values()), instance)


# ── All of them ─────────────────────────────────────────────────────────────────────────────────


HEADS = (
    "backend",
    "round trips a run",
    "a claim that wins",
    "that loses",
    "a heartbeat, 1 run",
    "a result",
    f"{BATCH} claims, each",
    f"{BATCH} results, each",
)


async def row_of(name: str, factory: Callable[[Path], object]) -> str:
    if name in _NO_SERVER:
        return f"| `{name}` | none: no server |" + " |" * (len(HEADS) - 2)
    try:
        async with AsyncExitStack() as stack:
            row = await measure(name, factory, stack)
    except (PastTheProxy, _pytest.outcomes.Skipped) as missing:
        return f"| `{name}` | not measured: {missing} |" + " |" * (len(HEADS) - 2)
    return f"| `{name}` | {row} |"


async def connections_ended() -> None:
    """Those of the proxies, which see last that both their ends are closed."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others, timeout=5)


async def table_of(names: Sequence[str]) -> str:
    backends = {**BACKENDS, **CLAIM_ONLY}
    unknown = sorted(set(names) - backends.keys())
    if unknown:
        sys.exit(f"no backend {', '.join(unknown)}; there are: {', '.join(backends)}")
    lines = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
    for name in names or backends:
        lines.append(await row_of(name, backends[name]))
        await connections_ended()
        print(lines[-1], file=sys.stderr)
    measured = datetime.now(UTC).date().isoformat()
    with_what = f"Python {platform.python_version()}, {platform.system()}"
    return (
        "\n".join(lines)
        + f"\n\nMeasured on {measured} ({with_what}) by `python -m bench.round_trips --write`.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="into docs/stores/README.md")
    parser.add_argument("backends", nargs="*", metavar="BACKEND")
    args = parser.parse_args()
    if args.write and args.backends:
        parser.error("--write is for the whole table")
    table = asyncio.run(table_of(args.backends))
    print(table)
    if args.write:
        text = guarantees.PAGE.read_text(encoding="utf-8")
        guarantees.PAGE.write_text(guarantees.with_table(text, TABLE, table), encoding="utf-8")


if __name__ == "__main__":
    main()
