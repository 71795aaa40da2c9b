"""A private PostgreSQL server for the tests, and its clock under the tests' control.

The server is that of `ANARCHON_TEST_POSTGRES_URL` (a database the tests may do anything in), or is
started on a free port of the loopback, in a directory of its own: from the programs in
`ANARCHON_TEST_POSTGRES_BIN`, the newest of the system, or those of the wheel `pgserver`. PostgreSQL
does not run as root: there it runs as the user `postgres`, or `nobody`.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import itertools
import os
import pwd
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import asyncpg
import pytest

from anarchon_backends.postgres import PostgresStore
from anarchon_backends.postgres._connection import Pool, address_of
from anarchon_server.core.store import OpenOptions, Store
from tests.servers.ports import free_port

URL_VARIABLE = "ANARCHON_TEST_POSTGRES_URL"
BIN_VARIABLE = "ANARCHON_TEST_POSTGRES_BIN"
USER = "anarchon"
READY = "database system is ready to accept"
READY_S = 30
_PR_SET_PDEATHSIG = 1

# Before the schema of `clock_timestamp`, in the search path of the tests' sessions.
VIRTUAL_CLOCK = """
CREATE SCHEMA IF NOT EXISTS virtual;
CREATE OR REPLACE FUNCTION virtual.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE AS $$
    SELECT coalesce(to_timestamp(nullif(current_setting('anarchon.us', true), '')::numeric / 1000000),
        pg_catalog.clock_timestamp()) $$;
"""


class Server:
    """A server that was started here. `url` names its database, as a superuser."""

    def __init__(self, bindir: Path, *settings: str, standby_of: Server | None = None) -> None:
        self._bindir = bindir
        self._settings = settings
        in_memory = Path("/dev/shm")
        self.directory = Path(tempfile.mkdtemp(dir=in_memory if in_memory.is_dir() else None))
        self.data = self.directory / "data"
        self._as = _unprivileged(self.directory)
        self.port = free_port()
        self._process: subprocess.Popen[str] | None = None
        self.log: list[str] = []
        try:
            if standby_of is None:
                self._run("initdb", "-D", str(self.data), "-U", USER, "-A", "trust", "-E", "UTF8")
            else:
                primary = f"user={USER} host=127.0.0.1 port={standby_of.port} application_name=two"
                self._run("pg_basebackup", "-D", str(self.data), "-d", primary, "-R", "-c", "fast")
            self.start()
        except BaseException:
            self.stop()
            raise

    @property
    def url(self) -> str:
        return f"postgresql://{USER}@127.0.0.1:{self.port}/postgres"

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._bindir / program), *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=self.directory, **self._as
        )
        assert done.returncode == 0, done.stderr

    def start(self, *settings: str) -> None:
        """Starts the server, and waits until it says that it is ready."""
        usual = (
            f"port={self.port}",
            "listen_addresses=127.0.0.1",
            "unix_socket_directories=",
            "max_connections=400",
            "shared_buffers=32MB",
        )
        options = [word for each in (*usual, *self._settings, *settings) for word in ("-c", each)]
        self._process = subprocess.Popen(
            [str(self._bindir / "postgres"), "-D", str(self.data), *options],
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.directory,
            env={**os.environ, "LC_ALL": "C"},
            start_new_session=True,  # so that an interrupt of the tests is not the server's
            preexec_fn=_end_with_parent,  # noqa: PLW1509 - it takes no lock
            **self._as,
        )
        ready = threading.Event()
        threading.Thread(target=self._read_log, args=(self._process, ready), daemon=True).start()
        assert ready.wait(READY_S), "not ready in time"
        assert self._process.poll() is None, "\n".join(self.log)

    def _read_log(self, process: subprocess.Popen[str], ready: threading.Event) -> None:
        assert process.stderr is not None
        with process.stderr:
            for line in process.stderr:
                self.log.append(line.rstrip())
                if READY in line:
                    ready.set()
        ready.set()

    def kill(self) -> None:
        """`kill -9` of the server and all its processes: as if the machine's kernel had died."""
        process, self._process = self._process, None
        if process is not None:
            children = _children_of(process.pid)  # each in a process group of its own
            os.kill(process.pid, signal.SIGKILL)
            for child in children:
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            process.wait()
            (self.data / "postmaster.pid").unlink(missing_ok=True)

    def stop(self) -> None:
        """Ends the server and removes its directory."""
        self.end()
        shutil.rmtree(self.directory, ignore_errors=True)

    def end(self) -> None:
        """Ends the server as an operator would; it can be started again."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGINT)  # "fast": ends the sessions too
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Pooler:
    """A PgBouncer in transaction mode before a server, with two connections to it."""

    def __init__(self, server_url: str) -> None:
        program = shutil.which("pgbouncer") or missing("no PgBouncer: apt-get install pgbouncer")
        self.directory = Path(tempfile.mkdtemp())
        as_user = _unprivileged(self.directory)
        self.port = free_port()
        host = urlsplit(server_url)
        settings = self.directory / "pgbouncer.ini"
        settings.write_text(f"""\
