"""What the broker tells operators alone, by its HTTP API: policies, nodes, where declarations are.

Imports the port, the errors, the standard library and the modules beside it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import (
    HTTPRedirectHandler,
    HTTPSHandler,
    OpenerDirector,
    ProxyHandler,
    Request,
    build_opener,
)

from anarchon_backends.rabbitmq._address import Address
from anarchon_backends.rabbitmq._claims import queue_of
from anarchon_backends.rabbitmq._restarts import KHEPRI_ALONE
from anarchon_server.core.errors import StoreRefused
from anarchon_server.core.store import Doubt

_TIMEOUT_S = 2.0
_ANSWER_MAX = 4_000_000
_QUEUES = ("all", "queues", "classic_queues", "quorum_queues")

_KHEPRI_HOLDS = (
    "declarations are kept by Khepri: a part of the cluster without a majority makes none"
)
_PAUSE = "set cluster_partition_handling to pause_minority, or enable khepri_db (from 4.0 on)"


async def look(
    address: Address, namespace: str, version: tuple[int, ...]
) -> tuple[list[str], list[Doubt]]:
    """What holds of policies and of the cluster, and what is in doubt.

    Raises `StoreRefused` for a policy that makes the broker forget claims too soon.
    """
    khepri = version >= KHEPRI_ALONE
    if not address.management:
        return ([_KHEPRI_HOLDS] if khepri else []), _not_seen(khepri=khepri)
    try:
        policies, nodes, flags = await asyncio.to_thread(_fetched, address)
    except (OSError, ValueError) as error:
        why = f"HTTP {error.code}" if isinstance(error, HTTPError) else str(error)
        doubt = Doubt(
            f"the management API did not answer as it should ({why}): neither policies nor the "
            "cluster could be looked at",
            "see that management is the address of the HTTP API, and that the user has the tag "
            "monitoring",
            unverified=True,
        )
        return ([_KHEPRI_HOLDS] if khepri else []), [doubt]
    by_policies, by_nodes = (
        _of_policies(policies, address, namespace),
        of_nodes(nodes, flags, address, khepri=khepri),
    )
    return by_policies[0] + by_nodes[0], by_policies[1] + by_nodes[1]


def of_nodes(
    nodes: Sequence[Mapping[str, Any]],
    flags: Sequence[Mapping[str, Any]],
    address: Address,
    *,
    khepri: bool,
) -> tuple[list[str], list[Doubt]]:
    """What a broker of these nodes does in a partition, and where one of them dies.

    `khepri`: it has nothing else to keep declarations in.
    """
    verified: list[str] = []
    doubts: list[Doubt] = []
    if khepri or any(f.get("name") == "khepri_db" and f.get("state") == "enabled" for f in flags):
        verified.append(_KHEPRI_HOLDS)
    elif len(nodes) <= 1:
        verified.append("the broker is one node: it has no partitions")
    else:
        doubts.append(
            Doubt(
                f"the broker's {len(nodes)} nodes keep declarations in Mnesia: in a partition both "
                "sides may give a slot a winner; whether they pause then is not to be seen",
                _PAUSE,
            )
        )
    if len(nodes) > 1 and address.queue_type == "classic":
        doubts.append(
            Doubt(
                f"the broker has {len(nodes)} nodes, and a classic queue is on one of them: while "
                "that is down, questions about the slots claimed on it may have no answer",
                "add queue_type=quorum to the URL",
            )
        )
    return verified, doubts


def _not_seen(*, khepri: bool) -> list[Doubt]:
    """What remains in doubt without the API."""
    cluster = "" if khepri else " or partitions"
    return [
        Doubt(
            f"policies{cluster} that would make the broker forget claims could not be looked for",
            "add management=http://host:15672 to the URL, and give the user the tag monitoring",
            unverified=True,
        )
    ]


def _fetched(
    address: Address,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """Policies of users and of operators, nodes, and feature flags where they may be seen."""
    tls = [HTTPSHandler(context=address.tls_context())] if address.tls else []
    opener = build_opener(ProxyHandler({}), _NoRedirects(), *tls)
    virtual_host = quote(address.virtual_host, safe="")
    policies = _get(opener, address, f"policies/{virtual_host}")
    policies += _get(opener, address, f"operator-policies/{virtual_host}")
    nodes = _get(opener, address, "nodes")
    try:
        flags = _get(opener, address, "feature-flags")
    except HTTPError:  # for administrators alone, up to 3.x
        flags = []
    return policies, nodes, flags


class _NoRedirects(HTTPRedirectHandler):
    """The password is for the address that was given: whoever points elsewhere is an error."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _get(opener: OpenerDirector, address: Address, path: str) -> list[dict[str, Any]]:
    login = base64.b64encode(f"{address.username}:{address.password}".encode()).decode()
    request = Request(
        f"{address.management.rstrip('/')}/api/{path}", headers={"Authorization": f"Basic {login}"}
    )
    with opener.open(request, timeout=_TIMEOUT_S) as answer:
        said = json.loads(answer.read(_ANSWER_MAX))
    if not isinstance(said, list) or not all(isinstance(each, dict) for each in said):
        raise ValueError(f"{path} is no list")
    return said


def _of_policies(
    policies: Sequence[Mapping[str, Any]], address: Address, namespace: str
) -> tuple[list[str], list[Doubt]]:
    """Policies and arguments of a queue are both heeded, and of two times the shorter counts."""
    claims = (queue_of(namespace, "job", 0), queue_of("n" * 128, "j" * 128, 0))
    doubts: list[Doubt] = []
    for policy in policies:
        expires = policy.get("definition", {}).get("expires")
        shorter = isinstance(expires, int) and expires < address.retention_ms
        if not shorter or policy.get("apply-to") not in _QUEUES:
            continue
        name = str(policy.get("name"))[:100]
        if any(_applies(str(policy.get("pattern")), claim) for claim in claims):
            raise StoreRefused(
                f"the policy {name!r} of the virtual host {address.virtual_host!r} has the broker "
                f"forget claims after {expires} ms, and slots would run twice: have its pattern "
                f"leave out queues that begin with 'an.', or set its expires to no less than the "
                f"retention, {address.retention_ms} ms"
            )
        doubts.append(
            Doubt(
                f"the policy {name!r} has queues deleted after {expires} ms: should its pattern match "
                "the claims of a job, its slots would run twice",
                "have its pattern leave out queues that begin with 'an.'",
            )
        )
    return ([] if doubts else ["no policy makes the broker forget claims"]), doubts


def _applies(pattern: str, queue: str) -> bool:
    try:
        return re.search(pattern, queue) is not None
    except re.error:  # the broker's dialect may know more
        return True
