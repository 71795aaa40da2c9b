"""A cluster of private Redis or Valkey servers: one for a test session, more where a test asks.

It is put together by hand (`CLUSTER ADDSLOTSRANGE`, `MEET`), as `redis-cli` does it.
"""

from __future__ import annotations

import atexit
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from redis.crc import key_slot

from tests.servers import redis
from tests.servers.ports import free_port

MASTERS = 3
_SLOTS = 16_384
_START_S = 30.0


@dataclass
class RedisCluster:
    """Three masters, each with `replicas` replicas. `settings` are those of every node."""

    kind: str = "redis"
    settings: Sequence[str] = ()
    replicas: int = 0
    nodes: list[redis.Server] = field(default_factory=list)

    @property
    def url(self) -> str:
        """Names two of the masters."""
        first, second = self.nodes[:2]
        return f"redis://127.0.0.1:{first.port},127.0.0.1:{second.port}/?cluster=true"

    @property
    def masters(self) -> list[redis.Server]:
        return self.nodes[:MASTERS]

    def start(self) -> Self:
        """Starts it, and waits until every node knows all others and serves."""
        for _ in range(MASTERS * (1 + self.replicas)):
            self.add()
        bounds = [round(n * _SLOTS / MASTERS) for n in range(MASTERS + 1)]
        for number, master in enumerate(self.masters):
            first, last = bounds[number], bounds[number + 1] - 1
            _done(master.send("CLUSTER", "ADDSLOTSRANGE", str(first), str(last)))
            _done(master.send("CLUSTER", "SET-CONFIG-EPOCH", str(number + 1)))
        for node in self.nodes[1:]:
            self.meet(node)
        for number, node in enumerate(self.nodes[MASTERS:]):
            master = self.masters[number % MASTERS]
            self._wait(lambda node=node, master=master: id_of(master) in known_to(node))
            _done(node.send("CLUSTER", "REPLICATE", id_of(master)))
        self._wait(self.is_whole)
        return self

    def add(self) -> redis.Server:
        """Starts one more node, which knows no other yet."""
        node = redis.private(self.kind, *self.settings)
        node.settings = (
            *("--cluster-enabled", "yes", "--cluster-port", str(free_port())),
            *("--cluster-node-timeout", "1000", "--repl-diskless-sync-delay", "0"),
            *self.settings,
        )
        self.nodes.append(node)
        return node.start()

    def meet(self, node: redis.Server) -> None:
        first = self.nodes[0]
        bus = node.settings[list(node.settings).index("--cluster-port") + 1]
        _done(first.send("CLUSTER", "MEET", "127.0.0.1", str(node.port), bus))

    def is_whole(self) -> bool:
        """Whether every node that runs knows that every slot is served, and by whom."""
        running = [node for node in self.nodes if node.process and node.process.poll() is None]
        said = [node.send("CLUSTER", "INFO") for node in running]
        linked = [
            f"connected_slaves:{self.replicas}".encode() in master.send("INFO", "replication")
            for master in self.masters
            if master in running
        ]
        return (
            all(
                b"cluster_state:ok" in each
                and f"cluster_known_nodes:{len(self.nodes)}".encode() in each
                for each in said
            )
            and all(linked)
            and all(known_to(node) == known_to(running[0]) for node in running)
        )

    def wait_until_whole(self) -> None:
        self._wait(self.is_whole)

    def master_of(self, key: str) -> redis.Server:
        """The master that has a key, as the first node tells."""
        slot = str(key_slot(key.encode()))
        node_id = ""
        for line in said_by(self.nodes[0], "CLUSTER", "NODES").splitlines():
            words = line.split()
            for span in words[8:]:
                first, _, last = span.partition("-")
                if "[" not in span and int(first) <= int(slot) <= int(last or first):
                    node_id = words[0]
        return next(node for node in self.nodes if id_of(node) == node_id)

    def _wait(self, true: object) -> None:
        assert callable(true)
        end = time.monotonic() + _START_S
        while not true():
            if time.monotonic() > end:
                said = [said_by(node, "CLUSTER", "INFO") for node in self.nodes]
                raise RuntimeError(f"the cluster is not whole: {said}")
            redis.select_nothing(0.02)

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()


def said_by(node: redis.Server, *words: str) -> str:
    """The whole of a bulk answer, without its length."""
    said = node.send(*words).decode()
    return said.partition("\r\n")[2].rstrip("\r\n")


def id_of(node: redis.Server) -> str:
    """A node's name of 40 digits."""
    return said_by(node, "CLUSTER", "MYID")


def known_to(node: redis.Server) -> set[str]:
    """The nodes that a node knows and has met."""
    lines = said_by(node, "CLUSTER", "NODES").splitlines()
    return {line.split()[0] for line in lines if not re.search("handshake|noaddr", line)}


def _done(said: bytes) -> None:
    assert said == b"+OK\r\n", said


_clusters: dict[str, RedisCluster] = {}


def session_cluster(kind: str) -> RedisCluster:
    """The session's cluster of this kind; skips the test where none can be had."""
    if kind not in _clusters:
        cluster = RedisCluster(kind, ("--appendonly", "no"))
        atexit.register(cluster.stop)
        cluster.start()
        _clusters[kind] = cluster
    return _clusters[kind]


def fresh_url(kind: str, strategy: str = "lease") -> str:
    """The session's cluster, with what stands before the namespaces of one test as a fragment."""
    return f"{session_cluster(kind).url}&strategy={strategy}#{secrets.token_hex(4)}."
