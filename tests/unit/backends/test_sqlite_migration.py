"""SQLite files of earlier versions: `sqlite_version_N.sql` is what that version wrote."""

# ruff: noqa: ASYNC240 - these tests are about files

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from anarchon_backends.sqlite import _file, open_store
from anarchon_server.core.errors import StoreRefused
from anarchon_server.core.model import AttemptCause, OverlapPolicy, Reason, RunState
from anarchon_server.core.store import ClaimOutcome, OpenOptions, Store, TriggerRun
from tests.contract.harness import PERIOD, T0, Cluster, FakeClock, Node

HERE = Path(__file__).parent
NOW = T0 + 4 * PERIOD  # when the file was written
OPENERS = 20


def options() -> OpenOptions:
    return OpenOptions("default", FakeClock())


class _Database:
    """A file, as the contract suite's clusters want it."""

    def __init__(self, path: Path) -> None:
        self.url = f"sqlite://{path}"

    def store(self, options: OpenOptions) -> Store:
        return open_store(self.url, options)


@pytest.fixture(params=[1])
def version(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


@pytest.fixture
def path(version: int, tmp_path: Path) -> Path:
    """A file that an earlier version wrote: four slots, one of them in progress."""
    made = tmp_path / "anarchon.db"
    with closing(sqlite3.connect(made)) as db:
        db.executescript((HERE / f"sqlite_version_{version}.sql").read_text())
    return made


def asked(path: Path, sql: str) -> list[Any]:
    with closing(sqlite3.connect(path)) as db:
        return db.execute(sql).fetchall()


def schema(path: Path) -> dict[str, Any]:
    """Every table's columns and every index, as SQLite sees them."""
    names = asked(path, "SELECT name, type FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'")
    return {
        name: asked(path, f"PRAGMA {'table_xinfo' if kind == 'table' else 'index_xinfo'}({name})")
        for name, kind in names
    }


async def reopened(path: Path) -> tuple[Cluster, Node]:
    cluster = Cluster(_Database(path))
    cluster.advance_to(NOW)
    node = await cluster.node("host:1")
    return cluster, node


async def test_an_earlier_versions_file_becomes_one_of_the_present(
    path: Path, version: int, tmp_path: Path
) -> None:
    cluster, _ = await reopened(path)
    report = await cluster.nodes[0].store.open()
    await cluster.stack.aclose()
    fresh = tmp_path / "fresh.db"
    async with (await reopened(fresh))[0].stack:
        pass
    assert schema(path) == schema(fresh)
    assert asked(path, "PRAGMA user_version") == asked(fresh, "PRAGMA user_version") != [(version,)]
    assert not any("brought from" in text for text in report.verified), "only once"


async def test_the_report_says_that_the_file_was_brought_to_the_present_version(
    path: Path, version: int
) -> None:
    store = open_store(f"sqlite://{path}", options())
    report = await store.open()
    await store.close()
    assert any(f"from schema version {version} to" in text for text in report.verified)


async def test_what_an_earlier_version_wrote_is_kept(path: Path) -> None:
    cluster, node = await reopened(path)
    async with cluster.stack:
        assert await node.states() == {
            10: RunState.SUCCESS,
            20: RunState.FAILED,
            30: RunState.CLAIMED,
            40: (RunState.SKIPPED, Reason.OVERLAP),
        }
        running = await node.run(T0 + 3 * PERIOD)
        assert running is not None
        assert [a.cause for a in running.attempts] == [AttemptCause.CLAIM, AttemptCause.TAKEOVER]
        assert running.lease_left_ms == 30_000
        run = running.run
        assert (run.retries, run.retry_at, run.retry_delay_ms, run.request_id) == (0, None, 0, "")
        (job,) = (await node.store.jobs(["job"], "", 1)).answers
        assert (job.paused_at, job.pause_reason) == (None, "")
        assert await node.settled() == NOW


async def test_what_an_earlier_version_began_goes_on(path: Path) -> None:
    cluster, node = await reopened(path)
    async with cluster.stack:
        seen = await node.look(T0 + 3 * PERIOD)
        assert seen is not None
        holder = {"incarnation": seen.run.current.incarnation} if seen.run.current else {}
        assert (await node.renew(seen, **holder)).outcome == "renewed"
        await node.complete(seen)
        cluster.advance(PERIOD)
        await node.win(NOW + PERIOD)
        trigger = TriggerRun("job", "r-1", b"p", (), cluster.now + PERIOD, OverlapPolicy.ALLOW, 0)
        (answer,) = (await node.store.control([trigger])).answers
        assert answer.run is not None
        won = await node.claim(answer.run.run.slot, overlap=OverlapPolicy.ALLOW)
        assert (won.outcome, won.payload) == (ClaimOutcome.WON, b"p")


async def test_of_twenty_that_open_an_earlier_versions_file_at_once_one_brings_it_along(
    path: Path,
) -> None:
    stores = [open_store(f"sqlite://{path}", options()) for _ in range(OPENERS)]
    reports = await asyncio.gather(*(store.open() for store in stores))
    brought = [r for r in reports if any("brought from" in text for text in r.verified)]
    assert len(brought) == 1
    histories = await asyncio.gather(*(store.jobs([], "", 10) for store in stores))
    assert [len(reply.answers) for reply in histories] == [1] * OPENERS
    assert len({reply.store_id for reply in histories}) == 1
    await asyncio.gather(*(store.close() for store in stores))


async def test_a_migration_that_fails_leaves_the_file_as_it_was(
    path: Path, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = schema(path)
    broken = _file._MIGRATIONS[version] + "; INSERT INTO nowhere VALUES (1)"
    with monkeypatch.context() as patch:
        patch.setitem(_file._MIGRATIONS, version, broken)
        with pytest.raises(StoreRefused, match="nowhere"):
            await reopened(path)
    assert schema(path) == before
    assert asked(path, "PRAGMA user_version") == [(version,)]
    cluster, node = await reopened(path)
    async with cluster.stack:
        assert len(await node.states()) == 4


async def test_a_file_of_a_later_version_is_refused_and_not_touched(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {_file._SCHEMA_VERSION + 1}")
    before = path.read_bytes()
    with pytest.raises(StoreRefused, match="run the version that wrote it"):
        await reopened(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("version", [1], indirect=True)
async def test_what_still_runs_the_earlier_version_fails_rather_than_clears_what_it_does_not_know(
    path: Path,
) -> None:
    """Version 1 writes whole rows, by these statements."""
    cluster, _ = await reopened(path)
    await cluster.stack.aclose()
    with closing(sqlite3.connect(path)) as db:
        for table, values in (("job", 7), ("run", 23)):
            marks = ", ".join("?" * values)
            with pytest.raises(sqlite3.OperationalError, match="values were supplied"):
                db.execute(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", [1] * values)


async def test_a_library_without_strict_tables_brings_a_file_along(path: Path) -> None:
    """Its own files have none either; the statements must not fail for the word."""
    file = _file.File(path, (3, 36, 0), None, 1_000)
    file.open().close()
    assert asked(path, "PRAGMA user_version") == [(_file._SCHEMA_VERSION,)]
