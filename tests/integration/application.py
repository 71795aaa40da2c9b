"""The application of the integration tests: told by a JSON argument which jobs to run.

It prints what happens, one JSON object a line: `ready`, `start`, `step`, `end`. A handler works in
small steps, each checked as a careful handler would, until the file named `release` exists.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from anarchon import AnarchonClient, Context, Every, Job, OnTrigger, SyncContext

_STEP_S = 0.02


_telling = threading.Lock()


def emit(what: str, **facts: object) -> None:
    """One line for whoever watches, whole: handlers in several threads tell at once."""
    at = time.clock_gettime_ns(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)) // 1_000_000
    with _telling:
        print(json.dumps({"what": what, "boot_ms": at, **facts}), flush=True)  # noqa: T201


def _facts(ctx: Context | SyncContext) -> dict[str, Any]:
    return {
        "job": ctx.job,
        "slot": ctx.slot,
        "attempt": ctx.attempt,
        "fence": ctx.fence,
        "token": ctx.token,
        "instance": ctx.instance_id,
    }


async def quick(ctx: Context) -> None:
    """Starts and ends."""
    emit("start", **_facts(ctx))
    emit("end", **_facts(ctx), outcome="success")


def failing(ctx: SyncContext) -> None:
    """Fails every time."""
    emit("start", **_facts(ctx))
    raise ValueError("as it was told to")


def working(release: Path) -> Any:
    async def working(ctx: Context) -> str:
        emit("start", **_facts(ctx))
        try:
            while not release.exists():  # noqa: ASYNC240 - another process makes it
                ctx.check()
                emit("step", **_facts(ctx))
                await asyncio.sleep(_STEP_S)
        except BaseException as error:
            emit("end", **_facts(ctx), outcome=type(error).__name__)
            raise
        emit("end", **_facts(ctx), outcome="success")
        return f"released on attempt {ctx.attempt}"

    return working


def lasting(seconds: float) -> Any:
    async def lasting(ctx: Context) -> None:
        """Takes so long, and stops as soon as it is asked to."""
        emit("start", **_facts(ctx))
        try:
            await ctx.sleep(timedelta(seconds=seconds))
        except BaseException as error:
            emit("end", **_facts(ctx), outcome=type(error).__name__)
            raise
        emit("end", **_facts(ctx), outcome="success")

    return lasting


def stubborn(release: Path) -> Any:
    def stubborn(ctx: SyncContext) -> str:
        """A thread that never looks whether it may go on."""
        emit("start", **_facts(ctx))
        while not release.exists():
            time.sleep(_STEP_S)
        emit("end", **_facts(ctx), outcome="success")
        return "late"

    return stubborn


async def main(told: dict[str, Any]) -> None:
    release = Path(told["release"])
    kinds = {
        "quick": quick,
        "failing": failing,
        "working": working(release),
        "stubborn": stubborn(release),
    }
    handlers = [
        Job(
            lasting(job["seconds"]) if job["kind"] == "lasting" else kinds[job["kind"]],
            Every(job["every"], offset=job.get("offset", "0s")) if "every" in job else OnTrigger(),
            name=job["name"],
            **job.get("policies", {}),
        )
        for job in told["jobs"]
    ]
    client = AnarchonClient(told["address"], stop_grace=told.get("stop_grace", "20s"))
    subscription = client.subscribe(handlers)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: subscription.stop())
    emit("ready", instance=await subscription.ready())
    await subscription.closed


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
