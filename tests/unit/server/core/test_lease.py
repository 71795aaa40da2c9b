"""Trust in a lease, and the store's time by the sidecar's clock (S1, S15, S19)."""

from __future__ import annotations

import pytest

from anarchon_server.core.lease import StoreTime, trust_end


def test_s15_trust_is_counted_from_the_sending_and_ends_a_sixth_before_the_lease() -> None:
    assert trust_end(1_000, 30_000) == 26_000
    assert trust_end(0, 3_000) == 2_500


def test_s1_the_stores_time_is_judged_at_the_middle_of_a_request() -> None:
    assert not StoreTime().known
    time = StoreTime()
    assert time.sample(100, 200, store_at=5_150) is False
    assert time.known
    assert time.at(1_000) == 6_000
    assert time.when(6_000) == 1_000


def test_s1_nobody_may_ask_before_the_store_has_answered() -> None:
    with pytest.raises(AssertionError, match="before the store has answered"):
        StoreTime().at(1)


def test_s1_of_the_last_eight_samples_the_quickest_decides() -> None:
    time = StoreTime()
    time.sample(0, 20, store_at=1_000 + 10 + 7)  # 7 ms off, but quicker than what follows
    for step in range(1, 8):
        sent = step * 1_000
        time.sample(sent, sent + 100, store_at=1_000 + sent + 50)
        assert time.at(0) == 1_007
    time.sample(8_000, 8_100, store_at=1_000 + 8_050)  # the quick one is forgotten
    assert time.at(0) == 1_000


def steady(offset: int = 1_000_000, margin_ms: int = 500) -> StoreTime:
    """A clock seen to run evenly since 0."""
    time = StoreTime()
    time.margin_ms = margin_ms
    time.sample(0, 0, store_at=offset)
    return time


def test_s19_a_clock_is_watched_from_the_first_quick_answer_on() -> None:
    time = StoreTime()
    time.margin_ms = 500
    assert time.steady_for(900) == 0
    time.sample(0, 300, store_at=1_000_150)  # a round trip of more than half the margin
    assert time.steady_for(900) == 0
    time.sample(1_000, 1_250, store_at=1_001_125)
    assert time.steady_for(1_250) == 0
    assert time.steady_for(4_250) == 3_000


@pytest.mark.parametrize("moved", [251, -251, 3_600_000, -3_600_000])
def test_s19_a_quick_answer_more_than_half_the_margin_off_proves_a_step(moved: int) -> None:
    time = steady()
    assert time.sample(5_000, 5_000, store_at=1_005_000 + moved) is True
    assert time.at(5_000) == 1_005_000 + moved, "the older samples are forgotten"
    assert time.steady_for(6_000) == 1_000, "the watching begins anew"


@pytest.mark.parametrize("moved", [250, -250, 0])
def test_s19_less_than_that_is_no_step(moved: int) -> None:
    time = steady()
    assert time.sample(5_000, 5_000, store_at=1_005_000 + moved) is False
    assert time.steady_for(6_000) == 6_000


def test_s19_a_slow_answer_proves_only_what_its_round_trip_cannot_explain() -> None:
    time = steady()
    # Sent at 5,000, answered at 7,000: the store may have handled it at any time between.
    assert time.sample(5_000, 7_000, store_at=1_000_000 + 5_000 - 499) is False
    assert time.steady_for(7_000) == 7_000
    assert time.sample(8_000, 10_000, store_at=1_000_000 + 8_000 - 501) is True
    assert time.steady_for(10_000) == 0, "a slow answer begins no watching"


def test_s19_a_store_that_speaks_of_a_step_is_watched_anew() -> None:
    time = steady()
    time.distrust()
    assert time.steady_for(9_000) == 0
    time.sample(9_000, 9_000, store_at=1_009_000)
    assert time.steady_for(9_500) == 500
    assert time.at(9_000) == 1_009_000
