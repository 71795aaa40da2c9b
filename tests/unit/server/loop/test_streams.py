"""A stream gives its events in order, ends after them, and has a bound."""

from __future__ import annotations

import asyncio

import pytest

from anarchon_server.core import limits
from anarchon_server.core.errors import RefusedError
from anarchon_server.core.messages import Draining
from anarchon_server.loop import Stream


async def test_events_come_in_order_and_the_stream_ends_after_them() -> None:
    stream = Stream("s", 1)
    stream.put(Draining(1))
    reader = asyncio.create_task(_read(stream))
    await asyncio.sleep(0)
    stream.put(Draining(2))
    stream.put(Draining(3))
    stream.end(None)
    assert await reader == [1, 2, 3]
    await stream.ended()


async def test_the_first_end_counts() -> None:
    stream = Stream("s", 1)
    stream.end(RefusedError("DRAINING", "first"))
    stream.end(None)
    assert isinstance(stream.error, RefusedError)
    assert await _read(stream) == []


async def test_a_full_stream_takes_no_more() -> None:
    stream = Stream("s", 1)
    for number in range(limits.EVENT_QUEUE_MAX):
        assert not stream.full
        stream.put(Draining(number))
    assert stream.full
    with pytest.raises(AssertionError):
        stream.put(Draining(0))


async def _read(stream: Stream) -> list[int]:
    return [event.grace_ms async for event in stream if isinstance(event, Draining)]
