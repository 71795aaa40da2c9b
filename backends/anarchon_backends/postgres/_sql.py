"""The schema: its tables, and the functions that act on them in one round trip.

Imports nothing. `anarchon.` stands for the schema's own name, which `in_schema` puts in.

Locks are taken in one order everywhere: jobs by name, then runs by job and slot. So batches of
rivals wait for each other and never in a circle. A run is inserted only under its job's lock, and
whoever writes a job or a run raises its `version`: what was decided outside on rows of certain
versions can then be written if they still have them (`write`). A pause, a run that waits or one
that is in progress is thus never passed by: a claim is decided under the job's lock, or on versions
of the job and of all its unfinished runs. A function locks in one statement
and reads in the next, which sees what was committed meanwhile: under READ COMMITTED each statement
of a volatile function has a snapshot of its own, and a statement that locked as it read would have
read everything but the locked row from before it waited.

Joins are LATERAL with OFFSET 0 or FOR UPDATE, and writes are upserts, so that a plan made while
the tables were empty, and cached, still goes through the primary keys when they are full.

A function that decides or writes has the schema's version in its name (`{v}`), so that a sidecar of
an earlier version, which is still connected when the schema is brought forward, fails instead of
clearing what it does not know.
"""

from __future__ import annotations

from collections.abc import Sequence

SCHEMA_VERSION = 2

_TABLES = """
CREATE TABLE anarchon.meta (version int4 NOT NULL, store_id text NOT NULL);

CREATE TABLE anarchon.job (
    namespace text COLLATE "C" NOT NULL, job text COLLATE "C" NOT NULL,
    version int8 NOT NULL DEFAULT 1, floor int8 NOT NULL DEFAULT -1, fence int8 NOT NULL DEFAULT 0,
    definition_id text NOT NULL DEFAULT '', schedule_id text NOT NULL DEFAULT '',
    definition_at int8 NOT NULL DEFAULT 0, paused_at int8, pause_reason text NOT NULL DEFAULT '',
    PRIMARY KEY (namespace, job)
) WITH (fillfactor = 70);

CREATE TABLE anarchon.schedule (
    namespace text COLLATE "C" NOT NULL, job text COLLATE "C" NOT NULL,
    schedule_id text COLLATE "C" NOT NULL, since int8 NOT NULL, settled int8 NOT NULL,
    PRIMARY KEY (namespace, job, schedule_id)
) WITH (fillfactor = 70);

CREATE TABLE anarchon.definition (
    namespace text COLLATE "C" NOT NULL, job text COLLATE "C" NOT NULL,
    definition_id text COLLATE "C" NOT NULL, schedule_id text NOT NULL,
    window_ms int8 NOT NULL, held_at int8 NOT NULL, spec text NOT NULL,
    PRIMARY KEY (namespace, job, definition_id)
);

CREATE TABLE anarchon.instance (
    namespace text COLLATE "C" NOT NULL, incarnation text COLLATE "C" NOT NULL,
    instance_id text NOT NULL, registered boolean NOT NULL, seen_at int8 NOT NULL,
    lease_ms int8 NOT NULL, record text NOT NULL,
    PRIMARY KEY (namespace, incarnation)
) WITH (fillfactor = 50);

CREATE TABLE anarchon.hold (
    namespace text COLLATE "C" NOT NULL, job text COLLATE "C" NOT NULL,
    incarnation text COLLATE "C" NOT NULL, definition_id text COLLATE "C" NOT NULL,
    schedule_id text NOT NULL,
    PRIMARY KEY (namespace, job, incarnation, definition_id)
);
CREATE INDEX hold_of_instance ON anarchon.hold (namespace, incarnation);

-- A run with its newest attempt. Times in milliseconds; texts of handlers and callers are JSON, in
-- ASCII.
CREATE TABLE anarchon.run (
    namespace text COLLATE "C" NOT NULL, job text COLLATE "C" NOT NULL, slot int8 NOT NULL,
    version int8 NOT NULL, final boolean NOT NULL, trigger text NOT NULL, state text NOT NULL,
    reason text NOT NULL, lease_until int8, lease_length_ms int8, freed text NOT NULL,
    lost int8 NOT NULL, failed int8 NOT NULL, max_attempts int8 NOT NULL, window_ms int8 NOT NULL,
    cancel text, cancelled_at int8 NOT NULL, cancel_message text NOT NULL DEFAULT '',
    cancel_grace_ms int8 NOT NULL, blocking_slot int8 NOT NULL, slots_covered int8 NOT NULL,
    ended_at int8, retries int8 NOT NULL DEFAULT 0, retry_at int8,
    retry_delay_ms int8 NOT NULL DEFAULT 0, request_id text COLLATE "C" NOT NULL DEFAULT '',
    payload bytea, attempt int8 NOT NULL, token text, fence int8, instance_id text, incarnation text, cause text,
    attempt_state text, attempt_reason text, claimed_at int8, started_at int8,
    attempt_ended_at int8, failure text, result text,
    PRIMARY KEY (namespace, job, slot)
) WITH (fillfactor = 80);
CREATE INDEX run_newest_first ON anarchon.run (namespace, slot, job);
CREATE INDEX run_unfinished ON anarchon.run (namespace, job, slot) WHERE NOT final;
CREATE UNIQUE INDEX run_requested ON anarchon.run (namespace, job, request_id)
    WHERE request_id <> '';

-- The attempts before the newest.
CREATE TABLE anarchon.attempt (
    namespace text COLLATE "C" NOT NULL, job text COLLATE "C" NOT NULL, slot int8 NOT NULL,
    attempt int8 NOT NULL, token text NOT NULL, fence int8 NOT NULL, instance_id text NOT NULL,
    incarnation text NOT NULL, cause text NOT NULL, attempt_state text NOT NULL,
    attempt_reason text NOT NULL, claimed_at int8 NOT NULL, started_at int8,
    attempt_ended_at int8, failure text, result text NOT NULL,
    PRIMARY KEY (namespace, job, slot, attempt)
);
"""

# What makes tables of the version before of the next, by the version before; and the functions that
# go, as all are made anew.
_MIGRATIONS = {
    1: """
ALTER TABLE anarchon.job
    ADD COLUMN paused_at int8, ADD COLUMN pause_reason text NOT NULL DEFAULT '';
ALTER TABLE anarchon.run
    ADD COLUMN cancel_message text NOT NULL DEFAULT '',
    ADD COLUMN retries int8 NOT NULL DEFAULT 0, ADD COLUMN retry_at int8,
    ADD COLUMN retry_delay_ms int8 NOT NULL DEFAULT 0,
    ADD COLUMN request_id text COLLATE "C" NOT NULL DEFAULT '', ADD COLUMN payload bytea;
CREATE UNIQUE INDEX run_requested ON anarchon.run (namespace, job, request_id)
    WHERE request_id <> '';
DROP FUNCTION anarchon.now_us, anarchon.fences, anarchon.read, anarchon.write, anarchon.let_go,
    anarchon.forget, anarchon.claim, anarchon.complete, anarchon.beat, anarchon.register_read,
    anarchon.register_write, anarchon.prune_read, anarchon.prune_write;
""",
}
OLDER_VERSIONS = frozenset(_MIGRATIONS)

