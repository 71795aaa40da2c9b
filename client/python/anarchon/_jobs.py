"""Jobs: a function in, a job spec out, checked as early as can be. Imports the standard library and
the wire's messages.

Of a cron expression the number of fields and plain numbers are checked here. What needs the whole
grammar or a calendar (also zones, and the shortest gap of a cron schedule) is left to the sidecar,
which checks every spec at registration.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TypedDict, TypeVar, Unpack

from anarchon._duration import Duration, to_text, to_timedelta, to_wire
from anarchon._errors import JobError
from anarchon.v1 import job_pb2

Handler = Callable[..., object]
Handlers = Iterable["Handler | Job"] | Mapping[str, "Handler | Job"]
_H = TypeVar("_H", bound=Handler)

JOBS_MAX = 10_000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}", re.ASCII)
_PERIOD_MIN, _PERIOD_MAX = timedelta(milliseconds=100), timedelta(days=366)
_LEASE_MIN, _LEASE_MAX = timedelta(seconds=3), timedelta(hours=1)
_HEARTBEATS_A_LEASE = 3
_EXPRESSION_MAX = 1_000
# Name, least, most, and how the sidecar writes the range.
_CRON_FIELDS = (
    ("second", 0, 59, "0 to 59"),
    ("minute", 0, 59, "0 to 59"),
    ("hour", 0, 23, "0 to 23"),
    ("day of month", 1, 31, "1 to 31"),
    ("month", 1, 12, "1 to 12 or JAN to DEC"),
    ("day of week", 0, 7, "0 to 7 or SUN to SAT"),
)
_CRON_NUMBERS = re.compile(r"([0-9]{1,2})(?:-([0-9]{1,2}))?(?:/[0-9]+)?")
_LABELS_MAX, _LABEL_MAX_BYTES = 16, 128
# Where a decorated function keeps its job; the function itself stays as it was.
_ATTRIBUTE = "__anarchon_job__"

_OVERLAP = {
    "skip": job_pb2.OVERLAP_POLICY_SKIP,
    "allow": job_pb2.OVERLAP_POLICY_ALLOW,
    "queue": job_pb2.OVERLAP_POLICY_QUEUE,
    "cancel": job_pb2.OVERLAP_POLICY_CANCEL,
}
_CATCH_UP = {
    "none": job_pb2.CATCH_UP_POLICY_NONE,
    "latest": job_pb2.CATCH_UP_POLICY_LATEST,
    "all": job_pb2.CATCH_UP_POLICY_ALL,
}


class Policies(TypedDict, total=False):
    """What one may say of a job besides its schedule. What is left out, the sidecar decides.

    Durations are `timedelta` or texts such as "1h30m", in whole milliseconds. What the sidecar's
    store cannot do, the sidecar refuses.
    """

    jitter: Duration
    """The longest random wait before an instance claims a slot; less than the gap between slots.
    Default: the smaller of 2 s and a quarter of the gap. "0s": none."""
    timeout: Duration
    """How long one attempt may take before it is cancelled. Default: no limit."""
    heartbeat: Duration
    """How often a runner says that it is alive, at most a third of the lease. Default: a sixth."""
    lease: Duration
    """How long a runner is believed after its last heartbeat, 3 s to 1 h. Default: 30 s."""
    overlap: Literal["skip", "allow", "queue", "cancel"]
    """What a slot does that finds another run unfinished. Default: "skip" where the store keeps
    leases, else "allow". "queue": it starts when the other has ended; of several that wait the
    newest stays. "cancel": as "queue", and the other run is asked to stop."""
    catch_up: Literal["none", "latest", "all"]
    """Which slots are run that came due while nobody could. Default: "latest", the newest of them,
    where the store keeps leases, else "none". "all": every one, oldest first."""
    catch_up_window: Duration
    """No slot older than this is caught up, nor a run taken over. Default: 24 h."""
    catch_up_limit: int
    """No more slots than this are caught up. Default: 100."""
    start_deadline: Duration
    """A slot that nobody claimed for this long is missed. Default: the gap to the next slot, at
    most 60 s, at least jitter + 5 s."""
    max_attempts: int
    """Attempts a run may have because its runners died, froze or were cut off, 1 to 1,000.
    Default: 3."""
    retries: int
    """Attempts that follow failed ones, 0 to 100. Default: 0, a failure is final."""
    retry_delay: Duration
    """The pause before the first retry. Each is drawn from 50 % to 100 % of it. Default: 1 s."""
    retry_factor: float
    """Each pause is this many times the one before, at least 1. Default: 2."""
    retry_max_delay: Duration
    """No pause is longer than this. Default: 1 h."""
    concurrency: int
    """Runs of the job that one instance may execute at once, 1 to 10,000. Default: no limit of its
    own."""
    labels: Mapping[str, str]
    """Annotations for people and dashboards: at most 16, key and value at most 128 bytes each."""
    cancel_grace: Duration
    """How long a handler that was asked to stop keeps its lease. Default: 5 s."""
    stop_grace: Duration
    """How long a running handler may go on when its instance stops. Default, and at most: the
    instance's own grace, 20 s."""


