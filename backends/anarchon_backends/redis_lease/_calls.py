"""Scripts carried out on the keys of one namespace: on one server all jobs of a batch in one call, in
a cluster a call a job, those of a node at once.

Imports what the backends of Redis share, the scripts, the errors and the standard library.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from anarchon_backends.redis._cluster import Cluster, Server
from anarchon_backends.redis._connection import Answer, Call
from anarchon_backends.redis._script import Script
from anarchon_backends.redis._text import decode, encode
from anarchon_backends.redis_lease import _scripts
from anarchon_backends.redis_lease._batches import parts_of
from anarchon_server.core import store as port
from anarchon_server.core.errors import OutcomeUnknown, StoreError, StoreUnavailable

Item = dict[str, Any]
Reply = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Part:
    """What became of the items at some places of a batch: a script's reply, or an error."""

    places: Sequence[int]
    reply: Reply | None = None
    error: StoreError | None = None


class Calls:
    """The keys of a namespace, and what is asked about them.

    In a cluster (`apart`) the namespace and each job may be on different nodes. With `durable`,
    claims and results wait for what the URL asks for. `clock` stands in for the servers' clocks, in
    tests.
    """

    def __init__(
        self,
        server: Server,
        namespace: str,
        clock: port.StoreClock | None,
        *,
        durable: bool = False,
    ) -> None:
        self._server = server
        self._durable = durable
        self._clock = clock
        self._drawn_id = secrets.token_hex(8)
        self._store_id = ""
        self.apart = isinstance(server, Cluster)
        self.namespace = f"anarchon:{{{len(namespace)}:{namespace}}}"

    def key_of(self, job: str) -> str:
        """The job's key, whose hash tag tells all keys of the job from those of all others."""
        return f"{self.namespace[:-1]}:{job}}}"

    def identity(self, store_id: str) -> str:
        """The store's identity: as the namespace has it, and how often a server may have lost what
        it acknowledged (S27a). It means something to this process alone.
        """
        losses = self._server.losses
        return f"{store_id}+{losses}" if losses else store_id

    async def of_namespace(
        self, script: Script, batch: Mapping[str, object], *, within_ms: int | None = None
    ) -> Reply:
        """Carries out a script on the namespace's keys."""
        call = self._call(script, [self.namespace], batch)
        within_s = None if within_ms is None else within_ms / 1_000
        (answer,) = await self._server.run_each([call], within_s=within_s)
        if isinstance(answer, StoreError):
            raise answer
        return self._reply(answer)

    async def of_key(self, script: Script, key: str, batch: Mapping[str, object]) -> Reply:
        """Carries out a script on one key that is not the namespace's."""
        call = self._call(script, [key], {**batch, "apart": True})
        return self._reply(await self._server.run(call.script, call.keys, call.batch))

    async def of_jobs(
        self,
        script: Script,
        items: Sequence[Item],
        batch: Mapping[str, object] | None = None,
        *,
        whole: bool = False,
        form: Callable[[list[Item]], dict[str, Any]] = lambda items: {"items": items},
        last: Mapping[str, object] | None = None,
        durable: bool = False,
        within_ms: int | None = None,
    ) -> list[Part]:
        """Carries out a script on the items' jobs.

        `form` makes a call's batch of its items. With `whole`, the items of a job, which stand side
        by side, stay in one call. On one server what is in `last` goes with the last call, of which
        there is at least one. In a cluster the nodes have `within_ms` (None: a call's usual time).
        """
        parts = _divided(items, apart=self.apart, whole=whole)
        if not parts and not self.apart:
            parts = [([], [])]
        batches = [{**(batch or {}), **form(items)} for _, items in parts]
        durable = durable and self._durable
        if durable:
            batches = [{**each, "durable": True} for each in batches]
        if self.apart:
            within_s = None if within_ms is None else within_ms / 1_000
            return await self._spread(script, parts, batches, durable=durable, within_s=within_s)
        batches[-1] |= last or {}
        return await self._in_turn(script, parts, batches, durable=durable)

    async def _in_turn(
        self,
        script: Script,
        parts: Sequence[tuple[list[int], list[Item]]],
        batches: Sequence[Mapping[str, object]],
        *,
        durable: bool,
    ) -> list[Part]:
        """One part after the other, up to the first that fails: the server has others to serve."""
        done: list[Part] = []
        for (places, items), batch in zip(parts, batches, strict=True):
            keys = [self.namespace, *(self.key_of(item["job"]) for item in items)]
            calls = [self._call(script, keys, batch)]
            (answer,) = await self._server.run_each(calls, durable=durable)
            done.append(self._part(places, answer))
            if done[-1].error is not None:
                rest = StoreUnavailable("not asked for, as a part of the call before it failed")
                return done + [Part(places, error=rest) for places, _ in parts[len(done) :]]
        return done

    async def _spread(
        self,
        script: Script,
        parts: Sequence[tuple[list[int], list[Item]]],
        batches: Sequence[Mapping[str, object]],
        *,
        durable: bool,
        within_s: float | None,
    ) -> list[Part]:
        """All at once. News of jobs are told the namespace afterwards: a wake-up at most."""
        if not parts:
            return []
        calls = [
            self._call(
                script, [self.key_of(item["job"]) for item in items], {**batch, "apart": True}
            )
            for (_, items), batch in zip(parts, batches, strict=True)
        ]
        answers = await self._server.run_each(calls, durable=durable, within_s=within_s)
        done = [self._part(p, each) for (p, _), each in zip(parts, answers, strict=True)]
        if any(part.reply and part.reply["news"] for part in done):
            with suppress(StoreError):
                await self.of_namespace(_scripts.NEWS, {})
        return done

    def _call(self, script: Script, keys: Sequence[str], batch: Mapping[str, object]) -> Call:
        batch = {**batch, "store_id": self._drawn_id}
        if self._clock is not None:
            batch["now_us"] = self._clock.wall_us()
        text = json.dumps(batch, ensure_ascii=False, separators=(",", ":"))
        return Call(script, keys, encode(text))

    def _part(self, places: Sequence[int], answer: Answer) -> Part:
        if isinstance(answer, StoreError):
            return Part(places, error=answer)
        return Part(places, self._reply(answer))

    def _reply(self, said: bytes) -> Reply:
        """A script's reply. That of a job's keys alone does not say whose store it is."""
        reply: Reply = json.loads(decode(said))
        self._store_id = reply.get("store_id") or self._store_id
        return reply | {"store_id": self.identity(self._store_id)}


