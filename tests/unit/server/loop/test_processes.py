"""S24: the end of a client's process is seen at once, and only of the one that is meant."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from anarchon_server.core.model import Client
from anarchon_server.loop.processes import (
    ProcessWatch,
    own_pid_namespace,
    start_ticks,
    watchable,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has pidfds")


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as started:
        yield started
        started.kill()


def client_of(process: subprocess.Popen[bytes]) -> Client:
    return Client(
        process_id=process.pid,
        process_start_ticks=start_ticks(process.pid),
        pid_namespace=own_pid_namespace(),
    )


async def exit_seen(watch: ProcessWatch, seen: asyncio.Queue[str]) -> str:
    try:
        async with asyncio.timeout(10):
            return await seen.get()
    finally:
        watch.close()


async def test_s24_the_end_of_a_process_is_seen(process: subprocess.Popen[bytes]) -> None:
    seen: asyncio.Queue[str] = asyncio.Queue()
    watch = ProcessWatch(seen.put_nowait)
    watch.watch("session", client_of(process))
    assert seen.empty()
    process.kill()
    assert await exit_seen(watch, seen) == "session"


async def test_s24_a_process_that_is_gone_already_is_reported(
    process: subprocess.Popen[bytes],
) -> None:
    seen: asyncio.Queue[str] = asyncio.Queue()
    client = client_of(process)
    process.kill()
    process.wait()
    watch = ProcessWatch(seen.put_nowait)
    watch.watch("session", client)
    assert await exit_seen(watch, seen) == "session"


async def test_s24_a_number_that_belongs_to_another_process_by_now_counts_as_gone(
    process: subprocess.Popen[bytes],
) -> None:
    seen: asyncio.Queue[str] = asyncio.Queue()
    other = Client(process_id=process.pid, process_start_ticks=1, pid_namespace=1)
    watch = ProcessWatch(seen.put_nowait)
    watch.watch("session", other)
    assert await exit_seen(watch, seen) == "session"


async def test_what_is_not_watched_any_more_is_not_reported(
    process: subprocess.Popen[bytes],
) -> None:
    seen: asyncio.Queue[str] = asyncio.Queue()
    watch = ProcessWatch(seen.put_nowait)
    watch.watch("first", client_of(process))
    watch.watch("second", client_of(process))
    watch.unwatch("first")
    watch.unwatch("never")
    process.kill()
    assert await exit_seen(watch, seen) == "second"
    assert seen.empty()


def test_only_a_process_that_is_what_it_says_can_be_watched(
    process: subprocess.Popen[bytes],
) -> None:
    ticks, namespace = start_ticks(process.pid), own_pid_namespace()
    assert watchable(
        Client(process_id=process.pid, process_start_ticks=ticks, pid_namespace=namespace)
    )
    for wrong in (
        Client(),
        Client(process_id=process.pid, process_start_ticks=0, pid_namespace=namespace),
        Client(process_id=process.pid, process_start_ticks=ticks + 1, pid_namespace=namespace),
        Client(process_id=process.pid, process_start_ticks=ticks, pid_namespace=namespace + 1),
        Client(process_id=2**31 - 1, process_start_ticks=ticks, pid_namespace=namespace),
    ):
        assert not watchable(wrong)


def test_start_ticks_are_read_whatever_the_process_calls_itself() -> None:
    assert start_ticks(os.getpid()) > 0
    assert start_ticks(2**31 - 1) == 0