@dataclass(frozen=True, slots=True)
class Every:
    """A grid counted from the Unix epoch in UTC: due at `offset` + n * `period`.

    `period` is 100 ms to 366 days, `offset` (default: none) less than the period; both are whole
    milliseconds. Raises `JobError`.
    """

    period: Duration
    offset: Duration = timedelta(0)

    def __post_init__(self) -> None:
        period = _duration("period", self.period)
        if not _PERIOD_MIN <= period <= _PERIOD_MAX:
            raise _wrong("period", to_text(period), "must be 100ms to 366d")
        offset = _duration("offset", self.offset)
        if offset >= period:
            raise _wrong(
                "offset", to_text(offset), f"must be less than the period {to_text(period)}"
            )
        object.__setattr__(self, "period", period)
        object.__setattr__(self, "offset", offset)


@dataclass(frozen=True, slots=True)
class Cron:
    """A calendar: due whenever the wall clock of the zone `tz` matches `expression`.

    `expression` has five fields, or six with seconds first, or is an alias such as "@daily"; `tz`
    is an IANA name such as "Europe/Athens", default "UTC". Raises `JobError` for a wrong number of
    fields and for numbers out of range; the sidecar checks the rest at registration.
    """

    expression: str
    tz: str = "UTC"

    def __post_init__(self) -> None:
        _check_expression(self.expression)
        _check_zone(self.tz)


@dataclass(frozen=True, slots=True)
class OnTrigger:
    """No schedule: the job is never due by itself, and runs when somebody triggers it.

    The sidecar refuses it where the store has no control, and with it the policies that are for slots:
    `jitter`, `start_deadline`, `catch_up` and `catch_up_limit`.
    """


class Job:
    """A function with its schedule and policies: for what the decorators cannot say.

    Without a schedule the job is offered by name, and the sidecar's configuration must have it.
    `name` (default: the function's `__name__`) identifies the job in the store, and must be the
    same on every instance and in every deploy: 1 to 128 characters of letters, digits and
    `. _ - : /`, starting with a letter or digit. `policies` are those of `Policies`. Raises
    `JobError`.
    """

    __slots__ = ("handler", "is_async", "name", "spec", "takes_context")

    def __init__(
        self,
        handler: Handler,
        schedule: Every | Cron | OnTrigger | None = None,
        *,
        name: str | None = None,
        **policies: Unpack[Policies],
    ) -> None:
        self.name = _name_of(handler) if name is None else name
        check_name(self.name)
        self.handler = handler
        try:
            self.spec = _make_spec(self.name, schedule, policies)
            self.takes_context, self.is_async = _shape(handler)
        except JobError as error:
            raise JobError(
                f"job {self.name!r}: {error}", field=error.field, expected=error.expected
            ) from None

    def __repr__(self) -> str:
        return f"Job({self.name!r})"


