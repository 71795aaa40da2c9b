"""Every number that bounds something, in one place, with their relations asserted at import.

Imports nothing. Durations are whole milliseconds. The two ends of a session (`client` and
`server`) agree on these through the protocol, not through this file.
"""

from __future__ import annotations

SECOND = 1_000
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE
DAY = 24 * HOUR
NEVER = 2**62
"""A moment that does not come."""

# S32, S30 and the protocol: names and sizes
NAME_MAX = 128
TOKEN_MAX_BYTES = 256
JOBS_MAX = 10_000
CONCURRENCY_MAX = 10_000
LABELS_MAX = 16
LABEL_MAX_BYTES = 128
RESULT_MAX_BYTES = 16 * 1024
MESSAGE_MAX_BYTES = 4 * 1024
TRACE_MAX_BYTES = 16 * 1024
MESSAGE_BYTES = 4 * 1024 * 1024
BATCH_BYTES = 2 * 1024 * 1024
ASSIGNMENTS_MAX = 500
RESULTS_MAX = 1_000
SESSIONS_MAX = 64
EVENT_QUEUE_MAX = 1_024

# Schedules
PERIOD_MIN = 100
PERIOD_MAX = 366 * DAY
GAP_SAMPLE = 1_000
PREVIEW_MAX = 1_000
NEXT_SLOTS = 5
NOTES_MAX = 100

# Claiming
EARLY_MAX = SECOND
JITTER_DEFAULT = 2 * SECOND
JITTER_GAP_SHARE = 4
START_DEADLINE_MAX_DEFAULT = 60 * SECOND
START_DEADLINE_OVER_JITTER = 5 * SECOND
START_DEADLINE_MIN = SECOND
CLAIM_BATCH = 500
RECORD_OVER_DEADLINE = 10 * MINUTE
UNKNOWN_ASKED_FOR = 5 * MINUTE
PLAN_BATCH = 20
PLANNED_ALONG = 100
MISSED_LISTED_MAX = 10_000
CATCH_UP_LIMIT = 100
CATCH_UP_LIMIT_MAX = 10_000
CATCH_UP_WINDOW = DAY
CATCH_UP_WINDOW_MAX = 366 * DAY

# S22, S29
RETRIES_MAX = 100
RETRY_DELAY = SECOND
RETRY_DELAY_MAX = HOUR
RETRY_FACTOR = 2.0
RETRY_FACTOR_MAX = 100.0
RETRY_AFTER_MAX = 7 * DAY
TRIGGERED_WAITING_MAX = 100
PAYLOAD_MAX_BYTES = 64 * 1024
REASON_MAX_BYTES = 1_024
ASKED_WITHIN = 5 * SECOND
ASKED_AGAIN = 5

# S15: leases, and what follows from them
LEASE_DEFAULT = 30 * SECOND
LEASE_MIN = 3 * SECOND
LEASE_MAX = HOUR
HEARTBEAT_SHARE = 6
HEARTBEAT_SHARE_MIN = 3
HEARTBEAT_MIN = 100
MARGIN_SHARE = 6
SESSION_SHARE = 2
KEEP_ALIVE_SHARE = 3
KEEP_ALIVE_SLACK = SECOND
CANCEL_GRACE = 5 * SECOND
STOP_GRACE = 20 * SECOND
TIMEOUT_MAX = 366 * DAY
MAX_ATTEMPTS = 3
ATTEMPTS_MAX = 1_000
RESEND_ROUNDS = 2
SILENCES_BEFORE_RESEND = 2
REFUSALS_DOUBLED = 10

# Takeover
END_LOOK_SPREAD = 250
LOOKS_MAX = 1_000

# S1: the clock
CLOCK_OFFSET_MAX = 30 * SECOND
CLOCK_SAMPLES = 8

# S5: comparing zone databases. A span is the outlook, and a day on either side and between.
COMPARE_EVERY = MINUTE
OUTLOOK = 30 * DAY
OUTLOOK_SPAN = OUTLOOK + 3 * DAY
JOBS_NAMED = 20
INSTANCES_NAMED = 10

# Store calls
OP_TIMEOUT = 2 * SECOND
REGISTER_BATCH = 250
REGISTER_PAUSE_MAX = 100  # between parts; as long as the one before took, if that is less
BEAT_TIMEOUT_LEAST = SECOND
RETRY_FIRST = 50
RETRY_MAX = SECOND
RESULTS_KEPT = 5 * MINUTE
RESULTS_WAITING_MAX = 20_000
JOB_AWAITED = 6 * SECOND
"""For a client's longest back-off before it subscribes again, and a second."""
REPORT_AWAITED = SECOND
"""For a client that has just subscribed, with an attempt whose time is over, to say how it ended."""
RECORDED_REMEMBERED = 20_000

# What history keeps, by S30
HISTORY_DAYS = 14
HISTORY_MAX = 1_000
ATTEMPTS_SHOWN = 100
PRUNE_EVERY = MINUTE
PRUNE_BATCH = 200
LOST_SHOWN = DAY
PAGE_DEFAULT = 50
PAGE_MAX = 500

# Watching runs. A round looks at one page of the newest runs at least, and at one of the older ones
WATCHES_MAX = 32
WATCH_EVERY = SECOND
WATCH_PAUSE_LEAST = 100
WATCH_BUSY_SHARE = 4
WATCH_STORE_AWAY = MINUTE
WATCH_LATE_MAX = 30 * SECOND
WATCH_HEADS_MAX = 40
WATCH_ASIDES = 20
WATCH_KNOWN_MAX = 20_000


def lease_margin(lease_ms: int) -> int:
    """By how much local trust in a lease ends before the lease does: a sixth of it."""
    return lease_ms // MARGIN_SHARE


def default_heartbeat(lease_ms: int) -> int:
    """How often a lease is renewed where the job does not say: a sixth of it."""
    return lease_ms // HEARTBEAT_SHARE


def session_ttl(lease_ms: int) -> int:
    """How long a client may believe in a session whose shortest lease is `lease_ms`: half."""
    return lease_ms // SESSION_SHARE


def keep_alive_interval(lease_ms: int) -> int:
    """How often that client says that it lives: a third of the session's time."""
    return session_ttl(lease_ms) // KEEP_ALIVE_SHARE


for _lease in (LEASE_MIN, LEASE_DEFAULT, LEASE_MAX):
    assert 3 * keep_alive_interval(_lease) <= session_ttl(_lease)
    assert session_ttl(_lease) + default_heartbeat(_lease) + lease_margin(_lease) <= _lease
    assert session_ttl(_lease) + _lease // HEARTBEAT_SHARE_MIN + lease_margin(_lease) <= _lease
assert LEASE_MIN // HEARTBEAT_SHARE_MIN >= HEARTBEAT_MIN
assert EARLY_MAX < START_DEADLINE_OVER_JITTER
assert WATCH_KNOWN_MAX >= PAGE_MAX * WATCH_HEADS_MAX
assert CLAIM_BATCH <= ASSIGNMENTS_MAX
assert UNKNOWN_ASKED_FOR < RECORD_OVER_DEADLINE
assert NAME_MAX + 13 + 32 + 2 <= TOKEN_MAX_BYTES
