"""Tokens, and what the parts of an engine ask of its clocks."""

from __future__ import annotations

import pytest

from anarchon_server.core.context import Context, new_token, read_token
from anarchon_server.core.messages import Draining, Send
from anarchon_server.core.sessions import Session
from anarchon_server.core.settings import Settings
from anarchon_server.core.store import Capabilities


def context(*, boot_leases: bool = False) -> Context:
    capabilities = Capabilities("memory", boot_leases=boot_leases)
    return Context(Settings("a", "x"), capabilities, lambda most: 0, lambda: "nonce")


@pytest.mark.parametrize("job", ["sync", "a.b", "a.b.c", "a:/", "x" * 128])
def test_s17_any_sidecar_can_read_a_tokens_job_and_slot(job: str) -> None:
    assert read_token(new_token(1_800_000_000_000, "f" * 32, job)) == (job, 1_800_000_000_000)


@pytest.mark.parametrize(
    "token",
    [
        "",
        "sync",
        "12",
        "12.",
        "12.n",
        "12.n.",
        "12.n..",
        "12.n.a b",
        "12.n.a\0",
        "12..sync",
        ".n.sync",
        "-1.n.sync",
        "١٢.n.sync",
        "x.n.sync",
        "1" * 17 + ".n.sync",
        "12.n." + "j" * 300,
        "12." + "n" * 300 + ".sync",
    ],
)
def test_s17_what_is_no_token_of_ours_is_not_read(token: str) -> None:
    assert read_token(token) is None


def test_s17_a_token_over_the_limit_is_a_mistake_of_ours() -> None:
    with pytest.raises(AssertionError):
        new_token(1, "f" * 32, "j" * 300)


def test_s1_the_clock_is_usable_once_known_and_near_the_hosts() -> None:
    assert not context().clock_usable
    shared = context()
    shared.store_time.sample(0, 0, store_at=5_000)
    assert shared.clock_usable
    assert shared.store_now == 5_000
    for offset, usable in ((30_000, True), (-30_000, True), (30_001, False), (-30_001, False)):
        shared.clock_offset_ms = offset
        assert shared.clock_usable is usable


def test_s19_the_clock_is_vouched_for_after_a_lease_of_watching() -> None:
    shared = context()
    shared.store_time.sample(1_000, 1_000, store_at=5_000)
    shared.now = 3_999
    assert not shared.vouched(3_000)
    assert shared.takeovers_from(3_000) == 4_000
    shared.now = 4_000
    assert shared.vouched(3_000)
    assert shared.takeovers_from(3_000) == 4_000
    shared.now = 9_000
    assert shared.takeovers_from(3_000) == 9_000


def test_s19_leases_by_a_clock_that_cannot_step_need_no_second_witness() -> None:
    shared = context(boot_leases=True)
    shared.now = 10
    assert shared.takeovers_from(3_000) == 10


@pytest.mark.parametrize("boot_leases", [True, False])
def test_s27a_after_a_store_went_back_takeovers_wait(boot_leases: bool) -> None:
    shared = context(boot_leases=boot_leases)
    shared.quarantined_until = 70_000
    assert shared.takeovers_from(3_000) == 70_000


def test_a_session_without_a_stream_is_sent_nothing() -> None:
    shared = context()
    session = Session("s", ttl_ms=1, offered_ms=1, kept_alive_at=0)
    shared.send(session, Draining(5))
    assert shared.out == []
    session.stream_id = 3
    shared.send(session, Draining(5))
    assert shared.out == [Send("s", 3, Draining(5))]
