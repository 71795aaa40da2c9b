"""Where in the stream what is kept: the subjects of one namespace.

Names stand in them as single tokens (`names.token`), so no two names ever meet. Imports the names
and the standard library.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from anarchon_backends.nats.names import name, token


@dataclass(frozen=True, slots=True)
class Subjects:
    """The subjects of one namespace, below `prefix`, in the stream `stream`."""

    prefix: str
    namespace: str

    @property
    def stream(self) -> str:
        """The stream, which all namespaces share."""
        return f"{self.prefix}-lease"

    @property
    def all(self) -> str:
        """Everything that the stream holds."""
        return f"{self.prefix}.lease.>"

    @property
    def news(self) -> str:
        """Where it is said that there are news (`machine.Saved`). Nothing keeps it."""
        return f"{self.prefix}.lease-news.{token(self.namespace)}"

    def job(self, job: str) -> str:
        """The job's truth."""
        return f"{self._of('job')}.{token(job)}"

    def run(self, job: str, slot: int) -> str:
        """A run that has ended, with its newest attempt."""
        return self.attempt(job, slot, 0)

    def attempt(self, job: str, slot: int, number: int) -> str:
        """An attempt before the newest of a run, ended or not."""
        return f"{self._of('run')}.{token(job)}.{slot}.{number}"

    def payload(self, job: str, slot: int, name: str) -> str:
        """What came with the call that triggered a run. It never changes: `name` is drawn for it."""
        return f"{self._of('run')}.{token(job)}.{slot}.payload.{name}"

    def request(self, job: str, slot: int, request_id: str) -> str:
        """That this request triggered a run that has ended. Requests may hold anything: a digest."""
        return f"{self._of('run')}.{token(job)}.{slot}.request.{_digest(request_id)}"

    def of_run(self, job: str, slot: int) -> str:
        """All that stands of one run beside its job."""
        return f"{self._of('run')}.{token(job)}.{slot}.>"

    def definition(self, job: str, definition_id: str) -> str:
        """The spec of a definition. It never changes, as its id is its digest."""
        return f"{self._of('definition')}.{token(job)}.{definition_id}"

    def instance(self, label: str, incarnation: str) -> str:
        """An instance, as last heard of."""
        return f"{self._of('instance')}.{token(label)}.{token(incarnation)}"

    def holds(self, incarnation: str, generation: int, part: int) -> str:
        """A part of what an instance holds. A part never changes: what is new is a generation."""
        return f"{self._of('holds')}.{token(incarnation)}.{generation}.{part}"

    # Patterns

    def jobs(self) -> str:
        """All jobs."""
        return f"{self._of('job')}.*"

    def ended_runs(self, job: str = "") -> str:
        """All runs in the history, of one job or of all."""
        return f"{self._of('run')}.{token(job) if job else '*'}.*.0"

    def payloads(self, job: str) -> str:
        """All payloads of a job's runs."""
        return f"{self._of('run')}.{token(job)}.*.payload.*"

    def requests(self, job: str, request_id: str) -> str:
        """The runs in the history that this request triggered."""
        return f"{self._of('run')}.{token(job)}.*.request.{_digest(request_id)}"

    def instances(self, label: str = "") -> str:
        """All instances, of one label or of all."""
        return f"{self._of('instance')}.{token(label)}.*" if label else f"{self._of('instance')}.>"

    def generation(self, incarnation: str, generation: int) -> str:
        """All parts of one generation of what an instance holds."""
        return f"{self._of('holds')}.{token(incarnation)}.{generation}.*"

    def _of(self, kind: str) -> str:
        return f"{self.prefix}.lease.{token(self.namespace)}.{kind}"


def job_of(subject: str) -> str:
    """The job of one of `jobs`."""
    return name(subject.rpartition(".")[2])


def run_at(subject: str) -> tuple[str, int]:
    """The job and the slot of one of `ended_runs`."""
    _, job, slot, _ = subject.rsplit(".", 3)
    return name(job), int(slot)


def payload_at(subject: str) -> tuple[int, str]:
    """The slot and the name of one of `payloads`."""
    _, slot, _, drawn = subject.rsplit(".", 3)
    return int(slot), drawn


def requested_at(subject: str) -> int:
    """The slot of one of `requests`."""
    return int(subject.rsplit(".", 3)[1])


def _digest(request_id: str) -> str:
    return hashlib.sha256(request_id.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def instance_of(subject: str) -> tuple[str, str]:
    """The label and the incarnation of one of `instances`."""
    _, label, incarnation = subject.rsplit(".", 2)
    return name(label), name(incarnation)
