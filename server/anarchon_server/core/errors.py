"""Domain errors, grouped by what the caller can do about them.

Imports nothing of Anarchon.

    AnarchonError
    ├── InvalidError            correct the named field and ask again
    │   └── InvalidScheduleError   ... an expression, period or zone
    ├── InvalidJobsError        the same, for every bad job of a registration at once
    ├── UnsupportedError        use another backend, or leave the feature unset
    ├── NotFoundError           there is no such job, run, instance or session
    ├── RefusedError            the state of things forbids it now (reason says which)
    └── StoreError              the store did not answer
        ├── StoreUnavailable    surely nothing was done; ask again later
        ├── OutcomeUnknown      it may have been done; ask again with the same token (S11)
        └── StoreRefused        the store can never serve as it is; an operator must act
"""

from __future__ import annotations

from collections.abc import Sequence


class AnarchonError(Exception):
    """The base of every error that Anarchon raises on purpose."""


class InvalidError(AnarchonError):
    """A value is wrong. `field` names it; `expected` says what would be right."""

    def __init__(self, field: str, value: object, expected: str) -> None:
        self.field = field
        self.value = value
        self.expected = expected
        super().__init__(f"{field} is {_shown(value)}: {expected}")


class InvalidScheduleError(InvalidError):
    """A schedule or its time zone cannot be read."""


class InvalidJobsError(AnarchonError):
    """Some jobs of a registration are wrong: `problems` has one entry a bad job.

    Each entry is (the job's index in the request, its name, the error): an `InvalidError`,
    or an `UnsupportedError` for what the backend cannot do or this version does not have yet.
    """

    def __init__(
        self, problems: Sequence[tuple[int, str, InvalidError | UnsupportedError]]
    ) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(f"job {name!r}: {error}" for _, name, error in self.problems))


class UnsupportedError(AnarchonError):
    """`backend` cannot do `feature`; `backends` can (empty: it is not in this version)."""

    def __init__(self, feature: str, backend: str, backends: Sequence[str], hint: str = "") -> None:
        self.feature = feature
        self.backend = backend
        self.backends = tuple(backends)
        if backends:
            can = ", ".join(backends)
            message = f"{feature} is not supported by {backend}; backends that can: {can}"
        else:
            message = f"{feature} is not in this version"
        super().__init__(message + (f"; {hint}" if hint else ""))


class NotFoundError(AnarchonError):
    """There is no such thing. `kind` is "job", "run", "instance" or "session"."""

    def __init__(self, kind: str, name: str, hint: str = "") -> None:
        self.kind = kind
        self.name = name
        super().__init__(f"no {kind} {name!r}" + (f"; {hint}" if hint else ""))


class RefusedError(AnarchonError):
    """The state of things forbids it now. `reason` is an ErrorReason of the protocol."""

    def __init__(self, reason: str, message: str) -> None:
        self.reason = reason
        super().__init__(message)


class StoreError(AnarchonError):
    """The store did not do, or did not say that it did, what it was asked."""


class StoreUnavailable(StoreError):  # noqa: N818 - the protocol's word for it
    """Surely nothing was done: not connected, refused, busy. Ask again later."""


class OutcomeUnknown(StoreError):  # noqa: N818 - a fact about the call, not a fault of ours
    """It was sent and may have been done. Ask again with the same token (S11)."""


class StoreRefused(StoreError):  # noqa: N818 - the store, or what it stands on, is not usable
    """The store cannot serve as it is; the message says what an operator must change."""


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"
