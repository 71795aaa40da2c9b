"""The SQLite store and what it stands on: files, libraries, other processes, bounds, loss."""

# ruff: noqa: ASYNC240 - these tests are about files

from __future__ import annotations

import asyncio
import fcntl
import os
import resource
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest

from anarchon_backends.sqlite import SqliteStore, _file, open_store
from anarchon_backends.sqlite._file import wal_is_safe
from anarchon_backends.sqlite._rows import Rows
from anarchon_server.clock import SystemClock
from anarchon_server.core import messages
from anarchon_server.core.engine import Status
from anarchon_server.core.errors import OutcomeUnknown, StoreRefused, StoreUnavailable
from anarchon_server.core.model import Instance, JobSpec, Outcome, OverlapPolicy
from anarchon_server.core.policy import Job
from anarchon_server.core.store import Completion, Doubt, OpenOptions, RunQuery, Store
from anarchon_server.loop import Loop
from tests.contract.harness import PERIOD, T0, Cluster, FakeClock, Node, definition

SLOT = T0 + PERIOD
FIXED = (3, 53, 0)
CONNECTION = "_connection_worker_thread"  # how aiosqlite's threads are named
HERE = Path(__file__).parent
ROOT = HERE.parents[2]


class _Database:
    """A file, as the contract suite's clusters want it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = f"sqlite://{path}"

    def store(self, options: OpenOptions) -> Store:
        return open_store(self.url, options)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    made = Cluster(_Database(tmp_path / "anarchon.db"))
    async with made.stack:
        yield made


def options() -> OpenOptions:
    return OpenOptions("default", FakeClock())


async def test_s30_a_late_page_of_a_long_history_costs_what_the_first_does(
    cluster: Cluster,
) -> None:
    """By what the library does, not by the clock."""
    node = await cluster.node()
    jobs = [f"job-{number:02}" for number in range(50)]
    await node.register(*(definition(job) for job in jobs))
    for number in range(1, 41):
        cluster.advance_to(T0 + number * PERIOD)
        claims = [node.wish(cluster.now, job=job) for job in jobs]
        await node.store.claim(claims)
        outcome = Outcome()
        await node.store.complete([Completion(c.job, c.slot, c.token, outcome) for c in claims])

    def steps(query: RunQuery) -> int:
        count = 0

        def step() -> None:
            nonlocal count
            count += 1

        with closing(sqlite3.connect(cluster.database.url.removeprefix("sqlite://"))) as db:
            db.row_factory = sqlite3.Row
            db.set_progress_handler(step, 10)
            page = Rows(db, OpenOptions("default", cluster.clock)).history(query)
        assert len(page) == query.limit
        return count

    first = steps(RunQuery(limit=50))
    late = steps(RunQuery(limit=50, after=(T0 + 2 * PERIOD, "job-25")))
    assert late < 2 * first


# URLs


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("sqlite:///var/lib/a.db", "/var/lib/a.db"),
        ("sqlite:a.db", "a.db"),
        ("sqlite:some dir/a b.db", "some dir/a b.db"),
    ],
)
def test_the_two_forms_of_url(url: str, path: str) -> None:
    store = open_store(url, options())
    assert isinstance(store, SqliteStore)
    assert str(store) == f"sqlite file {Path(path).resolve()}"


@pytest.mark.parametrize(
    "url",
    [
        "sqlite:",
        "sqlite://",
        "sqlite:///",
        "sqlite://host/a.db",
        "sqlite://user:secret@host/a.db",
        "sqlite::memory:",
        "sqlite:a.db?mode=ro",
        "sqlite:///a.db#x",
        "sqlite3:a.db",
        "postgresql://user:secret@host/db",
    ],
)
def test_any_other_form_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(StoreRefused, match=r"sqlite:///absolute/path\.db or") as caught:
        open_store(url, options())
    assert "secret" not in str(caught.value)


def test_nothing_is_touched_before_open(tmp_path: Path) -> None:
    open_store(f"sqlite://{tmp_path}/a.db", options())
    assert list(tmp_path.iterdir()) == []


# Opening


async def opened(path: Path, **given: object) -> SqliteStore:
    store = SqliteStore(path, options(), **given)  # type: ignore[arg-type]
    await store.open()
    return store


async def refusal(path: Path, **given: object) -> str:
    store = SqliteStore(path, options(), **given)  # type: ignore[arg-type]
    with pytest.raises(StoreRefused) as caught:
        await store.open()
    await store.close()
    return str(caught.value)


async def test_a_new_file_is_its_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = await opened(tmp_path / "a.db")
    finally:
        os.umask(before)
    await store.close()
    assert stat.S_IMODE((tmp_path / "a.db").stat().st_mode) == 0o600


async def test_a_file_that_others_may_read_is_doubted(tmp_path: Path) -> None:
    await (await opened(tmp_path / "a.db")).close()
    (tmp_path / "a.db").chmod(0o644)
    store = SqliteStore(tmp_path / "a.db", options())
    report = await store.open()
    await store.close()
    (doubt,) = report.doubts
    assert isinstance(doubt, Doubt)
    assert "mode 0644" in doubt
    assert doubt.fix == f"chmod 600 {tmp_path / 'a.db'}"
    assert not doubt.unverified


async def test_the_report_says_what_holds(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "a.db", options())
    report = await store.open()
    await store.close()
    assert report.location == f"sqlite file {tmp_path / 'a.db'}"
    text = "; ".join(report.verified)
    for word in (sqlite3.sqlite_version, "no damage", "mode 0600", "local file system"):
        assert word in text


async def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    assert "make it first" in await refusal(tmp_path / "no" / "a.db")


async def test_a_directory_as_the_file_is_refused(tmp_path: Path) -> None:
    assert "is a directory" in await refusal(tmp_path)


async def test_a_directory_that_cannot_be_written_is_refused() -> None:
    message = await refusal(Path("/proc/anarchon.db"))
    assert "cannot write to /proc" in message


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
async def test_a_directory_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert f"cannot write to {tmp_path}" in await refusal(tmp_path / "a.db")


async def test_what_is_not_a_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.db").write_text(
        "something else entirely, and long enough to be read as a header" * 9
    )
    assert "not a database" in await refusal(tmp_path / "a.db")


async def test_another_programs_database_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "a.db") as db:
        db.execute("CREATE TABLE theirs (x)")
    db.close()
    assert "another program's database" in await refusal(tmp_path / "a.db")
    with sqlite3.connect(tmp_path / "a.db") as db:
        assert db.execute("SELECT name FROM sqlite_master").fetchall() == [("theirs",)]
    db.close()


async def test_an_unknown_schema_version_is_refused_with_what_to_do(tmp_path: Path) -> None:
    await (await opened(tmp_path / "a.db")).close()
    with sqlite3.connect(tmp_path / "a.db") as db:
        db.execute("PRAGMA user_version = 7")
    db.close()
    message = await refusal(tmp_path / "a.db")
    assert "schema version 7" in message
    assert "run the version that wrote it" in message


async def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    await (await opened(path)).close()
    data = bytearray(path.read_bytes())
    data[4096 + 100 : 2 * 4096] = b"\xff" * 3996
    data[3 * 4096 : 4 * 4096] = b"\xff" * 4096
    path.write_bytes(data)
    message = await refusal(path)
    assert "damaged" in message or "malformed" in message


async def test_an_opening_that_another_process_does_not_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_file, "_OPEN_S", 0.05)
    fd = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    assert "another process has been opening it" in await refusal(tmp_path / "a.db")
    os.close(fd)
    await (await opened(tmp_path / "a.db")).close()


async def test_a_file_that_is_locked_all_the_time_is_refused(tmp_path: Path) -> None:
    await (await opened(tmp_path / "a.db")).close()
    other = sqlite3.connect(tmp_path / "a.db", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    store = SqliteStore(tmp_path / "a.db", OpenOptions("default", FakeClock(), op_timeout_ms=100))
    with pytest.raises(StoreRefused, match="locked"):
        await store.open()
    other.close()
    assert (await store.open()).doubts == ()
    await store.close()


async def test_the_look_for_damage_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_file, "_CHECK_S", 0)
    monkeypatch.setattr(_file, "_CHECK_STEPS", 1)
    store = SqliteStore(tmp_path / "a.db", options())
    report = await store.open()
    await store.close()
    assert any("too large to be checked" in doubt for doubt in report.doubts)


async def test_little_room_is_doubted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_file, "_ROOM_MIN", 1 << 62)
    store = SqliteStore(tmp_path / "a.db", options())
    report = await store.open()
    await store.close()
    assert any("MiB are free" in doubt for doubt in report.doubts)


MOUNTS = """\
22 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw
30 22 0:40 / {at} rw,relatime shared:9 - {kind} server:/export rw,vers=4.2
31 22 0:41 / /elsewhere rw - nfs4 server:/other rw
"""


@pytest.mark.parametrize(
    "kind", ["nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "fuse.sshfs", "ceph"]
)
async def test_a_file_system_shared_between_hosts_is_refused(tmp_path: Path, kind: str) -> None:
    mounts = MOUNTS.format(at=tmp_path, kind=kind)
    message = await refusal(tmp_path / "a.db", mountinfo=mounts)
    assert f"on a {kind} file system" in message
    assert not (tmp_path / "a.db").exists()


async def test_a_shared_mount_with_a_space_in_its_name_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "with space é"
    directory.mkdir()
    mounts = MOUNTS.format(at=str(directory).replace(" ", "\\040"), kind="nfs")
    assert "nfs" in await refusal(directory / "a.db", mountinfo=mounts)


async def test_a_link_to_a_shared_file_system_is_refused(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "here.db").symlink_to(tmp_path / "there" / "a.db")
    mounts = MOUNTS.format(at=tmp_path / "there", kind="nfs")
    assert "nfs" in await refusal(tmp_path / "here.db", mountinfo=mounts)


@pytest.mark.parametrize(
    ("kind", "doubt"), [("tmpfs", "lost when the machine restarts"), ("overlay", ""), ("ext4", "")]
)
async def test_a_local_file_system_serves(tmp_path: Path, kind: str, doubt: str) -> None:
    store = SqliteStore(
        tmp_path / "a.db", options(), mountinfo=MOUNTS.format(at=tmp_path, kind=kind)
    )
    report = await store.open()
    await store.close()
    assert (doubt in "".join(report.doubts)) if doubt else report.doubts == ()


async def test_where_the_file_system_is_unknown_it_is_doubted(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "a.db", options(), mountinfo="")
    report = await store.open()
    await store.close()
    (doubt,) = report.doubts
    assert isinstance(doubt, Doubt)
    assert "could not be found out" in doubt
    assert doubt.unverified


# The WAL-reset bug


@pytest.mark.parametrize(
    ("library", "safe"),
    [
        ((3, 40, 1), False),
        ((3, 44, 5), False),
        ((3, 44, 6), True),
        ((3, 45, 0), False),
        ((3, 50, 6), False),
        ((3, 50, 7), True),
        ((3, 51, 2), False),
        ((3, 51, 3), True),
        ((3, 52, 0), False),
        ((3, 53, 0), True),
        ((4, 0, 0), True),
    ],
)
def test_wal_is_used_only_where_its_bug_is_fixed(
    library: tuple[int, int, int], *, safe: bool
) -> None:
    assert wal_is_safe(library) is safe


def journal_of(path: Path) -> str:
    db = sqlite3.connect(path)
    (mode,) = db.execute("PRAGMA journal_mode").fetchone()
    db.close()
    return str(mode)


async def test_a_fixed_library_makes_a_wal_file_and_an_older_one_refuses_it(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    store = SqliteStore(path, options(), library=FIXED)
    report = await store.open()
    assert any("journal wal, synchronous FULL" in each for each in report.verified)
    await store.close()
    assert journal_of(path) == "wal"
    message = await refusal(path, library=(3, 40, 1))
    assert "WAL-reset bug" in message
    assert "3.51.3 or newer in every instance" in message


async def test_a_file_without_wal_stays_so_under_a_fixed_library(tmp_path: Path) -> None:
    """An instance with an older library may be using it."""
    path = tmp_path / "a.db"
    old = await opened(path, library=(3, 40, 1))
    new = SqliteStore(path, options(), library=FIXED)
    report = await new.open()
    assert any("journal truncate, synchronous EXTRA" in each for each in report.verified)
    await new.close()
    await old.close()
    assert journal_of(path) != "wal"


async def test_a_library_without_strict_tables_serves(tmp_path: Path) -> None:
    store = await opened(tmp_path / "a.db", library=(3, 36, 0))
    await store.close()
    with sqlite3.connect(tmp_path / "a.db") as db:
        assert not db.execute("SELECT 1 FROM sqlite_master WHERE sql LIKE '%STRICT%'").fetchall()
    db.close()


async def test_wal_carries_the_same_claims(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    clock = FakeClock()
    stores = [SqliteStore(path, OpenOptions("default", clock), library=FIXED) for _ in range(2)]
    for store in stores:
        await store.open()
    cluster = Cluster(_Database(path), clock)
    first, second = (Node(cluster, store, f"h{n}", f"i{n}") for n, store in enumerate(stores))
    await first.register()
    cluster.advance_to(SLOT)
    answers = await asyncio.gather(first.claim(SLOT), second.claim(SLOT))
    assert sorted(a.outcome for a in answers) == ["lost", "won"]
    for store in stores:
        await store.close()


# Bounds


async def threads_to_end() -> None:
    """Waits for the threads of connections that were closed."""
    for thread in threading.enumerate():
        if CONNECTION in thread.name:
            await asyncio.to_thread(thread.join, 10)


class HeldClock(FakeClock):
    """A clock that can be held in the midst of a transaction, after the lock was taken."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.go.set()
        self.entered = threading.Event()

    def wall_us(self) -> int:
        self.entered.set()
        self.go.wait(20)
        return super().wall_us()