TABLES = ("meta", "job", "schedule", "definition", "instance", "hold", "run", "attempt")

_RUN = """
namespace job slot version final trigger state reason lease_until lease_length_ms freed lost failed
max_attempts window_ms cancel cancelled_at cancel_message cancel_grace_ms blocking_slot
slots_covered ended_at retries retry_at retry_delay_ms request_id
attempt token fence instance_id incarnation cause attempt_state attempt_reason claimed_at started_at
attempt_ended_at failure result
"""

# A run in the functions' answers: an array, half as long as an object. What the handler said comes
# last, and is left out where it has just been told. After it, where a claim may want it, comes what
# a triggered run was given (in hexadecimal).
RUN_VALUES = tuple(_RUN.split())[1:]

# How every planner setting but the index scan is kept out, and how long a lock is waited for.
_INDEXES_ONLY = """
    SET lock_timeout = '1s' SET enable_seqscan = off SET enable_hashjoin = off
    SET enable_mergejoin = off SET plan_cache_mode = force_generic_plan"""

_CLOCK = """
CREATE FUNCTION anarchon.now_us() RETURNS int8 LANGUAGE sql VOLATILE AS $$
    SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::int8
$$;
"""

# What a decision outside needs, in one snapshot: `_unfinished` are jobs of which all runs are wanted
# that are not final. `_run_tokens` ask for earlier attempts too.
_READ = """
CREATE FUNCTION anarchon.read{v}(
    _ns text, _jobs text[], _run_jobs text[], _run_slots int8[], _run_tokens text[],
    _unfinished text[], _lock boolean
) RETURNS json LANGUAGE plpgsql {settings} AS $$
BEGIN
    IF _lock THEN
        PERFORM FROM (SELECT each FROM unnest(_jobs) each GROUP BY each ORDER BY each COLLATE "C") want
            CROSS JOIN LATERAL (
                SELECT FROM anarchon.job WHERE namespace = _ns AND job = want.each FOR UPDATE) lock;
        PERFORM FROM (SELECT job, slot FROM (
                    SELECT job, slot FROM unnest(_run_jobs, _run_slots) asked (job, slot)
                    UNION SELECT hit.job, hit.slot FROM unnest(_unfinished) want (name)
                        CROSS JOIN LATERAL (SELECT job, slot FROM anarchon.run
                            WHERE namespace = _ns AND job = want.name AND NOT final OFFSET 0) hit
                ) wanted ORDER BY job COLLATE "C", slot) want
            CROSS JOIN LATERAL (
                SELECT FROM anarchon.run WHERE namespace = _ns AND job = want.job
                AND slot = want.slot FOR UPDATE) lock;
    END IF;
    RETURN (SELECT json_build_object(
        'now_us', anarchon.now_us(),
        'jobs', (SELECT json_agg(hit) FROM (SELECT DISTINCT each FROM unnest(_jobs) each) want
            CROSS JOIN LATERAL (
                SELECT job, version, floor, fence, definition_id, schedule_id, definition_at,
                    paused_at, pause_reason
                FROM anarchon.job WHERE namespace = _ns AND job = want.each OFFSET 0) hit),
        'schedules', (SELECT json_agg(hit) FROM (SELECT DISTINCT each FROM unnest(_jobs) each) want
            CROSS JOIN LATERAL (
                SELECT job, schedule_id, since, settled
                FROM anarchon.schedule WHERE namespace = _ns AND job = want.each OFFSET 0) hit),
        'runs', (SELECT json_agg({asked_run}) FROM
            (SELECT DISTINCT job, slot FROM unnest(_run_jobs, _run_slots) k (job, slot)) want
            CROSS JOIN LATERAL (
                SELECT * FROM anarchon.run
                WHERE namespace = _ns AND job = want.job AND slot = want.slot OFFSET 0) hit),
        'unfinished', (SELECT json_agg({whole_run}) FROM
            (SELECT DISTINCT each FROM unnest(_unfinished) each) want
            CROSS JOIN LATERAL (
                SELECT * FROM anarchon.run
                WHERE namespace = _ns AND job = want.each AND NOT final OFFSET 0) hit),
        'attempts', (SELECT json_agg(hit) FROM
            unnest(_run_jobs, _run_slots, _run_tokens) want (job, slot, token)
            CROSS JOIN LATERAL (
                SELECT * FROM anarchon.attempt
                WHERE namespace = _ns AND job = want.job AND slot = want.slot
                AND token = want.token OFFSET 0) hit)
    ));
END $$;
"""

# The oldest run that waits, of each of the jobs.
_DUE = """
CREATE FUNCTION anarchon.due{v}(_ns text, _jobs text[]) RETURNS json LANGUAGE plpgsql {settings}
AS $$
BEGIN
    RETURN (SELECT json_agg({whole_run}) FROM unnest(_jobs) want (job) CROSS JOIN LATERAL (
        SELECT * FROM anarchon.run WHERE namespace = _ns AND job = want.job AND NOT final
        AND state = 'due' ORDER BY slot LIMIT 1) hit);
END $$;
"""

