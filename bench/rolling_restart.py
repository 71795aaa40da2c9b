"""What becomes of the runs while all instances of a service are restarted, one after another (S23).

    python -m bench.rolling_restart [--write] [--rounds N] [--store URL ...] [BACKEND ...]

For each store three instances are started, each a sidecar and an application in processes of their
own, under a load of short jobs and two long ones. Then each instance is restarted as a pod is: SIGTERM
to the application, then to its sidecar, and the next one only when it is ready again. Afterwards the
history and what the handlers wrote down say what became of each slot. The command fails if one was
lost or run twice. `--write` puts the table into bench/README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import _pytest.outcomes

from tests.contract.harness import BACKENDS
from tests.docs.guarantees import with_table
from tests.integration.account import Account, Grid, account, has_ended
from tests.integration.harness import Cluster

MEASURED = ("sqlite", "postgres", "redis")
INSTANCES = ("one", "two", "three")
PAUSE_S = 5.0
"""How long an instance is let work before the next is stopped, as a deployment's minReadySeconds."""
END_S = 90.0
"""What was due by the end of the last round has ended by then, or is lost."""
STOP_GRACE = "2s"
"""Far less than a long run takes, so that it is cancelled and handed over."""

SHORT = {f"short-{n}": Grid(1_000) for n in range(10)}
LONG = {
    f"long-{n}": Grid(20_000, offset_ms=offset, overlaps=True)
    for n, offset in enumerate((0, 10_000))
}
SHORT_S, LONG_S = 0.05, 15.0
GRIDS = {**SHORT, **LONG}
TABLE, PAGE = "rolling-restart", Path(__file__).with_name("README.md")


def jobs() -> list[dict[str, Any]]:
    """As the application of the integration tests is told of them; policies are the defaults.

    But a long run that begins anew after a hand-over may last into its job's next slot, which is none
    of its business: these may overlap.
    """
    return [
        {
            "name": name,
            "kind": "lasting",
            "seconds": LONG_S if name in LONG else SHORT_S,
            "every": f"{grid.every_ms}ms",
            "offset": f"{grid.offset_ms}ms",
            "policies": {"overlap": "allow"} if grid.overlaps else {},
        }
        for name, grid in GRIDS.items()
    ]


@dataclass(frozen=True, slots=True)
class Measured:
    """What one store came to."""

    found: Account
    restarts_s: Sequence[float]
    impolite: Sequence[str]
    """Processes that did not end with 0 when they were asked to."""

    @property
    def is_well(self) -> bool:
        """Whether nothing was lost and nothing doubled."""
        return not (self.found.lost or self.found.doubled or self.impolite)

    def __str__(self) -> str:
        found, waits = self.found, self.found.hand_overs_ms
        cells = (
            found.slots,
            found.success,
            found.overlap,
            len(found.lost),
            len(found.doubled),
            found.handed_over,
            len(waits),
            f"{statistics.median_low(waits)} ms" if waits else "",
            f"{waits[-1]} ms" if waits else "",
            ", ".join(f"{why} {n}" for why, n in sorted(found.otherwise.items())) or "none",
            f"{len(self.restarts_s)}, {statistics.median(self.restarts_s):.1f} s",
        )
        return " | ".join(map(str, cells))


HEADS = (
    "store",
    "slots",
    "success",
    "skipped, the run before unfinished",
    "lost",
    "doubled",
    "runs handed over",
    "hand-overs",
    "took, p50",
    "took, max",
    "attempts interrupted otherwise",
    "restarts, each (median)",
)


# ── One store ───────────────────────────────────────────────────────────────────────────────────