@pytest.fixture
async def held(tmp_path: Path) -> AsyncIterator[tuple[Node, HeldClock]]:
    clock = HeldClock()
    cluster = Cluster(_Database(tmp_path / "anarchon.db"), clock)
    async with cluster.stack:
        node, patient = await cluster.node(op_timeout_ms=300), await cluster.node()
        await patient.register()
        cluster.advance_to(SLOT)
        clock.go.clear()
        clock.entered.clear()
        yield node, clock
        clock.go.set()


async def test_s11_a_call_that_takes_too_long_is_unknown_and_those_behind_it_are_not_done(
    held: tuple[Node, HeldClock],
) -> None:
    node, clock = held
    claim = node.wish(SLOT)
    first = asyncio.create_task(node.ask(claim))
    await asyncio.to_thread(clock.entered.wait, 5)
    second = asyncio.create_task(node.ask(node.wish(SLOT)))
    with pytest.raises(OutcomeUnknown, match="not done within 262 ms"):
        await first
    with pytest.raises(StoreUnavailable, match="not begun within 262 ms"):
        await second
    clock.go.set()
    again = await node.ask(claim)
    assert again.outcome == "won", "it was done after all, and is recognised by its token"
    assert len(await node.history()) == 1


class Two:
    """An engine that makes two calls when it is woken, and keeps how they failed."""

    wake_at = None

    def __init__(self, node: Node) -> None:
        self._wishes = [node.wish(SLOT), node.wish(SLOT)]
        self.failed: list[messages.StoreFailed] = []

    def step(self, _now: int, event: messages.Input) -> list[messages.Command]:
        if isinstance(event, messages.StoreFailed):
            self.failed.append(event)
        if not isinstance(event, messages.Woken):
            return []
        return [
            messages.CallStore(number, messages.Method.CLAIM, ((wish,),), timeout_ms=1_000)
            for number, wish in enumerate(self._wishes)
        ]

    def status(self, _now: int) -> Status:
        return Status(True, True, (), Instance("a:1", "aa"), ())

    def resolve(self, spec: JobSpec, wall_at: int) -> Job:
        raise NotImplementedError

    def resolve_stored(self, spec: JobSpec, wall_at: int) -> Job:
        raise NotImplementedError


