"""Private RabbitMQ brokers: one of each kind for a test session, more where a test asks.

`rabbitmq` is the system's (Debian: the package `rabbitmq-server`), `rabbitmq4` and `rabbitmq-new`
are those of Debian 13 and of Debian's newest, which `install-rabbitmq` unpacks.
`ANARCHON_TEST_RABBITMQ_URL`, `..._RABBITMQ4_URL` and `..._RABBITMQ_NEW_URL` name brokers to be used
instead of the private ones of a session.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import NoReturn, Self

import pytest

from anarchon_backends.rabbitmq import RabbitmqStore
from anarchon_backends.rabbitmq._address import address_of
from anarchon_server.core.store import OpenOptions
from tests.servers.ports import free_ports

KINDS = ("rabbitmq", "rabbitmq4", "rabbitmq-new")
VHOST = "anarchon"
START_S = 50.0
_CACHE = Path(__file__).parents[2] / ".cache/rabbitmq"
_PLACES = {"rabbitmq": Path("/"), "rabbitmq4": _CACHE / "trixie", "rabbitmq-new": _CACHE / "sid"}
_HELLO = b"AMQP\x00\x00\x09\x01"
_LOOPBACK = "-kernel inet_dist_use_interface {127,0,0,1}"
_PDEATHSIG = 1


class Missing(Exception):  # noqa: N818 - a fact about the machine
    """There is no such broker here."""


def programs(kind: str) -> tuple[Path, Path]:
    """The folders with RabbitMQ's scripts and with Erlang's. Raises `Missing`."""
    lib = _PLACES[kind] / "usr/lib"
    scripts = next(iter(sorted(lib.glob("rabbitmq/lib/rabbitmq_server-*/sbin"))), None)
    erlang = lib / "erlang/bin"
    if scripts is None or not (erlang / "erl").exists():
        source = "apt-get install rabbitmq-server"
        if kind != "rabbitmq":
            source = f"tests/servers/install-rabbitmq {_PLACES[kind].name}"
        raise Missing(f"no RabbitMQ in {lib} ({source})")
    return scripts, erlang


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@dataclass
class Broker:
    """A private broker of one node, with an Erlang port mapper of its own, on the loopback.

    `settings` are further lines of its `rabbitmq.conf`. Its user `guest` may do everything in the
    virtual host `anarchon`. `beside` is another node, with which it can form a cluster.
    """

    kind: str = "rabbitmq"
    settings: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    beside: Broker | None = None
    directory: str = ""
    ports: list[int] = field(default_factory=lambda: free_ports(3))
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def port(self) -> int:
        return self.ports[0]

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}/{VHOST}"

    @property
    def cookie(self) -> Path:
        """What nodes of one cluster have in common."""
        return Path(self.directory) / ".erlang.cookie"

    @property
    def node(self) -> str:
        return f"anarchon-{self.ports[0]}@localhost"

    def start(self) -> Self:
        """Starts it, and waits until it greets a client."""
        scripts, erlang = programs(self.kind)
        self.directory = self.directory or mkdtemp(dir=_in_memory())
        self._configure()
        if self.beside is None:
            self._run(str(erlang / "epmd"), "-address", "127.0.0.1", "-port", str(self.ports[1]))
        else:
            self.ports[1] = self.beside.ports[1]
            shutil.copy2(self.beside.cookie, self.cookie)
        self._run(str(scripts / "rabbitmq-server"))
        end = time.monotonic() + START_S
        while not self._greets():
            if self.processes[-1].poll() is not None or time.monotonic() > end:
                said = Path(self.directory, "said").read_text()[-3_000:]
                self.stop()
                raise RuntimeError(f"{self.kind} did not start: {said}")
            time.sleep(0.05)
        return self

    def _configure(self) -> None:
        lines = (
            f"listeners.tcp.1 = 127.0.0.1:{self.port}",
            "log.console = false",
            "log.file = log",
            "disk_free_limit.absolute = 1MB",
            f"default_vhost = {VHOST}",
            *self.settings,
        )
        Path(self.directory, "rabbitmq.conf").write_text("\n".join(lines) + "\n")
        Path(self.directory, "plugins").write_text(f"[{','.join(self.plugins)}].\n")

    def _run(self, *command: str) -> None:
        with Path(self.directory, "said").open("ab") as said:
            process = subprocess.Popen(
                command,
                env=self._environment(),
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - it takes no lock
            )
        self.processes.append(process)

    def _environment(self) -> Mapping[str, str]:
        _, erlang = programs(self.kind)
        return {
            "PATH": f"{erlang}:{os.environ['PATH']}",
            "LANG": "C.UTF-8",
            "HOME": self.directory,  # of the cookie
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(self.ports[1]),
            "RABBITMQ_CTL_ERL_ARGS": _LOOPBACK,
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": _LOOPBACK,
            "RABBITMQ_CONFIG_FILE": f"{self.directory}/rabbitmq.conf",
            "RABBITMQ_CONF_ENV_FILE": "/dev/null",
            "RABBITMQ_DIST_PORT": str(self.ports[2]),
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{self.directory}/plugins",
            "RABBITMQ_LOG_BASE": self.directory,
            "RABBITMQ_MNESIA_BASE": f"{self.directory}/data",
            "RABBITMQ_NODENAME": self.node,
            "RABBITMQ_PID_FILE": f"{self.directory}/pid",
            "RUNNING_UNDER_SYSTEMD": "true",  # so that the script becomes the broker
        }

    def _greets(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
                connection.sendall(_HELLO)
                return bool(connection.recv(1))
        except OSError:
            return False

    def ctl(self, *words: str) -> str:
        """What `rabbitmqctl` says. Raises `CalledProcessError` with its complaint."""
        scripts, _ = programs(self.kind)
        command = [str(scripts / "rabbitmqctl"), "-q", *words]
        return subprocess.run(
            command, env=self._environment(), check=True, capture_output=True, text=True
        ).stdout

    def join(self) -> Self:
        """Becomes a node of the cluster of the one that it was started beside."""
        assert self.beside is not None
        self.ctl("stop_app")
        self.ctl("join_cluster", self.beside.node)
        self.ctl("start_app")
        return self

    def freeze(self) -> None:
        """Stops it in the middle of whatever it does, for good: only `kill` comes after this."""
        self.processes[-1].send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        """Ends it at once, as `kill -9` does. Nodes beside it do without a port mapper then."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()
        self.processes.clear()

    def stop(self) -> None:
        """Ends it, and removes what it wrote."""
        self.kill()
        if self.directory:
            shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()


