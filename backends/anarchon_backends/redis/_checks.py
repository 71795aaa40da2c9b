"""What the server must be, and what it should be, to keep what it acknowledges.

Imports the port, the errors, the standard library and redis-py's errors.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from redis.exceptions import RedisError

from anarchon_backends.redis._address import Address, shown_host
from anarchon_backends.redis._cluster import Server
from anarchon_backends.redis._connection import AccessDenied, Pool
from anarchon_backends.redis._identity import is_hidden
from anarchon_backends.redis._text import decode
from anarchon_server.core.errors import StoreRefused, StoreUnavailable
from anarchon_server.core.store import Doubt

_OLDEST = {"redis": (6, 2), "valkey": (7, 2)}
_APART_MS = 500
_SECTIONS = ("server", "replication", "persistence", "memory", "cluster")
_SETTINGS = (
    "maxmemory-policy",
    "maxmemory",
    "appendonly",
    "appendfsync",
    "min-replicas-to-write",
)

_LET_READ = "add +config|get and +info to what the user may do"


@dataclass(slots=True)
class Findings:
    """What holds, and what could not be verified or may be lost."""

    verified: list[str] = field(default_factory=list)
    doubts: list[Doubt] = field(default_factory=list)

    def warn(self, text: str, fix: str) -> None:
        """Notes what may be lost, and what to change about it."""
        self.doubts.append(Doubt(text, fix))

    def unverified(self, text: str, fix: str) -> None:
        """Notes what could not be found out, and what would let us."""
        self.doubts.append(Doubt(text, fix, unverified=True))


async def check(server: Server, address: Address, *, expires: bool = False) -> Findings:
    """Looks at each server's kind, role and settings. Raises `StoreRefused` for what is fatal.

    `expires`: claims have an expiry, so that no policy of eviction spares them.
    """
    if isinstance(server, Pool):
        return await _check_one(server, address, expires=expires)
    await server.refresh()
    found = {
        host: await _check_one(pool, address, expires=expires)
        for host, pool in server.nodes().items()
    }
    merged = _merged(found)
    await _check_clocks(server, merged)
    return merged


async def _check_one(pool: Pool, address: Address, *, expires: bool) -> Findings:
    found = Findings()
    answers = await pool.ask(
        *(["INFO", section] for section in _SECTIONS),
        *(["CONFIG", "GET", name] for name in _SETTINGS),
    )
    for each in answers:
        if isinstance(each, RedisError) and not is_hidden(each):
            raise StoreUnavailable(f"{pool.location}: {each}")
    info = _info_of(answers[: len(_SECTIONS)])
    settings = _settings_of(answers[len(_SECTIONS) :], info)
    check_server(info, found, cluster=address.cluster)
    _check_memory(settings, found, expires=expires)
    _check_disk(settings, found, address)
    _check_replicas(info, settings, found, address)
    await _check_durability(pool, address, info, found)
    if not pool.watched:
        found.unverified(
            "master_replid and evicted_keys cannot be watched (INFO is not allowed): a fail-over, "
            "a restart or an eviction that lost claims is noticed only where a fence fell",
            "add +info to what the user may do",
        )
    return found


def _merged(found: Mapping[tuple[str, int], Findings]) -> Findings:
    """What all nodes have in common, and what only some of them, which it then names."""
    verified: dict[str, list[str]] = {}
    doubts: dict[Doubt, list[str]] = {}
    for host, each in found.items():
        for sentence in each.verified:
            verified.setdefault(sentence, []).append(shown_host(host))
        for doubt in each.doubts:
            doubts.setdefault(doubt, []).append(shown_host(host))

    def said(sentence: str, nodes: list[str]) -> str:
        return sentence if len(nodes) == len(found) else f"{', '.join(nodes)}: {sentence}"

    return Findings(
        [said(sentence, nodes) for sentence, nodes in verified.items()],
        [
            Doubt(said(doubt, nodes), doubt.fix, unverified=doubt.unverified)
            for doubt, nodes in doubts.items()
        ],
    )


async def _check_clocks(cluster: Server, found: Findings) -> None:
    """Each job's slots and leases go by the clock of the node that has it."""
    now = asyncio.get_running_loop().time
    ahead_s: list[float] = []
    for pool in cluster.nodes().values():
        began = now()
        (said,) = await pool.ask(["TIME"])
        if isinstance(said, RedisError):
            raise pool.meaning_of(said)
        ahead_s.append(int(said[0]) + int(said[1]) / 1e6 - (began + now()) / 2)
    apart_ms = (max(ahead_s) - min(ahead_s)) * 1_000
    if apart_ms > _APART_MS:
        found.warn(
            f"the clocks of the cluster's nodes are {apart_ms:.0f} ms apart: slots are claimed early "
            "or late by that much, and takeovers may be refused",
            "have the nodes' clocks set by the same time servers (NTP)",
        )
    else:
        found.verified.append(
            f"{len(ahead_s)} masters, whose clocks are less than {_APART_MS} ms apart"
        )