def every(
    period: Duration,
    *,
    offset: Duration = timedelta(0),
    name: str | None = None,
    **policies: Unpack[Policies],
) -> Callable[[_H], _H]:
    """Decorate a handler that is due every `period`; the function is given back as it was.

    See `Every` for `period` and `offset`, `Job` for `name`, `Policies` for the rest. The handler is
    `fn(ctx)` or `fn()`, async or not. Raises `JobError`.
    """
    return _decorator(Every(period, offset), name, policies)


def cron(
    expression: str,
    *,
    tz: str = "UTC",
    name: str | None = None,
    **policies: Unpack[Policies],
) -> Callable[[_H], _H]:
    """Decorate a handler that is due by a calendar; the function is given back as it was.

    See `Cron` for `expression` and `tz`, `Job` for `name`, `Policies` for the rest. The handler is
    `fn(ctx)` or `fn()`, async or not. Raises `JobError`.
    """
    return _decorator(Cron(expression, tz), name, policies)


def on_trigger(*, name: str | None = None, **policies: Unpack[Policies]) -> Callable[[_H], _H]:
    """Decorate a handler that runs only when it is triggered; the function is given back as it was.

    See `OnTrigger`, `Job` for `name`, `Policies` for the rest. The handler is `fn(ctx)` or `fn()`,
    async or not. Raises `JobError`.
    """
    return _decorator(OnTrigger(), name, policies)


def collect(handlers: Handlers) -> dict[str, Job]:
    """Return the jobs of what `subscribe` was given, by name. Raises `JobError`."""
    if isinstance(handlers, str | Job) or not isinstance(handlers, Iterable):
        raise JobError(
            f"handlers must be a list of handlers, or a mapping of names to them, not {handlers!r:.80}"
        )
    if isinstance(handlers, Mapping):
        jobs = [_job_named(name, handler) for name, handler in handlers.items()]
    else:
        jobs = [_job_of(handler) for handler in handlers]
    if not 1 <= len(jobs) <= JOBS_MAX:
        raise JobError(f"{len(jobs)} handlers given: must be 1 to {JOBS_MAX:,}")
    by_name: dict[str, Job] = {}
    for job in jobs:
        if job.name in by_name:
            raise JobError(
                f"two handlers are named {job.name!r}: "
                f"{_described(by_name[job.name].handler)} and {_described(job.handler)}. "
                "Give one of them another name="
            )
        by_name[job.name] = job
    return by_name


def check_name(name: object) -> None:
    """Raise `JobError` unless `name` may be a job's name (S32)."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        expected = (
            "must be 1 to 128 characters of letters, digits and . _ - : /, starting with a letter "
            "or digit"
        )
        raise JobError(
            f"job name {name!r}: {expected}; set it with name=", field="name", expected=expected
        )


# ── Handlers ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a decorator leaves on its function; a `Job` is made of it on subscribing."""

    schedule: Every | Cron | OnTrigger
    name: str | None
    policies: Policies

    def job(self, handler: Handler) -> Job:
        return Job(handler, self.schedule, name=self.name, **self.policies)


def _decorator(
    schedule: Every | Cron | OnTrigger, name: str | None, policies: Policies
) -> Callable[[_H], _H]:
    plan = _Plan(schedule, name, policies)

    def attach(handler: _H) -> _H:
        if _plan_of(handler) is not None:
            raise JobError(
                f"{_described(handler)} has a schedule already: for a second one give "
                "Job(handler, schedule, name=...) to subscribe"
            )
        # A method shows its shape only when it is bound, on subscribing.
        if _is_method(handler):
            Job(_nothing, schedule, name=_name_of(handler) if name is None else name, **policies)
        else:
            plan.job(handler)
        try:
            setattr(handler, _ATTRIBUTE, plan)
        except (AttributeError, TypeError):
            raise JobError(
                f"{_described(handler)} cannot be decorated: give Job(handler, schedule) instead"
            ) from None
        return handler

    return attach


def _nothing() -> None:
    """Stand in for a method while its policies are checked."""