def _die_with_parent() -> None:
    """So that no broker outlives a test run that was killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)


def _in_memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


_brokers: dict[str, Broker] = {}


def session_broker(kind: str) -> Broker:
    """The session's private broker of this kind; skips the test where none can be had."""
    if kind not in _brokers:
        broker = Broker(kind)
        try:
            broker.start()
        except Missing as error:
            not_there(kind, str(error))
        atexit.register(broker.stop)
        _brokers[kind] = broker
    return _brokers[kind]


def session_url(kind: str) -> str:
    """The URL of the broker to test on, private or given."""
    given = os.environ.get(f"ANARCHON_TEST_{kind.upper().replace('-', '_')}_URL")
    return given or session_broker(kind).url


def private(kind: str, *settings: str) -> Broker:
    """A broker of the test's own, not started; skips the test where none can be had."""
    try:
        programs(kind)
    except Missing as error:
        not_there(kind, str(error))
    return Broker(kind, settings)


def not_there(kind: str, why: str) -> NoReturn:
    """Skips, and where every store must be there fails: Debian's newest may be in the making."""
    if os.environ.get("CI", "").lower() in ("1", "true") and kind != "rabbitmq-new":
        pytest.fail(f"no store: {kind}: {why}")
    pytest.skip(f"no store: {kind}: {why}")


def fresh_url(kind: str, options: str = "") -> str:
    """The session's broker, with what stands before the namespaces of one test as a fragment."""
    return f"{session_url(kind)}{options}#{secrets.token_hex(4)}."


def open_virtual(url: str, options: OpenOptions) -> RabbitmqStore:
    """A store on a `fresh_url`."""
    address, _, prefix = url.partition("#")
    return RabbitmqStore(
        address_of(address), replace(options, namespace=prefix + options.namespace)
    )
