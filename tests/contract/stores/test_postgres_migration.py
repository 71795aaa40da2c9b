"""PostgreSQL schemas of earlier versions: `postgres_version_N.sql` is what that version made."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from anarchon_backends.postgres import _connection, _sql, _start, open_store
from anarchon_backends.postgres._values import definition_row
from anarchon_server.core.errors import StoreRefused, StoreUnavailable
from anarchon_server.core.machine import hold_of
from anarchon_server.core.model import (
    AttemptCause,
    Definition,
    Instance,
    OverlapPolicy,
    Reason,
    RunState,
)
from anarchon_server.core.store import ClaimOutcome, OpenOptions, Store, StoreReport
from tests.contract.harness import PERIOD, T0, Cluster, FakeClock, Node, definition
from tests.servers import postgres

HERE = Path(__file__).parent
NOW = T0 + 4 * PERIOD  # when the rows were written
OPENERS = 20


class _Database:
    """A schema, as the contract suite's clusters want it."""

    def __init__(self, url: str) -> None:
        self.url = url

    def store(self, options: OpenOptions) -> Store:
        return postgres.open_virtual(self.url, options)


@pytest.fixture(params=[1])
def version(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


@pytest.fixture
async def url(version: int) -> str:
    """A schema that an earlier version made and wrote to: four slots, one of them in progress."""
    made = postgres.new_schema()
    schema = schema_of(made)
    statements = [f"CREATE SCHEMA {schema}"]
    texts = (HERE / f"postgres_version_{version}{part}.sql" for part in ("", "_rows"))
    statements += (text.read_text().replace('"anarchon".', f"{schema}.") for text in texts)
    await asked(made, *statements, "SELECT 1")
    return made


def schema_of(url: str) -> str:
    return url.rpartition("schema=")[2]


async def asked(url: str, *statements: str) -> list[Any]:
    """Runs statements as the superuser, outside the store; gives the last one's rows."""
    connection = await asyncpg.connect(url.partition("?")[0])
    try:
        for statement in statements[:-1]:
            await connection.execute(statement)
        return [tuple(row) for row in await connection.fetch(statements[-1])]
    finally:
        await connection.close()


async def what_there_is(url: str) -> list[list[Any]]:
    """Every table's columns, every index and every function, as PostgreSQL sees them."""
    schema = schema_of(url)
    columns = """
        SELECT table_name, column_name, data_type, collation_name, column_default, is_nullable
        FROM information_schema.columns WHERE table_schema = $1 ORDER BY 1, 2"""
    indexes = "SELECT indexdef FROM pg_indexes WHERE schemaname = $1 ORDER BY 1"
    functions = """
        SELECT proname, pg_get_function_identity_arguments(p.oid), prosrc, proconfig::text
        FROM pg_proc p JOIN pg_namespace n ON n.oid = pronamespace WHERE nspname = $1 ORDER BY 1, 2"""
    queries = [each.replace("$1", f"'{schema}'") for each in (columns, indexes, functions)]
    return [
        [tuple(str(value).replace(schema, "its") for value in row) for row in rows]
        for rows in [await asked(url, query) for query in queries]
    ]


async def version_of(url: str) -> Any:
    return (await asked(url, f"SELECT version FROM {schema_of(url)}.meta"))[0][0]


async def opened(url: str) -> StoreReport:
    """The report of opening."""
    store = open_store(url, OpenOptions("default", FakeClock()))
    try:
        return await store.open()
    finally:
        await store.close()


def brought(report: StoreReport) -> bool:
    return any("brought from" in text for text in report.verified)


async def reopened(url: str) -> tuple[Cluster, Node]:
    cluster = Cluster(_Database(url))
    cluster.advance_to(NOW)
    node = await cluster.node("host:1")
    return cluster, node


async def test_an_earlier_versions_schema_becomes_one_of_the_present(
    url: str, version: int
) -> None:
    report = await opened(url)
    assert any(f"brought from schema version {version} to" in text for text in report.verified)
    assert not brought(await opened(url)), "only once"
    fresh = postgres.new_schema()
    await opened(fresh)
    assert await what_there_is(url) == await what_there_is(fresh)
    assert await version_of(url) == await version_of(fresh) != version


async def test_what_an_earlier_version_wrote_is_kept(url: str) -> None:
    cluster, node = await reopened(url)
    async with cluster.stack:
        assert await node.states() == {
            10: RunState.SUCCESS,
            20: RunState.FAILED,
            30: RunState.RUNNING,
            40: (RunState.SKIPPED, Reason.OVERLAP),
        }
        running = await node.run(T0 + 3 * PERIOD)
        assert running is not None
        assert [a.cause for a in running.attempts] == [AttemptCause.CLAIM, AttemptCause.TAKEOVER]
        assert running.lease_left_ms == 30_000
        run = running.run
        assert (run.retries, run.retry_at, run.retry_delay_ms, run.request_id) == (0, None, 0, "")
        assert run.cancel_message == ""
        (job,) = (await node.store.jobs(["job"], "", 1)).answers
        assert (job.paused_at, job.pause_reason) == (None, "")
        assert await node.settled() == NOW


async def test_what_an_earlier_version_began_goes_on(url: str) -> None:
    cluster, node = await reopened(url)
    async with cluster.stack:
        seen = await node.look(T0 + 3 * PERIOD)
        assert seen is not None
        assert seen.run.current is not None
        renewed = await node.renew(seen, incarnation=seen.run.current.incarnation)
        assert renewed.outcome == "renewed"
        await node.complete(seen)
        cluster.advance(PERIOD)
        await node.win(NOW + PERIOD)
        made = await node.triggered(overlap=OverlapPolicy.ALLOW, payload=b"p")
        won = await node.claim(made.run.slot, overlap=OverlapPolicy.ALLOW)
        assert (won.outcome, won.payload) == (ClaimOutcome.WON, b"p")


async def test_of_twenty_that_open_an_earlier_versions_schema_at_once_one_brings_it_along(
    url: str,
) -> None:
    reports = await asyncio.gather(*(opened(url) for _ in range(OPENERS)))
    assert sum(map(brought, reports)) == 1
    assert await version_of(url) == _sql.SCHEMA_VERSION


async def test_a_migration_that_fails_leaves_the_schema_as_it_was(
    url: str, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = await what_there_is(url)
    broken = _sql._MIGRATIONS[version] + "INSERT INTO anarchon.nowhere VALUES (1);"
    with monkeypatch.context() as patch:
        patch.setitem(_sql._MIGRATIONS, version, broken)
        with pytest.raises(StoreRefused, match="nowhere"):
            await opened(url)
    assert (await what_there_is(url), await version_of(url)) == (before, version)
    cluster, node = await reopened(url)
    async with cluster.stack:
        assert len(await node.states()) == 4


async def test_a_migration_that_deadlocks_with_others_is_repeated_by_itself(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(_connection._SESSION, "deadlock_timeout", "3s")
    stranger, watcher = [await asyncpg.connect(url.partition("?")[0]) for _ in range(2)]
    schema = schema_of(url)
    try:
        await stranger.execute("SET deadlock_timeout = '1min'")  # the other finds it
        async with stranger.transaction():
            await stranger.execute(f"SELECT FROM {schema}.run LIMIT 1 FOR UPDATE")
            opening = asyncio.create_task(opened(url))
            waits = (
                f"SELECT FROM pg_locks WHERE NOT granted AND relation = '{schema}.run'::regclass"
            )
            while not await watcher.fetch(waits):
                pass
            # It is given only when the migration, which has changed `job`, was undone.
            await stranger.execute(f"SELECT FROM {schema}.job LIMIT 1 FOR UPDATE")
        assert brought(await opening)
    finally:
        await stranger.close()
        await watcher.close()


# Sidecars of version 1 beside it


V1_RENEWALS = "text[] int8[] text[] text[] int8[] int8[] bool[]"

# The functions of version 1 that write, or that a batch of it begins with: types and values.
V1_CALLS: dict[str, tuple[str, Callable[[int], tuple[Any, ...]]]] = {
    "claim": (
        f"text text[] int8[] {4 * 'text[] '} {6 * 'int8[] '} bool[] bool[]",
        lambda slot: (
            *("default", ["job"], [slot], [f"t-{slot}"], ["host:1"], ["inc-1"], ["every:10s"]),
            *([slot - 1], [1_000_000], [30_000], [5_000], [3], [86_400_000], [True], [False]),
        ),
    ),
    "write": (
        "text json json json json text",
        lambda _: ("default", "[]", "[]", "[]", "[]", "news"),
    ),
    "beat": (
        f"{3 * 'text '} int8 text bool {V1_RENEWALS} text[] int8[] {2 * 'text[] '} int8",
        lambda _: ("default", "inc-1", "host:1", 30_000, "{}", False, *([[]] * 11), 10),
    ),
    "complete": (
        f"text text[] int8[] {4 * 'text[] '} int8[]",
        lambda _: (
            *("default", ["job"], [T0 + 3 * PERIOD], ["inc-2-1"]),
            *(["success"], [None], ['"x"'], [0]),
        ),
    ),
    "register_read": ("text text text[]", lambda _: ("default", "inc-1", ["job"])),
    "prune_read": ("text text int8", lambda _: ("default", "", 10)),
}


class EarlierSidecar:
    """A connection of version 1, with its statements prepared."""

    def __init__(self, connection: Any, schema: str) -> None:
        self.connection = connection
        self._schema = schema

    async def call(self, name: str, slot: int = NOW) -> Any:
        types, values = V1_CALLS[name]
        given = ", ".join(f"${n}::{each}" for n, each in enumerate(types.split(), 1))
        sql = f"SELECT {self._schema}.{name}({given})"
        return await self.connection.fetchval(sql, *values(slot))


async def earlier_sidecar(url: str) -> EarlierSidecar:
    connection = await asyncpg.connect(url.partition("?")[0])
    await connection.execute("SET search_path = virtual, pg_catalog")
    await connection.execute(f"SET anarchon.us = '{NOW * 1_000}'")
    return EarlierSidecar(connection, schema_of(url))


@pytest.mark.parametrize("version", [1], indirect=True)
@pytest.mark.parametrize("what", list(V1_CALLS))
async def test_what_still_runs_version_1_fails_and_changes_nothing(url: str, what: str) -> None:
    """Were it to write, it would clear what it does not know, such as a pause."""
    sidecar = await earlier_sidecar(url)
    try:
        earlier = sidecar.connection.transaction()
        await earlier.start()
        await sidecar.call(what)
        await earlier.rollback()
        cluster, node = await reopened(url)
        async with cluster.stack:
            before = await node.history(traces=True)
            with pytest.raises(asyncpg.UndefinedFunctionError):
                await sidecar.call(what)
            assert await node.history(traces=True) == before
    finally:
        await sidecar.connection.close()


@pytest.mark.parametrize("version", [1], indirect=True)
async def test_s10_a_schema_is_brought_along_while_version_1_claims(url: str) -> None:
    """Each call of the earlier version is done or refused, and what it won is still there."""
    schema = schema_of(url)
    sidecars = [await earlier_sidecar(url) for _ in range(3)]
    under_load, won = asyncio.Event(), set[int]()

    async def work(number: int) -> None:
        sidecar = sidecars[number]
        for n in range(number, 100_000, len(sidecars)):
            slot = NOW - 5 * PERIOD - n
            try:
                answer = json.loads(await sidecar.call("claim", slot))
            except asyncpg.UndefinedFunctionError:
                return
            except (asyncpg.DeadlockDetectedError, asyncpg.LockNotAvailableError):
                continue
            assert answer["wins"] == [1]
            won.add(slot)
            if len(won) > 30:
                under_load.set()
        raise AssertionError("it was never refused")

    try:
        await asked(url, f"UPDATE {schema}.schedule SET settled = 0", "SELECT 1")
        working = [asyncio.create_task(work(number)) for number in range(len(sidecars))]
        await under_load.wait()
        assert brought(await opened(url))
        await asyncio.gather(*working)
        rows = await asked(url, f"SELECT slot FROM {schema}.run WHERE token LIKE 't-%'")
        assert {slot for (slot,) in rows} == won
    finally:
        for sidecar in sidecars:
            await sidecar.connection.close()


@pytest.mark.parametrize("version", [1], indirect=True)
async def test_version_1_does_not_open_what_was_brought_along(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a sidecar that starts, nor a new connection of one that runs."""
    await opened(url)
    monkeypatch.setattr(_start, "SCHEMA_VERSION", 1)
    monkeypatch.setattr(_start, "OLDER_VERSIONS", frozenset())
    with pytest.raises(StoreRefused, match="has version 2, and this version of Anarchon knows 1"):
        await opened(url)
    connection = await asyncpg.connect(url.partition("?")[0])
    try:
        with pytest.raises(StoreUnavailable, match="another schema version"):
            await _start.check_again(connection, schema_of(url), "here")
    finally:
        await connection.close()


# Roles


async def test_who_may_not_change_the_tables_says_who_may_and_then_goes_on_as_before(
    url: str,
) -> None:
    """The grants of the docs hold for the present version, too."""
    schema, role = schema_of(url), f"worker_{schema_of(url)}"
    theirs = url.replace(f"{postgres.USER}@", f"{role}@")
    await asked(
        url,
        f"CREATE ROLE {role} LOGIN",
        f"GRANT USAGE ON SCHEMA {schema} TO {role}",
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO {role}",
        "SELECT 1",
    )
    try:
        with pytest.raises(StoreRefused, match=r"let a role that .* made it, open the store once"):
            await opened(theirs)
        await opened(url)
        assert not brought(await opened(theirs))
    finally:
        await asked(url, f"DROP OWNED BY {role}", f"DROP ROLE {role}", "SELECT 1")


# Sidecars of the present version, from before registration in parts, beside it


async def test_a_schema_of_this_version_that_lacks_what_came_later_gets_it_once() -> None:
    url = postgres.new_schema()
    await opened(url)
    whole = await what_there_is(url)
    await asked(url, f"DROP FUNCTION {schema_of(url)}.{_sql.LATER_FUNCTION}", "SELECT 1")
    reports = await asyncio.gather(*(opened(url) for _ in range(5)))
    assert not any(map(brought, reports))
    assert await what_there_is(url) == whole


async def test_s28_a_sidecar_from_before_registration_in_parts_goes_on_registering_all_at_once() -> (
    None
):
    url = postgres.new_schema()
    cluster = Cluster(_Database(url))
    async with cluster.stack:
        (node,) = await cluster.nodes_of(1)
        await node.register(definition("new"))
        wanted = [definition(), definition("old")]
        await registered_whole(url, cluster.now, wanted)
        assert await holders(node) == {
            "job": ("host:1", "old:1"),
            "new": ("host:1",),
            "old": ("old:1",),
        }
        await node.let_go("job")
        await node.register(definition("old"))
        await registered_whole(url, cluster.now, wanted[:1])
        assert await holders(node) == {"job": ("old:1",), "new": ("host:1",), "old": ("host:1",)}


async def registered_whole(url: str, now: int, definitions: Sequence[Definition]) -> None:
    """As such a sidecar registers: all that it holds, with what of it is new to the store."""
    instance = Instance("old:1", "inc-old", lease_ms=30_000, seen_at=now)
    rows = [
        definition_row(hold_of(instance, each), each) | {"held_at": now} for each in definitions
    ]
    jobs, ids = [each.job for each in definitions], [each.definition_id for each in definitions]
    types = "text int8 text text int8 text text[] text[] json json json"
    given = ", ".join(f"${n}::{each}" for n, each in enumerate(types.split(), 1))
    function = f"{schema_of(url)}.register_write_{_sql.SCHEMA_VERSION}"
    connection = await asyncpg.connect(url.partition("?")[0])
    try:
        await connection.fetchval(
            f"SELECT {function}({given})",
            *("default", now, instance.incarnation, instance.instance_id, instance.lease_ms),
            *(instance.to_json(), jobs, ids, "[]", "[]", json.dumps(rows)),
        )
        names = ", ".join(f"'{job}'" for job in jobs)
        await connection.execute(
            f"INSERT INTO {schema_of(url)}.job (namespace, job, definition_id, schedule_id)"
            f" SELECT namespace, job, definition_id, schedule_id FROM {schema_of(url)}.definition"
            f" WHERE job IN ({names}) ON CONFLICT DO NOTHING"
        )
    finally:
        await connection.close()


async def holders(node: Node) -> dict[str, tuple[str, ...]]:
    """Which live instances hold each job."""
    return {view.name: view.instance_ids for view in (await node.store.jobs((), "", 9)).answers}