# Writes what was decided outside, job by job: where the versions decided on are no longer there,
# nothing of that job is written and its name is returned. Version 0: there was no such row. `_seen`
# are runs that were decided on and stay as they are. Where a run has ended, what waits in its job
# (`due`) is returned, and is news.
_WRITE = """
CREATE FUNCTION anarchon.write{v}(
    _ns text, _jobs json, _schedules json, _runs json, _attempts json, _seen json,
    _is_news boolean, _news text
) RETURNS json LANGUAGE plpgsql {settings} AS $$
DECLARE
    _stale text[];
    _due json;
BEGIN
    PERFORM FROM (SELECT job FROM json_populate_recordset(NULL::anarchon.job, _jobs)
            ORDER BY job COLLATE "C") want
        CROSS JOIN LATERAL (
            SELECT FROM anarchon.job WHERE namespace = _ns AND job = want.job FOR UPDATE) lock;
    PERFORM FROM (SELECT job, slot FROM (
                SELECT job, slot FROM json_populate_recordset(NULL::anarchon.run, _runs)
                UNION ALL SELECT job, slot FROM json_populate_recordset(NULL::anarchon.run, _seen)
            ) known ORDER BY job COLLATE "C", slot) want
        CROSS JOIN LATERAL (
            SELECT FROM anarchon.run WHERE namespace = _ns AND job = want.job
            AND slot = want.slot FOR UPDATE) lock;
    _stale := ARRAY(
        SELECT want.job FROM json_populate_recordset(NULL::anarchon.job, _jobs) want
            LEFT JOIN LATERAL (
                SELECT version FROM anarchon.job WHERE namespace = _ns AND job = want.job OFFSET 0
            ) hit ON true
            WHERE hit.version IS DISTINCT FROM want.version
        UNION
        SELECT want.job FROM (
                SELECT job, slot, version FROM json_populate_recordset(NULL::anarchon.run, _runs)
                UNION ALL
                SELECT job, slot, version FROM json_populate_recordset(NULL::anarchon.run, _seen)
            ) want
            LEFT JOIN LATERAL (
                SELECT version FROM anarchon.run
                WHERE namespace = _ns AND job = want.job AND slot = want.slot OFFSET 0
            ) hit ON true
            WHERE coalesce(hit.version, 0) <> want.version);
    INSERT INTO anarchon.job (namespace, job, version, floor, fence, definition_id, schedule_id,
            definition_at, paused_at, pause_reason)
        SELECT _ns, job, version + 1, floor, fence, definition_id, schedule_id, definition_at,
            paused_at, pause_reason
        FROM json_populate_recordset(NULL::anarchon.job, _jobs) WHERE job <> ALL (_stale)
        ON CONFLICT (namespace, job) DO UPDATE SET (version, floor, fence, definition_id,
            schedule_id, definition_at, paused_at, pause_reason) = ROW (excluded.version,
            excluded.floor, excluded.fence, excluded.definition_id, excluded.schedule_id,
            excluded.definition_at, excluded.paused_at, excluded.pause_reason);
    INSERT INTO anarchon.schedule
        SELECT _ns, job, schedule_id, since, settled
        FROM json_populate_recordset(NULL::anarchon.schedule, _schedules)
        WHERE job <> ALL (_stale)
        ON CONFLICT (namespace, job, schedule_id)
            DO UPDATE SET (since, settled) = ROW (excluded.since, excluded.settled);
    INSERT INTO anarchon.attempt
        SELECT _ns, job, slot, attempt, token, fence, instance_id, incarnation, cause,
            attempt_state, attempt_reason, claimed_at, started_at, attempt_ended_at, failure, result
        FROM json_populate_recordset(NULL::anarchon.attempt, _attempts)
        WHERE job <> ALL (_stale)
        ON CONFLICT (namespace, job, slot, attempt) DO NOTHING;
    INSERT INTO anarchon.run ({columns}, payload)
        SELECT {from_json}, payload
        FROM json_populate_recordset(NULL::anarchon.run, _runs) WHERE job <> ALL (_stale)
        ON CONFLICT (namespace, job, slot) DO UPDATE SET ({rest}) = ROW ({excluded});
    _due := anarchon.due{v}(_ns, ARRAY(
        SELECT DISTINCT job FROM json_populate_recordset(NULL::anarchon.run, _runs)
        WHERE final AND attempt > 0 AND job <> ALL (_stale)));
    IF _is_news OR _due IS NOT NULL THEN
        PERFORM pg_notify(_news, '');
    END IF;
    RETURN json_build_object('stale', _stale, 'due', _due);
END $$;
"""

# Claims. What is plain is decided here: the first claim of a slot that nothing stands against
# wins, whatever its job does about overlap. Everything else is read for the machine, which decides it outside, and then `write`s.
# `_plain`: a first claim that may run, and the only one of its job in the batch.
# `_alone`: no other run of the job may be unfinished, or wait.
_CLAIM = """
CREATE FUNCTION anarchon.claim{v}(
    _ns text, _jobs text[], _slots int8[], _tokens text[], _instance_ids text[],
    _incarnations text[], _schedule_ids text[], _previous int8[], _deadlines int8[],
    _leases int8[], _graces int8[], _attempts int8[], _windows int8[], _retries int8[],
    _plain boolean[], _alone boolean[]
) RETURNS json LANGUAGE plpgsql {settings} AS $$
DECLARE
    _now_us int8;
    _now int8;
    _won json;
    _wins int8[];
    _rest json;
BEGIN
    -- Losing stays cheap: the job of a slot that has a row is not locked. (A row that is pruned
    -- after this look leaves a floor behind, and its slot is too late.)
    PERFORM FROM (
            SELECT job FROM unnest(_jobs, _slots, _plain) c (job, slot, plain)
            WHERE plain AND NOT EXISTS (SELECT FROM anarchon.run r
                WHERE r.namespace = _ns AND r.job = c.job AND r.slot = c.slot OFFSET 0)
            ORDER BY job COLLATE "C") want
        CROSS JOIN LATERAL (
            SELECT FROM anarchon.job WHERE namespace = _ns AND job = want.job FOR UPDATE) lock;
    _now_us := anarchon.now_us();
    _now := _now_us / 1000;
    WITH won AS MATERIALIZED (
        SELECT c.*, job.version, greatest(job.fence + 1, _now_us) AS fence, s.since, s.settled
        FROM unnest(_jobs, _slots, _tokens, _instance_ids, _incarnations, _schedule_ids, _previous,
                _deadlines, _leases, _graces, _attempts, _windows, _retries, _plain, _alone)
            WITH ORDINALITY c (job, slot, token, instance_id, incarnation, schedule_id, previous,
                deadline, lease, grace, attempts, window_ms, retries, plain, alone, number)
            CROSS JOIN LATERAL (
                SELECT * FROM anarchon.job j
                WHERE j.namespace = _ns AND j.job = c.job OFFSET 0) job
            CROSS JOIN LATERAL (
                SELECT since, settled FROM anarchon.schedule s
                WHERE s.namespace = _ns AND s.job = c.job AND s.schedule_id = c.schedule_id
                OFFSET 0) s
        WHERE c.plain AND job.paused_at IS NULL AND c.slot <= _now + {early}
            AND c.slot > greatest(job.floor, s.settled)
            AND c.slot >= _now - c.deadline
            AND NOT EXISTS (SELECT FROM anarchon.run r
                WHERE r.namespace = _ns AND r.job = c.job AND r.slot = c.slot OFFSET 0)
            AND NOT (c.alone AND EXISTS (SELECT FROM anarchon.run r
                WHERE r.namespace = _ns AND r.job = c.job AND NOT r.final OFFSET 0))
    ), run AS (
        INSERT INTO anarchon.run (namespace, job, slot, version, final, trigger, state, reason,
            lease_until, lease_length_ms, freed, lost, failed, max_attempts, window_ms,
            cancelled_at, cancel_grace_ms, blocking_slot, slots_covered, retries, attempt, token,
            fence, instance_id, incarnation, cause, attempt_state, attempt_reason, claimed_at,
            result)
        SELECT _ns, job, slot, 1, false, 'schedule', 'claimed', '', _now + lease, lease, '', 0, 0,
            attempts, window_ms, 0, grace, 0, 0, retries, 1, token, fence, instance_id,
            incarnation, 'claim', 'claimed', '', _now, '' FROM won
    ), job AS (
        INSERT INTO anarchon.job (namespace, job, version, fence)
        SELECT _ns, job, version + 1, fence FROM won
        ON CONFLICT (namespace, job)
            DO UPDATE SET version = excluded.version, fence = excluded.fence
    ), schedule AS (
        INSERT INTO anarchon.schedule
        SELECT _ns, job, schedule_id, since, slot FROM won
        WHERE previous IS NULL OR previous <= settled
        ON CONFLICT (namespace, job, schedule_id) DO UPDATE SET settled = excluded.settled
    )
    SELECT json_agg(fence ORDER BY number), array_agg(number ORDER BY number)
        INTO _won, _wins FROM won;
    IF coalesce(cardinality(_wins), 0) < cardinality(_jobs) THEN
        -- Of what is plainly lost, or won before with this token, the run says enough.
        SELECT anarchon.read{v}(_ns, array_agg(job) FILTER (WHERE open), array_agg(job),
                array_agg(slot), NULL, array_agg(job) FILTER (WHERE open AND alone), false)
            INTO _rest
            FROM unnest(_jobs, _slots, _plain, _alone)
                WITH ORDINALITY c (job, slot, plain, alone, number)
            CROSS JOIN LATERAL (SELECT NOT (plain AND EXISTS (SELECT FROM anarchon.run r
                WHERE r.namespace = _ns AND r.job = c.job AND r.slot = c.slot
                AND (r.final OR r.attempt > 0))) AS open OFFSET 0) o
            WHERE _wins IS NULL OR number <> ALL (_wins);
    END IF;
    RETURN json_build_object('now_us', _now_us, 'won', _won, 'wins', _wins, 'rest', _rest,
        'fences', anarchon.fences(_ns, _jobs));
END $$;
"""