async def measure(cluster: Cluster, rounds: int) -> Measured:
    """The whole story on one store, with instances that are destroyed by the caller."""
    for name in INSTANCES:
        await cluster.start(name, jobs(), stop_grace=STOP_GRACE)
    await cluster.wait_for(lambda e: e["what"] == "start" and e["job"] in LONG)
    restarts_s, impolite = [], []
    for _ in range(rounds):
        for name in INSTANCES:
            began = time.monotonic()
            ended = await cluster.instances[name].stop()
            if ended != (0, 0):
                impolite.append(f"{name}: application and sidecar ended with {ended}")
            await cluster.instances[name].start_again()
            restarts_s.append(time.monotonic() - began)
            await asyncio.sleep(PAUSE_S)
    until = time.time_ns() // 1_000_000
    via = cluster.instances[INSTANCES[0]]
    runs = await cluster.runs_when(
        via, lambda runs: has_ended(GRIDS, runs, until), within_s=END_S, ask_again_s=1.0
    )
    return Measured(account(GRIDS, runs, cluster.events, until), restarts_s, impolite)


async def on(name: str, url: str, rounds: int) -> Measured:
    """Measure the store at a URL; `#` stands before what its namespaces begin with."""
    address, _, prefix = url.partition("#")
    with tempfile.TemporaryDirectory() as folder:
        namespace = f"{prefix}rolling-{secrets.token_hex(4)}"
        cluster = Cluster(Path(folder), address, namespace)
        try:
            measured = await measure(cluster, rounds)
        except AssertionError:
            print(cluster.report(), file=sys.stderr)
            raise
        finally:
            await cluster.destroy()
    for what in (*measured.found.lost, *measured.found.doubled, *measured.impolite):
        print(f"{name}: {what}", file=sys.stderr)
    return measured


# ── All of them ─────────────────────────────────────────────────────────────────────────────────


def urls_of(args: argparse.Namespace, folder: Path) -> dict[str, Callable[[], str]]:
    """What is measured: by name, what gives the URL."""
    if args.store:
        # A URL may hold a password: the table has its scheme.
        return {
            f"{url.partition(':')[0]} {number}": partial(str, url)
            for number, url in enumerate(args.store, 1)
        }
    return {name: partial(_url, name, folder) for name in args.backends or MEASURED}


def _in_memory() -> str | None:
    """Where the tests' servers have their data, too: not a disk that others keep busy."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _url(name: str, folder: Path) -> str:
    """A new store of the contract suite's."""
    return BACKENDS[name](folder).url


def table_of(args: argparse.Namespace) -> tuple[str, bool]:
    """The table, and whether nothing was lost or doubled on what was measured."""
    lines = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
    is_well = True
    with tempfile.TemporaryDirectory(dir=_in_memory()) as folder:
        for name, url in urls_of(args, Path(folder)).items():
            try:
                measured = asyncio.run(on(name, url(), args.rounds))
            except _pytest.outcomes.Skipped as missing:
                lines.append(f"| `{name}` | not measured: {missing} |" + " |" * (len(HEADS) - 2))
            else:
                is_well &= measured.is_well
                lines.append(f"| `{name}` | {measured} |")
            print(lines[-1], file=sys.stderr)
    today = datetime.now(UTC).date().isoformat()
    with_what = f"Python {platform.python_version()}, {platform.system()}, {os.cpu_count()} cores"
    command = " ".join(["python -m bench.rolling_restart", *sys.argv[1:]])
    if args.store:
        command = "python -m bench.rolling_restart --store ..."
    load = f"load average {os.getloadavg()[2]:.0f}"
    said = f"Measured on {today} ({with_what}, {load}) by `{command}`."
    return "\n".join(lines) + f"\n\n{said}\n", is_well


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="into bench/README.md")
    parser.add_argument("--rounds", type=int, default=2, help="restarts of each (default: 2)")
    parser.add_argument(
        "--store", metavar="URL", action="append", help="a store with leases, in place of ours"
    )
    parser.add_argument("backends", nargs="*", metavar="BACKEND", help=", ".join(MEASURED))
    args = parser.parse_args()
    if args.write and (args.backends or args.store):
        parser.error("--write is for the whole table")
    if args.rounds < 1:
        parser.error("--rounds: at least 1")
    if unknown := sorted(set(args.backends) - set(MEASURED)):
        parser.error(f"no backend {', '.join(unknown)}; there are: {', '.join(MEASURED)}")
    table, is_well = table_of(args)
    print(table)
    if args.write:
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(with_table(text, TABLE, table), encoding="utf-8")
    sys.exit(not is_well)


if __name__ == "__main__":
    main()
