"""The application of the demo: four jobs of different kinds. Imports the client only.

It is an application like any other, but that it prints what its handlers do, one JSON object
a line, so that `anarchon demo` can show it. Run by `anarchon demo`, one process an instance.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from anarchon import (
    AnarchonClient,
    AttemptContext,
    Context,
    Cron,
    Every,
    Job,
    Policies,
    SyncContext,
)

CHECKSUM_SECONDS = 5.0
"""How long `checksum` takes: it hashes on until then, a file at a time."""


_telling = threading.Lock()


def emit(what: str, **facts: object) -> None:
    """One line for whoever watches, whole: handlers in several threads tell at once."""
    with _telling:
        print(json.dumps({"what": what, "at": time.time(), **facts}), flush=True)


@contextmanager
def told(ctx: AttemptContext) -> Iterator[Callable[[str], None]]:
    """Tells that a handler starts, and how it ends; yields what sets the end's words."""
    run = {"job": ctx.job, "slot": ctx.slot, "attempt": ctx.attempt, "fence": ctx.fence}
    words = ""

    def say(text: str) -> None:
        nonlocal words
        words = text

    emit("start", **run)
    try:
        yield say
    except BaseException as error:
        emit("end", **run, outcome=type(error).__name__, words=str(error))
        raise
    emit("end", **run, outcome="success", words=words)


def jobs(tree: Path, *, leases: bool) -> list[Job]:
    """The demo's jobs. Leases of 3 s, so that a takeover comes within seconds."""

    async def tick(ctx: Context) -> None:
        with told(ctx):
            await ctx.sleep("50ms")

    def report(ctx: SyncContext) -> str:
        with told(ctx) as say:
            files = sum(1 for _ in tree.iterdir())
            say(f"{files} entries in {tree.name}/")
            return str(files)

    async def flaky(ctx: Context) -> None:
        with told(ctx):
            await ctx.sleep("20ms")
            if ctx.slot // 3_000 % 4 == 0:
                raise ConnectionError("the other side hung up, as it does now and then")

    def checksum(ctx: SyncContext) -> str:
        with told(ctx) as say:
            digest, files, size = _checksum(tree, ctx)
            say(f"{files} files, {size / 1e6:.0f} MB, sha256 {digest[:12]}...")
            return digest

    short: Policies = {"lease": "3s"} if leases else {}
    long: Policies = {**short, "jitter": "300ms", "stop_grace": "500ms"}
    return [
        Job(tick, Every("2s"), **short),
        Job(report, Cron("*/5 * * * * *"), **short),
        Job(flaky, Every("3s"), **short),
        Job(checksum, Every("10s"), **long),
    ]


def _checksum(tree: Path, ctx: SyncContext) -> tuple[str, int, int]:
    """Hashes the tree's files, over and over, until the time is up."""
    digest, files, size = hashlib.sha256(), 0, 0
    end = time.monotonic() + CHECKSUM_SECONDS
    paths = sorted(p for p in tree.rglob("*.py") if p.is_file())
    while True:
        for path in paths:
            ctx.check()  # raises once this attempt is no longer ours
            content = path.read_bytes()
            digest.update(content)
            files, size = files + 1, size + len(content)
            if time.monotonic() >= end:
                return digest.hexdigest(), files, size


async def serve(address: str, handlers: list[Job]) -> None:
    """Runs until SIGTERM."""
    client = AnarchonClient(address, stop_grace="1s")
    subscription = client.subscribe(handlers)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, lambda: subscription.stop())
    emit("ready", instance=await subscription.ready())
    await subscription.closed
    emit("stopped")


def main(argv: list[str]) -> None:
    """The process: `python -m anarchon_server.cli.demo.application ADDRESS [--no-leases]`."""
    parser = argparse.ArgumentParser(prog="demo application")
    parser.add_argument("address")
    parser.add_argument("--no-leases", action="store_true")
    args = parser.parse_args(argv)
    tree = Path(sysconfig.get_path("stdlib"))
    asyncio.run(serve(args.address, jobs(tree, leases=not args.no_leases)))


if __name__ == "__main__":
    main(sys.argv[1:])