# Results. What is plain is recorded here: a return, or an error after which there is no retry, of the
# present attempt, which nobody cancelled or freed (`_states` says which; empty: it is not plain).
# What waits in the job of a run that ended (`due`) is news.
_COMPLETE = """
CREATE FUNCTION anarchon.complete{v}(
    _ns text, _jobs text[], _slots int8[], _tokens text[], _states text[], _failures text[],
    _results text[], _elapsed int8[], _news text
) RETURNS json LANGUAGE plpgsql {settings} AS $$
DECLARE
    _now_us int8;
    _now int8;
    _done json;
    _numbers int8[];
    _ended text[];
    _due json;
    _rest json;
BEGIN
    PERFORM FROM (SELECT job, slot FROM unnest(_jobs, _slots) k (job, slot)
            GROUP BY job, slot ORDER BY job COLLATE "C", slot) want
        CROSS JOIN LATERAL (
            SELECT FROM anarchon.run WHERE namespace = _ns AND job = want.job
            AND slot = want.slot FOR UPDATE) lock;
    _now_us := anarchon.now_us();
    _now := _now_us / 1000;
    WITH plain AS MATERIALIZED (
        SELECT r.*, c.number, c.state AS new_state, c.failure AS new_failure,
            c.result AS new_result,
            least(r.started_at, greatest(r.claimed_at, _now - c.elapsed)) AS new_started_at
        FROM unnest(_jobs, _slots, _tokens, _states, _failures, _results, _elapsed)
            WITH ORDINALITY c (job, slot, token, state, failure, result, elapsed, number)
            CROSS JOIN LATERAL (
                SELECT * FROM anarchon.run r
                WHERE r.namespace = _ns AND r.job = c.job AND r.slot = c.slot OFFSET 0) r
        WHERE c.state <> '' AND r.token = c.token AND r.state IN ('claimed', 'running')
            AND r.freed = '' AND r.cancel IS NULL
    ), done AS (
        INSERT INTO anarchon.run ({columns})
        SELECT namespace, job, slot, version + 1, true, trigger, new_state, '', NULL, NULL, '',
            lost, failed + (new_state = 'failed')::int, max_attempts, window_ms, cancel,
            cancelled_at, cancel_message, cancel_grace_ms, blocking_slot, slots_covered, _now,
            retries, retry_at, retry_delay_ms, request_id, attempt, token, fence, instance_id,
            incarnation, cause, new_state, '', claimed_at, new_started_at, _now, new_failure,
            new_result
        FROM plain
        ON CONFLICT (namespace, job, slot) DO UPDATE SET (version, final, state, reason,
            lease_until, lease_length_ms, failed, ended_at, attempt_state, attempt_reason,
            started_at, attempt_ended_at, failure, result) = ROW (excluded.version, true,
            excluded.state, '', NULL::int8, NULL::int8, excluded.failed, excluded.ended_at,
            excluded.attempt_state, '', excluded.started_at, excluded.attempt_ended_at,
            excluded.failure, excluded.result)
        RETURNING run.*
    )
    SELECT (SELECT json_agg({brief_run}) FROM done hit), array_agg(number), array_agg(DISTINCT job)
        INTO _done, _numbers, _ended FROM plain;
    _due := anarchon.due{v}(_ns, _ended);
    IF _due IS NOT NULL THEN
        PERFORM pg_notify(_news, '');
    END IF;
    IF coalesce(cardinality(_numbers), 0) < cardinality(_jobs) THEN
        SELECT anarchon.read{v}(_ns, NULL, array_agg(job), array_agg(slot), array_agg(token), NULL,
                false)
            INTO _rest
            FROM unnest(_jobs, _slots, _tokens) WITH ORDINALITY c (job, slot, token, number)
            WHERE _numbers IS NULL OR number <> ALL (_numbers);
    END IF;
    RETURN json_build_object('now_us', _now_us, 'numbers', _numbers, 'done', _done, 'due', _due,
        'rest', _rest, 'fences', anarchon.fences(_ns, _jobs));
END $$;
"""

_FENCES = """
CREATE FUNCTION anarchon.fences(_ns text, _jobs text[]) RETURNS json
LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN (SELECT json_object_agg(each, fence) FROM (SELECT DISTINCT each FROM unnest(_jobs) each) j
        CROSS JOIN LATERAL (SELECT fence FROM anarchon.job
            WHERE namespace = _ns AND job = each OFFSET 0) f);
END $$;
"""

# `let_go`: an instance no longer holds what it held until `_until`, but for what is to be kept.
# `forget`: it leaves, or is no longer known.
_FORGET = """
CREATE FUNCTION anarchon.let_go{v}(
    _ns text, _incarnation text, _until int8, _kept_jobs text[], _kept_ids text[]
) RETURNS void LANGUAGE plpgsql {settings} AS $$
DECLARE
    _gone_jobs text[];
    _gone_ids text[];
BEGIN
    SELECT array_agg(job), array_agg(definition_id) INTO _gone_jobs, _gone_ids FROM (
        SELECT job, definition_id FROM anarchon.hold
        WHERE namespace = _ns AND incarnation = _incarnation AND ((job, definition_id) IN (
            SELECT unnest(_kept_jobs) COLLATE "C", unnest(_kept_ids) COLLATE "C")) IS NOT TRUE
        ORDER BY job, definition_id) gone;
    IF _gone_jobs IS NULL THEN
        RETURN;
    END IF;
    WITH was_held AS MATERIALIZED (
        SELECT d.* FROM unnest(_gone_jobs, _gone_ids) gone (job, id) CROSS JOIN LATERAL (
            SELECT * FROM anarchon.definition WHERE namespace = _ns AND job = gone.job
            AND definition_id = gone.id FOR UPDATE) d)
    INSERT INTO anarchon.definition SELECT * FROM was_held
        ON CONFLICT (namespace, job, definition_id)
            DO UPDATE SET held_at = greatest(definition.held_at, _until);
    DELETE FROM anarchon.hold h WHERE namespace = _ns AND incarnation = _incarnation
        AND ((job, definition_id) IN (
            SELECT unnest(_gone_jobs) COLLATE "C", unnest(_gone_ids) COLLATE "C")) IS TRUE;
END $$;

CREATE FUNCTION anarchon.forget{v}(_ns text, _incarnation text, _until int8) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM anarchon.let_go{v}(_ns, _incarnation, _until, '{{}}', '{{}}');
    DELETE FROM anarchon.instance WHERE namespace = _ns AND incarnation = _incarnation;
END $$;
"""

