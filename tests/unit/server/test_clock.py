"""The machine's clocks, and pauses (S3, S4)."""

from __future__ import annotations

import asyncio

from anarchon_server.clock import PAUSE_MS, PULSE_MS, PauseDetector, SystemClock, sleep
from anarchon_server.testing import VirtualClock


def test_s03_the_boot_clock_only_goes_forward_and_names_its_boot() -> None:
    clock = SystemClock()
    readings = [clock.boot_ms() for _ in range(1_000)]
    assert readings == sorted(readings)
    assert clock.boot_id == SystemClock().boot_id != ""


def test_the_wall_clock_is_in_microseconds_since_the_epoch() -> None:
    assert SystemClock().wall_us() > 1_700_000_000_000_000


async def test_a_timer_never_fires_before_its_time() -> None:
    clock = SystemClock()
    for wait_ms in (0, 1, 3, 7):
        at = clock.boot_ms() + wait_ms
        fired = asyncio.get_running_loop().create_future()
        clock.call_at(at, lambda fired=fired: fired.set_result(clock.boot_ms()))  # type: ignore[misc]
        assert await fired >= at


async def test_a_cancelled_timer_does_not_fire() -> None:
    clock = VirtualClock(0)
    fired: list[str] = []
    clock.call_at(clock.boot_ms() + 5, lambda: fired.append("cancelled")).cancel()
    clock.call_at(clock.boot_ms() + 5, lambda: fired.append("kept"))
    clock.move_to(clock.boot_ms() + 5)
    assert fired == ["kept"]


async def test_sleep_waits_on_the_clock_it_is_given() -> None:
    clock = VirtualClock(0)
    sleeper = asyncio.create_task(sleep(clock, 60_000))
    await asyncio.sleep(0)
    clock.move_to(clock.boot_ms() + 59_999)
    await asyncio.sleep(0)
    assert not sleeper.done()
    clock.move_to(clock.boot_ms() + 1)
    await sleeper


def test_s04_a_pulse_that_is_late_by_more_than_a_second_is_a_pause() -> None:
    detector = PauseDetector(now=0)
    late = PULSE_MS + PAUSE_MS
    assert detector.gap_ms(late) == 0
    assert detector.gap_ms(late + 1) == late + 1


def test_s04_a_pause_is_told_once() -> None:
    detector = PauseDetector(now=0)
    assert detector.gap_ms(60_000) == 60_000
    assert detector.gap_ms(60_001) == 0
    detector.pulse(60_250)
    assert detector.gap_ms(61_500) == 0
