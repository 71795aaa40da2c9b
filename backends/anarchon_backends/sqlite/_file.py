"""The file: whether it can be trusted with claims, how it is opened, and the tables in it.

Imports the port's report, the errors and the standard library.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from anarchon_server.core import store as port
from anarchon_server.core.errors import StoreRefused, StoreUnavailable

Library = tuple[int, int, int]

_APPLICATION_ID = 0x414E4152  # "ANAR": a file of ours
_SCHEMA_VERSION = 2
_OPEN_S = 10.0  # how long opening may wait for others that open or write
_CHECK_S = 1.0  # how long the start's look for damage may take
_CHECK_STEPS = 10_000  # of SQLite's machine, after which the time is looked at
_ROOM_MIN = 64 << 20  # bytes free below which the report doubts

# Locks that one kernel keeps hold between its processes, and not between hosts.
_SHARED_FILE_SYSTEMS = frozenset(
    {
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "gfs",
        "gfs2",
        "glusterfs",
        "gpfs",
        "lustre",
        "ncpfs",
        "nfs",
        "nfs4",
        "ocfs2",
        "prl_fs",
        "smb3",
        "smbfs",
        "vboxsf",
        "virtiofs",
        "vmhgfs",
    }
)

_SCHEMA = """
CREATE TABLE meta (store_id TEXT NOT NULL) STRICT;
CREATE TABLE news (namespace TEXT PRIMARY KEY, times INTEGER NOT NULL) STRICT;
CREATE TABLE job (
    namespace TEXT NOT NULL, job TEXT NOT NULL, floor INTEGER NOT NULL, fence INTEGER NOT NULL,
    definition_id TEXT NOT NULL, schedule_id TEXT NOT NULL, definition_at INTEGER NOT NULL,
    paused_at INTEGER, pause_reason TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (namespace, job)
) STRICT, WITHOUT ROWID;
CREATE TABLE schedule (
    namespace TEXT NOT NULL, job TEXT NOT NULL, schedule_id TEXT NOT NULL,
    since INTEGER NOT NULL, settled INTEGER NOT NULL,
    PRIMARY KEY (namespace, job, schedule_id)
) STRICT, WITHOUT ROWID;
CREATE TABLE definition (
    namespace TEXT NOT NULL, job TEXT NOT NULL, definition_id TEXT NOT NULL,
    schedule_id TEXT NOT NULL, window_ms INTEGER NOT NULL, held_at INTEGER NOT NULL,
    spec TEXT NOT NULL,
    PRIMARY KEY (namespace, job, definition_id)
) STRICT;
CREATE TABLE instance (
    namespace TEXT NOT NULL, incarnation TEXT NOT NULL, registered INTEGER NOT NULL,
    record TEXT NOT NULL,
    PRIMARY KEY (namespace, incarnation)
) STRICT;
CREATE TABLE hold (
    namespace TEXT NOT NULL, incarnation TEXT NOT NULL, job TEXT NOT NULL,
    definition_id TEXT NOT NULL, schedule_id TEXT NOT NULL,
    PRIMARY KEY (namespace, job, incarnation, definition_id)
) STRICT, WITHOUT ROWID;
CREATE INDEX hold_of_instance ON hold (namespace, incarnation);
CREATE TABLE run (
    namespace TEXT NOT NULL, job TEXT NOT NULL, slot INTEGER NOT NULL, "trigger" TEXT NOT NULL,
    state TEXT NOT NULL, final INTEGER NOT NULL, reason TEXT NOT NULL, attempt INTEGER NOT NULL,
    lease_until INTEGER, lease_length_ms INTEGER, lease_end_at INTEGER, lease_boot_id TEXT,
    freed TEXT NOT NULL, lost INTEGER NOT NULL, failed INTEGER NOT NULL,
    max_attempts INTEGER NOT NULL, window_ms INTEGER NOT NULL,
    cancel TEXT, cancelled_at INTEGER NOT NULL, cancel_grace_ms INTEGER NOT NULL,
    blocking_slot INTEGER NOT NULL, slots_covered INTEGER NOT NULL, ended_at INTEGER,
    retries INTEGER NOT NULL DEFAULT 0, retry_at INTEGER,
    retry_delay_ms INTEGER NOT NULL DEFAULT 0, request_id TEXT NOT NULL DEFAULT '',
    cancel_message TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (namespace, job, slot)
) STRICT, WITHOUT ROWID;
CREATE INDEX run_newest_first ON run (namespace, slot, job);
CREATE INDEX run_unfinished ON run (namespace, job, slot) WHERE final = 0;
CREATE UNIQUE INDEX run_requested ON run (namespace, job, request_id) WHERE request_id <> '';
CREATE TABLE payload (
    namespace TEXT NOT NULL, job TEXT NOT NULL, slot INTEGER NOT NULL, payload BLOB NOT NULL,
    PRIMARY KEY (namespace, job, slot)
) STRICT, WITHOUT ROWID;
CREATE TABLE attempt (
    namespace TEXT NOT NULL, job TEXT NOT NULL, slot INTEGER NOT NULL, attempt INTEGER NOT NULL,
    token TEXT NOT NULL, fence INTEGER NOT NULL, instance_id TEXT NOT NULL,
    incarnation TEXT NOT NULL, cause TEXT NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL,
    claimed_at INTEGER NOT NULL, started_at INTEGER, ended_at INTEGER,
    failure TEXT, result TEXT NOT NULL,
    PRIMARY KEY (namespace, job, slot, attempt)
) STRICT
"""

# What makes a file of the version before one of the next, by the version before.
_MIGRATIONS = {
    1: """