async def _check_durability(
    pool: Pool, address: Address, info: Mapping[str, str], found: Findings
) -> None:
    """Tries what `durability` asks for: the server must know it, and permit it."""
    if not address.durable:
        return
    wanted = f"durability={'fsync' if address.fsync else f'replicas:{address.replicas}'}"
    (said,) = await pool.ask(["WAITAOF", 1, 0, 1] if address.fsync else ["WAIT", 0, 1])
    if isinstance(said, RedisError):
        raise StoreRefused(
            f"the server cannot do what the URL's {wanted} asks for: {said}. It needs "
            + (
                "Redis 7.2 or Valkey 7.2 or newer, appendonly yes, and the permission +waitaof"
                if address.fsync
                else "the permission +wait"
            )
        )
    replicas = info.get("connected_slaves")
    if address.replicas and replicas is not None and int(replicas) < address.replicas:
        found.warn(
            f"it has {replicas} replicas, and {wanted}: no claim counts until there are more",
            "start more replicas, or ask for fewer in the URL",
        )
    else:
        found.verified.append(f"{wanted}: a claim or a result counts when it has arrived there")


def denied(error: AccessDenied, location: str, page: str = "redis.md") -> StoreRefused:
    """What to do where the server does not let us in, or does not let us do it."""
    said = str(error).removeprefix(f"{location}: ").rstrip(".")
    if "CERTIFICATE" in said:
        advice = "the URL's option tls_ca names a file with the authorities to trust"
    elif "DB index" in said:
        advice = "the URL's path is the number of a database that the server has"
    else:
        advice = (
            "the user and the password come from the URL, from password_file or from "
            f"REDISCLI_AUTH; docs/stores/{page} lists the permissions that the user needs"
        )
    return StoreRefused(f"{location}: {said}; {advice}")


def not_run(error: RedisError, location: str, page: str = "redis.md") -> StoreRefused:
    """What to do where the server stopped a script at one of its commands."""
    said = str(error).partition(" script: ")[0]
    return StoreRefused(
        f"{location}: it does not carry out the scripts: {said}. docs/stores/{page} lists the "
        "commands, keys and channels that the user needs"
    )


def _info_of(answers: list[object]) -> dict[str, str]:
    lines = [line for each in answers if isinstance(each, bytes) for line in decode(each).split()]
    return dict(line.split(":", 1) for line in lines if ":" in line)


def _settings_of(answers: list[object], info: Mapping[str, str]) -> dict[str, str]:
    """By CONFIG GET, else as far as INFO shows them."""
    settings: dict[str, str] = {}
    if "maxmemory_policy" in info:
        settings["maxmemory-policy"] = info["maxmemory_policy"]
    if "maxmemory" in info:
        settings["maxmemory"] = info["maxmemory"]
    if "aof_enabled" in info:
        settings["appendonly"] = "yes" if info["aof_enabled"] == "1" else "no"
    for each in answers:
        if isinstance(each, list) and len(each) == 2:
            settings[decode(each[0])] = decode(each[1])
    return settings


