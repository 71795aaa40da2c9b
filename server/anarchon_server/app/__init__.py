"""One sidecar process, from its configuration to its end: the only wiring.

Imports everything below it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
import signal
from datetime import timedelta
from importlib.metadata import version as installed_version

from anarchon_server import failpoints
from anarchon_server.app import logs
from anarchon_server.app.stores import OPEN_TIMEOUT_S, find_store, open_store
from anarchon_server.clock import SystemClock
from anarchon_server.config import Config, load_jobs
from anarchon_server.core.engine import Engine, Status
from anarchon_server.core.errors import AnarchonError, StoreError, StoreRefused
from anarchon_server.core.messages import Reload
from anarchon_server.core.model import InstanceState
from anarchon_server.core.settings import Settings
from anarchon_server.core.slots import TZDATA_VERSION
from anarchon_server.core.store import StoreReport
from anarchon_server.loop import Loop
from anarchon_server.rpc.probes import Probes
from anarchon_server.rpc.server import Server

__all__ = ["CRASHED", "REFUSED", "Sidecar", "run", "version"]

REFUSED = 2
"""The exit status where an operator must change something first."""

CRASHED = 70
"""The exit status where a mistake of ours was met: leases lapse, and others take over."""

REOPEN_FIRST_S, REOPEN_MAX_S = 0.5, 5.0
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""What asks for a stop: a supervisor, and Ctrl-C."""

RELOAD_SIGNAL = signal.SIGHUP
"""Reads the configuration's jobs again. Without a file of settings it asks for a stop, as it does of
any program whose terminal goes away.
"""

CLOSE_GRACE_S = 1.0
"""How long open calls may take to end once the engine has stopped."""

_log = logging.getLogger("anarchon")


def version() -> str:
    """Return the version of the installed distribution."""
    return installed_version("anarchon")


def run(config: Config) -> int:
    """Run a sidecar until it is told to stop; return the exit status."""
    lines = logs.set_up(config.log_format, config.log_level, config.store.parts)
    try:
        if armed := os.environ.get(failpoints.ENVIRONMENT):
            failpoints.arm_from(armed)
            _log.warning("failpoints_armed", extra={"fields": {"failpoints": armed}})
        return asyncio.run(_run(config))
    except (AnarchonError, failpoints.UnknownActionError) as error:
        logs.refused(error)
        return REFUSED
    finally:
        _ignore_stop_signals()
        lines.flush()


async def _run(config: Config) -> int:
    return await Sidecar(config).run()


