"""An event loop whose time is a number: it jumps to the next timer whenever nothing else happens."""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

_P = ParamSpec("_P")
# For a thread that calls back; nothing in these tests takes a real second.
_REAL_WAIT_S = 5


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop that never waits for a timer."""

    def __init__(self) -> None:
        self._now_s = 1_000.0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self._now_s

    def jump(self, for_s: float) -> None:
        self._now_s += for_s


class _Selector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            events = super().select(_REAL_WAIT_S)
            if not events:
                raise RuntimeError("nothing is left to happen")
            return events
        events = super().select(0)
        if not events and timeout > 0:
            self._loop.jump(timeout)
        return events


class VirtualClock:
    """The client's clock on such a loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def now_ms(self) -> int:
        # The loop's sums of seconds may fall short by a hair.
        return int(self._loop.time() * 1_000 + 1e-3)


def virtual(test: Callable[_P, Coroutine[Any, Any, None]]) -> Callable[_P, None]:
    """Run a test's coroutine on a loop of its own whose time is virtual."""

    @functools.wraps(test)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run