ALTER TABLE freed RENAME TO news;
ALTER TABLE job ADD COLUMN paused_at INTEGER;
ALTER TABLE job ADD COLUMN pause_reason TEXT NOT NULL DEFAULT '';
ALTER TABLE run ADD COLUMN retries INTEGER NOT NULL DEFAULT 0;
ALTER TABLE run ADD COLUMN retry_at INTEGER;
ALTER TABLE run ADD COLUMN retry_delay_ms INTEGER NOT NULL DEFAULT 0;
ALTER TABLE run ADD COLUMN request_id TEXT NOT NULL DEFAULT '';
ALTER TABLE run ADD COLUMN cancel_message TEXT NOT NULL DEFAULT '';
CREATE UNIQUE INDEX run_requested ON run (namespace, job, request_id) WHERE request_id <> '';
CREATE TABLE payload (
    namespace TEXT NOT NULL, job TEXT NOT NULL, slot INTEGER NOT NULL, payload BLOB NOT NULL,
    PRIMARY KEY (namespace, job, slot)
) STRICT, WITHOUT ROWID
"""
}


class File:
    """The file: whether it can be trusted, how it is opened, what was found (see `StoreReport`)."""

    def __init__(self, path: Path, library: Library, mountinfo: str | None, busy_ms: int) -> None:
        self._path = Path(os.path.realpath(path))
        self._library = library
        self._mountinfo = mountinfo
        self._busy_ms = busy_ms
        self._identity = (0, 0)
        self._verified: list[str] = []
        self._doubts: list[port.Doubt] = []

    def __str__(self) -> str:
        return str(self._path)

    @property
    def report(self) -> port.StoreReport:
        return port.StoreReport(f"sqlite file {self}", tuple(self._verified), tuple(self._doubts))

    def _doubt(self, text: str, fix: str, *, unverified: bool = False) -> None:
        self._doubts.append(port.Doubt(text, fix, unverified=unverified))

    def open(self) -> sqlite3.Connection:
        """Checks and connects; makes the file and its tables where they are missing."""
        self._verified.clear()
        self._doubts.clear()
        try:
            self._check_directory()
            with self._alone():
                self._make()
                db = self.connect()
                try:
                    self._prepare(db)
                    self._look_for_damage(db)
                except BaseException:
                    db.close()
                    raise
        except (sqlite3.Error, OSError) as error:
            raise StoreRefused(f"{self}: {error}") from error
        return db

    def _check_directory(self) -> None:
        directory = self._path.parent
        if not directory.is_dir():
            raise StoreRefused(f"{self}: there is no directory {directory}; make it first")
        if self._path.is_dir():
            raise StoreRefused(f"{self} is a directory; name a file in it")
        kind = _file_system(directory, self._mountinfo)
        if kind in _SHARED_FILE_SYSTEMS or kind.startswith("fuse."):
            raise StoreRefused(
                f"{self} is on a {kind} file system, whose locks do not hold between hosts: use a "
                "local disk, or a store that is made for several hosts"
            )
        if not kind:
            text = "whether the file system is local could not be found out"
            self._doubt(text, "see to it that it is no network file system", unverified=True)
        elif kind in ("tmpfs", "ramfs"):
            text = f"the file is on {kind} and is lost when the machine restarts"
            self._doubt(text, "name a file on a disk")
        else:
            self._verified.append(f"on a local file system ({kind})")
        try:
            with tempfile.TemporaryFile(dir=directory):
                pass
        except OSError as error:
            raise StoreRefused(
                f"{self}: cannot write to {directory} ({error.strerror}); SQLite keeps its journal "
                "there"
            ) from error
        room = os.statvfs(directory)
        free = room.f_bavail * room.f_frsize
        if free < _ROOM_MIN:
            self._doubt(f"only {free >> 20} MiB are free beside the file", "make room on the disk")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Opening is done by one process at a time, so that only one makes the tables."""
        fd = os.open(self._path.parent, os.O_RDONLY)
        try:
            until = time.monotonic() + _OPEN_S
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until:
                        raise StoreRefused(
                            f"{self}: another process has been opening it for {_OPEN_S:.0f} s"
                        ) from None
                    time.sleep(0.01)
            yield
        finally:
            os.close(fd)

    def _make(self) -> None:
        """The file, readable by nobody else: results may hold what is nobody else's business."""
        with suppress(FileExistsError):
            os.close(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        found = self._path.stat()
        self._identity = (found.st_dev, found.st_ino)
        if found.st_mode & 0o077:
            mode = f"{found.st_mode & 0o777:04o}"
            self._doubt(
                f"others on this machine may use the file (mode {mode})", f"chmod 600 {self}"
            )
        else:
            self._verified.append("the file is its owner's alone (mode 0600)")

    def connect(self) -> sqlite3.Connection:
        """A connection to the file as it is."""
        db = sqlite3.connect(
            f"{self._path.as_uri()}?mode=rw",
            uri=True,
            isolation_level=None,
            timeout=self._busy_ms / 1_000,
            check_same_thread=False,
        )
        db.row_factory = sqlite3.Row
        return db

    def connect_again(self) -> sqlite3.Connection:
        """Another connection to the file that was opened."""
        self.check_in_place()
        try:
            return self.connect()
        except sqlite3.Error as error:
            raise StoreUnavailable(f"{self}: {error}") from error

    def _prepare(self, db: sqlite3.Connection) -> None:
        def pragma(text: str) -> Any:
            row = db.execute(f"PRAGMA {text}").fetchone()
            return row[0] if row else None

        fresh = pragma("application_id") == pragma("user_version") == pragma("page_count") == 0
        if not fresh and pragma("application_id") != _APPLICATION_ID:
            raise StoreRefused(f"{self} is another program's database; name another file")
        version = pragma("user_version")
        if not fresh and version not in (*_MIGRATIONS, _SCHEMA_VERSION):
            raise StoreRefused(
                f"{self} has schema version {version}, and this version of Anarchon knows "
                f"{_SCHEMA_VERSION}: run the version that wrote it, or name another file"
            )
        wal = wal_is_safe(self._library) if fresh else pragma("journal_mode") == "wal"
        library = ".".join(map(str, self._library))
        if wal and not wal_is_safe(self._library):
            raise StoreRefused(
                f"{self} is in WAL mode, in which SQLite {library} can lose commits (the WAL-reset "
                "bug): use SQLite 3.51.3 or newer in every instance"
            )
        journal, synchronous = ("wal", 2) if wal else ("truncate", 3)
        pragma(f"synchronous = {synchronous}")
        if pragma(f"journal_mode = {journal}") != journal or pragma("synchronous") != synchronous:
            raise StoreRefused(f"{self}: SQLite refuses journal_mode {journal}: who else uses it?")
        level = {2: "FULL", 3: "EXTRA"}[synchronous]
        self._verified.append(f"SQLite {library}, journal {journal}, synchronous {level}")
        if fresh:
            self._create(db)
        elif version != _SCHEMA_VERSION:
            self._migrate(db, version)

    def _create(self, db: sqlite3.Connection) -> None:
        db.execute("BEGIN IMMEDIATE")
        self._carry_out(db, _SCHEMA)
        db.execute("INSERT INTO meta VALUES (?)", (secrets.token_hex(16),))
        db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
        db.execute("COMMIT")

    def _migrate(self, db: sqlite3.Connection, version: int) -> None:
        """From an earlier version to the present one, as a whole or not at all, and never back.

        Whoever still has the file open with an earlier version of Anarchon fails from then on
        (its rows are too short), rather than clear what it does not know.
        """
        db.execute("BEGIN IMMEDIATE")
        for before in range(version, _SCHEMA_VERSION):
            self._carry_out(db, _MIGRATIONS[before])
        db.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
        db.execute("COMMIT")
        self._verified.append(f"brought from schema version {version} to {_SCHEMA_VERSION}")

    def _carry_out(self, db: sqlite3.Connection, statements: str) -> None:
        if self._library < (3, 37, 0):
            statements = statements.replace(" STRICT, ", " ").replace(" STRICT", "")
        for statement in statements.split(";"):
            db.execute(statement)

    def _look_for_damage(self, db: sqlite3.Connection) -> None:
        until = time.monotonic() + _CHECK_S
        db.set_progress_handler(lambda: time.monotonic() > until, _CHECK_STEPS)
        try:
            (found,) = db.execute("PRAGMA quick_check(1)").fetchone()
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_INTERRUPT:
                raise
            text = f"too large to be checked for damage in {_CHECK_S:.0f} s"
            self._doubt(text, f'sqlite3 {self} "PRAGMA quick_check"', unverified=True)
        else:
            if found != "ok":
                raise StoreRefused(f"{self} is damaged ({found}): restore it or name another file")
            self._verified.append("no damage found")
        finally:
            db.set_progress_handler(None, 0)

    def check_in_place(self) -> None:
        """Refuses to go on with a file that others no longer see under its name."""
        try:
            found = self._path.stat()
        except OSError:
            found = None
        if found is None or (found.st_dev, found.st_ino) != self._identity:
            raise StoreUnavailable(f"{self} was removed or replaced while it was in use: restart")

    def data_version(self, db: sqlite3.Connection) -> int:
        """A number that differs whenever another connection has committed."""
        try:
            (version,) = db.execute("PRAGMA data_version").fetchone()
        except sqlite3.DatabaseError as error:
            raise StoreUnavailable(f"{self}: {error}") from error
        return int(version)


def wal_is_safe(library: Library) -> bool:
    """Whether this SQLite is free of the WAL-reset bug (sqlite.org/wal.html#walresetbug)."""
    fixed_in = {(3, 44): 6, (3, 50): 7, (3, 51): 3}
    least = fixed_in.get(library[:2])
    return library >= (3, 53, 0) if least is None else library[2] >= least


def _file_system(directory: Path, mountinfo: str | None) -> str:
    """The type of the file system that holds the directory; empty where it is not known."""
    if mountinfo is None:
        try:
            mountinfo = Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape")
        except OSError:
            return ""
    best, kind = "", ""
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        mount = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), left.split(" ")[4])
        inside = directory == Path(mount) or Path(mount) in directory.parents
        if inside and len(mount) >= len(best):  # of equal ones the later covers the earlier
            best, kind = mount, right.split(" ")[0]
    return kind
