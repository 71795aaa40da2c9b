"""The numbers that bound things, and what must hold between them."""

from __future__ import annotations

import pytest

from anarchon_server.core import limits

LEASES = [*range(limits.LEASE_MIN, limits.LEASE_MAX, 7_919), limits.LEASE_MAX]


def test_s15_the_default_lease_gives_the_numbers_of_the_protocol() -> None:
    lease = limits.LEASE_DEFAULT
    assert lease == 30_000
    assert limits.default_heartbeat(lease) == 5_000
    assert limits.lease_margin(lease) == 5_000
    assert limits.session_ttl(lease) == 15_000
    assert limits.keep_alive_interval(lease) == 5_000


@pytest.mark.parametrize("heartbeat_share", [limits.HEARTBEAT_SHARE, limits.HEARTBEAT_SHARE_MIN])
def test_s15_every_lease_outlives_a_lost_session_by_its_margin(heartbeat_share: int) -> None:
    for lease in LEASES:
        session = limits.session_ttl(lease)
        assert 3 * limits.keep_alive_interval(lease) <= session
        assert session + lease // heartbeat_share + limits.lease_margin(lease) <= lease


def test_s15_leases_are_three_seconds_to_an_hour() -> None:
    assert (limits.LEASE_MIN, limits.LEASE_MAX) == (3_000, 3_600_000)


def test_s6_grids_are_100_ms_to_366_days() -> None:
    assert (limits.PERIOD_MIN, limits.PERIOD_MAX) == (100, 366 * 24 * 3_600_000)


def test_s32_a_token_has_room_for_the_longest_name() -> None:
    slot, nonce = "9" * 13, "f" * 32
    assert len(f"{slot}.{nonce}.{'j' * limits.NAME_MAX}") <= limits.TOKEN_MAX_BYTES
