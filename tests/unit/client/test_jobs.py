"""Functions in, specs out; what is wrong is said where it is written."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import anarchon
from anarchon import Cron, Every, Job, JobError, OnTrigger, cron, every, on_trigger
from anarchon._jobs import collect
from anarchon.v1 import job_pb2


def nothing() -> None:
    """A handler."""


async def with_context(ctx: anarchon.Context) -> None:
    """Another."""


def spec_of(**policies: Any) -> job_pb2.JobSpec:
    return Job(nothing, Every("10s"), **policies).spec


# ── Decorators ──────────────────────────────────────────────────────────────────────────────────


def test_a_decorator_gives_the_function_back_unchanged() -> None:
    def handler() -> int:
        return 3

    assert every("10s")(handler) is handler
    assert handler() == 3


def test_the_name_is_the_functions_unless_one_is_given() -> None:
    @every("10s")
    def sync() -> None: ...

    @cron("0 8 * * *", tz="Europe/Athens", name="reports/daily:8")
    def report() -> None: ...

    jobs = collect([sync, report])
    assert list(jobs) == ["sync", "reports/daily:8"]
    assert jobs["reports/daily:8"].spec.cron.time_zone == "Europe/Athens"
    assert jobs["reports/daily:8"].spec.cron.expression == "0 8 * * *"


def test_methods_are_bound_when_they_are_subscribed() -> None:
    class Service:
        @every("10s")
        async def sync(self, ctx: anarchon.Context) -> None: ...

        @every("10s")
        def other(self) -> None: ...

    service = Service()
    jobs = collect([service.sync, service.other])
    assert jobs["sync"].handler == service.sync
    assert (jobs["sync"].takes_context, jobs["sync"].is_async) == (True, True)
    assert (jobs["other"].takes_context, jobs["other"].is_async) == (False, False)
    with pytest.raises(JobError, match="it takes"):
        collect([Service.sync])


def test_one_function_may_be_two_jobs() -> None:
    jobs = collect([Job(nothing, Every("1m"), name="a"), Job(nothing, Cron("@daily"), name="b")])
    assert list(jobs) == ["a", "b"]
    assert repr(jobs["a"]) == "Job('a')"


def test_policies_become_the_spec() -> None:
    spec = spec_of(
        jitter="1s",
        timeout="5m",
        heartbeat=timedelta(seconds=2),
        lease="12s",
        overlap="queue",
        catch_up="all",
        catch_up_window="1h",
        catch_up_limit=7,
        start_deadline="30s",
        max_attempts=5,
        retries=2,
        retry_delay="5s",
        retry_factor=3,
        retry_max_delay="1m",
        concurrency=4,
        labels={"team": "billing"},
        cancel_grace="3s",
        stop_grace="10s",
    )
    assert spec.jitter.seconds == 1
    assert spec.timeout.seconds == 300
    assert (spec.heartbeat.seconds, spec.lease.seconds) == (2, 12)
    assert spec.overlap == job_pb2.OVERLAP_POLICY_QUEUE
    assert spec.catch_up.policy == job_pb2.CATCH_UP_POLICY_ALL
    assert (spec.catch_up.window.seconds, spec.catch_up.limit) == (3_600, 7)
    assert spec.catch_up.start_deadline.seconds == 30
    assert (spec.max_attempts, spec.concurrency) == (5, 4)
    assert (spec.retry.retries, spec.retry.delay.seconds, spec.retry.factor) == (2, 5, 3)
    assert spec.retry.max_delay.seconds == 60
    assert dict(spec.labels) == {"team": "billing"}
    assert (spec.cancel_grace.seconds, spec.stop_grace.seconds) == (3, 10)


def test_what_is_not_said_is_left_to_the_sidecar() -> None:
    spec = spec_of()
    assert [field.name for field, _ in spec.ListFields()] == ["name", "every"]
    assert spec_of(jitter="0s").HasField("jitter"), "none is not the same as unsaid"


# ── What is refused ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        ({"jitter": "10s"}, "jitter 10s: must be less than the period, 10s"),
        ({"jitter": -1}, "jitter -1: write a timedelta"),
        ({"timeout": "0s"}, "timeout 0s: must be 1ms to"),
        ({"lease": "2s"}, "lease 2s: must be 3s to 1h"),
        ({"lease": "2h"}, "lease 2h: must be 3s to 1h"),
        ({"lease": "9s", "heartbeat": "4s"}, "heartbeat 4s: must be at most a third of the lease"),
        ({"heartbeat": "30m"}, "heartbeat 30m: must be 1ms to 20m"),
        ({"overlap": "wait"}, "overlap 'wait': must be one of skip, allow, queue, cancel"),
        ({"catch_up": "some"}, "catch_up 'some': must be one of none, latest, all"),
        ({"catch_up": "all", "overlap": "cancel"}, 'catch_up "all" with overlap "cancel"'),
        ({"catch_up_limit": 0}, "catch_up_limit 0: must be a whole number from 1 to 10,000"),
        ({"max_attempts": 1_001}, "max_attempts 1001: must be a whole number from 1 to 1,000"),
        ({"max_attempts": True}, "max_attempts True: must be a whole number"),
        ({"concurrency": "2"}, "concurrency '2': must be a whole number"),
        ({"retries": 101}, "retries 101: must be a whole number from 0 to 100"),
        ({"retry_delay": "1s"}, "retry_delay without retries"),
        ({"retries": 1, "retry_delay": "2h"}, "at most retry_max_delay, 1h"),
        ({"retries": 1, "retry_factor": 0.5}, "retry_factor 0.5: must be a number from 1"),
        ({"labels": ["a"]}, "must be a mapping of texts"),
        ({"labels": {"a": 1}}, "label 'a': key and value must be texts"),
        ({"labels": {"a": "ü" * 65}}, "at most 128 bytes"),
        ({"labels": {str(n): "" for n in range(17)}}, "17 labels: must be at most 16"),
        ({"start_deadline": "1ms"}, "start_deadline 1ms: must be 1s to"),
        ({"retry": 3}, "no such policy: retry; there are cancel_grace, catch_up, "),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_a_bad_policy_is_refused_by_name_and_value(policies: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError) as raised:
        spec_of(**policies)
    assert message in str(raised.value)
    assert str(raised.value).startswith("job 'nothing': ")
    assert str(raised.value).endswith(raised.value.expected)
    # The last of those given is the wrong one; labels have no single value, nor has no policy.
    assert raised.value.field in ("" if {"labels", "retry"} & set(policies) else policies)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: every("99ms"), "period 99ms: must be 100ms to 366d"),
        (lambda: every("367d"), "must be 100ms to 366d"),
        (lambda: every("10"), '"10s" is seconds'),
        (lambda: every(timedelta(microseconds=100_500)), "whole milliseconds"),
        (lambda: every("10s", offset="10s"), "offset 10s: must be less than the period 10s"),
        (lambda: cron("0 8 * *"), "must have five fields, or six with seconds first; it has 4"),
        (lambda: cron(""), "it has 0"),
        (lambda: cron("@every 10s"), 'use every("10s")'),
        (lambda: cron("x" * 1_001), "at most 1,000 characters"),
        (lambda: cron(5), "must be a text"),  # type: ignore[arg-type]
        (lambda: cron("0 8 * * *", tz=""), 'must be an IANA name such as "Europe/Athens"'),
        (lambda: cron("0 8 * * *", tz="Europe Athens"), "must be an IANA name"),
        (lambda: Job(nothing, "10s"), "must be Every(...), Cron(...) or OnTrigger()"),  # type: ignore[arg-type]
        (lambda: Job(nothing, 3), "schedule 3: must be Every"),  # type: ignore[arg-type]
    ],
)
def test_a_bad_schedule_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(JobError) as raised:
        make()
    assert message in str(raised.value)


VECTORS = Path(__file__).parents[2] / "conformance" / "vectors"


def test_a_number_out_of_range_is_refused_where_it_is_written_in_the_sidecars_words() -> None:
    cases = json.loads((VECTORS / "refused.json").read_text())["cases"]
    seen = 0
    for case in cases:
        number, _, _ = case["why"].partition(" is outside ")
        if number == case["why"] or f"{number}L" in case["expression"] or "W" in case["expression"]:
            continue
        with pytest.raises(JobError) as raised:
            cron(case["expression"])
        said = str(raised.value)
        assert said.startswith(f"cron expression {case['expression']!r}: {case['field']} is '")
        assert said.endswith(f": {case['why']}")
        seen += 1
    assert seen >= 9


def test_every_schedule_that_a_sidecar_takes_can_be_written() -> None:
    cases = json.loads((VECTORS / "crons.json").read_text())["cases"]
    for case in cases:
        Cron(case["schedule"], tz=case["time_zone"])
    assert len(cases) > 300


def takes_two(ctx: object, other: object) -> None: ...


def takes_keyword(*, ctx: object) -> None: ...


def yields() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize("handler", [takes_two, takes_keyword, yields])
def test_a_handler_with_a_wrong_signature_is_refused(handler: Callable[..., object]) -> None:
    with pytest.raises(JobError, match=r"must be fn\(ctx\) or fn\(\)"):
        every("10s")(handler)


def test_what_cannot_be_called_is_no_handler() -> None:
    with pytest.raises(JobError, match=r"must be fn\(ctx\) or fn\(\)"):
        Job(3, Every("10s"), name="three")  # type: ignore[arg-type]


class Callables:
    """Things that can be called, with what they are: takes a context, is async."""

    def __call__(self, ctx: anarchon.SyncContext) -> None: ...


@pytest.mark.parametrize(
    ("handler", "shape"),
    [
        (nothing, (False, False)),
        (with_context, (True, True)),
        (functools.partial(with_context), (True, True)),
        (functools.partial(takes_two, 1), (True, False)),
        (functools.partial(takes_two, 1, 2), (False, False)),
        (Callables(), (True, False)),
        (lambda ctx=None: ctx, (True, False)),
        (lambda number=5: number, (False, False)),
        (lambda *args, **kwargs: (args, kwargs), (False, False)),
    ],
)
def test_the_shape_of_a_handler_is_seen(
    handler: Callable[..., object], shape: tuple[bool, bool]
) -> None:
    job = Job(handler, Every("10s"), name="job")
    assert (job.takes_context, job.is_async) == shape


@pytest.mark.parametrize("name", ["", "a b", "-a", "ä", "a" * 129, "a\n", 3, None])
def test_s32_a_bad_name_is_refused(name: str) -> None:
    with pytest.raises(JobError, match=r"1 to 128 characters|not callable|has no name"):
        Job(functools.partial(nothing), Every("10s"), name=name)


@pytest.mark.parametrize("name", ["a", "9", "a.b", "a:b/c-d_e", "a" * 128])
def test_s32_a_good_name_is_taken(name: str) -> None:
    assert Job(nothing, Every("10s"), name=name).spec.name == name


def test_a_function_without_a_usable_name_needs_one() -> None:
    with pytest.raises(JobError, match="set it with name="):
        every("10s")(lambda: None)


def test_two_handlers_of_one_name_are_refused() -> None:
    with pytest.raises(JobError, match=r"two handlers are named 'a': .*nothing and .*with_context"):
        collect([Job(nothing, Every("1s"), name="a"), Job(with_context, Every("1s"), name="a")])


def test_a_second_decorator_says_how_to_have_two_jobs() -> None:
    with pytest.raises(JobError, match=r"Job\(handler, schedule, name="):
        every("1s")(every("2s")(lambda_named()))


def lambda_named() -> Callable[[], None]:
    def job() -> None: ...

    return job


def test_what_cannot_be_decorated_says_what_to_do() -> None:
    with pytest.raises(JobError, match=r"give Job\(handler, schedule\) instead"):
        every("1s")(print)


@pytest.mark.parametrize("handlers", [nothing, "nothing", 3, Job(nothing, Every("1s"))])
def test_handlers_must_be_a_list(handlers: Any) -> None:
    with pytest.raises(JobError, match="must be a list of handlers"):
        collect(handlers)


def test_a_handler_without_a_schedule_says_what_to_do() -> None:
    with pytest.raises(JobError) as raised:
        collect([nothing])
    advice = "decorate it with @every or @cron, give Job(handler, schedule), or"
    assert f"nothing has no schedule: {advice}" in str(raised.value)


def test_handlers_are_offered_by_name_where_they_say_no_more() -> None:
    @every("10s", lease="6s")
    def decorated() -> None: ...

    own = Job(nothing, Every("1s"), name="own")
    handlers: dict[str, Any] = {"sync": nothing, "other/name": decorated, "own": own}
    jobs = collect(handlers)
    assert jobs["sync"].spec == job_pb2.JobSpec(name="sync", by_name=True)
    assert jobs["other/name"].spec.every.period.seconds == 10
    assert jobs["other/name"].spec.lease.seconds == 6
    assert jobs["own"] is own
    by_name = Job(nothing, name="sync", lease="6s")
    assert by_name.spec.by_name
    assert by_name.spec.lease.seconds == 6


def test_a_handler_may_run_only_when_it_is_triggered() -> None:
    @on_trigger(name="import", overlap="queue", lease="6s")
    def decorated() -> None: ...

    jobs = collect([decorated, Job(nothing, OnTrigger(), name="own")])
    assert jobs["own"].spec == job_pb2.JobSpec(name="own")
    assert jobs["import"].spec.WhichOneof("schedule") is None
    assert not jobs["import"].spec.by_name
    assert jobs["import"].spec.lease.seconds == 6


@pytest.mark.parametrize(
    ("handlers", "said"),
    [
        ({"a b": nothing}, "job name 'a b': must be"),
        ({3: nothing}, "job name 3: must be"),
        ({"a": Job(nothing, Every("1s"), name="b")}, "given under the name 'a': use one name"),
        ({"a": 3}, "job 'a': 3 must be"),
        ({}, "0 handlers given"),
    ],
)
def test_what_is_wrong_with_a_mapping_is_said(handlers: Any, said: str) -> None:
    with pytest.raises(JobError) as raised:
        collect(handlers)
    assert said in str(raised.value)


def test_no_handlers_at_all_are_refused() -> None:
    with pytest.raises(JobError, match="0 handlers given"):
        collect([])