def _divided(
    items: Sequence[Item], *, apart: bool, whole: bool
) -> list[tuple[list[int], list[Item]]]:
    """The items in runs that one call may carry out, with their places."""
    by_job: dict[str, list[tuple[int, Item]]] = {}
    for place, item in enumerate(items):
        by_job.setdefault(item["job"] if apart or whole else "", []).append((place, item))
    parts: list[tuple[list[int], list[Item]]] = []
    if apart or not whole:
        for group in by_job.values():
            places = iter([place for place, _ in group])
            found = [item for _, item in group]
            divided = [found] if whole else parts_of(found)
            parts += [([next(places) for _ in part], part) for part in divided]
        return parts
    for groups in parts_of(list(by_job.values())):
        placed = [each for group in groups for each in group]
        parts.append(([place for place, _ in placed], [item for _, item in placed]))
    return parts


def failure_of(parts: Sequence[Part]) -> StoreError | None:
    """Why a call is not wholly done, if it is not."""
    errors = [part.error for part in parts if part.error is not None]
    if not errors:
        return None
    worst = next((each for each in errors if isinstance(each, OutcomeUnknown)), errors[0])
    if len(errors) < len(parts) and not isinstance(worst, OutcomeUnknown):
        unknown = OutcomeUnknown(f"{worst}; a part of the call was done before")
        unknown.__cause__ = worst
        return unknown
    return worst


def replies_of(parts: Sequence[Part]) -> list[Reply]:
    """The replies to a call. Raises where a part of it failed."""
    failure = failure_of(parts)
    if failure is not None:
        raise failure
    return [part.reply for part in parts if part.reply is not None]