# A heartbeat. What is plain is renewed here: the present attempt, by its holder, not cancelled.
_BEAT = """
CREATE FUNCTION anarchon.beat{v}(
    _ns text, _incarnation text, _instance_id text, _lease_ms int8, _record text, _leaving boolean,
    _jobs text[], _slots int8[], _tokens text[], _incarnations text[], _leases int8[],
    _started int8[], _plain boolean[],
    _look_jobs text[], _look_slots int8[], _sweep_jobs text[], _sweep_ids text[], _limit int8
) RETURNS json LANGUAGE plpgsql {settings} AS $$
DECLARE
    _now_us int8;
    _now int8;
    _renewed json;
    _numbers int8[];
    _rest json;
    _known boolean;
BEGIN
    PERFORM FROM (SELECT job, slot FROM unnest(_jobs, _slots) k (job, slot)
            GROUP BY job, slot ORDER BY job COLLATE "C", slot) want
        CROSS JOIN LATERAL (
            SELECT FROM anarchon.run WHERE namespace = _ns AND job = want.job
            AND slot = want.slot FOR UPDATE) lock;
    _now_us := anarchon.now_us();
    _now := _now_us / 1000;
    WITH plain AS MATERIALIZED (
        SELECT r.*, c.number, c.lease, CASE WHEN r.started_at IS NULL THEN c.started END AS starts,
            r.lease_until - _now > c.lease AND r.lease_until - _now
                <= r.lease_length_ms + r.lease_length_ms / {margin_share} AS longer
        FROM unnest(_jobs, _slots, _tokens, _incarnations, _leases, _started, _plain)
            WITH ORDINALITY c (job, slot, token, incarnation, lease, started, plain, number)
            CROSS JOIN LATERAL (
                SELECT * FROM anarchon.run r
                WHERE r.namespace = _ns AND r.job = c.job AND r.slot = c.slot OFFSET 0) r
        WHERE c.plain AND r.token = c.token AND r.incarnation = c.incarnation
            AND r.state IN ('claimed', 'running') AND r.freed = '' AND r.cancel IS NULL
    ), renewed AS (
        INSERT INTO anarchon.run ({columns})
        SELECT namespace, job, slot, version + 1, false, trigger,
            CASE WHEN starts IS NULL THEN attempt_state ELSE 'running' END, reason,
            CASE WHEN longer THEN lease_until ELSE _now + lease END,
            CASE WHEN longer THEN lease_length_ms ELSE lease END,
            freed, lost, failed, max_attempts, window_ms, cancel, cancelled_at, cancel_message,
            cancel_grace_ms, blocking_slot, slots_covered, ended_at, retries, retry_at,
            retry_delay_ms, request_id, attempt, token, fence, instance_id, incarnation, cause, CASE WHEN starts IS NULL THEN attempt_state ELSE 'running' END, attempt_reason,
            claimed_at, CASE WHEN starts IS NULL THEN started_at ELSE greatest(starts, slot) END,
            attempt_ended_at, failure, result
        FROM plain
        ON CONFLICT (namespace, job, slot) DO UPDATE SET (version, state, lease_until,
            lease_length_ms, attempt_state, started_at) = ROW (excluded.version, excluded.state,
            excluded.lease_until, excluded.lease_length_ms, excluded.attempt_state,
            excluded.started_at)
        RETURNING run.*
    )
    SELECT (SELECT json_agg({brief_run}) FROM renewed hit), array_agg(number)
        INTO _renewed, _numbers FROM plain;
    IF coalesce(cardinality(_numbers), 0) < cardinality(_jobs) THEN
        SELECT anarchon.read{v}(_ns, NULL, array_agg(job), array_agg(slot), NULL, NULL, false)
            INTO _rest FROM unnest(_jobs, _slots) WITH ORDINALITY c (job, slot, number)
            WHERE _numbers IS NULL OR number <> ALL (_numbers);
    END IF;
    SELECT registered INTO _known FROM anarchon.instance
        WHERE namespace = _ns AND incarnation = _incarnation;
    IF _leaving THEN
        PERFORM anarchon.forget{v}(_ns, _incarnation, _now);
    ELSE
        INSERT INTO anarchon.instance
            VALUES (_ns, _incarnation, _instance_id, false, _now, _lease_ms, _record)
            ON CONFLICT (namespace, incarnation) DO UPDATE SET (instance_id, seen_at, lease_ms,
                record) = ROW (excluded.instance_id, excluded.seen_at, excluded.lease_ms,
                excluded.record);
    END IF;
    RETURN (SELECT json_build_object(
        'now_us', _now_us, 'numbers', _numbers, 'renewed', _renewed, 'rest', _rest,
        'known', coalesce(_known, false),
        'twins', (SELECT json_agg(incarnation) FROM anarchon.instance WHERE namespace = _ns
            AND instance_id = _instance_id AND incarnation <> _incarnation
            AND _now - seen_at <= lease_ms),
        'looks', (SELECT json_agg({whole_run}) FROM unnest(_look_jobs, _look_slots) want (job, slot)
            CROSS JOIN LATERAL (SELECT * FROM anarchon.run WHERE namespace = _ns
                AND job = want.job AND slot = want.slot OFFSET 0) hit),
        'unfinished', (SELECT json_agg({whole_run}) FROM (
            SELECT * FROM anarchon.run WHERE namespace = _ns AND NOT final
                AND (job IN (SELECT unnest(_sweep_jobs) COLLATE "C")) IS TRUE
            ORDER BY NOT coalesce(freed <> '' OR lease_until <= _now OR lease_until - _now
                > lease_length_ms + lease_length_ms / {margin_share}, false), slot, job
            LIMIT _limit) hit),
        'settled', (SELECT json_agg(settled ORDER BY number)
            FROM unnest(_sweep_jobs, _sweep_ids) WITH ORDINALITY want (job, id, number)
            LEFT JOIN LATERAL (SELECT settled FROM anarchon.schedule WHERE namespace = _ns
                AND job = want.job AND schedule_id = want.id OFFSET 0) s ON true),
        'swept', (SELECT json_agg(fence ORDER BY number)
            FROM unnest(_sweep_jobs) WITH ORDINALITY want (job, number)
            LEFT JOIN LATERAL (SELECT fence FROM anarchon.job WHERE namespace = _ns
                AND job = want.job OFFSET 0) j ON true),
        'fences', anarchon.fences(_ns, _jobs || _look_jobs)
    ));
END $$;
"""

