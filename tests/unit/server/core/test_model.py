"""Records: what is read from them, and a spec's way into the store and back."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from anarchon_server.core.model import (
    Attempt,
    AttemptCause,
    CatchUpPolicy,
    CronSchedule,
    Definition,
    EverySchedule,
    JobSpec,
    Lease,
    OverlapPolicy,
    RetrySpec,
    Run,
    RunState,
    RunView,
    Trigger,
    labels_of,
)

FULL = JobSpec(
    name="sync",
    schedule=CronSchedule("0 8 * * *", "Europe/Athens"),
    jitter_ms=0,
    timeout_ms=1_000,
    heartbeat_ms=500,
    lease_ms=3_000,
    overlap=OverlapPolicy.ALLOW,
    catch_up=CatchUpPolicy.NONE,
    catch_up_window_ms=60_000,
    catch_up_limit=7,
    start_deadline_ms=5_000,
    max_attempts=4,
    retry=RetrySpec(2, delay_ms=100, factor=2.0, max_delay_ms=400),
    concurrency=3,
    labels=(("team", "billing"), ("tier", "1")),
    cancel_grace_ms=1_000,
    stop_grace_ms=2_000,
)
BARE = JobSpec("sync", EverySchedule(10_000, 2_500))


@pytest.mark.parametrize(
    "spec", [FULL, BARE, JobSpec("sync", by_name=True)], ids=["full", "bare", "by name"]
)
def test_s28_a_definition_comes_back_from_the_store_as_it_went(spec: JobSpec) -> None:
    assert JobSpec.from_json(spec.to_json()) == spec


def test_s28_fields_of_a_later_version_are_ignored() -> None:
    raw = json.loads(FULL.to_json())
    raw["later"] = {"unknown": 1}
    raw["schedule"]["later"] = True
    raw["retry"]["later"] = True
    assert JobSpec.from_json(json.dumps(raw)) == FULL


def test_s28_a_definitions_texts_are_made_once() -> None:
    definition = Definition(FULL, "every 10s", 1)
    assert definition.spec_json == FULL.to_json()
    assert definition.spec_json is definition.spec_json
    assert definition.definition_id is definition.definition_id


def test_s28_two_instances_hold_one_definition_exactly_if_their_specs_are_equal() -> None:
    def identity(spec: JobSpec) -> str:
        return Definition(spec, "every 10s", 1).definition_id

    assert identity(BARE) == identity(JobSpec("sync", EverySchedule(10_000, 2_500)))
    for field in ("jitter_ms", "timeout_ms", "max_attempts", "concurrency", "lease_ms"):
        changes: dict[str, Any] = {field: 3_600}
        assert identity(dataclasses.replace(BARE, **changes)) != identity(BARE), field
    assert len(identity(FULL)) == 32


def test_s28_a_definition_is_known_by_its_jobs_name() -> None:
    assert Definition(FULL, "id", 1).job == "sync"


def test_s28_the_order_in_which_labels_are_given_makes_no_definition_another() -> None:
    assert labels_of({"b": "2", "a": "1"}) == labels_of({"a": "1", "b": "2"})
    assert labels_of({"b": "2", "a": "1"}) == (("a", "1"), ("b", "2"))


def test_i3_success_failed_and_skipped_are_final_and_nothing_else_is() -> None:
    final = {state for state in RunState if state.final}
    assert final == {RunState.SUCCESS, RunState.FAILED, RunState.SKIPPED}


def attempt(number: int) -> Attempt:
    return Attempt(
        number, f"token-{number}", 1, "a", "x", AttemptCause.CLAIM, RunState.CLAIMED, claimed_at=1
    )


def test_a_run_shows_the_number_and_token_of_its_newest_attempt() -> None:
    fresh = Run("sync", 1, Trigger.SCHEDULE, RunState.DUE)
    assert (fresh.attempt, fresh.token) == (0, "")
    taken = dataclasses.replace(fresh, current=attempt(2), state=RunState.CLAIMED)
    assert (taken.attempt, taken.token) == (2, "token-2")


@pytest.mark.parametrize(
    ("freed", "left", "takeable"),
    [("", 1, False), ("", 0, True), ("", -5, True), ("", None, False), ("handed_over", 900, True)],
)
def test_s19_a_run_may_be_taken_once_its_lease_is_over_or_it_was_freed(
    freed: str, left: int | None, takeable: bool
) -> None:
    run = Run(
        "sync",
        1,
        Trigger.SCHEDULE,
        RunState.CLAIMED,
        current=attempt(1),
        lease=Lease(1, 1, 1),
        freed=freed,
    )
    assert RunView(run, left).takeable is takeable
