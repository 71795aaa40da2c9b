"""What the server must be, and what it should be, to keep what it acknowledges.

Imports the port, the errors, the standard library and redis-py's errors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from redis.exceptions import NoPermissionError, RedisError

from anarchon_backends.redis._connection import AccessDenied, Pool
from anarchon_backends.redis._text import decode
from anarchon_server.core.errors import StoreRefused, StoreUnavailable

_OLDEST = {"redis": (6, 2), "valkey": (7, 2)}
_SECTIONS = ("server", "replication", "persistence", "memory", "cluster")
_SETTINGS = (
    "maxmemory-policy",
    "maxmemory",
    "appendonly",
    "appendfsync",
    "min-replicas-to-write",
)


@dataclass(slots=True)
class Findings:
    """What holds, and what could not be verified or may be lost."""

    verified: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)


async def check(pool: Pool, location: str) -> Findings:
    """Looks at the server's kind, role and settings. Raises `StoreRefused` for what is fatal."""
    found = Findings()
    answers = await pool.ask(
        *(["INFO", section] for section in _SECTIONS),
        *(["CONFIG", "GET", name] for name in _SETTINGS),
    )
    for each in answers:
        if isinstance(each, RedisError) and not _hidden(each):
            raise StoreUnavailable(f"{location}: {each}")
    info = _info_of(answers[: len(_SECTIONS)])
    settings = _settings_of(answers[len(_SECTIONS) :], info)
    _check_server(info, found)
    _check_memory(settings, found)
    _check_disk(settings, found)
    _check_replicas(info, settings, found)
    return found


def denied(error: AccessDenied, location: str) -> StoreRefused:
    """What to do where the server does not let us in, or does not let us do it."""
    said = str(error).removeprefix(f"{location}: ").rstrip(".")
    if "CERTIFICATE" in said:
        advice = "the URL's option tls_ca names a file with the authorities to trust"
    elif "DB index" in said:
        advice = "the URL's path is the number of a database that the server has"
    else:
        advice = (
            "the user and the password come from the URL, from password_file or from "
            "REDISCLI_AUTH; docs/stores/redis.md lists the permissions that the user needs"
        )
    return StoreRefused(f"{location}: {said}; {advice}")


def not_run(error: RedisError, location: str) -> StoreRefused:
    """What to do where the server stopped a script at one of its commands."""
    said = str(error).partition(" script: ")[0]
    return StoreRefused(
        f"{location}: it does not carry out the scripts: {said}. docs/stores/redis.md lists the "
        "commands, keys and channels that the user needs"
    )


def _hidden(error: RedisError) -> bool:
    """Whether the server keeps this from its users, as managed ones do."""
    text = str(error).lower()
    return isinstance(error, NoPermissionError) or "unknown" in text or "not allowed" in text


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


def _check_server(info: Mapping[str, str], found: Findings) -> None:
    kind = "valkey" if "valkey_version" in info else "redis"
    version = info.get(f"{kind}_version", "")
    if not version:
        found.doubts.append("the server's version and role could not be read (INFO is not allowed)")
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
    if info.get("cluster_enabled") == "1":
        raise StoreRefused(
            "the server is a node of a Redis Cluster, which this version does not speak to: use a "
            "server with cluster-enabled no"
        )
    if info.get("role") != "master":
        raise StoreRefused(
            f"the server's role is {info.get('role')!r}: give the address of the master, which "
            "alone takes writes"
        )
    found.verified.append(f"{kind} {version}, a master, not a cluster's node")


def _check_memory(settings: Mapping[str, str], found: Findings) -> None:
    policy = settings.get("maxmemory-policy")
    if policy is None:
        found.doubts.append(
            "maxmemory-policy could not be read: with one of allkeys-* the server would throw "
            "claims away when its memory is full"
        )
    elif policy.startswith("allkeys"):
        raise StoreRefused(
            f"the server's maxmemory-policy is {policy}, which throws claims away when its memory "
            "is full, and slots would run twice: set it to noeviction"
        )
    else:
        found.verified.append(f"maxmemory-policy is {policy}: no key without expiry is evicted")


def _check_disk(settings: Mapping[str, str], found: Findings) -> None:
    appendonly, appendfsync = settings.get("appendonly"), settings.get("appendfsync")
    if appendonly is None:
        found.doubts.append(
            "appendonly could not be read: without it a restart of the server loses claims"
        )
    elif appendonly != "yes":
        found.doubts.append(
            "appendonly is no: a restart of the server loses what was claimed since its last "
            "snapshot, and such slots may run twice; set it to yes"
        )
    elif appendfsync is None:
        found.doubts.append("appendonly is yes; appendfsync could not be read")
    elif appendfsync != "always":
        found.verified.append("appendonly is yes: the server's death loses nothing")
        found.doubts.append(
            f"appendfsync is {appendfsync}: a power cut may lose the last second or more; always "
            "loses nothing"
        )
    else:
        found.verified.append("appendonly is yes and appendfsync is always")


def _check_replicas(info: Mapping[str, str], settings: Mapping[str, str], found: Findings) -> None:
    replicas = info.get("connected_slaves")
    if replicas is None or int(replicas) == 0:
        return
    needed = settings.get("min-replicas-to-write")
    if needed is None:
        advice = "; min-replicas-to-write could not be read"
    elif int(needed) == 0:
        advice = "; set min-replicas-to-write to 1 to narrow it"
    else:
        advice = f"; min-replicas-to-write is {needed}, which narrows it"
    found.doubts.append(
        f"it has {replicas} replicas, which lag behind: a fail-over may lose the newest claims"
        f"{advice}"
    )
