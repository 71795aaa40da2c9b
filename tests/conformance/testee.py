"""Python's testee: see README.md beside it. It decides nothing; it shows what the client does."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import grpc

import anarchon
from anarchon import Cron, Every, Job

KEYS = {"jobs", "max_concurrency", "stop_grace", "on_lease_lost", "ca_file", "padding"}
KINDS: dict[str, type[Exception] | tuple[type[Exception], ...]] = {  # the first that fits
    "unsupported": anarchon.UnsupportedError,
    "version": anarchon.VersionError,
    "credentials": anarchon.CredentialsError,
    "refused": anarchon.RefusedError,
    "replaced": anarchon.SessionReplacedError,
    "setup": (anarchon.JobError, anarchon.ClientError),
}
released = threading.Event()
_writing = threading.Lock()


def emit(what: str, **facts: object) -> None:
    with _writing:
        sys.stdout.write(json.dumps({"what": what, **facts}) + "\n")
        sys.stdout.flush()


def told(ctx: anarchon.AttemptContext, error: anarchon.Cancelled) -> None:
    lost = isinstance(error, anarchon.LeaseLost)
    emit("cancelled", token=ctx.token, reason=error.reason.name, lost=lost)


# ── What the handlers do between `started` and `ended` ──────────────────────────────────────────


def returns(ctx: anarchon.SyncContext) -> str:
    return ctx.payload.decode()


async def gives_json(ctx: anarchon.Context) -> object:
    return {"rows": 3, "name": "Ωmega"}


def fails(ctx: anarchon.SyncContext) -> None:
    raise RuntimeError(ctx.payload.decode())


async def retries(ctx: anarchon.Context) -> None:
    raise anarchon.Retry("again", after=ctx.payload.decode() or None)


async def is_permanent(ctx: anarchon.Context) -> None:
    raise anarchon.Permanent(ctx.payload.decode())


async def shows(ctx: anarchon.Context) -> None:
    remaining = ctx.remaining
    emit(
        "context",
        **_named(ctx),
        fence=ctx.fence,
        instance_id=ctx.instance_id,
        trigger=ctx.trigger.value,
        payload=ctx.payload.decode(),
        scheduled_at=f"{ctx.scheduled_at:%Y-%m-%dT%H:%M:%S}.{ctx.scheduled_at.microsecond // 1_000:03}Z",
        has_deadline=ctx.deadline is not None and ctx.deadline > datetime.now(UTC),
        remaining_ms=None if remaining is None else round(remaining.total_seconds() * 1_000),
        cancelled=ctx.cancelled,
    )


async def confirms(ctx: anarchon.Context) -> None:
    try:
        await ctx.confirm()
    except asyncio.CancelledError:
        answer = "lost" if _is_lost(ctx) else "unknown"
    except anarchon.LeaseLost:
        answer = "lost"
    except anarchon.NotConfirmedError:
        answer = "unknown"
    else:
        answer = "confirmed"
    emit("confirm", token=ctx.token, answer=answer)


def _is_lost(ctx: anarchon.Context) -> bool:
    try:
        ctx.check()
    except anarchon.Cancelled as error:
        return isinstance(error, anarchon.LeaseLost)
    return False


async def waits(ctx: anarchon.Context) -> None:
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        try:
            ctx.check()
        except anarchon.Cancelled as error:
            told(ctx, error)
        raise


async def waits_anyway(ctx: anarchon.Context) -> str:
    with suppress(asyncio.CancelledError):
        await waits(ctx)
    return "done anyway"


def polls(ctx: anarchon.SyncContext) -> None:
    try:
        while True:
            ctx.check()
            time.sleep(0.01)
    except anarchon.Cancelled as error:
        told(ctx, error)
        raise


def lingers(ctx: anarchon.SyncContext) -> str:
    last: anarchon.Cancelled | None = None
    while not released.wait(0.01):
        try:
            ctx.check()
        except anarchon.Cancelled as error:
            if last is None or type(last) is not type(error):
                told(ctx, error)
            last = error
    if last is not None:
        raise last
    return "released"


def is_stubborn(ctx: anarchon.SyncContext) -> str:
    released.wait()
    return "late"


async def blocks(ctx: anarchon.Context) -> None:
    time.sleep(float(ctx.payload.decode().removesuffix("ms")) / 1_000)  # noqa: ASYNC251 - it is meant
    try:
        ctx.check()
    except anarchon.Cancelled as error:
        told(ctx, error)
        raise


ALL_POLICIES = anarchon.Policies(
    jitter="5s",
    timeout="2m",
    heartbeat="4s",
    lease="20s",
    overlap="queue",
    catch_up="all",
    catch_up_window="6h",
    catch_up_limit=7,
    start_deadline="30s",
    max_attempts=4,
    retries=5,
    retry_delay="2s",
    retry_factor=1.5,
    retry_max_delay="10m",
    concurrency=2,
    labels={"team": "blue"},
    cancel_grace="3s",
    stop_grace="15s",
)
HOURLY = Every("1h")
JOBS: dict[str, tuple[Any, Every | Cron | None, anarchon.Policies]] = {
    "succeed": (returns, HOURLY, {}),
    "json": (gives_json, HOURLY, {}),
    "fail": (fails, HOURLY, {}),
    "retry": (retries, HOURLY, {}),
    "permanent": (is_permanent, HOURLY, {}),
    "context": (shows, HOURLY, {}),
    "confirm": (confirms, HOURLY, {}),
    "wait": (waits, HOURLY, {}),
    "anyway": (waits_anyway, HOURLY, {}),
    "poll": (polls, HOURLY, {}),
    "linger": (lingers, HOURLY, {}),
    "stubborn": (is_stubborn, HOURLY, {}),
    "block": (blocks, HOURLY, {}),
    "policies": (returns, Every("1h", offset="10m"), ALL_POLICIES),
    "cron": (returns, Cron("0 8 * * *", tz="Europe/Athens"), {}),
    "brief": (waits, HOURLY, {"timeout": "1s", "retries": 0}),
    "named": (returns, None, {}),
}


# ── Jobs, the client, and what it is told ───────────────────────────────────────────────────────


def _named(ctx: anarchon.AttemptContext) -> dict[str, Any]:
    return {"token": ctx.token, "job": ctx.job, "slot": ctx.slot, "attempt": ctx.attempt}


def job(name: str) -> Job:
    does, schedule, policies = JOBS[name]
    handler: Any
    if inspect.iscoroutinefunction(does):

        async def handler(ctx: anarchon.Context) -> object:
            emit("started", **_named(ctx))
            try:
                return await does(ctx)
            finally:
                emit("ended", token=ctx.token)

    else:

        def handler(ctx: anarchon.SyncContext) -> object:
            emit("started", **_named(ctx))
            try:
                return does(ctx)
            finally:
                emit("ended", token=ctx.token)

    return Job(handler, schedule, name=name, **policies)


def padding(number: int) -> Job:
    labels = {f"{n:02}".ljust(128, "k"): "v" * 128 for n in range(1, 17)}
    return Job(returns, HOURLY, name=f"padding-{number}", labels=labels)


def client_of(config: dict[str, Any]) -> anarchon.AnarchonClient:
    options: dict[str, Any] = {
        k: config[k] for k in ("max_concurrency", "stop_grace", "on_lease_lost") if k in config
    }
    if "ca_file" in config:
        with open(config["ca_file"], "rb") as file:  # noqa: PTH123
            options["credentials"] = grpc.ssl_channel_credentials(file.read())
    return anarchon.AnarchonClient(**options)


def listen(stop: Any) -> None:
    for line in sys.stdin:
        word, _, rest = line.strip().partition(" ")
        if word == "release":
            released.set()
        elif word == "stop":
            stop(rest or None)
    os._exit(3)  # the suite is gone


async def main(config: dict[str, Any]) -> None:
    jobs = [job(name) for name in config["jobs"]]
    jobs += [padding(number) for number in range(1, config.get("padding", 0) + 1)]
    subscription = client_of(config).subscribe(jobs)

    def leave() -> None:
        _ = subscription.stop("0s" if subscription.is_stopping else None)

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, leave)
    threading.Thread(target=listen, args=(subscription.stop,), daemon=True).start()
    ready = asyncio.ensure_future(_say_ready(subscription))
    try:
        await subscription.closed
    finally:
        ready.cancel()


async def _say_ready(subscription: anarchon.Subscription) -> None:
    with suppress(anarchon.AnarchonError):  # `closed` says it
        emit("ready", instance=await subscription.ready())


def kind_of(error: anarchon.AnarchonError) -> str:
    return next((kind for kind, types in KINDS.items() if isinstance(error, types)), "other")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(levelname)s %(message)s")
    told_what = json.loads(os.environ["ANARCHON_TESTEE"])
    if unknown := told_what.keys() - KEYS:
        sys.stderr.write(f"ANARCHON_TESTEE: no such key: {', '.join(sorted(unknown))}\n")
        os._exit(2)
    status = 0
    try:
        asyncio.run(main(told_what))
        emit("closed", error="", message="")
    except anarchon.AnarchonError as closed_by:
        emit("closed", error=kind_of(closed_by), message=str(closed_by))
        status = 1
    sys.stdout.flush()
    os._exit(status)
