"""How an instance with 10,000 jobs comes: how long it takes, and who has to wait meanwhile.

    python -m bench.registering [--jobs N] [--rounds N] [--write] [BACKEND ...]

The instance is an engine with its loop in this process. Another process is its neighbour: it claims
slots, one after the other, of a job of its own and of one that both have, and says which of its
claims took longest. `--write` puts the table into bench/README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from anarchon_server.clock import SystemClock
from anarchon_server.core.errors import StoreError
from anarchon_server.core.limits import JOBS_MAX
from anarchon_server.core.model import (
    Client,
    CronSchedule,
    EverySchedule,
    Instance,
    JobSpec,
    OverlapPolicy,
)
from anarchon_server.core.policy import Job, resolve
from anarchon_server.core.store import Beat, Claim, OpenOptions, Store
from anarchon_server.loop import Loop
from anarchon_server.opening import open_store
from tests.contract.harness import BACKENDS, CLAIM_ONLY, DAY, SECOND
from tests.docs import guarantees
from tests.unit.server.sidecars import make_loop

USUAL = ("sqlite", "postgres", "redis")
README = Path(__file__).with_name("README.md")
TABLE = "registering"
HEADS = (
    "store",
    "jobs",
    "all are registered after",
    "the event loop stood still, longest",
    "a claim of a job of its own waited, longest",
    "of one of these jobs, longest",
    "claims of the neighbour that failed",
)
PROBE_S = 0.002
BEFORE_S = 1.0
CLAIM_EVERY_S = 0.05
KEEP_ALIVE_S = 2.0
PATIENCE_S = 120.0


def spec_of(number: int) -> JobSpec:
    """One of the jobs: every second one by cron. None is due while this lasts, but by chance."""
    name = f"job-{number:05}"
    if number % 2:
        return JobSpec(name, CronSchedule(f"{number % 60} {number % 24} 1 1 *", "Europe/Athens"))
    return JobSpec(name, EverySchedule(DAY))


def store_at(url: str) -> Store:
    """The store of a URL of the tests' harness, which may name a part of the namespaces."""
    address, _, prefix = url.partition("#")
    return open_store(address, OpenOptions(f"{prefix}bench", SystemClock()))


# ── The neighbour ───────────────────────────────────────────────────────────────────────────────


async def neighbour(url: str, shared: int) -> None:
    """Claims until it is told to stop by a line, and says what was longest."""
    store = store_at(url)
    await store.open()
    instance = Instance("bench:neighbour", "2" * 32, lease_ms=30 * SECOND)
    specs = [JobSpec("neighbour", EverySchedule(SECOND)), spec_of(shared)]
    now = (await store.beat(Beat(instance))).store_at
    jobs = [resolve(spec, store.capabilities, 30 * SECOND, now) for spec in specs]
    await store.register(instance, [job.definition for job in jobs])
    over = asyncio.Event()
    claimers = [asyncio.create_task(_claim(store, instance, job, over)) for job in jobs]
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    over.set()
    waited = [await claimer for claimer in claimers]
    longest = [most for most, _ in waited]
    print(json.dumps({"longest_ms": longest, "failed": sum(n for _, n in waited)}), flush=True)
    await store.close()


async def _claim(
    store: Store, instance: Instance, job: Job, over: asyncio.Event
) -> tuple[float, int]:
    """The longest that a claim took (ms), and how many failed."""
    longest, failed = 0.0, 0
    numbers = itertools.count()
    while not over.is_set():
        slot = time.time_ns() // 1_000_000
        claim = Claim(
            job=job.name,
            slot=slot,
            token=f"{job.name}-{next(numbers):020}",
            instance_id=instance.instance_id,
            incarnation=instance.incarnation,
            schedule_id=job.schedule_id,
            previous_slot=slot - 1,
            overlap=OverlapPolicy.ALLOW,
            start_deadline_ms=60 * SECOND,
            lease_ms=30 * SECOND,
            cancel_grace_ms=SECOND,
            max_attempts=3,
            window_ms=DAY,
            expected_at=slot,
            vouched=True,
        )
        began = time.perf_counter()
        try:
            await store.claim([claim])
        except StoreError:
            failed += 1
        longest = max(longest, (time.perf_counter() - began) * 1_000)
        await asyncio.sleep(CLAIM_EVERY_S)
    return longest, failed