def _plan_of(handler: object) -> _Plan | None:
    plan = getattr(handler, _ATTRIBUTE, None)
    return plan if isinstance(plan, _Plan) else None


def _job_of(handler: Handler | Job) -> Job:
    if isinstance(handler, Job):
        return handler
    plan = _plan_of(handler)
    if plan is None:
        raise JobError(
            f"{_described(handler)} has no schedule: decorate it with @every or @cron, give "
            'Job(handler, schedule), or {"name": handler} where the sidecar\'s configuration has it'
        )
    return plan.job(handler)


def _job_named(name: object, handler: Handler | Job) -> Job:
    """Return a job of a mapping: offered by name, unless the handler says more."""
    check_name(name)
    assert isinstance(name, str), "checked"
    if isinstance(handler, Job):
        if handler.name != name:
            raise JobError(f"{handler!r} is given under the name {name!r}: use one name for both")
        return handler
    plan = _plan_of(handler)
    if plan is None:
        return Job(handler, name=name)
    return Job(handler, plan.schedule, name=name, **plan.policies)


def _shape(handler: object) -> tuple[bool, bool]:
    """Return whether `handler` takes a context, and whether it is a coroutine function."""
    wanted = f"{_described(handler)} must be fn(ctx) or fn()"
    if not callable(handler):
        raise JobError(wanted)
    # Behind a partial, and behind an object that is called.
    call: object = getattr(handler, "func", handler)
    if not inspect.isroutine(call):
        call = type(call).__call__ if callable(call) else call
    if inspect.isgeneratorfunction(call) or inspect.isasyncgenfunction(call):
        raise JobError(f"{wanted}, without yield")
    try:
        signature = inspect.signature(handler)
    except ValueError:
        raise JobError(f"{wanted}, with a signature that can be read: wrap it in one") from None
    is_async = inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(call)
    parameters = list(signature.parameters.values())
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in _VARIADIC]
    first = parameters[0] if parameters else None
    if (
        first is not None
        and first.kind in _POSITIONAL
        and (required == [first.name] or (not required and first.name == "ctx"))
    ):
        return True, is_async
    if required:
        raise JobError(f"{wanted}; it takes {signature}")
    return False, is_async


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _is_method(handler: object) -> bool:
    """Whether `handler` is a function in a class's body, which is not bound yet."""
    if not inspect.isfunction(handler):
        return False
    return next(iter(inspect.signature(handler).parameters), "") in ("self", "cls")


def _name_of(handler: object) -> str:
    name = getattr(handler, "__name__", None)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise JobError(f"{_described(handler)} has no name that a job may have: set it with name=")
    return name


def _described(handler: object) -> str:
    name = getattr(handler, "__qualname__", None)
    return f"{getattr(handler, '__module__', '?')}.{name}" if name else repr(handler)


# ── Specs ───────────────────────────────────────────────────────────────────────────────────────


def _make_spec(name: str, schedule: object, policies: Policies) -> job_pb2.JobSpec:
    unknown = sorted(set(policies) - set(Policies.__annotations__))
    if unknown:
        known = ", ".join(sorted(Policies.__annotations__))
        raise JobError(f"no such policy: {', '.join(unknown)}; there are {known}")
    spec = job_pb2.JobSpec(name=name)
    match schedule:
        case Every():
            spec.every.period.FromTimedelta(_duration("period", schedule.period))
            if offset := _duration("offset", schedule.offset):
                spec.every.offset.FromTimedelta(offset)
        case Cron():
            spec.cron.expression = schedule.expression.strip()
            spec.cron.time_zone = schedule.tz
        case OnTrigger():
            pass
        case None:
            spec.by_name = True
        case _:
            raise JobError(f"schedule {schedule!r}: must be Every(...), Cron(...) or OnTrigger()")
    _set_durations(spec, policies)
    _set_choices(spec, policies)
    _set_numbers(spec, policies)
    _set_retry(spec, policies)
    _set_labels(spec, policies.get("labels"))
    _check_relations(spec, schedule)
    return spec


