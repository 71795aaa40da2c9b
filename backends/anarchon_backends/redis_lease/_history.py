"""History: pages of runs, found through an index and read in a few steps (S30).

Imports the port, the machine, the model and the standard library.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from anarchon_backends.redis_lease._rows import (
    all_attempts_of,
    attempts_of,
    decode,
    decoded,
    run_of,
)
from anarchon_server.core import machine, model
from anarchon_server.core import store as port

_STEP = 100  # runs read at once where not every one may be wanted

Read = Callable[..., Awaitable[tuple[machine.Moment, str, list[Any]]]]
Place = tuple[int, str]  # slot, job


class History:
    """Reads pages. `read` carries out commands as one step; `key_of` is a job's key."""

    def __init__(self, namespace: str, key_of: Callable[[str], str], read: Read) -> None:
        self._namespace = namespace
        self._key_of = key_of
        self._read = read

    async def page(self, query: port.RunQuery) -> port.Reply[model.RunView]:
        """The runs that are wanted, newest slot first; equal slots by job name, last first."""
        found: list[model.RunView] = []
        fences: dict[str, int] = {}
        below = query.after
        while True:
            now, store_id, places, more = await self._places(query, below)
            shown: list[tuple[model.RunView, int]] = []
            if places:
                now, store_id, shown = await self._runs(places, query)
            for seen, fence in shown:
                if len(found) < query.limit:
                    found.append(seen if query.traces else machine.without_traces(seen))
                    fences[seen.run.job] = fence
            if not more or len(found) >= query.limit:
                return port.Reply(now.at, tuple(found), fences, store_id)
            below = places[-1] if places else below

    @staticmethod
    def _step(query: port.RunQuery) -> int:
        return max(query.limit, _STEP) if query.states or query.instance_id else query.limit

    async def _places(
        self, query: port.RunQuery, below: Place | None
    ) -> tuple[machine.Moment, str, list[Place], bool]:
        """The next places of the index that the query spans, newest first; whether there may be more."""
        index = f"{self._key_of(query.job)}:runs" if query.job else f"{self._namespace}:runs"
        lowest = max((s for s in (query.slot, query.from_slot) if s is not None), default=None)
        highest = min(
            (
                slot
                for slot in (
                    query.slot,
                    None if query.until_slot is None else query.until_slot - 1,
                    below[0] if below else None,
                )
                if slot is not None
            ),
            default=None,
        )
        top = "+inf" if highest is None else str(highest)
        skip = 0
        if below is not None and below[0] == highest:
            skip = await self._skipped(index, query, below)
        now, store_id, (members,) = await self._read(
            [
                *("ZREVRANGEBYSCORE", index, top, "-inf" if lowest is None else str(lowest)),
                *("LIMIT", skip, self._step(query)),
            ]
        )
        places = [_place_of(decode(each), query.job) for each in members]
        more = len(members) == self._step(query)
        return now, store_id, [each for each in places if below is None or each < below], more

    async def _skipped(self, index: str, query: port.RunQuery, below: Place) -> int:
        """How many of the index at the slot of `below` stand at or before it."""
        slot, job = below
        member = str(slot) if query.job else f"{slot} {job}"
        _, _, (rank, newer) = await self._read(
            ["ZREVRANK", index, member], ["ZCOUNT", index, f"({slot}", "+inf"]
        )
        return 0 if rank is None else int(rank) - int(newer) + 1

    async def _runs(
        self, places: Sequence[Place], query: port.RunQuery
    ) -> tuple[machine.Moment, str, list[tuple[model.RunView, int]]]:
        """The runs at these places that are wanted, each with its job's fence."""
        now, store_id, answers = await self._read(
            *(["HGETALL", f"{self._key_of(job)}:{slot}"] for slot, job in places),
            *(["HGET", self._key_of(job), "fence"] for _, job in places),
        )
        rows, fences = answers[: len(places)], answers[len(places) :]
        wanted = _wanted(zip(places, rows, strict=True), query, now)
        by_place = dict(zip(places, fences, strict=True))
        return (
            now,
            store_id,
            [(seen, int(by_place[seen.run.slot, seen.run.job] or 0)) for seen in wanted],
        )


def _place_of(member: str, job: str) -> Place:
    slot, _, name = member.partition(" ")
    return int(slot), name or job


def _wanted(
    rows: Iterator[tuple[Place, Sequence[bytes]]], query: port.RunQuery, now: machine.Moment
) -> Iterator[model.RunView]:
    for (slot, job), row in rows:
        if not row:
            continue  # pruned meanwhile
        fields: Mapping[str, str] = decoded(row) | {"job": job, "slot": str(slot)}
        run = run_of(fields)
        seen = machine.view(run, now, attempts_of(run, fields))
        if query.states and seen.run.state not in query.states:
            continue
        if query.instance_id and not _attempted_by(query.instance_id, run, fields):
            continue
        yield seen


def _attempted_by(instance_id: str, run: model.Run, fields: Mapping[str, str]) -> bool:
    """Whether any attempt was that instance's, also one too old to be shown."""
    return any(each.instance_id == instance_id for each in all_attempts_of(run, fields))
