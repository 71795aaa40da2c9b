"""Finds the runs that may be wanted of many that are not, in the server: steps of a script that only reads.

A run's state and instance are in no index. What the script lets through is read by the caller, who
knows better. Imports what the backends of Redis share, the port, the model and the standard library.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from anarchon_backends.redis._cluster import Server
from anarchon_backends.redis._connection import Answer, Call
from anarchon_backends.redis._script import Script, script_of
from anarchon_backends.redis._text import decode, encode
from anarchon_server.core import store as port
from anarchon_server.core.errors import OutcomeUnknown, StoreError, StoreUnavailable
from anarchon_server.core.model import RunState

STEP = 250  # runs looked at by one call of the script, during which nobody else is served
STEP_LEAST = 8  # of a job, where there are many
LOOKED_MAX = 5_000  # runs looked at for one page ...
READ_MAX = 1_000  # ... and read for it
READ_LEAST = 100  # runs read at once where not every one may be wanted
_JOBS = 500  # calls sent to a server at once

Place = tuple[int, str]  # slot, job


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of the indexes that was looked at: where runs are that may be wanted, newest first; down
    to where that is all (None: there were none); how many were looked at; whether there are more.
    """

    places: Sequence[Place]
    end: Place | None
    looked: int
    more: bool


@dataclass(frozen=True, slots=True)
class Span:
    """The highest and the lowest slot that a query spans, as the commands take them."""

    top: str
    bottom: str


def span_of(query: port.RunQuery, below: Place | None) -> Span:
    """The slots of the query, from that of `below` on down."""
    until = None if query.until_slot is None else query.until_slot - 1
    tops = [s for s in (query.slot, until, below[0] if below else None) if s is not None]
    bottoms = [s for s in (query.slot, query.from_slot) if s is not None]
    return Span(str(min(tops)) if tops else "+inf", str(max(bottoms)) if bottoms else "-inf")


def is_selective(query: port.RunQuery) -> bool:
    """Whether not every run of an index is wanted."""
    return bool(query.states or query.instance_id)


async def parts_of(
    stretches: AsyncIterator[Stretch], query: port.RunQuery
) -> AsyncIterator[tuple[Sequence[Place], Place | None]]:
    """The places of the stretches, some at a time, each with down to where that is all (None: it is the
    end); no more than one page should look at.
    """
    size = _read_at_once(query)
    looked = read = 0
    async for stretch in stretches:
        for first in range(0, len(stretch.places), size):
            part = stretch.places[first : first + size]
            read += len(part)
            yield part, part[-1]
            if read >= max(READ_MAX, query.limit):
                return
        yield (), stretch.end if stretch.more else None
        looked += stretch.looked
        if looked >= max(LOOKED_MAX, query.limit):
            return


def _read_at_once(query: port.RunQuery) -> int:
    """How many runs to read before it is looked whether a page is full."""
    return max(query.limit, READ_LEAST) if is_selective(query) else query.limit


