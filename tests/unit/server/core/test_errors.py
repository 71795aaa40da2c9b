"""What the domain's errors say: each names the thing, its value and what would be right."""

from __future__ import annotations

import pytest

from anarchon_server.core.errors import (
    AnarchonError,
    InvalidError,
    InvalidJobsError,
    InvalidScheduleError,
    NotFoundError,
    OutcomeUnknown,
    RefusedError,
    StoreError,
    StoreRefused,
    StoreUnavailable,
    UnsupportedError,
)


def test_an_invalid_value_is_named_shown_and_corrected() -> None:
    error = InvalidError("lease", "1s", "3s to 1h")
    assert str(error) == "lease is '1s': 3s to 1h"
    assert (error.field, error.value, error.expected) == ("lease", "1s", "3s to 1h")


def test_a_huge_value_is_shown_in_part() -> None:
    message = str(InvalidError("name", "x" * 10_000, "shorter"))
    assert len(message) < 300
    assert "... (10002 characters)" in message


def test_every_bad_job_of_a_registration_is_named() -> None:
    wrong = InvalidError("jitter", "9s", "shorter")
    missing = UnsupportedError("retry", "sqlite", ())
    error = InvalidJobsError([(0, "a", wrong), (3, "b", missing)])
    assert str(error) == f"job 'a': {wrong}; job 'b': {missing}"
    assert error.problems == ((0, "a", wrong), (3, "b", missing))


@pytest.mark.parametrize(
    ("backends", "hint", "message"),
    [
        ((), "", "retry is not in this version"),
        ((), "leave it unset", "retry is not in this version; leave it unset"),
        (
            ("redis", "nats"),
            "leave it unset",
            "retry is not supported by sqlite; backends that can: redis, nats; leave it unset",
        ),
    ],
)
def test_what_a_backend_cannot_do_names_those_that_can(
    backends: tuple[str, ...], hint: str, message: str
) -> None:
    error = UnsupportedError("retry", "sqlite", backends, hint)
    assert str(error) == message
    assert (error.feature, error.backend, error.backends) == ("retry", "sqlite", backends)


@pytest.mark.parametrize(
    ("hint", "message"),
    [("", "no session 's1'"), ("subscribe again", "no session 's1'; subscribe again")],
)
def test_what_is_not_there_is_named(hint: str, message: str) -> None:
    error = NotFoundError("session", "s1", hint)
    assert str(error) == message
    assert (error.kind, error.name) == ("session", "s1")


def test_a_refusal_carries_the_protocols_reason() -> None:
    error = RefusedError("DRAINING", "it stops")
    assert (error.reason, str(error)) == ("DRAINING", "it stops")


@pytest.mark.parametrize("kind", [StoreUnavailable, OutcomeUnknown, StoreRefused])
def test_s11_what_a_store_can_do_wrong_is_told_apart_and_caught_as_one(kind: type) -> None:
    others = {StoreUnavailable, OutcomeUnknown, StoreRefused} - {kind}
    assert issubclass(kind, StoreError)
    assert not issubclass(kind, tuple(others))


def test_every_error_of_ours_has_one_base() -> None:
    for kind in (InvalidScheduleError, InvalidJobsError, UnsupportedError, NotFoundError):
        assert issubclass(kind, AnarchonError)
    assert issubclass(InvalidScheduleError, InvalidError)
    assert issubclass(StoreError, AnarchonError)