def _set_durations(spec: job_pb2.JobSpec, policies: Policies) -> None:
    for key, low, high in _DURATIONS:
        value = policies.get(key)
        if value is None:
            continue
        duration = _duration(key, value)
        if not low <= duration <= high:
            raise _wrong(key, to_text(duration), f"must be {to_text(low)} to {to_text(high)}")
        holder, wire_key = _WIRE_FIELDS.get(key, ("", key))
        target = getattr(spec, holder) if holder else spec
        getattr(target, wire_key).CopyFrom(to_wire(duration))


_LONG = _PERIOD_MAX
_MOMENT = timedelta(milliseconds=1)
# Key, least, most. What else they must fit is checked here where it is known, else by the sidecar.
_DURATIONS = (
    ("jitter", timedelta(0), _LONG),
    ("timeout", _MOMENT, _LONG),
    ("heartbeat", _MOMENT, _LEASE_MAX / _HEARTBEATS_A_LEASE),
    ("lease", _LEASE_MIN, _LEASE_MAX),
    ("catch_up_window", _MOMENT, _LONG),
    ("start_deadline", timedelta(seconds=1), _LONG),
    ("cancel_grace", timedelta(0), _LEASE_MAX),
    ("stop_grace", timedelta(0), _LONG),
)
_WIRE_FIELDS = {
    "catch_up_window": ("catch_up", "window"),
    "start_deadline": ("catch_up", "start_deadline"),
}


def _set_choices(spec: job_pb2.JobSpec, policies: Policies) -> None:
    if (overlap := policies.get("overlap")) is not None:
        spec.overlap = _choice("overlap", overlap, _OVERLAP)
    if (catch_up := policies.get("catch_up")) is not None:
        spec.catch_up.policy = _choice("catch_up", catch_up, _CATCH_UP)


def _set_numbers(spec: job_pb2.JobSpec, policies: Policies) -> None:
    if (value := policies.get("catch_up_limit")) is not None:
        spec.catch_up.limit = _whole("catch_up_limit", value, 1, 10_000)
    if (value := policies.get("max_attempts")) is not None:
        spec.max_attempts = _whole("max_attempts", value, 1, 1_000)
    if (value := policies.get("concurrency")) is not None:
        spec.concurrency = _whole("concurrency", value, 1, 10_000)


def _set_retry(spec: job_pb2.JobSpec, policies: Policies) -> None:
    retries = _whole("retries", policies.get("retries", 0), 0, 100)
    spacing = [key for key in ("retry_delay", "retry_factor", "retry_max_delay") if key in policies]
    if not retries:
        if spacing:
            raise _wrong(spacing[0], "without retries", "set retries= to 1 or more")
        return
    spec.retry.retries = retries
    delay = _duration("retry_delay", policies.get("retry_delay", timedelta(seconds=1)))
    longest = _duration("retry_max_delay", policies.get("retry_max_delay", timedelta(hours=1)))
    if not _MOMENT <= delay <= longest:
        raise _wrong(
            "retry_delay",
            to_text(delay),
            f"must be more than zero and at most retry_max_delay, {to_text(longest)}",
        )
    factor: object = policies.get("retry_factor", 2.0)
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 <= factor <= 100:
        raise _wrong("retry_factor", repr(factor), "must be a number from 1 to 100")
    if "retry_delay" in policies:
        spec.retry.delay.FromTimedelta(delay)
    if "retry_max_delay" in policies:
        spec.retry.max_delay.FromTimedelta(longest)
    if "retry_factor" in policies:
        spec.retry.factor = factor


def _set_labels(spec: job_pb2.JobSpec, labels: object) -> None:
    if labels is None:
        return
    if not isinstance(labels, Mapping):
        raise JobError(f"labels {labels!r:.80}: must be a mapping of texts to texts")
    if len(labels) > _LABELS_MAX:
        raise JobError(f"{len(labels)} labels: must be at most {_LABELS_MAX}")
    for key, value in labels.items():
        if not _is_label(key) or not _is_label(value):
            raise JobError(
                f"label {key!r:.80}: key and value must be texts of at most "
                f"{_LABEL_MAX_BYTES} bytes each"
            )
        spec.labels[key] = value


