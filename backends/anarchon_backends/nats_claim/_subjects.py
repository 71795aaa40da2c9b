"""Which subject holds what of one namespace, and the two streams that they belong to.

Imports the shared names and streams, and the standard library.

    PREFIX.claim.NAMESPACE.JOB.SLOT                       who won the slot
    PREFIX.run.NAMESPACE.JOB.SLOT                         what became of it
    PREFIX.job.NAMESPACE.JOB                              the job's definitions
    PREFIX.node.NAMESPACE.INSTANCE.INCARNATION.seen       an instance, as last heard of
    PREFIX.node.NAMESPACE.INSTANCE.INCARNATION.holds.N    a part of what it has registered
"""

from __future__ import annotations

from dataclasses import dataclass

from anarchon_backends.nats.names import name, token
from anarchon_backends.nats.streams import StreamPlan

SCHEMA = "1"
_NS_PER_MS = 1_000_000


@dataclass(frozen=True, slots=True)
class Subjects:
    """The subjects of a namespace under a prefix."""

    prefix: str
    namespace: str

    @property
    def claims(self) -> str:
        """The stream of claims."""
        return f"{self.prefix}-claims"

    @property
    def history(self) -> str:
        """The stream of everything else."""
        return f"{self.prefix}-history"

    def plans(self, kept_ms: int) -> tuple[StreamPlan, StreamPlan]:
        """Both streams. A claim stands as it was made for `kept_ms`, and nobody can remove it."""
        claims = StreamPlan(
            self.claims,
            (f"{self.prefix}.claim.>",),
            SCHEMA,
            {
                "discard": "new",
                "discard_new_per_subject": True,
                "deny_delete": True,
                "deny_purge": True,
                "max_age": kept_ms * _NS_PER_MS,
            },
            at_least=("max_age",),
        )
        kinds = ("run", "job", "node")
        history = StreamPlan(
            self.history, tuple(f"{self.prefix}.{kind}.>" for kind in kinds), SCHEMA
        )
        return claims, history

    def claim(self, job: str, slot: int) -> str:
        """Of the claim of a slot."""
        return f"{self._of('claim')}.{token(job)}.{slot}"

    def run(self, job: str, slot: int | str = "*") -> str:
        """Of a run, or of all of a job; `job` "*" is written as it is: all jobs."""
        return f"{self._of('run')}.{job if job == '*' else token(job)}.{slot}"

    def run_of(self, subject: str) -> tuple[int, str]:
        """The slot and the job of a run's subject."""
        _, job, slot = subject.rsplit(".", 2)
        return int(slot), name(job)

    def job(self, job: str = "*") -> str:
        """Of a job, or of all."""
        return f"{self._of('job')}.{job if job == '*' else token(job)}"

    def job_of(self, subject: str) -> str:
        """The job of a job's subject."""
        return name(subject.rpartition(".")[2])

    def nodes(self, instance_id: str = "") -> str:
        """All that is kept of instances, or of those with one label."""
        return (
            f"{self._of('node')}.{token(instance_id)}.>" if instance_id else f"{self._of('node')}.>"
        )

    def seen(self, instance_id: str, incarnation: str) -> str:
        """Of an instance."""
        return f"{self._of('node')}.{token(instance_id)}.{token(incarnation)}.seen"

    def holds(self, instance_id: str, incarnation: str, part: int) -> str:
        """Of a part of what an instance has registered."""
        return f"{self._of('node')}.{token(instance_id)}.{token(incarnation)}.holds.{part}"

    def node_of(self, subject: str) -> tuple[str, str, int | None]:
        """The label, the incarnation and the part of a subject (None: the instance itself)."""
        instance_id, incarnation, *rest = subject.removeprefix(f"{self._of('node')}.").split(".")
        return name(instance_id), name(incarnation), int(rest[1]) if len(rest) > 1 else None

    def _of(self, kind: str) -> str:
        return f"{self.prefix}.{kind}.{token(self.namespace)}"
