"""What both NATS backends share, without a server: addresses, names, and the store's time (S1)."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anarchon_backends.nats.address import Credentials, address_of
from anarchon_backends.nats.names import name, token
from anarchon_backends.nats.time import FRESH_MS, StoreTime, microseconds
from anarchon_backends.nats_claim._history import _row_of as row_of
from anarchon_backends.nats_claim._history import _run_of as run_of
from anarchon_backends.nats_claim._subjects import Subjects
from anarchon_server.core.errors import StoreRefused
from anarchon_server.core.model import Attempt, AttemptCause, Failure, Run, RunState, Trigger
from tests.contract.harness import FakeClock

# --- Addresses -----------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def nothing_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("USER", "PASSWORD", "TOKEN", "NKEY", "CREDS", "CA", "CERT", "KEY"):
        monkeypatch.delenv(f"NATS_{variable}", raising=False)


def test_an_address_has_defaults() -> None:
    address = address_of("nats://host")
    assert address.hosts == (("host", 4222),)
    assert address.location == "nats://host:4222"
    assert (address.replicas, address.prefix, address.inbox) == (1, "an", "_INBOX")
    assert address.credentials == Credentials()
    assert not address.tls


def test_an_address_may_have_several_hosts_and_options() -> None:
    address = address_of(
        "tls://me:p%40ss@a:1,[::1]:2,c?replicas=3&prefix=x&domain=hub&inbox=_I.me&tls_verify=none"
        "&tls_first=yes&retention=1h",
        ("retention",),
    )
    assert address.hosts == (("a", 1), ("::1", 2), ("c", 4222))
    assert address.location == "tls://a:1,[::1]:2,c:4222"
    assert address.credentials == Credentials(user="me", password="p@ss")
    assert (address.replicas, address.prefix, address.domain) == (3, "x", "hub")
    assert (address.inbox, address.tls, address.tls_verify, address.tls_first) == (
        "_I.me",
        True,
        False,
        True,
    )
    assert dict(address.own) == {"retention": "1h"}
    assert "p@ss" not in repr(address)


def test_what_stands_alone_before_the_host_is_a_token() -> None:
    assert address_of("nats://s3cret@host").credentials == Credentials(token="s3cret")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("nats:host", "a NATS store is nats://"),
        ("nats://u:hunter2@host/path", "nothing between the hosts and the options"),
        ("nats://u:hunter2@host#x", "with every # as %23"),
        ("nats://u:hunter2@", "has a host without a name"),
        ("nats://u:hunter2@a,,b", "has a host without a name"),
        ("nats://u:hunter2@host:port", "cannot be read"),
        ("nats://u:hunter2@host:99999", "cannot be read"),
        ("nats://u:hunter2@[host", "cannot be read"),
        ("nats://u:hunter2@host?x", "cannot be read"),
        ("nats://u:hunter2@host?colour=red", "'colour' is not known; there are strategy, replicas"),
        ("nats://u:hunter2@host?retention=1h", "'retention' is not known"),
        ("nats://u:hunter2@host?replicas=3&replicas=3", "'replicas' stands twice"),
        ("nats://u:hunter2@host?replicas=2", "replicas is '2': use one of: 1, 3, 5"),
        ("nats://u:hunter2@host?prefix=a.b", "prefix is 'a.b': it is 1 to 32 of"),
        ("nats://u:hunter2@host?prefix=", "prefix is '': it is 1 to 32 of"),
        ("nats://u:hunter2@host?inbox=_INBOX.*", "inbox is '_INBOX.*': it is a subject without"),
        ("nats://u:hunter2@host?domain=a%20b", "domain is 'a b'"),
        (
            "nats://u:hunter2@host?monitor=host:8222",
            "monitor has 'host:8222': it is the address of",
        ),
        ("nats://u:hunter2@host?monitor=http://a/x", "monitor has 'http://a/x'"),
        ("nats://u:hunter2@host?tls_verify=none", "tls_verify is for tls: only"),
        ("tls://u:hunter2@host?tls_verify=maybe", "tls_verify is 'maybe': use one of: full, none"),
        ("tls://u:hunter2@host?tls_ca=/nowhere", "tls_ca is '/nowhere': there is no such file"),
        ("nats://host?creds_file=/nowhere", "creds_file is '/nowhere': there is no such file"),
        ("nats://host?token_file=/nowhere", "token_file is '/nowhere': No such file"),
        ("nats://u:hunter2@host?password_file=x", "goes with a user that has no password"),
        ("nats://host?password_file=x", "goes with a user that has no password"),
        ("nats://u:hunter2@host?nkey_file=/dev/null", "there is no such file"),
    ],
)
def test_a_url_that_is_wrong_is_refused_with_what_is_right_and_never_shown(
    url: str, said: str
) -> None:
    with pytest.raises(StoreRefused) as caught:
        address_of(url)
    assert said in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_credentials_of_two_kinds_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("x")
    with pytest.raises(StoreRefused, match="several credentials: nkey_file, the part before @"):
        address_of(f"nats://u:hunter2@host?nkey_file={file}")


@pytest.mark.parametrize("variable", ["NATS_CREDS", "NATS_NKEY"])
def test_a_file_that_the_environment_names_has_to_be_there(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "/nowhere")
    with pytest.raises(StoreRefused, match=f"{variable} is '/nowhere': there is no such file"):
        address_of("nats://host")


def test_the_environment_gives_what_the_url_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NATS_USER", "around")
    monkeypatch.setenv("NATS_PASSWORD", "p")
    assert address_of("nats://host").credentials == Credentials(user="around", password="p")
    assert address_of("nats://u:q@host").credentials == Credentials(user="u", password="q")


# --- Names ---------------------------------------------------------------------------------------


CHARACTERS = st.characters(exclude_categories=["Cs"])
NAMES = st.text(CHARACTERS, min_size=1, max_size=128)


@given(NAMES, NAMES)
def test_s32_names_are_single_tokens_and_come_back_as_they_were(one: str, other: str) -> None:
    assert name(token(one)) == one
    assert not set(token(one)) & set(".*> \t\r\n")
    assert (token(one) == token(other)) == (one == other)


@given(st.text("ab.:/_-*>%~", min_size=1), st.text("ab.:/_-*>%~", min_size=1), st.integers(0))
def test_s31_subjects_say_whose_they_are(namespace: str, job: str, slot: int) -> None:
    subjects = Subjects("an", namespace)
    assert subjects.run_of(subjects.run(job, slot)) == (slot, job)
    assert subjects.job_of(subjects.job(job)) == job
    assert subjects.node_of(subjects.seen(job, "inc")) == (job, "inc", None)
    assert subjects.node_of(subjects.holds(job, "inc", 3)) == (job, "inc", 3)
    assert subjects.claim(job, slot).count(".") == 4


# --- The store's time: S1 ------------------------------------------------------------------------


def measured(clock: FakeClock, time: StoreTime, *, there_us: int, back_ms: int = 2) -> None:
    """A measurement whose request and answer took one half of `back_ms` each."""
    asked = clock.boot
    clock.boot += back_ms
    time.note(there_us, asked)


def test_s01_time_is_reckoned_from_the_measurement_in_the_middle_of_its_round_trip() -> None:
    clock = FakeClock(boot=1_000)
    time = StoreTime(clock)
    measured(clock, time, there_us=50_000_000, back_ms=10)
    assert time.now_us() == 50_000_000 + 5_000
    clock.boot += 1_000
    assert time.now_us() == 50_000_000 + 1_005_000


def test_s01_of_the_last_measurements_the_quickest_counts() -> None:
    clock = FakeClock(boot=1_000)
    time = StoreTime(clock)
    measured(clock, time, there_us=50_000_000, back_ms=2)
    for _ in range(7):
        measured(clock, time, there_us=clock.boot * 1_000 + 49_050_000, back_ms=100)
        assert time.now_us() == 50_001_000 + (clock.boot - 1_002) * 1_000
    measured(clock, time, there_us=clock.boot * 1_000 + 49_050_000, back_ms=100)
    assert time.now_us() != 50_001_000 + (clock.boot - 1_002) * 1_000, "it is too old now"


@pytest.mark.parametrize("step_us", [3_600_000_000, -3_600_000_000, 50_000, -50_000])
def test_s01_a_step_of_the_stores_clock_is_seen_with_the_next_measurement(step_us: int) -> None:
    clock = FakeClock(boot=1_000)
    time = StoreTime(clock)
    for _ in range(8):
        clock.boot += 500
        measured(clock, time, there_us=9_000_000_000 + (clock.boot + 1) * 1_000)
    clock.boot += 500
    before = time.now_us()
    measured(clock, time, there_us=9_000_000_000 + step_us + (clock.boot + 1) * 1_000)
    assert time.now_us() == before + 2_000 + step_us


def test_s01_a_measurement_is_good_for_some_seconds_and_for_one_connection() -> None:
    clock = FakeClock()
    time = StoreTime(clock)
    fresh = [time.fresh]
    measured(clock, time, there_us=1)
    fresh.append(time.fresh)
    clock.boot += FRESH_MS
    fresh.append(time.fresh)
    clock.boot += 1
    fresh.append(time.fresh)
    measured(clock, time, there_us=1)
    time.forget()
    fresh.append(time.fresh)
    assert fresh == [False, True, True, False, False]


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("2026-11-30T01:22:36.410063123Z", datetime(2026, 11, 30, 1, 22, 36, 410_063, UTC)),
        ("2026-11-30T01:22:36.41Z", datetime(2026, 11, 30, 1, 22, 36, 410_000, UTC)),
        ("2026-11-30T01:22:36Z", datetime(2026, 11, 30, 1, 22, 36, 0, UTC)),
        ("2026-11-30T03:22:36.5+02:00", datetime(2026, 11, 30, 1, 22, 36, 500_000, UTC)),
        ("2026-11-29T23:22:36-02:00", datetime(2026, 11, 30, 1, 22, 36, 0, UTC)),
    ],
)
def test_times_of_the_server_are_read_to_the_microsecond(text: str, at: datetime) -> None:
    assert microseconds(text) == round(at.timestamp() * 1_000_000)


# --- Rows --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failures", "kept"),
    [(2, ("m" * 4_096, "t" * 16_384)), (20, ("m" * 4_096, "")), (100, ("", ""))],
)
def test_s30_the_row_of_a_run_that_failed_often_is_no_longer_than_a_message(
    failures: int, kept: tuple[str, str]
) -> None:
    """256 KiB with its headers, where a server takes no more."""
    failure = Failure("E", "m" * 4_096, "t" * 16_384)
    attempts = [
        Attempt(n, f"t{n}", n, "a", "a", AttemptCause.RETRY, RunState.FAILED, n, failure=failure)
        for n in range(1, failures + 1)
    ]
    last = Attempt(failures + 1, "t", 1, "a", "a", AttemptCause.RETRY, RunState.CLAIMED, 1)
    run = Run("sync", 1, Trigger.SCHEDULE, RunState.CLAIMED, current=last, earlier=tuple(attempts))
    row = row_of(run)
    assert len(row) <= 240 * 1_024
    read = run_of("sync", 1, row)
    assert (read.current, len(read.earlier)) == (last, failures)
    for attempt in read.earlier:
        assert attempt.failure is not None
        assert (attempt.failure.message, attempt.failure.stack_trace) == kept
