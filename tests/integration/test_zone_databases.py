"""Instances with different zone databases, as in the middle of an update, and what they log (S5)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import tzdata

from anarchon import AnarchonClient, Cron, Job
from anarchon.admin import AdminClient
from tests.integration.harness import WAIT_S
from tests.servers.ports import free_port

ELSEWHERE = "2025z"


async def handler() -> None:
    """None of these jobs falls due while the test runs, or it does not matter."""


JOBS = [
    Job(handler, Cron("30 3 * * *", tz="Europe/Athens"), name="report"),
    Job(handler, Cron("0 * * * *", tz="Europe/Athens"), name="hourly"),
    Job(handler, Cron("30 3 * * *", tz="Asia/Tokyo"), name="tokyo"),
]


def other_database(folder: Path) -> Path:
    """A tzdata package of another version, in which Athens has the clocks of London."""
    package = folder / "tzdata"
    shutil.copytree(Path(tzdata.__file__).parent, package)
    zones = package / "zoneinfo" / "Europe"
    shutil.copyfile(zones / "London", zones / "Athens")
    about = package / "__init__.py"
    about.write_text(about.read_text().replace(tzdata.IANA_VERSION, ELSEWHERE))
    return folder


@contextlib.asynccontextmanager
async def instance(folder: Path, name: str, path: Path | None = None) -> AsyncIterator[Any]:
    """A sidecar and a client with the jobs; the sidecar's process, to read its log from."""
    address = f"127.0.0.1:{free_port()}"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "anarchon_server", "serve", "--listen", address),
        *("--store", f"sqlite://{folder / 'store.db'}"),
        *("--instance-id", name, "--log-format", "json"),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **({"PYTHONPATH": str(path)} if path else {})},
    )
    try:
        async with AnarchonClient(address) as client:
            await client.subscribe(JOBS).ready()
            await asyncio.wait_for(asyncio.to_thread(registered, address), WAIT_S)
            yield process
    finally:
        process.kill()
        await process.wait()


def registered(address: str) -> None:
    """Waits until the store has the jobs, and with them what the instance says of its zones."""
    with AdminClient(address) as admin:
        while len(list(admin.list_jobs())) < len(JOBS):
            pass


async def logged(process: Any, event: str) -> dict[str, Any]:
    """The next line of this kind."""
    async with asyncio.timeout(WAIT_S):
        async for line in process.stderr:
            fields: dict[str, Any] = json.loads(line)
            if fields["event"] == event:
                return fields
    raise AssertionError(f"it ended without {event}")


async def test_s05_an_instance_with_another_database_says_loudly_which_jobs_differ(
    tmp_path: Path,
) -> None:
    async with (
        instance(tmp_path, "one"),
        instance(tmp_path, "two", other_database(tmp_path)) as two,
    ):
        differs = await logged(two, "tzdata_differs")
        assert differs["level"] == "warning"
        assert (differs["ours"], differs["theirs"]) == (ELSEWHERE, tzdata.IANA_VERSION)
        assert differs["instances"] == "one"
        slots = await logged(two, "slots_differ")
        assert slots["level"] == "error"
        assert (slots["time_zone"], slots["jobs"]) == ("Europe/Athens", "report")
        assert slots["first_at"][14:] == "30:00Z"
