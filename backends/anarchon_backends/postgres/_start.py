"""The start: whether the server can be trusted with claims, and the schema on it.

Imports the port's report, the errors, limits, the standard library and asyncpg.
"""

from __future__ import annotations

import asyncio
import secrets

import asyncpg

from anarchon_backends.postgres._sql import (
    LATER_FUNCTION,
    OLDER_VERSIONS,
    SCHEMA_VERSION,
    TABLES,
    in_schema,
    later_sql,
    migration_sql,
    quoted,
    schema_sql,
)
from anarchon_server.core import limits
from anarchon_server.core import store as port
from anarchon_server.core.errors import StoreRefused, StoreUnavailable

_SERVER_MIN = 120_000
_OFFSET_MAX_MS = 2_000
_CREATING = 0x616E6172  # "anar": the advisory lock under which a schema is made, with its name
_MIGRATING_S = 600.0  # how long opening may take where the schema is brought forward
_REPEATS = 5  # of that, where it and others waited for each other

NUMBERS = {
    "early": limits.EARLY_MAX,
    "margin_share": limits.MARGIN_SHARE,
    "lost_shown": limits.LOST_SHOWN,
    "attempts_shown": limits.ATTEMPTS_SHOWN,
}

# What drivers and servers say when the URL is not right, and what to do.
REMEDIES = (
    (
        "unsupported startup parameter",
        "there is a pooler before the server: add ?pooler=transaction to the URL",
    ),
    ("root certificate file", "sslrootcert must name the authority that signed its certificate"),
    ("does not exist", "name a database and a role that exist"),
    ("password authentication failed", "correct the user or the password"),
    ("no pg_hba.conf entry", "let the server's pg_hba.conf admit this host, user and database"),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "sslrootcert must name the authority that signed its certificate",
    ),
    ("rejected SSL upgrade", "the server has no TLS: turn it on there, or correct sslmode"),
)

_SETTINGS = """
SELECT name, setting FROM pg_catalog.pg_settings WHERE name IN (
    'server_version_num', 'server_version', 'fsync', 'full_page_writes', 'synchronous_commit',
    'synchronous_standby_names', 'default_transaction_isolation', 'default_transaction_read_only',
    'transaction_read_only', 'in_hot_standby')
"""

_HAS_SCHEMA = "SELECT EXISTS (SELECT FROM pg_catalog.pg_namespace WHERE nspname = $1)"
_HAS_META = """
SELECT EXISTS (SELECT FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n
    ON n.oid = c.relnamespace WHERE n.nspname = $1 AND c.relname = 'meta')
"""
_HAS_FUNCTION = """
SELECT EXISTS (SELECT FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_namespace n
    ON n.oid = p.pronamespace WHERE n.nspname = $1 AND p.proname = $2)
"""