class Neighbour:
    """The other process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, url: str, shared: int) -> Neighbour:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "bench.registering", "--neighbour", url, "--jobs", str(shared)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        line = await process.stdout.readline()
        assert line == b"ready\n", f"the neighbour said {line!r}"
        return cls(process)

    async def stop(self) -> tuple[list[float], int]:
        """The longest claim of each of its jobs (ms), and how many failed."""
        said, _ = await self._process.communicate(b"\n")
        answer = json.loads(said)
        return answer["longest_ms"], answer["failed"]


# ── The instance ────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Figures:
    """What one round showed (ms)."""

    took: float
    still: float
    own: float
    shared: float
    failed: int


async def round_of(name: str, count: int) -> Figures:
    with tempfile.TemporaryDirectory() as directory:
        url = (BACKENDS | CLAIM_ONLY)[name](Path(directory)).url  # type: ignore[attr-defined]
        store = store_at(url)
        await store.open()
        beside = await Neighbour.start(url, count // 2)
        loop = make_loop(store)
        loop.start()
        try:
            await asyncio.sleep(BEFORE_S)
            took, still = await registered(loop, count)
            (own, shared), failed = await beside.stop()
        finally:
            await loop.close()
            await store.close()
    return Figures(took, still, own, shared, failed)


async def registered(loop: Loop, count: int) -> tuple[float, float]:
    """How long until all jobs are registered, and the longest that nothing else went (ms).

    What the Subscribe itself takes, in which all jobs are resolved, is in the first alone.
    """
    specs = tuple(spec_of(number) for number in range(count))
    began = time.perf_counter()
    loop.subscribe("session", Client("python"), specs, 1, ())
    alive = asyncio.create_task(keep_alive(loop))
    still = 0.0
    last = time.perf_counter()
    looked_at = last
    jobs = loop._engine._jobs  # type: ignore[attr-defined]
    while last - began < PATIENCE_S:
        await asyncio.sleep(PROBE_S)
        now = time.perf_counter()
        still = max(still, now - last - PROBE_S)
        if now - looked_at > 0.02:
            looked_at = now
            if len(list(jobs)) == count and all(job.registered for job in jobs):
                break
        last = time.perf_counter()
    else:
        raise AssertionError(f"not registered within {PATIENCE_S:g} s")
    alive.cancel()
    return (now - began) * 1_000, still * 1_000


async def keep_alive(loop: Loop) -> None:
    while True:
        await asyncio.sleep(KEEP_ALIVE_S)
        await loop.keep_alive("session", ())


# ── All of them ─────────────────────────────────────────────────────────────────────────────────


async def row_of(name: str, count: int, rounds: int) -> str:
    found = [await round_of(name, count) for _ in range(rounds)]
    cells = [
        f"{statistics.median(getattr(each, what) for each in found):,.0f} ms"
        for what in ("took", "still", "own", "shared")
    ]
    failed = sum(each.failed for each in found)
    return f"| `{name}` | {count:,} | {' | '.join(cells)} | {failed} |"


async def table_of(names: Sequence[str], count: int, rounds: int) -> str:
    unknown = sorted(set(names) - (BACKENDS | CLAIM_ONLY).keys())
    if unknown:
        sys.exit(f"no backend {', '.join(unknown)}; there are: {', '.join(BACKENDS | CLAIM_ONLY)}")
    lines = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
    for name in names:
        lines.append(await row_of(name, count, rounds))
        print(lines[-1], f"(load {os.getloadavg()[0]:.1f})", file=sys.stderr)
    measured = datetime.now(UTC).date().isoformat()
    load = f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.0f}"
    with_what = f"Python {platform.python_version()}, {platform.system()}, {load}"
    return (
        "\n".join(lines)
        + f"\n\nThe median of {rounds} rounds. Measured on {measured} ({with_what})"
        " by `python -m bench.registering --write`.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=JOBS_MAX, help="default: 10,000")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    parser.add_argument("--write", action="store_true", help="into bench/README.md")
    parser.add_argument("--neighbour", metavar="URL", default="", help=argparse.SUPPRESS)
    parser.add_argument("backends", nargs="*", metavar="BACKEND", default=USUAL)
    args = parser.parse_args()
    if args.neighbour:
        asyncio.run(neighbour(args.neighbour, args.jobs))
        return
    table = asyncio.run(table_of(args.backends, args.jobs, args.rounds))
    print(table)
    if args.write:
        text = README.read_text(encoding="utf-8")
        README.write_text(guarantees.with_table(text, TABLE, table), encoding="utf-8")


if __name__ == "__main__":
    main()