class Sieve:
    """Looks for runs in the indexes of one namespace.

    `key_of` is the key of a job, with which its index and its runs begin. `shown_as` has states that
    are not only stored as such: in which a run may be that shows so.
    """

    def __init__(
        self,
        server: Server,
        key_of: Callable[[str], str],
        shown_as: Mapping[RunState, Sequence[RunState]],
    ) -> None:
        self._server = server
        self._key_of = key_of
        self._shown_as = shown_as

    async def of_index(self, namespace: str, query: port.RunQuery) -> AsyncIterator[Stretch]:
        """The stretches of the index of the query's job, or of the namespace's, of all jobs."""
        if query.job:
            async for each in self.of_jobs([query.job], query):
                yield each
            return
        below = end = query.after
        more = True
        while more:
            span = span_of(query, below)
            asked = {"begin": f"{namespace[:-1]}:", "top": span.top, "bottom": span.bottom}
            if below is not None and str(below[0]) == span.top:
                asked["after"] = f"{below[0]} {below[1]}"
            (said,) = await self._ask([self._call(f"{namespace}:runs", asked, STEP, query)])
            below, more = _place_of(said["last"]) if said["looked"] else below, said["more"]
            places = [_place_of(each) for each in said["found"]]
            wanted = [each for each in places if end is None or each < end]
            # Where that before them is pruned meanwhile, its slot is looked at from the top again.
            is_further = below is not None and (end is None or below < end)
            end = below if is_further else end
            yield Stretch(wanted, end, said["looked"] if is_further else 0, more)

    async def of_jobs(self, names: Sequence[str], query: port.RunQuery) -> AsyncIterator[Stretch]:
        """The stretches of the jobs' own indexes, merged.

        Some of each job is looked at, and handed out what comes before all that was not.
        """
        step = max(STEP // max(len(names), 1), STEP_LEAST)
        bottom = span_of(query, None).bottom
        tops = {name: top_of(name, query) for name in names}
        ends: dict[str, Place] = {}  # of jobs that have more: down to where they were looked at
        waiting: list[Place] = []
        while tops:
            looked = 0
            calls = [
                self._call(f"{self._key_of(name)}:runs", asked, step, query)
                for name, top in tops.items()
                for asked in [{"begin": f"{self._key_of(name)}:", "top": top, "bottom": bottom}]
            ]
            for name, said in zip(tops, await self._ask(calls), strict=True):
                waiting += [(int(each), name) for each in said["found"]]
                looked += said["looked"]
                ends.pop(name, None)
                if said["more"]:
                    ends[name] = (int(said["last"]), name)
            barrier = max(ends.values(), default=None)
            ready = sorted((p for p in waiting if barrier is None or p >= barrier), reverse=True)
            waiting = [p for p in waiting if barrier is not None and p < barrier]
            yield Stretch(ready, barrier, looked, barrier is not None)
            newest = max(waiting, default=None)
            tops = {
                name: f"({end[0]}" for name, end in ends.items() if newest is None or end > newest
            }

    def _call(
        self, index: str, asked: Mapping[str, object], step: int, query: port.RunQuery
    ) -> Call:
        batch: dict[str, object] = {**asked, "step": step, "most": _read_at_once(query)}
        if query.states:
            stored = {each for state in query.states for each in self._stored_as(state)}
            batch["states"] = dict.fromkeys(stored, True)
        if query.instance_id:
            batch["instance_id"] = query.instance_id
        return Call(_script(), [index], encode(json.dumps(batch)))

    def _stored_as(self, state: RunState) -> Sequence[RunState]:
        return (state, *self._shown_as.get(state, ()))

    async def _ask(self, calls: Sequence[Call]) -> list[dict[str, Any]]:
        told: list[Answer] = []
        for first in range(0, len(calls), _JOBS):
            told += await self._server.run_each(calls[first : first + _JOBS])
        return [_said(each) for each in told]


@cache
def _script() -> Script:
    folder = resources.files(__package__) / "lua"
    return script_of((folder / "sift.lua").read_text(encoding="utf-8"))


def _said(answer: Answer) -> dict[str, Any]:
    """What the script said. It wrote nothing, whether it was done or not."""
    if isinstance(answer, OutcomeUnknown):
        raise StoreUnavailable(str(answer)) from answer
    if isinstance(answer, StoreError):
        raise answer
    said: dict[str, Any] = json.loads(decode(answer))
    return said


def _place_of(member: str) -> Place:
    slot, _, job = member.partition(" ")
    return int(slot), job


def top_of(name: str, query: port.RunQuery) -> str:
    """From where on down the job's index is looked at."""
    highest, after = span_of(query, None).top, query.after
    if after is None or (highest != "+inf" and int(highest) < after[0]):
        return highest
    return str(after[0]) if name < after[1] else f"({after[0]}"
