"""The parts of a batch, asked for at once, and what becomes of the batch where some fail.

Imports the errors and the standard library.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from anarchon_server.core.errors import OutcomeUnknown, StoreError, StoreUnavailable

_T = TypeVar("_T")


async def settled(parts: Iterable[Coroutine[Any, Any, _T]]) -> list[_T | StoreError]:
    """What became of each part, when all are over."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    await _end(tasks)
    outcomes: list[_T | StoreError] = []
    for task in tasks:
        error = _failure(task)
        outcomes.append(task.result() if error is None else error)
    return outcomes


async def _end(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Waits until all are over. Where that is cancelled they are, too."""
    if not tasks:
        return
    try:
        await asyncio.wait(tasks)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        raise


def _failure(task: asyncio.Future[Any]) -> StoreError | None:
    """Why the store did not do its part. Whatever else went wrong is raised."""
    error = task.exception()
    if error is not None and not isinstance(error, StoreError):
        raise error
    return error


async def together(parts: Iterable[Coroutine[Any, Any, _T]], *, writes: bool = False) -> list[_T]:
    """The answers of all parts, in their order.

    Where one fails the whole does: with `writes` as `OutcomeUnknown` unless surely nothing of the
    whole was done.
    """
    found = await settled(parts)
    answers = [each for each in found if not isinstance(each, StoreError)]
    errors = [each for each in found if isinstance(each, StoreError)]
    if errors:
        raise of_the_whole(errors, partly=writes and bool(answers))
    return answers


async def over(*parts: asyncio.Future[Any], writes: bool = True) -> None:
    """Waits until all parts are over. Raises as `together` does."""
    await _end(parts)
    errors = [error for error in map(_failure, parts) if error is not None]
    if errors:
        raise of_the_whole(errors, partly=writes and len(errors) < len(parts))


def of_the_whole(errors: list[StoreError], *, partly: bool) -> StoreError:
    """What these failures are to the whole; `partly`: something else of it was done."""
    unknown = next((error for error in errors if isinstance(error, OutcomeUnknown)), None)
    if unknown is None and partly and isinstance(errors[0], StoreUnavailable):
        return OutcomeUnknown(f"a part of it was done: {errors[0]}")
    return unknown or errors[0]