# A part of a registration is decided outside while its jobs' rows are locked: `register_read`, then
# `register_part`, in one transaction, of what is new to the store. It raises the version of a job
# of which something else is held than before, as what is in use has changed.
#
# A plan made while `hold` was empty may read all that an instance holds, or all that is held, for each
# job: `incarnation || ''` leaves it the primary key alone, and jobs are let go one by one.
#
# `register_write` is for sidecars from before `register_part` came: it takes all that an instance
# holds at once, and lets go of all else. It goes when the schema has another version.
_REGISTER = """
CREATE FUNCTION anarchon.register_read{v}(_ns text, _incarnation text, _jobs text[]) RETURNS json
LANGUAGE plpgsql {settings} AS $$
DECLARE
    _rows json;
    _now int8;
BEGIN
    INSERT INTO anarchon.job (namespace, job)
        SELECT _ns, each FROM unnest(_jobs) each GROUP BY each ORDER BY each COLLATE "C"
        ON CONFLICT DO NOTHING;
    _rows := anarchon.read{v}(_ns, _jobs, NULL, NULL, NULL, NULL, true);
    _now := (_rows ->> 'now_us')::int8 / 1000;
    RETURN json_build_object('rows', _rows, 'held', (
        SELECT json_agg(hit) FROM (SELECT DISTINCT each FROM unnest(_jobs) each) want
            CROSS JOIN LATERAL (
                SELECT h.incarnation, h.job, h.definition_id, h.schedule_id,
                    CASE WHEN h.incarnation = _incarnation THEN (
                        SELECT window_ms FROM anarchon.definition d WHERE d.namespace = _ns
                            AND d.job = h.job AND d.definition_id = h.definition_id) END AS window_ms
                FROM anarchon.hold h WHERE h.namespace = _ns AND h.job = want.each
                    AND EXISTS (SELECT FROM anarchon.instance i WHERE i.namespace = _ns
                        AND i.incarnation = h.incarnation AND _now - i.seen_at <= i.lease_ms)
                OFFSET 0) hit));
END $$;

CREATE FUNCTION anarchon.register_write{v}(
    _ns text, _now int8, _incarnation text, _instance_id text, _lease_ms int8, _record text,
    _held_jobs text[], _held_ids text[], _jobs json, _schedules json, _definitions json
) RETURNS void LANGUAGE plpgsql {settings} AS $$
BEGIN
    PERFORM anarchon.let_go{v}(_ns, _incarnation, _now, _held_jobs, _held_ids);
    INSERT INTO anarchon.instance
        VALUES (_ns, _incarnation, _instance_id, true, _now, _lease_ms, _record)
        ON CONFLICT (namespace, incarnation) DO UPDATE SET (instance_id, registered, seen_at,
            lease_ms, record) = ROW (excluded.instance_id, true, excluded.seen_at,
            excluded.lease_ms, excluded.record);
    INSERT INTO anarchon.definition
        SELECT _ns, job, definition_id, schedule_id, window_ms, _now, spec
        FROM json_populate_recordset(NULL::anarchon.definition, _definitions)
        ORDER BY job COLLATE "C", definition_id COLLATE "C"
        ON CONFLICT (namespace, job, definition_id)
            DO UPDATE SET (window_ms, held_at) = ROW (excluded.window_ms, excluded.held_at)
            WHERE definition.window_ms <> excluded.window_ms;
    INSERT INTO anarchon.hold
        SELECT _ns, job, _incarnation, definition_id, schedule_id
        FROM json_populate_recordset(NULL::anarchon.definition, _definitions)
        ON CONFLICT DO NOTHING;
    PERFORM anarchon.write{v}(_ns, _jobs, _schedules, '[]', '[]', '[]', false, '');
END $$;
"""

_REGISTER_PART = """
CREATE FUNCTION anarchon.register_part{v}(
    _ns text, _now int8, _incarnation text, _instance_id text, _lease_ms int8, _record text,
    _named text[], _held_jobs text[], _held_ids text[], _jobs json, _schedules json,
    _definitions json
) RETURNS void LANGUAGE plpgsql {settings} AS $$
DECLARE
    _gone_jobs text[];
    _gone_ids text[];
BEGIN
    SELECT array_agg(job), array_agg(definition_id) INTO _gone_jobs, _gone_ids FROM (
        SELECT h.job, h.definition_id FROM (SELECT DISTINCT each FROM unnest(_named) each) want
            CROSS JOIN LATERAL (
                SELECT job, definition_id FROM anarchon.hold WHERE namespace = _ns
                    AND job = want.each AND incarnation || '' = _incarnation OFFSET 0) h
        WHERE ((h.job, h.definition_id) IN (
            SELECT unnest(_held_jobs) COLLATE "C", unnest(_held_ids) COLLATE "C")) IS NOT TRUE
        ORDER BY h.job, h.definition_id) gone;
    IF _gone_jobs IS NOT NULL THEN
        WITH was_held AS MATERIALIZED (
            SELECT d.* FROM unnest(_gone_jobs, _gone_ids) gone (job, id) CROSS JOIN LATERAL (
                SELECT * FROM anarchon.definition WHERE namespace = _ns AND job = gone.job
                AND definition_id = gone.id FOR UPDATE) d)
        INSERT INTO anarchon.definition SELECT * FROM was_held
            ON CONFLICT (namespace, job, definition_id)
                DO UPDATE SET held_at = greatest(definition.held_at, _now);
        FOR _number IN 1 .. cardinality(_gone_jobs) LOOP
            DELETE FROM anarchon.hold WHERE namespace = _ns AND job = _gone_jobs[_number]
                AND incarnation || '' = _incarnation AND definition_id = _gone_ids[_number];
        END LOOP;
    END IF;
    INSERT INTO anarchon.instance
        VALUES (_ns, _incarnation, _instance_id, true, _now, _lease_ms, _record)
        ON CONFLICT (namespace, incarnation) DO UPDATE SET (instance_id, registered, seen_at,
            lease_ms, record) = ROW (excluded.instance_id, true, excluded.seen_at,
            excluded.lease_ms, excluded.record);
    INSERT INTO anarchon.definition
        SELECT _ns, job, definition_id, schedule_id, window_ms, _now, spec
        FROM json_populate_recordset(NULL::anarchon.definition, _definitions)
        ORDER BY job COLLATE "C", definition_id COLLATE "C"
        ON CONFLICT (namespace, job, definition_id)
            DO UPDATE SET (window_ms, held_at) = ROW (excluded.window_ms, excluded.held_at)
            WHERE definition.window_ms <> excluded.window_ms;
    INSERT INTO anarchon.hold
        SELECT _ns, job, _incarnation, definition_id, schedule_id
        FROM json_populate_recordset(NULL::anarchon.definition, _definitions)
        ON CONFLICT DO NOTHING;
    PERFORM anarchon.write{v}(_ns, _jobs, _schedules, '[]', '[]', '[]', false, '');
END $$;
"""

