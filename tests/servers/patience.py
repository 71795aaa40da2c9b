"""The time that calls of a store have, which is over when a test says so.

A test that waits for a call to time out would have to guess how long the machine needs until the
call has been sent. With this the call has much time, and none any more once the test has seen that.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import TracebackType
from typing import Self

import pytest


class Patience:
    """Holds the timeouts of `timeout_ms` that begin inside its block. `end` lets all be over now."""

    def __init__(self, timeout_ms: int) -> None:
        self._delay_s = timeout_ms / 1_000
        self._begun: list[asyncio.Timeout] = []
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> Self:
        plain = asyncio.timeout

        def timeout(delay: float | None) -> asyncio.Timeout:
            begun = plain(delay)
            if delay == self._delay_s:
                self._begun.append(begun)
            return begun

        self._patch.setattr(asyncio, "timeout", timeout)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._patch.undo()

    def end(self) -> None:
        """Fails where no such timeout has begun: then the calls are not bounded by it."""
        assert self._begun, f"no call is bounded by {self._delay_s} s"
        for each in self._begun:
            with suppress(RuntimeError):  # it is over already
                each.reschedule(asyncio.get_running_loop().time())