def check_server(info: Mapping[str, str], found: Findings, *, cluster: bool) -> None:
    """Refuses a server that is none, or none of those that the URL is about."""
    kind = "valkey" if "valkey_version" in info else "redis"
    version = info.get(f"{kind}_version", "")
    if not version:
        found.unverified(
            "the server's version and role could not be read (INFO is not allowed)",
            "add +info to what the user may do",
        )
        return
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    if numbers < _OLDEST[kind]:
        oldest = ".".join(map(str, _OLDEST[kind]))
        raise StoreRefused(f"the server is {kind} {version}: {oldest} or newer is needed")
    if info.get("redis_mode") == "sentinel":
        raise StoreRefused(
            "the server is a Sentinel: add the name of the master that it watches to the URL, as "
            "?sentinel=name"
        )
    is_node = info.get("cluster_enabled") == "1"
    if is_node and not cluster:
        raise StoreRefused(
            "the server is a node of a cluster: add cluster=true to the URL, and more of its nodes "
            "besides, as in redis://host1:port,host2:port/?cluster=true"
        )
    if cluster and not is_node:
        raise StoreRefused(
            "the server is not a node of a cluster: leave cluster=true out of the URL"
        )
    if info.get("role") != "master":
        raise StoreRefused(
            f"the server's role is {info.get('role')!r}: give the address of the master, which "
            "alone takes writes"
        )
    found.verified.append(
        f"{kind} {version}, a master, {'and' if cluster else 'not'} a cluster's node"
    )


def _check_memory(settings: Mapping[str, str], found: Findings, *, expires: bool) -> None:
    policy = settings.get("maxmemory-policy")
    if policy is None:
        bad = "any but noeviction" if expires else "one of allkeys-*"
        found.unverified(
            f"maxmemory-policy could not be read: with {bad} the server would throw claims "
            "away when its memory is full",
            _LET_READ,
        )
    elif policy.startswith("allkeys") or (expires and policy != "noeviction"):
        raise StoreRefused(
            f"the server's maxmemory-policy is {policy}, which throws claims away when its memory "
            "is full, and slots would run twice: set it to noeviction"
        )
    else:
        spared = "no key" if expires else "no key without expiry"
        found.verified.append(f"maxmemory-policy is {policy}: {spared} is evicted")


def _check_disk(settings: Mapping[str, str], found: Findings, address: Address) -> None:
    appendonly, appendfsync = settings.get("appendonly"), settings.get("appendfsync")
    if appendonly is None:
        found.unverified(
            "appendonly could not be read: without it a restart of the server loses claims",
            _LET_READ,
        )
    elif appendonly != "yes":
        found.warn(
            "appendonly is no: a restart of the server loses what was claimed since its last "
            "snapshot, and such slots may run twice",
            "set appendonly to yes",
        )
    elif appendfsync is None:
        found.unverified("appendonly is yes; appendfsync could not be read", _LET_READ)
    elif appendfsync != "always":
        found.verified.append("appendonly is yes: the server's death loses nothing")
        if not address.fsync:
            found.warn(
                f"appendfsync is {appendfsync}: a power cut may lose the last second or more",
                "set appendfsync to always, which costs a sync for each call",
            )
    else:
        found.verified.append("appendonly is yes and appendfsync is always")


def _check_replicas(
    info: Mapping[str, str], settings: Mapping[str, str], found: Findings, address: Address
) -> None:
    replicas = int(info.get("connected_slaves", "0"))
    if replicas == 0:
        return
    if address.replicas >= replicas:
        found.verified.append(
            f"a claim or a result counts when all connected replicas have it ({replicas}): a "
            "fail-over to one of them loses none"
        )
        return
    needed = settings.get("min-replicas-to-write")
    fix = f"durability=replicas:{min(replicas, 9)} in the URL waits for them"
    if needed is None:
        narrowed = "; min-replicas-to-write could not be read"
    elif int(needed) == 0:
        narrowed, fix = "", f"{fix}; min-replicas-to-write 1 narrows it, too"
    else:
        narrowed = f"; min-replicas-to-write is {needed}, which narrows it"
    found.warn(
        f"it has {replicas} replicas, which lag behind: a fail-over may lose the newest claims"
        f"{narrowed}",
        fix,
    )