# Pruning: `prune_read` shows what a page of jobs keeps; what may go is decided outside;
# `prune_write` deletes it, and passes over a job that changed meanwhile.
_PRUNE = """
CREATE FUNCTION anarchon.prune_read{v}(_ns text, _after text, _limit int8) RETURNS json
LANGUAGE plpgsql {settings} AS $$
DECLARE
    _now int8 := anarchon.now_us() / 1000;
    _names text[];
BEGIN
    PERFORM anarchon.forget{v}(_ns, incarnation, seen_at) FROM (
        SELECT incarnation, seen_at FROM anarchon.instance
        WHERE namespace = _ns AND _now - seen_at > lease_ms + {lost_shown}
        ORDER BY incarnation FOR UPDATE SKIP LOCKED) gone;
    _names := ARRAY(SELECT job FROM anarchon.job
        WHERE namespace = _ns AND job > _after AND definition_id <> '' ORDER BY job LIMIT _limit);
    RETURN json_build_object(
        'names', _names,
        'rows', anarchon.read{v}(_ns, _names, NULL, NULL, NULL, NULL, false),
        'definitions', (SELECT json_agg(hit) FROM unnest(_names) want (name) CROSS JOIN LATERAL (
            SELECT job, definition_id, schedule_id, window_ms, held_at FROM anarchon.definition
            WHERE namespace = _ns AND job = want.name OFFSET 0) hit),
        'held', (SELECT json_agg(hit) FROM unnest(_names) want (name) CROSS JOIN LATERAL (
            SELECT h.job, h.definition_id, _now - i.seen_at <= i.lease_ms AS live
            FROM anarchon.hold h CROSS JOIN LATERAL (
                SELECT seen_at, lease_ms FROM anarchon.instance
                WHERE namespace = _ns AND incarnation = h.incarnation OFFSET 0) i
            WHERE h.namespace = _ns AND h.job = want.name OFFSET 0) hit));
END $$;

CREATE FUNCTION anarchon.prune_write{v}(
    _ns text, _jobs text[], _versions int8[], _bounds int8[], _oldest int8[], _unused boolean[],
    _currents json, _gone json, _most int8, _room int8
) RETURNS json LANGUAGE plpgsql {settings} AS $$
DECLARE
    _each record;
    _beyond int8;
    _slots int8[];
    _deleted int8 := 0;
    _seen int8 := 0;
    _definitions text[];
BEGIN
    FOR _each IN SELECT * FROM unnest(_jobs, _versions, _bounds, _oldest, _unused)
            c (job, version, bound, oldest, unused) LOOP
        EXIT WHEN _deleted = _room;
        _seen := _seen + 1;
        _definitions := ARRAY(SELECT json_array_elements_text(_gone -> _each.job));
        _beyond := coalesce((SELECT slot FROM anarchon.run
            WHERE namespace = _ns AND job = _each.job ORDER BY slot DESC
            LIMIT 1 OFFSET _most), -1);
        _slots := ARRAY(SELECT slot FROM anarchon.run
            WHERE namespace = _ns AND job = _each.job
                AND slot <= least(_each.bound, greatest(_beyond, _each.oldest - 1)) AND final
                AND (slot <= _beyond OR greatest(slot, coalesce(ended_at, 0)) < _each.oldest)
            ORDER BY slot LIMIT _room - _deleted);
        CONTINUE WHEN _slots = '{{}}' AND _definitions = '{{}}';
        PERFORM FROM anarchon.job WHERE namespace = _ns AND job = _each.job
            AND version = _each.version FOR UPDATE;
        CONTINUE WHEN NOT FOUND;
        UPDATE anarchon.job SET version = version + 1,
            floor = greatest(floor, (SELECT max(slot) FROM unnest(_slots) slot))
            WHERE namespace = _ns AND job = _each.job;
        DELETE FROM anarchon.attempt
            WHERE namespace = _ns AND job = _each.job AND slot = ANY (_slots);
        DELETE FROM anarchon.run
            WHERE namespace = _ns AND job = _each.job AND slot = ANY (_slots);
        _deleted := _deleted + cardinality(_slots);
        IF _each.unused THEN
            CONTINUE WHEN EXISTS (
                SELECT FROM anarchon.run WHERE namespace = _ns AND job = _each.job);
            UPDATE anarchon.job SET definition_id = '', schedule_id = '', definition_at = 0,
                paused_at = NULL, pause_reason = ''
                WHERE namespace = _ns AND job = _each.job;
        ELSE
            UPDATE anarchon.job SET definition_id = _currents -> _each.job ->> 0,
                schedule_id = _currents -> _each.job ->> 1
                WHERE namespace = _ns AND job = _each.job;
        END IF;
        DELETE FROM anarchon.definition
            WHERE namespace = _ns AND job = _each.job AND definition_id = ANY (_definitions);
        DELETE FROM anarchon.schedule s WHERE namespace = _ns AND job = _each.job
            AND NOT EXISTS (SELECT FROM anarchon.definition d WHERE d.namespace = _ns
                AND d.job = _each.job AND d.schedule_id = s.schedule_id);
    END LOOP;
    RETURN json_build_object('deleted', _deleted, 'seen', _seen);
END $$;
"""

_FUNCTIONS = (
    _CLOCK,
    _FENCES,
    _READ,
    _DUE,
    _WRITE,
    _FORGET,
    _CLAIM,
    _COMPLETE,
    _BEAT,
    _REGISTER,
    _REGISTER_PART,
    _PRUNE,
)

# A function that came while the schema's version stayed: where it is missing it is made.
LATER_FUNCTION = f"register_part_{SCHEMA_VERSION}"

# History. The state that is asked for is the state as shown (see `machine.view`). `of_job` is a
# condition on the job, so that each of the two has a plan of its own.
RUNS = """
WITH at AS MATERIALIZED (SELECT anarchon.now_us() AS now_us), page AS MATERIALIZED (
    SELECT {columns} FROM anarchon.run, at
    WHERE namespace = $1 AND {of_job} AND slot BETWEEN $3 AND $4
        AND (slot, job) < ($5, $6)
        AND (cardinality($7::text[]) = 0 OR CASE
            WHEN state IN ('claimed', 'running') AND (lease_until <= now_us / 1000
                OR lease_until - now_us / 1000 > lease_length_ms + lease_length_ms / {margin_share})
            THEN 'interrupted' ELSE state END = ANY ($7))
        AND ($8 = '' OR instance_id = $8 OR EXISTS (SELECT FROM anarchon.attempt a
            WHERE a.namespace = run.namespace AND a.job = run.job AND a.slot = run.slot
            AND a.instance_id = $8))
    ORDER BY slot DESC, job DESC LIMIT $9)
SELECT json_build_object('now_us', now_us,
    'runs', (SELECT json_agg(page ORDER BY slot DESC, job DESC) FROM page),
    'attempts', (SELECT json_agg(a ORDER BY a.attempt) FROM page JOIN anarchon.attempt a
        ON a.namespace = page.namespace AND a.job = page.job AND a.slot = page.slot
        AND a.attempt > page.attempt - {attempts_shown}),
    'fences', anarchon.fences($1, ARRAY(SELECT job FROM page))) FROM at
"""

