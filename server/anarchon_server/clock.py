"""The machine's clocks, and whether the process was stopped meanwhile. The only module that reads
time; imports the standard library and the port.

Waiting and trust use a clock that only goes forward and counts suspend (S3); the wall clock only
names slots, and only for stores that have no clock of their own.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Protocol

from anarchon_server.core.store import StoreClock

PULSE_MS = 250
"""How often the loop proves to itself that it still runs."""

PAUSE_MS = 1_000
"""A pulse that comes later than expected by more than this means that the process was stopped."""

# macOS has no CLOCK_BOOTTIME; its CLOCK_MONOTONIC counts suspend, unlike time.monotonic() there.
_BOOT_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")


class Timer(Protocol):
    """A call that is to come."""

    def cancel(self) -> None:
        """Makes it not come."""
        ...


class Clock(StoreClock, Protocol):
    """The machine's clocks and timers on the boot-time clock. Tests put their own in its place."""

    def call_at(self, boot_at: int, callback: Callable[[], None]) -> Timer:
        """Call `callback` on the running event loop once `boot_ms` has reached `boot_at`.

        It may come late: a timer does not notice that the machine slept.
        """
        ...


class SystemClock:
    """The clocks of the machine it runs on."""

    def wall_us(self) -> int:
        """Return microseconds since the epoch; the clock may be stepped either way."""
        return time.time_ns() // 1_000

    def boot_ms(self) -> int:
        """Return milliseconds on a clock that only goes forward and counts suspend."""
        return time.clock_gettime_ns(_BOOT_CLOCK) // 1_000_000

    @cached_property
    def boot_id(self) -> str:
        """Which boot `boot_ms` belongs to."""
        if sys.platform == "darwin":
            command = ["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"]
            return subprocess.run(
                command, capture_output=True, text=True, check=True, timeout=5
            ).stdout.strip()
        return _BOOT_ID_FILE.read_text(encoding="ascii").strip()

    def call_at(self, boot_at: int, callback: Callable[[], None]) -> Timer:
        """Call `callback` on the running event loop once `boot_ms` has reached `boot_at`."""
        # `boot_ms` is rounded down, so the wait is never too short.
        wait_ms = max(0, boot_at - self.boot_ms())
        return asyncio.get_running_loop().call_later(wait_ms / 1_000, callback)


async def sleep(clock: Clock, duration_ms: int) -> None:
    """Wait on `clock`."""
    over = asyncio.get_running_loop().create_future()
    timer = clock.call_at(
        clock.boot_ms() + duration_ms, lambda: None if over.done() else over.set_result(None)
    )
    try:
        await over
    finally:
        timer.cancel()


class PauseDetector:
    """Notices that the process did not run for a while: stopped, or the machine slept (S4).

    `pulse` is called every `every_ms`; `gap_ms` before anything is done, so that nothing is done
    on the strength of what was true before the pause.
    """

    def __init__(self, now: int, every_ms: int = PULSE_MS) -> None:
        self._pulse_at = now
        self._every_ms = every_ms

    def gap_ms(self, now: int) -> int:
        """Return how long the process did not run (0: it did), and begin to watch anew."""
        late_ms = now - self._pulse_at - self._every_ms
        if late_ms <= PAUSE_MS:
            return 0
        self._pulse_at = now
        return late_ms + self._every_ms

    def pulse(self, now: int) -> None:
        """Note that the process runs."""
        self._pulse_at = now
