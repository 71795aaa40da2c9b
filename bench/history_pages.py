"""How long the pages of a history of 100,000 runs take: the first, the middle, the last; and to find
that no run is in a state.

    python -m bench.history_pages [--runs N] [--write] [BACKEND ...]

Each backend of the contract suite is filled by claims and results, as instances would. Then a sidecar
in front of it is asked for all pages, one after the other, and `anarchon runs` is run for the whole.
`--write` puts the table into bench/README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc

from anarchon.v1 import admin_pb2, admin_pb2_grpc, run_pb2
from anarchon_server.core.model import Outcome
from anarchon_server.core.store import ClaimOutcome, Completion, Store
from anarchon_server.rpc.server import Server
from tests.contract.harness import (
    BACKENDS,
    CLAIM_ONLY,
    PERIOD,
    SCHEDULE,
    T0,
    ClaimOnlyNode,
    Cluster,
    Node,
    definition,
)
from tests.docs import guarantees
from tests.unit.server.sidecars import VERSION, make_config, make_loop

JOBS = 100
PAGE = 500
AROUND = 5
"""So many pages make the first, the middle and the last: their median is shown."""

PATIENCE_MS = 60_000
"""A page that is slow on a busy machine is measured, where a sidecar would give up after 2 s."""

USUAL = ("sqlite", "postgres", "redis", "nats-lease", "redis-script", "nats")
README = Path(__file__).with_name("README.md")
TABLE = "history-pages"
HEADS = (
    "store",
    "runs",
    "pages",
    "first page",
    "middle page",
    "last page",
    "slowest",
    "bytes a page",
    "all, for a state that none is in",
    "all, by `anarchon runs`",
    "its memory",
)


# ── A history ───────────────────────────────────────────────────────────────────────────────────


async def fill(cluster: Cluster, count: int) -> None:
    """`JOBS` jobs with as many runs each, every one of them won and ended."""
    node = await cluster.node(op_timeout_ms=PATIENCE_MS)
    jobs = [f"job-{number:03}" for number in range(JOBS)]
    await node.register(*(definition(job) for job in jobs))
    for number in range(1, count // JOBS + 1):
        slot = T0 + number * PERIOD
        cluster.advance_to(slot)
        await run_all(node, jobs, slot)


async def run_all(node: Node, jobs: Sequence[str], slot: int) -> None:
    claims = [node.wish(slot, job=job, schedule_id=SCHEDULE) for job in jobs]
    answers = (await node.store.claim(claims)).answers
    assert {each.outcome for each in answers} == {ClaimOutcome.WON}, answers
    outcome = Outcome(result="42 rows in 3 files", elapsed_ms=35)
    await node.store.complete([Completion(c.job, c.slot, c.token, outcome) for c in claims])


# ── Asking for it ───────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Pages:
    """The time (ms) and the bytes of each page, and the time of a question that no run answers."""

    times_ms: list[float]
    sizes: list[int]
    runs: int
    none_ms: float

    def median(self, begin: int) -> float:
        return statistics.median(self.times_ms[begin : begin + AROUND])

    def __str__(self) -> str:
        middle, last = len(self.times_ms) // 2, len(self.times_ms) - AROUND
        shown = (self.median(0), self.median(middle), self.median(last), max(self.times_ms))
        cells = [f"{ms:.0f} ms" for ms in shown]
        size = f"{statistics.median(self.sizes) / 1_024:.0f} KiB"
        return " | ".join([*cells, size, f"{self.none_ms:.0f} ms"])


def ask(address: str) -> Pages:
    """Every page, as AdminClient asks for them."""
    with grpc.insecure_channel(address) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        request = admin_pb2.ListRunsRequest(page_size=PAGE)
        times_ms, sizes, runs = list[float](), list[int](), 0
        while True:
            page, took_ms = timed(stub, request)
            times_ms.append(took_ms)
            sizes.append(page.ByteSize())
            runs += len(page.runs)
            request.page_token = page.next_page_token
            if not request.page_token:
                break
        failed = admin_pb2.ListRunsRequest(page_size=PAGE, states=[run_pb2.RUN_STATE_FAILED])
        none_ms = 0.0
        while True:
            page, took_ms = timed(stub, failed)
            assert not page.runs
            none_ms += took_ms
            failed.page_token = page.next_page_token
            if not failed.page_token:
                return Pages(times_ms, sizes, runs, none_ms)


def timed(stub: Any, request: admin_pb2.ListRunsRequest) -> tuple[Any, float]:
    began = time.perf_counter()
    page = stub.ListRuns(request, timeout=60)
    return page, (time.perf_counter() - began) * 1_000


def by_command(address: str, count: int) -> tuple[float, int]:
    """How long (s) `anarchon runs` takes for all of it, and its peak memory (KiB)."""
    command = [
        sys.executable,
        "-m",
        "anarchon",
        "runs",
        "--address",
        address,
        "--limit",
        str(count),
    ]
    began = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0, f"{command} ended with {child.returncode}"
    return time.perf_counter() - began, usage.ru_maxrss


async def serve(store: Store) -> tuple[Server, Any, str]:
    loop = make_loop(store, op_timeout_ms=PATIENCE_MS)
    server = Server(make_config(), loop, VERSION)
    address = str(server.bind())
    loop.start()
    await server.start()
    return server, loop, address


def cluster_of(name: str, directory: Path) -> Cluster:
    if name in CLAIM_ONLY:
        return Cluster(CLAIM_ONLY[name](directory), node_type=ClaimOnlyNode)
    return Cluster(BACKENDS[name](directory))


async def row_of(name: str, count: int) -> str:
    with tempfile.TemporaryDirectory() as directory:
        cluster = cluster_of(name, Path(directory))
        async with cluster.stack:
            await fill(cluster, count)
            reader = await cluster.node(op_timeout_ms=PATIENCE_MS)
            server, loop, address = await serve(reader.store)
            try:
                pages = await asyncio.to_thread(ask, address)
                took_s, memory = await asyncio.to_thread(by_command, address, count)
            finally:
                await loop.close()
                await server.stop(0)
    command = f"{took_s:.1f} s | {memory / 1_024:.0f} MiB"
    return f"| `{name}` | {pages.runs:,} | {len(pages.times_ms)} | {pages} | {command} |"


async def table_of(names: Sequence[str], count: int) -> str:
    backends = {**BACKENDS, **CLAIM_ONLY}
    unknown = sorted(set(names) - backends.keys())
    if unknown:
        sys.exit(f"no backend {', '.join(unknown)}; there are: {', '.join(backends)}")
    lines = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
    for name in names:
        lines.append(await row_of(name, count))
        print(lines[-1], file=sys.stderr)
    measured = datetime.now(UTC).date().isoformat()
    load = f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.0f}"
    with_what = f"Python {platform.python_version()}, {platform.system()}, {load}"
    return (
        "\n".join(lines)
        + f"\n\nMeasured on {measured} ({with_what}) by `python -m bench.history_pages --write`.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=100_000, help="default: 100,000")
    parser.add_argument("--write", action="store_true", help="into bench/README.md")
    parser.add_argument("backends", nargs="*", metavar="BACKEND", default=USUAL)
    args = parser.parse_args()
    table = asyncio.run(table_of(args.backends, args.runs))
    print(table)
    if args.write:
        text = README.read_text(encoding="utf-8")
        README.write_text(guarantees.with_table(text, TABLE, table), encoding="utf-8")


if __name__ == "__main__":
    main()
