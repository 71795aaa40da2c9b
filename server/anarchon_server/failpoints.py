"""Named points at which a test can make the process die, stop or fail. Imports the standard library.

Nothing happens at any of them unless a test arms it: in the same process with `arm`, in a process
of its own with `ANARCHON_FAILPOINTS="store.claim.after=kill"` (several with commas between).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

ENVIRONMENT = "ANARCHON_FAILPOINTS"

Action = Callable[[], Awaitable[None]]

_armed: dict[str, Action] = {}


class FailpointError(Exception):
    """Raised at a failpoint that is armed with `error`."""


class UnknownActionError(ValueError):
    """A failpoint is to be armed with something that there is not."""


async def reached(name: str) -> None:
    """Say that the point `name` is reached; do what it is armed with, if it is."""
    if _armed and (action := _armed.get(name)):
        await action()


@contextmanager
def arm(name: str, action: Action) -> Iterator[None]:
    """Await `action` whenever `name` is reached, as long as the block lasts."""
    _armed[name] = action
    try:
        yield
    finally:
        del _armed[name]


def arm_from(text: str) -> None:
    """Arm for the life of the process what `text`, as in the module's docstring, asks for.

    The actions are `kill` (SIGKILL to itself), `stop` (SIGSTOP) and `error`. Raises
    `UnknownActionError`.
    """
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, action = item.partition("=")
        if action not in _ACTIONS:
            raise UnknownActionError(
                f"{ENVIRONMENT}: {item!r}: write NAME=ACTION with one of {', '.join(_ACTIONS)}"
            )
        _armed[name] = _ACTIONS[action]


async def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


async def _error() -> None:
    raise FailpointError("a failpoint was armed here")


_ACTIONS: dict[str, Action] = {"kill": _kill, "stop": _stop, "error": _error}