class Start:
    """One opening: what it finds is in `report` and, once it is through, `store_id`."""

    def __init__(self, schema: str, location: str, *, pooled: bool) -> None:
        self._schema = schema
        self._location = location
        self._pooled = pooled
        self._verified: list[str] = []
        self._doubts: list[port.Doubt] = []
        self.store_id = ""

    @property
    def report(self) -> port.StoreReport:
        return port.StoreReport(self._location, tuple(self._verified), tuple(self._doubts))

    def _refused(self, what: str) -> StoreRefused:
        return StoreRefused(f"PostgreSQL at {self._location}: {what}")

    async def run(
        self, connection: asyncpg.Connection, clock: port.StoreClock, limit: asyncio.Timeout
    ) -> None:
        """Checks the server, makes the schema where it is missing or old, checks that too.

        Its time is within `limit`, which is moved where a schema is to be brought forward.
        """
        await self._check_server(connection)
        version = await self._version(connection)
        if version in OLDER_VERSIONS:
            limit.reschedule(asyncio.get_running_loop().time() + _MIGRATING_S)
        if version is None or version in OLDER_VERSIONS or await self._lacks(connection):
            await self._make(connection)
        await self._check_schema(connection)
        await self._check_clock(connection, clock)

    async def _check_server(self, connection: asyncpg.Connection) -> None:
        found = {row["name"]: row["setting"] for row in await connection.fetch(_SETTINGS)}
        if int(found["server_version_num"]) < _SERVER_MIN:
            raise self._refused(
                f"it is version {found['server_version']}: Anarchon needs 12 or newer"
            )
        if await connection.fetchval("SELECT pg_catalog.pg_is_in_recovery()"):
            raise self._refused(
                "it is a standby, which cannot write: name the primary, or all hosts with"
                " target_session_attrs=read-write"
            )
        if found["transaction_read_only"] == "on" or found["default_transaction_read_only"] == "on":
            raise self._refused(
                "its transactions are read-only: ALTER ROLE ... SET default_transaction_read_only"
                " = off"
            )
        if found["fsync"] != "on":
            raise self._refused(
                "fsync is off: a crash of its machine loses and corrupts what it acknowledged: set"
                " fsync = on"
            )
        self._verified.append(f"PostgreSQL {found['server_version']}, a primary, fsync on")
        if found["full_page_writes"] != "on":
            text = (
                "full_page_writes is off: a power cut can corrupt pages, unless the disk writes"
                " pages whole"
            )
            self._doubts.append(port.Doubt(text, "set full_page_writes = on"))
        self._check_session(found)
        await self._check_standbys(connection, found["synchronous_standby_names"])

    def _check_session(self, found: dict[str, str]) -> None:
        if found["default_transaction_isolation"] != "read committed":
            raise self._refused(
                f"behind the pooler transactions are {found['default_transaction_isolation']}:"
                " ALTER ROLE ... SET default_transaction_isolation = 'read committed'"
            )
        if found["synchronous_commit"] == "off":
            raise self._refused(
                "behind the pooler synchronous_commit is off, which loses acknowledged claims in a"
                " crash: ALTER ROLE ... SET synchronous_commit = on"
            )
        self._verified.append(
            f"read committed, synchronous_commit {found['synchronous_commit']} for this role"
            if self._pooled
            else "read committed and synchronous_commit on in its sessions"
        )
        if self._pooled:
            text = (
                "a pooler in transaction mode: no news of freed runs, and no statement_timeout"
                " unless the role has one"
            )
            fix = (
                "ALTER ROLE ... SET statement_timeout = '1500ms'; for news connect to the server"
                " itself, or through a pooler in session mode"
            )
            self._doubts.append(port.Doubt(text, fix))

    async def _check_standbys(self, connection: asyncpg.Connection, synchronous: str) -> None:
        if synchronous:
            self._verified.append(f"commits wait for synchronous standbys ({synchronous})")
            return
        if await connection.fetchval("SELECT count(*) FROM pg_catalog.pg_stat_replication"):
            text = "its standbys are asynchronous: promoting one loses the last acknowledged claims"
            self._doubts.append(port.Doubt(text, "set synchronous_standby_names"))

    async def _version(self, connection: asyncpg.Connection) -> int | None:
        """The schema's version; None where it is not there."""
        table = f"{quoted(self._schema)}.meta"
        # Not by to_regclass, which may know from before a wait that there is no such schema.
        if not await connection.fetchval(_HAS_META, self._schema):
            return None
        try:
            row = await connection.fetchrow(f"SELECT version, store_id FROM {table}")  # noqa: S608
        except asyncpg.UndefinedColumnError:
            row = None
        except asyncpg.InsufficientPrivilegeError as error:
            raise self._refused(f"{error}: {self._grants()}") from error
        if row is None:
            raise self._refused(
                f"schema {self._schema} has another program's table named meta: name another schema"
                " with ?schema="
            )
        self.store_id = row["store_id"]
        return int(row["version"])

    async def _lacks(self, connection: asyncpg.Connection) -> bool:
        """Whether the schema was made before its version had all that it has now."""
        return not await connection.fetchval(_HAS_FUNCTION, self._schema, LATER_FUNCTION)

    def _grants(self) -> str:
        schema = quoted(self._schema)
        return (
            f"GRANT USAGE ON SCHEMA {schema}, SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA"
            f" {schema} and EXECUTE ON ALL FUNCTIONS IN SCHEMA {schema} to this role"
        )

    async def _make(self, connection: asyncpg.Connection) -> None:
        """Makes the schema, whoever comes first; the others wait for that and find it."""
        try:
            for repeats_left in reversed(range(_REPEATS)):
                try:
                    async with connection.transaction():
                        await self._make_under_lock(connection)
                    return
                except asyncpg.DeadlockDetectedError:
                    if not repeats_left:
                        raise
        except asyncpg.InsufficientPrivilegeError as error:
            raise self._refused(
                f"{error}: let a role that may create it, or that made it, open the store once, and"
                f" {self._grants()}; or GRANT CREATE on the database to this role"
            ) from error
        except (asyncpg.DuplicateTableError, asyncpg.DuplicateFunctionError) as error:
            raise self._refused(
                f"{error}: schema {self._schema} is another program's: name another schema with"
                " ?schema="
            ) from error

    async def _make_under_lock(self, connection: asyncpg.Connection) -> None:
        """Makes the schema, or one of an earlier version the present: as a whole or not at all.

        It never goes back. Whoever is still connected with an earlier version of Anarchon fails from
        then on, as the functions that it calls are gone.
        """
        schema = quoted(self._schema)
        lock = "SELECT pg_catalog.pg_advisory_xact_lock($1, pg_catalog.hashtext($2))"
        await connection.execute("SET LOCAL lock_timeout = 0; SET LOCAL statement_timeout = 0")
        await connection.execute(lock, _CREATING, self._schema)
        version = await self._version(connection)
        if version is None:
            if not await connection.fetchval(_HAS_SCHEMA, self._schema):
                await connection.execute(f"CREATE SCHEMA {schema}")
            await connection.execute(schema_sql(self._schema, NUMBERS))
            await connection.execute(
                f"INSERT INTO {schema}.meta VALUES ($1, $2)",  # noqa: S608
                SCHEMA_VERSION,
                secrets.token_hex(16),
            )
        elif version in OLDER_VERSIONS:
            await connection.execute(migration_sql(self._schema, version, NUMBERS))
            await connection.execute(
                f"UPDATE {schema}.meta SET version = $1",  # noqa: S608
                SCHEMA_VERSION,
            )
            self._verified.append(f"brought from schema version {version} to {SCHEMA_VERSION}")
        elif version == SCHEMA_VERSION and await self._lacks(connection):
            await connection.execute(later_sql(self._schema, NUMBERS))

    async def _check_schema(self, connection: asyncpg.Connection) -> None:
        version = await self._version(connection)
        if version != SCHEMA_VERSION:
            raise self._refused(
                f"schema {self._schema} has version {version}, and this version of Anarchon knows"
                f" {SCHEMA_VERSION}: run the version that wrote it, or name another schema with"
                " ?schema="
            )
        names = [f"{quoted(self._schema)}.{table}" for table in TABLES]
        unlogged = await connection.fetch(
            "SELECT relname FROM pg_catalog.pg_class"
            " WHERE oid = ANY ($1::text[]::regclass[]) AND relpersistence <> 'p'",
            names,
        )
        if unlogged:
            which = ", ".join(row["relname"] for row in unlogged)
            raise self._refused(
                f"UNLOGGED tables are empty after a crash ({which}): ALTER TABLE ... SET LOGGED"
            )
        missing = await connection.fetch(
            "SELECT name, priv FROM unnest($1::text[]) name, unnest("
            "'{SELECT,INSERT,UPDATE,DELETE}'::text[]) priv"
            " WHERE NOT pg_catalog.has_table_privilege(name, priv)",
            [name for name in names if not name.endswith(".meta")],
        )
        if missing:
            lacks = sorted({f"{row['priv']} on {row['name']}" for row in missing})
            raise self._refused(f"this role lacks {', '.join(lacks)}: {self._grants()}")
        self._verified.append(f"schema {self._schema}, version {version}, logged tables")

    async def _check_clock(self, connection: asyncpg.Connection, clock: port.StoreClock) -> None:
        """The offset between two clocks, by a question whose way there and back is known."""
        sent, boot = clock.wall_us(), clock.boot_ms()
        now_us = await connection.fetchval(in_schema("SELECT anarchon.now_us()", self._schema))
        took_ms = clock.boot_ms() - boot
        offset_ms = round((now_us - sent) / 1_000 - took_ms / 2)
        said = (
            f"its clock is {offset_ms:+d} ms from this machine's, to within {took_ms // 2 + 1} ms"
        )
        if abs(offset_ms) > _OFFSET_MAX_MS:
            fix = "have both machines' clocks set by the same time servers (NTP)"
            self._doubts.append(port.Doubt(said, fix))
        else:
            self._verified.append(said)


async def check_again(connection: asyncpg.Connection, schema: str, location: str) -> str:
    """The store's identity, on a new connection, which may lead to another server by now."""
    sql = in_schema(
        "SELECT version, store_id, pg_catalog.pg_is_in_recovery() AS standby FROM anarchon.meta",
        schema,
    )
    row = await connection.fetchrow(sql)
    if row is None or row["standby"] or row["version"] != SCHEMA_VERSION:
        what = "is a standby now" if row and row["standby"] else "has another schema version now"
        raise StoreUnavailable(f"PostgreSQL at {location}: it {what}")
    return str(row["store_id"])