async def test_s11_the_loop_hears_which_calls_were_not_begun(tmp_path: Path) -> None:
    """The loop's own limit, as long as the one that the store was opened with, comes too late."""
    clock = HeldClock()
    cluster = Cluster(_Database(tmp_path / "anarchon.db"), clock)
    async with cluster.stack:
        node = await cluster.node(op_timeout_ms=1_000)
        await node.register()
        engine = Two(node)
        loop = Loop(engine, node.store, SystemClock())
        clock.go.clear()
        loop.feed(messages.Woken())
        await loop.settled()
        clock.go.set()
        assert {each.call_id: each.unknown for each in engine.failed} == {0: True, 1: False}
        await loop.close()


async def test_s11_a_cancelled_call_may_have_been_done(held: tuple[Node, HeldClock]) -> None:
    node, clock = held
    claim = node.wish(SLOT)
    task = asyncio.create_task(node.ask(claim))
    await asyncio.to_thread(clock.entered.wait, 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    clock.go.set()
    assert (await node.ask(claim)).outcome == "won"


async def test_closing_does_not_wait_for_ever(held: tuple[Node, HeldClock]) -> None:
    node, clock = held
    task = asyncio.create_task(node.claim(SLOT))
    await asyncio.to_thread(clock.entered.wait, 5)
    async with asyncio.timeout(5):
        await node.store.close()
    with pytest.raises(OutcomeUnknown):
        await task
    clock.go.set()
    await threads_to_end()


async def test_a_busy_file_is_unavailable_and_nothing_was_done(cluster: Cluster) -> None:
    node, hurried = await cluster.node(), await cluster.node(op_timeout_ms=400)
    await node.register()
    cluster.advance_to(SLOT)
    other = sqlite3.connect(cluster.database.url.removeprefix("sqlite://"), isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailable, match=r"locked|not begun"):  # on a busy machine, neither
        await hurried.claim(SLOT)
    other.execute("ROLLBACK")
    other.close()
    assert await node.history() == []
    assert (await node.claim(SLOT)).outcome == "won"


async def test_s11_a_call_whose_time_ends_while_it_waits_for_a_locked_file_was_not_done(
    cluster: Cluster,
) -> None:
    node = await cluster.node(op_timeout_ms=1_000)
    await node.register()
    cluster.advance_to(SLOT)
    other = sqlite3.connect(cluster.database.url.removeprefix("sqlite://"), isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    first = asyncio.create_task(node.ask(node.wish(SLOT)))
    second = asyncio.create_task(node.ask(node.wish(SLOT)))
    with pytest.raises(StoreUnavailable, match=r"locked|not begun"):  # on a busy machine, neither
        await first
    with pytest.raises(StoreUnavailable, match="not begun within 875 ms"):
        await second
    other.execute("ROLLBACK")
    other.close()
    assert await node.history() == [], "nor is it done later"
    assert (await node.claim(SLOT)).outcome == "won"


async def test_a_closed_store_is_unavailable(cluster: Cluster) -> None:
    node = await cluster.node()
    await node.store.close()
    with pytest.raises(StoreUnavailable, match="not open"):
        await node.claim(SLOT)


async def test_a_file_that_was_removed_or_replaced_is_noticed(cluster: Cluster) -> None:
    """Else two instances would each have a file of their own, and two winners a slot."""
    node = await cluster.node()
    await node.register()
    path = Path(cluster.database.url.removeprefix("sqlite://"))
    path.rename(path.with_suffix(".old"))
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="removed or replaced"):
            await node.claim(SLOT)
        path.write_bytes(path.with_suffix(".old").read_bytes())


async def test_a_watch_of_a_file_that_was_removed_or_replaced_says_so(cluster: Cluster) -> None:
    """The sidecar watches again and again: each time it hears what an operator must know."""
    node = await cluster.node()
    path = Path(cluster.database.url.removeprefix("sqlite://"))
    path.rename(path.with_suffix(".old"))
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="removed or replaced"):
            await anext(node.store.watch())
        path.write_bytes(path.with_suffix(".old").read_bytes())


