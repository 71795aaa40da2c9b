"""A sidecar whose store is away at start, turns out to be unusable, or meets a mistake of ours."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Iterator
from typing import cast

import pytest

from anarchon_server import app, opening
from anarchon_server.app import CRASHED, Sidecar
from anarchon_server.clock import SystemClock
from anarchon_server.core.errors import StoreError, StoreRefused, StoreUnavailable
from anarchon_server.core.store import OpenOptions, Store, StoreReport
from anarchon_server.opening import open_store
from tests.unit.server.sidecars import make_config


class Away:
    """A store that cannot be opened at first, with these errors one after the other."""

    def __init__(self, *errors: StoreError) -> None:
        self.errors = list(errors)
        self.real = open_store("memory:", OpenOptions("default", SystemClock()))

    def __getattr__(self, name: str) -> object:
        return getattr(self.real, name)

    async def open(self) -> StoreReport:
        if self.errors:
            raise self.errors.pop(0)
        return await self.real.open()


class Lines(logging.Handler):
    """The log's events, each of which can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.events: asyncio.Queue[str] = asyncio.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self.events.put_nowait(record.getMessage())

    async def until(self, event: str) -> list[str]:
        before: list[str] = []
        async with asyncio.timeout(20):
            while (said := await self.events.get()) != event:
                before.append(said)
        return before


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Lines:
    monkeypatch.setattr(app, "REOPEN_FIRST_S", 0.01)
    monkeypatch.setattr(app, "REOPEN_MAX_S", 0.01)
    handler = Lines()
    logger = logging.getLogger("anarchon")
    monkeypatch.setattr(logger, "handlers", [handler])
    caplog.set_level(logging.INFO, "anarchon")
    return handler


@pytest.fixture(autouse=True)
def _signals_are_left_as_they_were() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in app.STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def sidecar_on(store: Away, monkeypatch: pytest.MonkeyPatch, **flags: str) -> Sidecar:
    monkeypatch.setattr(opening, "open_store", lambda *_: cast("Store", store))
    return Sidecar(make_config(**flags))


async def test_s27_a_store_that_is_away_at_start_is_tried_until_it_is_there(
    lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    sidecar = sidecar_on(Away(*[StoreUnavailable("no route")] * 3), monkeypatch)
    running = asyncio.create_task(sidecar.run())
    assert await lines.until("serving") == ["store_away_at_start", "store_away"]
    assert sidecar._not_ready() != ()
    assert await lines.until("store_opened") == []
    await lines.until("ready")
    assert sidecar._not_ready() == ()
    (doubt,) = sidecar._loop.status().instance.doubts
    assert "nothing about it was verified" in doubt
    sidecar._loop.stop()
    assert await running == 0


async def test_a_store_that_turns_out_to_be_unusable_ends_the_sidecar(
    lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Away(StoreUnavailable("no route"), StoreRefused("format 9 is not known: upgrade"))
    sidecar = sidecar_on(store, monkeypatch)
    with pytest.raises(StoreRefused, match="upgrade"):
        await sidecar.run()


async def test_s27_strict_is_as_strict_with_a_store_that_was_away_at_start(
    lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    sidecar = sidecar_on(Away(StoreUnavailable("no route")), monkeypatch, strict="true")
    with pytest.raises(StoreRefused, match=r"2 doubts: .*everything is lost.*no other instance"):
        await sidecar.run()


async def test_the_doubts_of_a_store_that_was_away_at_start_are_said(
    lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    sidecar = sidecar_on(Away(StoreUnavailable("no route")), monkeypatch)
    running = asyncio.create_task(sidecar.run())
    await lines.until("store_opened")
    assert [await lines.events.get() for _ in range(2)] == ["store_doubt"] * 2
    sidecar._loop.stop()
    assert await running == 0


async def test_a_store_that_is_refused_at_start_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Away(StoreRefused("no"))
    closed: list[bool] = []

    async def close() -> None:
        closed.append(True)

    monkeypatch.setattr(store.real, "close", close)
    with pytest.raises(StoreRefused):
        await sidecar_on(store, monkeypatch).run()
    assert closed == [True]


async def test_a_mistake_of_ours_ends_the_process_with_its_own_status(
    lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    sidecar = sidecar_on(Away(), monkeypatch)
    running = asyncio.create_task(sidecar.run())
    await lines.until("serving")

    def broken(*_: object) -> None:
        raise AssertionError("impossible")

    monkeypatch.setattr(sidecar._loop._engine, "step", broken)
    sidecar._loop.stop()
    assert await running == CRASHED