[databases]
postgres = host={host.hostname} port={host.port} user={USER}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {self.port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = 2
""")
        self._process = subprocess.Popen(
            [program, str(settings)],
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=_end_with_parent,  # noqa: PLW1509 - it takes no lock
            **as_user,
        )
        assert self._process.stderr is not None
        log = []
        for line in self._process.stderr:
            log.append(line)
            if "process up" in line:
                break
        else:
            raise AssertionError("".join(log))
        self._drain = threading.Thread(target=self._process.stderr.read, daemon=True)
        self._drain.start()

    @property
    def url(self) -> str:
        return f"postgresql://{USER}@127.0.0.1:{self.port}/postgres"

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._drain.join()
        assert self._process.stderr is not None
        self._process.stderr.close()
        shutil.rmtree(self.directory, ignore_errors=True)


def _children_of(pid: int) -> list[int]:
    """The processes of a server, as Linux lists them."""
    children = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            parent = status.read_text().rpartition(")")[2].split()[1]
            if int(parent) == pid:
                children.append(int(status.parent.name))
    return children


def _unprivileged(directory: Path) -> dict[str, Any]:
    """How a process is started that refuses to be root, in a directory that becomes its own."""
    if os.getuid() != 0:
        return {}
    try:
        owner = pwd.getpwnam("postgres")
    except KeyError:
        owner = pwd.getpwnam("nobody")
    os.chown(directory, owner.pw_uid, owner.pw_gid)
    return {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []}


def _end_with_parent() -> None:
    """In the child: a server does not outlive tests that were killed (Linux)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)


def binaries() -> Path | None:
    """Where a server's programs are; None: nowhere."""
    if given := os.environ.get(BIN_VARIABLE):
        return Path(given)
    found = [
        (int(match[1]), path.parent)
        for path in Path("/usr/lib/postgresql").glob("*/bin/postgres")
        if (match := re.search(r"/(\d+)/bin/", str(path)))
    ]
    if found:
        return max(found)[1]
    if on_path := shutil.which("postgres"):
        return Path(os.path.realpath(on_path)).parent
    wheel = find_spec("pgserver")
    places = wheel.submodule_search_locations if wheel else None
    return Path(places[0]) / "pginstall/bin" if places else None


def missing(why: str) -> Any:
    """No store: skips, or fails where everything must be there."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"no store: postgres: {why}")
    pytest.skip(f"no store: postgres: {why}")


def binaries_or_skip() -> Path:
    bindir = binaries()
    return bindir or missing(
        "no server on this machine: apt-get install postgresql, or pip install pgserver"
    )


def start_server(*settings: str, standby_of: Server | None = None) -> Server:
    """A server of the test's own, which it stops."""
    return Server(binaries_or_skip(), *settings, standby_of=standby_of)


@cache
def shared_url() -> str:
    """The server of the whole test session, started when the first test asks for it."""
    url = os.environ.get(URL_VARIABLE)
    if not url:
        server = start_server()
        atexit.register(server.stop)
        url = server.url
    prepare(url)
    return url


def prepare(url: str) -> None:
    """Gives a database the tests' clock."""
    run_sql(url, VIRTUAL_CLOCK)


def run_sql(url: str, sql: str) -> Any:
    """Runs statements from outside any event loop; gives the value of a single query."""

    async def run() -> Any:
        connection = await asyncpg.connect(url)
        try:
            if sql.lstrip().upper().startswith("SELECT"):
                return await connection.fetchval(sql)
            return await connection.execute(sql)
        finally:
            await connection.close()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(run())).result()


_numbers = itertools.count(1)


def with_options(url: str, **options: str) -> str:
    said = "&".join(f"{name}={value}" for name, value in options.items())
    return f"{url}{'&' if '?' in url else '?'}{said}"


def new_schema(url: str = "") -> str:
    """A URL that names a schema nobody has used."""
    schema = f"test_{os.getpid()}_{next(_numbers)}"
    return with_options(url or shared_url(), schema=schema)


class VirtualPool(Pool):
    """Connections on which the server's clock is that of the tests."""

    def __init__(self, store: PostgresStore, options: OpenOptions) -> None:
        super().__init__(store._address, options.op_timeout_ms, store._check_connection)
        self._clock = options.clock
        self._told: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    async def connect(self) -> Any:
        connection = await super().connect()
        await connection.execute("SET search_path = virtual, pg_catalog")
        return connection

    async def _take(self) -> Any:
        connection = await super()._take()
        now_us = self._clock.wall_us()
        if self._told.get(connection) != now_us:
            await connection.execute(f"SET anarchon.us = '{now_us}'")
            self._told[connection] = now_us
        return connection


def open_virtual(url: str, options: OpenOptions) -> Store:
    """A store whose server tells the time of `options.clock`, read when a call begins."""
    store = PostgresStore(address_of(url), options)
    store._pool = VirtualPool(store, options)
    return store