class Sidecar:
    """The parts of one sidecar, and their life.

    `run` raises `AnarchonError` where it cannot start; the message says what to change.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._clock = SystemClock()
        self._store = find_store(config, self._clock)
        self._said_ready: tuple[bool, tuple[str, ...]] | None = None
        self._reopened: asyncio.Task[None] | None = None

    async def run(self) -> int:
        """Serve until a signal; a second one skips the grace."""
        try:
            report = await self._open_store()
        except BaseException:
            await self._store.close()
            raise
        self._loop = self._make_loop(report)
        self._server = Server(self._config, self._loop, version())
        self._probes: Probes | None = None
        try:
            await self._serve(report)
            return await self._until_stopped()
        finally:
            await self._close()

    async def _until_stopped(self) -> int:
        try:
            await self._loop.stopped()
        except AnarchonError:
            raise
        except Exception:  # noqa: BLE001 - logged where it happened
            return CRASHED
        return 0

    # ── The store ───────────────────────────────────────────────────────────────────────────────

    async def _open_store(self) -> StoreReport | None:
        """Return what was found; None where the store is away, which is no reason not to start."""
        try:
            return await self._try_to_open()
        except StoreRefused:
            raise
        except (StoreError, TimeoutError) as error:
            fields = {"error": str(error) or f"no answer within {OPEN_TIMEOUT_S:g} s"}
            _log.warning("store_away_at_start", extra={"fields": fields})
            return None

    async def _try_to_open(self) -> StoreReport:
        return await open_store(self._store, strict=self._config.strict)

    async def _open_store_later(self) -> None:
        pause_s = REOPEN_FIRST_S
        while not self._loop.store_open:
            await asyncio.sleep(random.uniform(pause_s / 2, pause_s))
            pause_s = min(REOPEN_MAX_S, pause_s * 2)
            try:
                report = await self._try_to_open()
            except StoreRefused as error:
                self._loop.fail(error)
                return
            except (StoreError, TimeoutError):
                continue  # said once, at the start
            self._loop.store_open = True
            _log.info("store_opened", extra={"fields": {"store": report.location}})
            _say_findings(report)

    # ── Parts ───────────────────────────────────────────────────────────────────────────────────

    def _make_loop(self, report: StoreReport | None) -> Loop:
        config = self._config
        unverified = "the store could not be reached at start, so nothing about it was verified"
        doubts = tuple(doubt.in_full for doubt in report.doubts) if report else (unverified,)
        settings = Settings(
            instance_id=config.instance_id,
            incarnation=secrets.token_hex(16),
            version=version(),
            tzdata_version=TZDATA_VERSION,
            lease_ms=_ms(config.lease),
            stop_grace_ms=_ms(config.stop_grace),
            max_clock_offset_ms=_ms(config.max_clock_offset),
            history_ms=_ms(config.history),
            history_max=config.history_max,
            doubts=doubts,
            jobs=config.jobs,
        )
        system_random = random.SystemRandom()
        engine = Engine(
            settings,
            self._store.capabilities,
            draw=lambda most: system_random.randint(0, most),
            new_nonce=lambda: secrets.token_hex(16),
        )
        return Loop(
            engine,
            self._store,
            self._clock,
            on_status=self._status_looked_at,
            store_open=report is not None,
        )

    async def _serve(self, report: StoreReport | None) -> None:
        config = self._config
        bound = self._server.bind()
        served: dict[str, object] = {
            "version": version(),
            "instance_id": config.instance_id,
            "namespace": config.namespace,
            "store": report.location if report else f"{_scheme(config)}: (not reached yet)",
            "listen": bound,
        }
        if config.http is not None:
            self._probes = Probes(config.http, self._not_ready)
            served["http"] = await self._probes.start()
        self._handle_signals()
        self._loop.start()
        await self._server.start()
        _log.info("serving", extra={"fields": served})
        if report is not None:
            _say_findings(report)
        else:
            self._reopened = asyncio.create_task(self._open_store_later())

    def _handle_signals(self) -> None:
        """Take every signal to stop as one, also while the process ends.

        Not by the event loop's own handlers: when it closes, it lets go of them, and another signal
        would kill the process before its exit status is told.
        """
        events = asyncio.get_running_loop()

        def stop(_number: int, _frame: object) -> None:
            if not events.is_closed():
                events.call_soon_threadsafe(self._loop.stop)

        def reload(_number: int, _frame: object) -> None:
            if not events.is_closed():
                events.call_soon_threadsafe(self._reload)

        reloads = self._config.file is not None
        if reloads:
            signal.signal(RELOAD_SIGNAL, reload)
        for number in STOP_SIGNALS if reloads else (*STOP_SIGNALS, RELOAD_SIGNAL):
            # Ignored by who started us, as nohup does with SIGHUP: then it stays so.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, stop)

    def _reload(self) -> None:
        """Read the configuration's jobs again; what is wrong with them changes nothing."""
        assert self._config.file is not None, "without a file the signal stops"
        try:
            jobs = load_jobs(self._config.file)
        except AnarchonError as error:
            fields = {"file": str(self._config.file), "error": str(error)}
            _log.error("reload_refused", extra={"fields": fields})
            return
        self._loop.feed(Reload(jobs, str(self._config.file)))

    async def _close(self) -> None:
        if self._reopened is not None:
            self._reopened.cancel()
        if self._probes is not None:
            await self._probes.stop()
        await self._loop.close()
        await self._server.stop(CLOSE_GRACE_S)
        await self._store.close()

    # ── Readiness ───────────────────────────────────────────────────────────────────────────────

    def _not_ready(self) -> tuple[str, ...]:
        """Why callers should not be sent here; empty: they may."""
        return self._reasons(self._loop.status())

    def _reasons(self, status: Status) -> tuple[str, ...]:
        if self._server.address_is_ours:
            return status.reasons
        return (*status.reasons, f"{self._config.listen} no longer leads to this process")

    def _status_looked_at(self, status: Status) -> None:
        """Four times a second; said only when it changes."""
        reasons = self._reasons(status)
        state = (not reasons, reasons)
        if state == self._said_ready:
            return
        first, self._said_ready = self._said_ready is None, state
        self._server.health.set_ready(not reasons)
        if not reasons:
            _log.info("ready")
        elif not first:
            # A stop is no reason to worry: somebody asked for it.
            asked_for = status.instance.state is InstanceState.DRAINING
            level = logging.INFO if asked_for else logging.WARNING
            _log.log(level, "not_ready", extra={"fields": {"reasons": "; ".join(reasons)}})


def _ignore_stop_signals() -> None:
    """Let a signal that comes once all is over change nothing, least of all the exit status.

    Those that nobody handled yet, since the sidecar never served, are left as they are.
    """
    for number in (*STOP_SIGNALS, RELOAD_SIGNAL):
        if signal.getsignal(number) not in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, signal.SIG_IGN)


def _say_findings(report: StoreReport) -> None:
    if report.verified:
        _log.info("store_verified", extra={"fields": {"verified": "; ".join(report.verified)}})
    for doubt in report.doubts:
        fields = {"doubt": doubt, "kind": "unverified" if doubt.unverified else "warning"}
        _log.warning(
            "store_doubt", extra={"fields": fields | ({"fix": doubt.fix} if doubt.fix else {})}
        )


def _scheme(config: Config) -> str:
    return config.store.reveal().partition(":")[0]


def _ms(duration: timedelta) -> int:
    return duration // timedelta(milliseconds=1)