# The slots between two of a job that have a row, for each of the jobs given.
TAKEN = """
SELECT json_agg(json_build_array(want.job, hit.slots))
FROM unnest($2::text[], $3::int8[], $4::int8[]) want (job, first, last) CROSS JOIN LATERAL (
    SELECT coalesce(json_agg(slot), '[]') AS slots FROM anarchon.run
    WHERE namespace = $1 AND job = want.job AND slot BETWEEN want.first AND want.last) hit
"""

# What operators' acts need besides the rows that `read` gives: of each job the slots from a moment on
# that have a row, the run that a request made, and what live instances hold.
CONTROLLED = """
WITH want AS MATERIALIZED (
    SELECT * FROM unnest($2::text[], $3::int8[], $4::text[]) want (job, since, request_id))
SELECT json_build_object(
    'taken', (SELECT json_agg(json_build_array(want.job, hit.slots)) FROM want CROSS JOIN LATERAL (
        SELECT coalesce(json_agg(slot), '[]') AS slots FROM anarchon.run
        WHERE namespace = $1 AND job = want.job AND slot >= want.since) hit),
    'requested', (SELECT json_agg({whole_run}) FROM want CROSS JOIN LATERAL (
        SELECT * FROM anarchon.run WHERE namespace = $1 AND job = want.job
        AND request_id = want.request_id AND request_id <> '' OFFSET 0) hit),
    'held', (SELECT json_agg(hit) FROM (SELECT DISTINCT job FROM want) want CROSS JOIN LATERAL (
        SELECT h.incarnation, h.job, h.definition_id, h.schedule_id
        FROM anarchon.hold h JOIN anarchon.instance i
            ON i.namespace = $1 AND i.incarnation = h.incarnation
        WHERE h.namespace = $1 AND h.job = want.job
            AND anarchon.now_us() / 1000 - i.seen_at <= i.lease_ms OFFSET 0) hit))
"""

# Jobs: those of the names given, or a page of all. `in_use`: the schedules whose slots are slots of
# the job, each with a definition that has it, if possible the current one.
JOBS = """
WITH at AS MATERIALIZED (SELECT anarchon.now_us() / 1000 AS now), page AS MATERIALIZED (
    SELECT * FROM anarchon.job WHERE namespace = $1 AND definition_id <> ''
        AND CASE WHEN cardinality($2::text[]) = 0 THEN job > $3 ELSE job = ANY ($2) END
    ORDER BY job LIMIT $4
), held AS MATERIALIZED (
    SELECT h.job, h.definition_id, h.schedule_id, i.instance_id
    FROM at, page JOIN anarchon.hold h ON h.namespace = $1 AND h.job = page.job
        JOIN anarchon.instance i ON i.namespace = $1 AND i.incarnation = h.incarnation
    WHERE at.now - i.seen_at <= i.lease_ms
), in_use AS MATERIALIZED (
    SELECT DISTINCT ON (job, schedule_id) * FROM (
        SELECT job, schedule_id, definition_id, 0 AS turn FROM page
        UNION ALL SELECT job, schedule_id, definition_id, 1 FROM held) used
    WHERE schedule_id <> '' ORDER BY job, schedule_id, turn)
SELECT json_build_object('now', now, 'jobs', (SELECT json_agg(json_build_object(
    'job', job, 'fence', fence, 'definition_at', definition_at,
    'paused_at', paused_at, 'pause_reason', pause_reason,
    'spec', (SELECT spec FROM anarchon.definition d WHERE d.namespace = $1
        AND d.job = page.job AND d.definition_id = page.definition_id),
    'held', (SELECT json_agg(json_build_array(definition_id, instance_id)) FROM held
        WHERE held.job = page.job),
    'in_use', (SELECT json_agg(json_build_array(s.schedule_id, s.settled, d.spec))
        FROM in_use u JOIN anarchon.schedule s ON s.namespace = $1 AND s.job = u.job
            AND s.schedule_id = u.schedule_id
        JOIN anarchon.definition d ON d.namespace = $1 AND d.job = u.job
            AND d.definition_id = u.definition_id
        WHERE u.job = page.job),
    'last', (SELECT r FROM (SELECT {columns} FROM anarchon.run WHERE namespace = $1
        AND run.job = page.job ORDER BY slot DESC LIMIT 1) r)) ORDER BY job) FROM page)) FROM at
"""

INSTANCES = """
SELECT json_build_object('now', anarchon.now_us() / 1000,
    'records', (SELECT json_agg(json_build_array(record, seen_at)) FROM anarchon.instance
        WHERE namespace = $1))
"""


def quoted(name: str) -> str:
    """A name as an identifier of SQL."""
    return '"' + name.replace('"', '""') + '"'


def in_schema(sql: str, schema: str) -> str:
    """The SQL with the schema's name in the place of `anarchon.`."""
    return sql.replace("anarchon.", f"{quoted(schema)}.")


def _array_of(columns: Sequence[str], *more: str) -> str:
    return f"json_build_array({', '.join((*(f'hit.{column}' for column in columns), *more))})"


def parts(numbers: dict[str, int]) -> dict[str, object]:
    """What the texts above name in braces; `numbers` are limits."""
    columns = _RUN.split()
    return {
        "v": f"_{SCHEMA_VERSION}",
        "settings": _INDEXES_ONLY,
        "columns": ", ".join(columns),
        "from_json": ", ".join(
            {"namespace": "_ns", "version": "version + 1"}.get(c, c) for c in columns
        ),
        "rest": ", ".join(columns[3:]),
        "excluded": ", ".join(f"excluded.{c}" for c in columns[3:]),
        "asked_run": _array_of(RUN_VALUES, "encode(hit.payload, 'hex')"),
        "whole_run": _array_of(RUN_VALUES),
        "brief_run": _array_of(RUN_VALUES[:-2]),
        **numbers,
    }


def schema_sql(schema: str, numbers: dict[str, int]) -> str:
    """All that makes the schema's tables and functions."""
    return in_schema(_TABLES + _functions(numbers), schema)


def migration_sql(schema: str, version: int, numbers: dict[str, int]) -> str:
    """All that makes a schema of an earlier version one of the present."""
    steps = "".join(_MIGRATIONS[before] for before in range(version, SCHEMA_VERSION))
    return in_schema(steps + _functions(numbers), schema)


def later_sql(schema: str, numbers: dict[str, int]) -> str:
    """All that a schema of the present version lacks that was made before `LATER_FUNCTION` came."""
    return in_schema(_REGISTER_PART.format(**parts(numbers)), schema)


def _functions(numbers: dict[str, int]) -> str:
    known = parts(numbers)
    return "".join(text.format(**known) for text in _FUNCTIONS)
