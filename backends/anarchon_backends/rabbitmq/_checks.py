"""What the broker must be, and what it should be, for a declaration to be a claim.

Imports the port, the errors, the standard library and the modules beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from anarchon_backends.rabbitmq import _management
from anarchon_backends.rabbitmq._address import Address
from anarchon_backends.rabbitmq._claims import TYPE, Claims, passing_of
from anarchon_backends.rabbitmq._connection import HEARTBEAT_S, AccessDenied, Link
from anarchon_backends.rabbitmq._restarts import version_of
from anarchon_server.core.errors import StoreRefused
from anarchon_server.core.store import Doubt

OLDEST = (3, 10)
_OTHER_TYPE = {"classic": "quorum", "quorum": "classic"}


@dataclass(slots=True)
class Findings:
    """What holds, and what could not be verified or may be lost."""

    verified: list[str] = field(default_factory=list)
    doubts: list[Doubt] = field(default_factory=list)


async def check(link: Link, address: Address, namespace: str) -> Findings:
    """Looks at the broker and tries a claim on it. Raises `StoreRefused` for what is fatal."""
    found = Findings()
    version = _check_server(await link.server(link.deadline()), found)
    await _check_claim(link, address, namespace, found)
    if address.virtual_host == "/":
        found.doubts.append(
            Doubt(
                "the virtual host is '/', the one of all who name none: whatever policies it has "
                "for others reach the claims too",
                "make one for Anarchon alone, and name it in the URL's path",
            )
        )
    else:
        found.verified.append(f"the virtual host {address.virtual_host!r} is not everybody's")
    verified, doubts = await _management.look(address, namespace, version)
    found.verified += verified
    found.doubts += doubts
    return found


def denied(error: AccessDenied, location: str) -> StoreRefused:
    """What to do where the broker does not let us in, or does not let us do it."""
    said = str(error).removeprefix(f"{location}: ").rstrip(".")
    if "CERTIFICATE" in said:
        advice = "the URL's option tls_ca names a file with the authorities to trust"
    elif said.startswith("NOT_ALLOWED"):
        advice = (
            "the URL's path is the name of a virtual host, which has to be there "
            "(rabbitmqctl add_vhost) and on which the user has to have permissions"
        )
    else:
        advice = (
            "the user and the password come from the URL, from password_file or from "
            "RABBITMQ_USERNAME and RABBITMQ_PASSWORD; docs/stores/rabbitmq.md lists the "
            "permissions that the user needs"
        )
    return StoreRefused(f"{location}: {said}; {advice}")


def _check_server(properties: dict[str, Any], found: Findings) -> tuple[int, ...]:
    """The broker's version, as two numbers."""
    product, version = str(properties.get("product", "")), str(properties.get("version", ""))
    if product != "RabbitMQ":
        raise StoreRefused(
            f"the broker calls itself {product[:40]!r}: only RabbitMQ is known to refuse a "
            "declaration that differs from the first"
        )
    numbers = version_of(properties)
    if numbers < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise StoreRefused(f"the broker is RabbitMQ {version[:40]}: {oldest} or newer is needed")
    found.verified.append(f"RabbitMQ {version}; heartbeats every {HEARTBEAT_S} s are agreed on")
    return numbers


async def _check_claim(link: Link, address: Address, namespace: str, found: Findings) -> None:
    """Claims a queue of no slot for one number, and then for another."""
    kind = address.queue_type
    claims = Claims(link, kind, address.retention_ms)
    queue = passing_of(namespace, "probe")
    await claims.declare(queue, 1, link.deadline())
    try:
        again = await claims.declare(queue, 1, link.deadline())
        other = await claims.declare(queue, 2, link.deadline())
        if again is None or not again.mine or other is None or other.mine:
            raise StoreRefused(
                "the broker lets a queue be declared with two different x-max-length-bytes: slots "
                "would run twice on it"
            )
        stranger = Claims(link, _OTHER_TYPE[kind], address.retention_ms)
        await stranger.declare(queue, 1, link.deadline())
    finally:
        await claims.delete(queue, link.deadline())
    found.verified.append(
        "a claim has one winner: of two numbers for a queue the second was refused"
    )
    if stranger.disagrees == TYPE:
        found.verified.append(f"x-queue-type is heeded: claims are {kind} queues")
    else:
        found.doubts.append(
            Doubt(
                f"whether claims are {kind} queues could not be verified: the broker takes another "
                "x-queue-type for the same",
                "set quorum_queue.property_equivalence.relaxed_checks_on_redeclaration to false",
                unverified=True,
            )
        )
