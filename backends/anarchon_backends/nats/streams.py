"""Streams, made on first use and looked at whenever a store is opened; and the servers themselves.

Imports the address, JetStream, the monitoring, the time, the port, the errors and the standard library.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from anarchon_backends.nats.address import Address
from anarchon_backends.nats.connection import AccessDenied, Connection, NobodyThereError
from anarchon_backends.nats.jetstream import NO_STREAM, JetStream, JetStreamError
from anarchon_backends.nats.monitoring import check_disk
from anarchon_backends.nats.time import microseconds
from anarchon_server.core.errors import OutcomeUnknown, StoreRefused, StoreUnavailable
from anarchon_server.core.store import Doubt

SCHEMA = "anarchon-schema"
_OLDEST = (2, 11)
_ENOUGH_REPLICAS = 3
_PAYLOAD_LEAST = 256 * 1024
_ROOM_LEAST = 64 * 1024
_SILENT_US = 4_000_000
_MAKING_TIMES = 2
_MAKING_SHARE = 0.5
_MAKING_PAUSE_S = 0.1
_NAME_IN_USE = 10_058
_SUBJECTS_OVERLAP = 10_065
_NOT_ENABLED = (10_039, 10_076)
_TEMPORARY = (10_008, 10_009)

# What every stream of ours is; a plan adds to it. Durations are nanoseconds, as NATS has them.
_COMMON: Mapping[str, object] = {
    "retention": "limits",
    "storage": "file",
    "max_msgs": -1,
    "max_bytes": -1,
    "max_msg_size": -1,
    "max_consumers": -1,
    "max_msgs_per_subject": 1,
    "discard": "old",
    "discard_new_per_subject": False,
    "max_age": 0,
    "allow_direct": False,
    "deny_delete": False,
    "deny_purge": False,
    "allow_rollup_hdrs": False,
    "no_ack": False,
    "sealed": False,
}
_WHY = {
    "storage": "what is kept in memory is gone with the server, and slots would run twice",
    "allow_direct": "a replica that lags would answer that a slot is free",
    "max_msgs": "the stream would throw away or refuse what it still needs",
    "max_bytes": "the stream would throw away or refuse what it still needs",
}


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """A stream as it must be. `settings` are added to those that all have.

    `at_least` names those of `settings` that may be larger in the server than here.
    """

    name: str
    subjects: tuple[str, ...]
    schema: str
    settings: Mapping[str, object] = field(default_factory=dict)
    at_least: tuple[str, ...] = ()

    def config(self, replicas: int) -> dict[str, object]:
        """As STREAM.CREATE takes it."""
        return {
            "name": self.name,
            "subjects": list(self.subjects),
            "num_replicas": replicas,
            "metadata": {SCHEMA: self.schema},
            **_COMMON,
            **self.settings,
        }


@dataclass(slots=True)
class Findings:
    """What holds, and what could not be verified or may be lost."""

    verified: list[str] = field(default_factory=list)
    doubts: list[Doubt] = field(default_factory=list)


async def prepare(
    connection: Connection, jetstream: JetStream, address: Address, plans: Sequence[StreamPlan]
) -> Findings:
    """Connects, makes the streams that are missing, and checks them all and the server.

    Raises `StoreRefused` for what is fatal, with what to change, and `StoreUnavailable`; the
    connection is closed then.
    """
    try:
        return await _prepared(connection, jetstream, address, plans)
    except BaseException:
        await connection.close()
        raise


async def _prepared(
    connection: Connection, jetstream: JetStream, address: Address, plans: Sequence[StreamPlan]
) -> Findings:
    found = Findings()
    try:
        server = await connection.open()
        _check_server(server, address, found)
        await _check_account(connection, jetstream, found)
        for plan in plans:
            _check_stream(await _made(jetstream, address, plan), plan, address, found)
    except AccessDenied as error:
        raise _denied(error, address) from None
    except JetStreamError as error:
        if error.code in _NOT_ENABLED:
            raise StoreRefused(
                f"{address.location}: JetStream is not enabled for this account: start the server "
                "with -js and give the account jetstream: enabled"
            ) from None
        raise
    verified, doubts = await check_disk(address)
    found.verified += verified
    found.doubts += doubts
    return found


def _check_server(server: Mapping[str, Any], address: Address, found: Findings) -> None:
    version = str(server.get("version", ""))
    if tuple(int(n) for n in re.findall(r"\d+", version)[:2]) < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        raise StoreRefused(
            f"{address.location}: the server is NATS {version or '(unknown)'}: {oldest} or newer "
            "is needed"
        )
    most = int(server.get("max_payload", 0))
    if most < _PAYLOAD_LEAST:
        raise StoreRefused(
            f"{address.location}: the server's max_payload is {most} bytes: at least "
            f"{_PAYLOAD_LEAST} are needed"
        )
    found.verified.append(f"NATS {version} with JetStream")


async def _check_account(connection: Connection, jetstream: JetStream, found: Findings) -> None:
    """Whether the account has JetStream at all, and room left in it."""
    try:
        account = await jetstream.api("INFO", connection.until())
    except NobodyThereError:
        raise StoreRefused(
            f"{connection.location}: nobody answers for JetStream: start the server with -js, or "
            "name JetStream's domain by the URL's option domain"
        ) from None
    limits = account.get("limits", {})
    most, used = int(limits.get("max_storage", -1)), int(account.get("storage", 0))
    if most < 0:
        return
    if used > most - _ROOM_LEAST:
        raise StoreRefused(
            f"{connection.location}: the account's storage is full ({used} of {most} bytes): raise "
            "its limit max_file"
        )
    found.doubts.append(
        Doubt(
            f"the account may store {most} bytes, of which {used} are used: when they are full, "
            "nothing can be claimed",
            "watch it, or lift the account's limit max_file",
        )
    )


async def _made(jetstream: JetStream, address: Address, plan: StreamPlan) -> dict[str, Any]:
    """The stream as it is, made if it was not there. Twenty may do so at once.

    A cluster that is asked twice to make a stream answers only one of them, and does not answer for
    a stream that has no leader yet: both are asked for again.
    """
    connection = jetstream.connection
    ends = connection.until(_MAKING_TIMES)
    while True:
        until = min(ends, connection.until(_MAKING_SHARE))
        try:
            seen = await _made_once(jetstream, address, plan, until)
            if "cluster" in seen and not seen["cluster"].get("leader"):
                raise StoreUnavailable(f"{address.location}: the stream {plan.name} has no leader")
            return seen
        except (AccessDenied, JetStreamError, NobodyThereError):
            raise
        except (StoreUnavailable, OutcomeUnknown):
            if asyncio.get_running_loop().time() + _MAKING_PAUSE_S >= ends:
                raise
            await asyncio.sleep(_MAKING_PAUSE_S)


async def _made_once(
    jetstream: JetStream, address: Address, plan: StreamPlan, until: float
) -> dict[str, Any]:
    try:
        return await jetstream.info(plan.name, until)
    except JetStreamError as error:
        if error.code != NO_STREAM:
            raise
    try:
        await jetstream.api(
            f"STREAM.CREATE.{plan.name}", until, plan.config(address.replicas), writes=True
        )
    except JetStreamError as error:
        if error.code == _SUBJECTS_OVERLAP:
            raise StoreRefused(
                f"{address.location}: another stream has subjects of {', '.join(plan.subjects)}: "
                "remove it, or choose other names by the URL's option prefix"
            ) from None
        if error.code in _TEMPORARY:
            raise
        if error.code != _NAME_IN_USE:  # by somebody who made it meanwhile
            raise StoreRefused(
                f"{error}: the stream cannot be made; the URL's option replicas is "
                f"{address.replicas}"
            ) from None
    return await jetstream.info(plan.name, until)


def _check_stream(
    seen: Mapping[str, Any], plan: StreamPlan, address: Address, found: Findings
) -> None:
    config: Mapping[str, Any] = seen["config"]
    _check_schema(config, plan, address)
    _check_settings(config, plan, address)
    replicas = int(config.get("num_replicas", 1))
    found.verified.append(
        f"the stream {plan.name} is kept in files on {replicas} "
        f"{'server' if replicas == 1 else 'servers'}, and read from its leader"
    )
    if replicas < _ENOUGH_REPLICAS:
        found.doubts.append(
            Doubt(
                f"the stream {plan.name} is on {replicas} "
                f"{'server' if replicas == 1 else 'servers'}: what is on its disk is all there is",
                "in a cluster of three, add replicas=3 to the URL before the stream is made, or "
                f"change it by: nats stream edit {plan.name} --replicas 3",
            )
        )
    elif away := _servers_away(seen):
        found.doubts.append(
            Doubt(
                f"servers that keep the stream {plan.name} are away: {', '.join(away)}",
                "start them: with one more gone nothing can be claimed",
            )
        )


def _check_settings(config: Mapping[str, Any], plan: StreamPlan, address: Address) -> None:
    """Refuses a stream that does not keep what it acknowledges where it is looked for."""
    for name, wanted in {**_COMMON, **plan.settings}.items():
        actual = config.get(name, type(wanted)())
        more = (
            name in plan.at_least and isinstance(wanted, int) and (actual == 0 or actual >= wanted)
        )
        if actual != wanted and not more:
            why = f": {_WHY[name]}" if name in _WHY else ""
            raise StoreRefused(
                f"{address.location}: the stream {plan.name} has {name} {actual!r} and not "
                f"{wanted!r}{why}. Change it with `nats stream edit`, or remove the stream while "
                "nothing runs"
            )
    if set(config.get("subjects", ())) != set(plan.subjects):
        raise StoreRefused(
            f"{address.location}: the stream {plan.name} has the subjects "
            f"{config.get('subjects')!r} and not {list(plan.subjects)!r}"
        )
    if config.get("mirror") or config.get("sources"):
        raise StoreRefused(
            f"{address.location}: the stream {plan.name} copies another one: claims must be its own"
        )
    if config.get("subject_transform"):
        raise StoreRefused(
            f"{address.location}: the stream {plan.name} renames subjects (subject_transform): a "
            "claim would not be found again. Remove that while nothing runs"
        )
    if config.get("persist_mode") == "async":
        raise StoreRefused(
            f"{address.location}: the stream {plan.name} has persist_mode 'async': it acknowledges "
            "what it has not written, and slots would run twice. Remove it while nothing runs: it is "
            "made anew as it should be"
        )


def _servers_away(seen: Mapping[str, Any]) -> list[str]:
    """The servers that the stream's leader has not heard of lately; usually it does every second.

    One that it has never heard of since it leads has been silent since then.
    """
    cluster = seen["cluster"]
    led_us = microseconds(seen["ts"]) - microseconds(cluster.get("leader_since", seen["created"]))
    away: list[str] = []
    for replica in cluster.get("replicas") or ():
        heard_us = int(replica.get("active", 0)) // 1_000
        silent_us = led_us if not heard_us and not replica.get("current") else heard_us
        if replica.get("offline") or silent_us > _SILENT_US:
            away.append(str(replica["name"]))
    return away


def _check_schema(config: Mapping[str, Any], plan: StreamPlan, address: Address) -> None:
    schema = (config.get("metadata") or {}).get(SCHEMA)
    if schema is None:
        raise StoreRefused(
            f"{address.location}: the stream {plan.name} is not Anarchon's: remove it, or choose "
            "other names by the URL's option prefix"
        )
    if schema != plan.schema:
        raise StoreRefused(
            f"{address.location}: the stream {plan.name} has the schema {schema!a:.40}, and this "
            f"version of Anarchon knows {plan.schema}: use the version of Anarchon that made it"
        )


def _denied(error: AccessDenied, address: Address) -> StoreRefused:
    """What to do where the server does not let us in, or does not let us do it."""
    said = str(error).removeprefix(f"{address.location}: ").rstrip(".")
    if "certificate" in said.lower():
        advice = "the URL's option tls_ca names a file with the authorities to trust"
    elif "violation for" in said.lower():
        advice = "docs/stores/nats.md lists the permissions that the user needs"
    else:
        advice = (
            "the user and the password, the token or the key come from the URL, from files that it "
            "names, or from NATS_USER and NATS_PASSWORD, NATS_TOKEN, NATS_NKEY, NATS_CREDS"
        )
    return StoreRefused(f"{address.location}: {said}; {advice}")