async def test_a_watch_that_cannot_connect_finds_the_store_unavailable(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file goes between the look at its place and the connecting."""
    node = await cluster.node()
    path = Path(cluster.database.url.removeprefix("sqlite://"))
    monkeypatch.setattr(_file.File, "check_in_place", lambda _file: path.unlink())
    with pytest.raises(StoreUnavailable, match="unable to open database file"):
        await anext(node.store.watch())


async def test_a_full_disk_is_unavailable_with_its_reason_and_passes(cluster: Cluster) -> None:
    """The file may not grow (RLIMIT_FSIZE), then it may again."""
    node = await cluster.node()
    await node.register()
    cluster.advance_to(SLOT)
    size = Path(cluster.database.url.removeprefix("sqlite://")).stat().st_size
    definitions = [definition(f"job-{n}", labels=(("x", "y" * 120),)) for n in range(400)]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        with pytest.raises(StoreUnavailable, match="disk"):
            await node.register(*definitions)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len((await node.store.jobs((), "", 500)).answers) == 1
    assert len(await node.register(*definitions)) == 400


async def test_an_error_of_ours_is_not_hidden_and_rolls_back(cluster: Cluster) -> None:
    node = await cluster.node()
    await node.register()
    cluster.advance_to(SLOT)
    wrong = node.wish(SLOT, overlap=OverlapPolicy.ALLOW, lease_ms=None)
    with pytest.raises(TypeError):
        await node.store.claim([node.wish(SLOT - PERIOD + 5_000), wrong])
    assert await node.history() == []
    assert (await node.claim(SLOT)).outcome == "won"


# Processes


def run_python(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


PRELUDE = """
import asyncio, sys, time
sys.path.insert(0, ".")
from pathlib import Path
from anarchon_backends.sqlite import open_store
from anarchon_server.core.store import OpenOptions
from tests.contract.harness import *
class Database:
    url = sys.argv[1]
    def store(self, options): return open_store(self.url, options)
async def main():
    cluster = Cluster(Database())
    node = await cluster.node()
    await node.register()
    await work(cluster, node)
"""

CLAIM_FOR_EVER = """
async def work(cluster, node):
    for n in range(1, 100_000):
        cluster.advance_to(T0 + n * PERIOD)
        seen = await node.win(T0 + n * PERIOD)
        print("won", n, flush=True)
        await node.complete(seen)
        print("done", n, flush=True)
"""

HANG_BEFORE_COMMIT = """
from anarchon_backends.sqlite._rows import Rows
async def work(cluster, node):
    cluster.advance_to(T0 + PERIOD)
    write = Rows.write
    def written(rows):
        write(rows)
        print("written", flush=True)
        time.sleep(60)
    Rows.write = written
    await node.claim(T0 + PERIOD)
"""


def lines_of(process: subprocess.Popen[str], enough: int) -> list[str]:
    """The lines a process printed until there were enough, and then until it was killed."""
    assert process.stdout is not None
    lines: list[str] = []
    while len(lines) < enough:
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        lines.append(line.strip())
    process.kill()
    rest, _ = process.communicate(timeout=20)
    complete = rest.rpartition("\n")[0]
    return lines + [line for line in complete.split("\n") if line]


async def test_nothing_acknowledged_is_lost_when_a_process_is_killed(cluster: Cluster) -> None:
    """SIGKILL in the midst of its work, three times over."""
    node = await cluster.node()
    for round_ in range(3):
        code = f"{PRELUDE}{CLAIM_FOR_EVER}asyncio.run(main())".replace(
            "range(1,", f"range({1 + round_ * 10_000},"
        )
        process = await asyncio.to_thread(run_python, code, cluster.database.url)
        lines = await asyncio.to_thread(lines_of, process, 30 + round_)
        rows = {
            (seen.run.slot - T0) // PERIOD: seen
            for seen in await node.history(from_slot=T0 + round_ * 10_000 * PERIOD, limit=500)
        }
        for line in lines:
            word, number = line.split()
            seen = rows[int(number)]
            assert len(seen.attempts) == 1
            if word == "done":
                assert seen.run.state == "success"
        unfinished = [seen for seen in rows.values() if not seen.run.state.final]
        assert len(unfinished) <= 1
        for seen in unfinished:
            await node.complete(seen)


async def test_a_process_killed_in_the_midst_of_a_transaction_leaves_no_trace(
    cluster: Cluster,
) -> None:
    node = await cluster.node()
    code = f"{PRELUDE}{HANG_BEFORE_COMMIT}asyncio.run(main())"
    process = await asyncio.to_thread(run_python, code, cluster.database.url)
    lines = await asyncio.to_thread(lines_of, process, 1)
    assert lines == ["written"]
    assert await node.history() == []
    cluster.advance_to(SLOT)
    await node.register()
    assert (await node.claim(SLOT)).outcome == "won"


async def test_a_process_frozen_in_the_midst_of_a_transaction_keeps_all_out_until_it_is_killed(
    cluster: Cluster,
) -> None:
    """What SQLite's locks cannot prevent (docs/stores/sqlite.md)."""
    node, hurried = await cluster.node(), await cluster.node(op_timeout_ms=400)
    code = f"{PRELUDE}{HANG_BEFORE_COMMIT}asyncio.run(main())"
    process = await asyncio.to_thread(run_python, code, cluster.database.url)
    assert process.stdout is not None
    try:
        assert await asyncio.to_thread(process.stdout.readline) == "written\n"
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(StoreUnavailable, match=r"locked|not begun"):
            await hurried.register()
    finally:
        process.kill()
        await asyncio.to_thread(process.communicate, timeout=20)
    cluster.advance_to(SLOT)
    await node.register()
    assert (await node.claim(SLOT)).outcome == "won"


async def test_a_process_that_ends_without_closing_is_not_kept_alive(cluster: Cluster) -> None:
    code = f"{PRELUDE}\nasync def work(cluster, node): pass\nasyncio.run(main())"
    process = await asyncio.to_thread(run_python, code, cluster.database.url)
    await asyncio.to_thread(process.communicate, timeout=30)
    assert process.returncode == 0


async def test_a_store_that_is_closed_leaves_no_warning_and_no_thread(tmp_path: Path) -> None:
    store = await opened(tmp_path / "a.db")
    watch = store.watch()
    waiting = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0)
    await store.close()
    waiting.cancel()
    await asyncio.wait([waiting])
    await watch.aclose()  # type: ignore[attr-defined]
    del store, watch
    await threads_to_end()
    assert not [each for each in threading.enumerate() if CONNECTION in each.name]
