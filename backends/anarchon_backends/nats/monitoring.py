"""When the servers write to disk: clients are not told, their monitoring pages are.

Imports the address, the port and the standard library.
"""

from __future__ import annotations

import asyncio
import json
from http.client import HTTPException
from typing import Any
from urllib.request import urlopen

from anarchon_backends.nats.address import Address
from anarchon_server.core.store import Doubt

_ANSWER_S = 2.0
_PAGE_MAX = 1_000_000
_ALWAYS = "set jetstream { sync_interval: always } in the servers' configuration"
_SHOW = "name the monitoring of every server by the URL's option monitor, as http://host:8222"


async def check_disk(address: Address) -> tuple[list[str], list[Doubt]]:
    """What is verified about when the servers write to disk, and what is doubtful."""
    found = await asyncio.gather(*(_look(each) for each in address.monitors))
    verified = [str(each) for each in found if not isinstance(each, Doubt)]
    doubts = [each for each in found if isinstance(each, Doubt)]
    if len(found) < max(len(address.hosts), address.replicas):
        doubts.append(
            Doubt(
                "the servers' sync_interval is not shown to clients: by default they write to disk "
                "every 2 minutes, and a power cut of a majority of them loses claims",
                f"{_ALWAYS}, and {_SHOW}",
                unverified=True,
            )
        )
    return verified, doubts


async def _look(monitor: str) -> str | Doubt:
    try:
        page = await asyncio.to_thread(_page, f"{monitor}/jsz")
        settings = page["config"]
        always, every_ns = bool(settings.get("sync_always")), int(settings["sync_interval"])
    except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
        return Doubt(
            f"the monitoring at {monitor} does not say when its server writes to disk "
            f"({type(error).__name__})",
            _SHOW,
            unverified=True,
        )
    if always:
        return f"the server at {monitor} has on disk what it acknowledges (sync_interval: always)"
    return Doubt(
        f"the server at {monitor} writes to disk every {every_ns / 1e9:g} s, and a power cut of a "
        "majority of such servers loses the claims of that time",
        _ALWAYS,
    )


def _page(url: str) -> dict[str, Any]:
    with urlopen(url, timeout=_ANSWER_S) as answer:
        read: dict[str, Any] = json.loads(answer.read(_PAGE_MAX))
        return read