def _is_label(text: object) -> bool:
    return isinstance(text, str) and len(text.encode(errors="replace")) <= _LABEL_MAX_BYTES


def _check_relations(spec: job_pb2.JobSpec, schedule: object) -> None:
    if isinstance(schedule, Every) and spec.HasField("jitter"):
        jitter, period = spec.jitter.ToTimedelta(), _duration("period", schedule.period)
        if jitter >= period:
            raise _wrong(
                "jitter", to_text(jitter), f"must be less than the period, {to_text(period)}"
            )
    if spec.HasField("lease") and spec.HasField("heartbeat"):
        lease, heartbeat = spec.lease.ToTimedelta(), spec.heartbeat.ToTimedelta()
        if heartbeat * _HEARTBEATS_A_LEASE > lease:
            raise _wrong(
                "heartbeat",
                to_text(heartbeat),
                f"must be at most a third of the lease, {to_text(lease)}",
            )
    if (
        spec.overlap == job_pb2.OVERLAP_POLICY_CANCEL
        and spec.catch_up.policy == job_pb2.CATCH_UP_POLICY_ALL
    ):
        raise _wrong(
            "catch_up",
            '"all" with overlap "cancel"',
            'each slot caught up would cancel the one before; use catch_up "latest", or overlap '
            '"queue"',
        )


def _check_zone(tz: object) -> None:
    if not isinstance(tz, str) or not re.fullmatch(r"[A-Za-z0-9_+/-]{1,64}", tz):
        raise _wrong("tz", f"{tz!r:.80}", 'must be an IANA name such as "Europe/Athens" or "UTC"')


def _check_expression(expression: object) -> None:
    if not isinstance(expression, str) or len(expression) > _EXPRESSION_MAX:
        raise _wrong_expression(
            expression, f"must be a text of at most {_EXPRESSION_MAX:,} characters"
        )
    if expression.strip().startswith("@every"):
        raise _wrong_expression(expression, 'use every("10s")')
    texts = expression.split()
    if len(texts) == 1 and texts[0].startswith("@"):
        return
    fields = _CRON_FIELDS[-len(texts) :]
    if not len(texts) == len(fields) >= len(_CRON_FIELDS) - 1:
        raise _wrong_expression(
            expression, f"must have five fields, or six with seconds first; it has {len(texts)}"
        )
    for (name, low, high, wanted), text in zip(fields, texts, strict=True):
        for number in _plain_numbers(text):
            if not low <= number <= high:
                outside = f"{number} is outside {wanted}"
                raise _wrong_expression(expression, f"{name} is {text!r:.80}: {outside}")


def _wrong_expression(expression: object, expected: str) -> JobError:
    what = f"cron expression {expression!r:.80}"
    return JobError(f"{what}: {expected}", field="expression", expected=expected)


def _plain_numbers(text: str) -> Iterator[int]:
    """Yield the values of a cron field that are mere numbers, also those that bound a range."""
    for item in text.split(","):
        if match := _CRON_NUMBERS.fullmatch(item):
            yield from (int(number) for number in match.groups() if number)


def _duration(field: str, value: object) -> timedelta:
    try:
        return to_timedelta(value)
    except ValueError as error:
        raise _wrong(field, f"{value!r:.80}", str(error)) from None


def _wrong(field: str, shown: str, expected: str) -> JobError:
    return JobError(f"{field} {shown}: {expected}", field=field, expected=expected)


def _whole(field: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        expected = f"must be a whole number from {low:,} to {high:,}"
        raise _wrong(field, f"{value!r:.80}", expected)
    return value


_C = TypeVar("_C")


def _choice(field: str, value: object, choices: Mapping[str, _C]) -> _C:
    if not isinstance(value, str) or value not in choices:
        raise _wrong(field, f"{value!r:.80}", f"must be one of {', '.join(choices)}")
    return choices[value]
