"""From a seed to a simulation that has happened."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tests.simulation.faults import FAULTS, ONLY_A_MACHINE, ONLY_A_NETWORK, plan_faults
from tests.simulation.plan import Plan, draw_plan
from tests.simulation.world import World


@dataclass(frozen=True, slots=True)
class Focus:
    """What a search looks at closely: only these faults, many of them, on plans changed like this.

    `plan` replaces fields of each plan drawn, `spec` of each job's spec, `work` of what its handlers
    do. `leases` false: on claim-only stores.
    """

    faults: tuple[str, ...] = tuple(FAULTS)
    plan: tuple[tuple[str, Any], ...] = ()
    spec: tuple[tuple[str, Any], ...] = ()
    work: tuple[tuple[str, Any], ...] = ()
    leases: bool = True


def plan_of(seed: int, focus: Focus | None = None) -> Plan:
    """What a seed stands for."""
    leases = None if focus is None else focus.leases
    plan = draw_plan(seed, tuple(FAULTS), ONLY_A_MACHINE, ONLY_A_NETWORK, leases)
    if focus is None:
        return plan
    changes = {
        "faults": focus.faults,
        "fault_count": 8,
        "real_clients": False,
        **dict(focus.plan),
    }
    jobs = tuple(
        replace(
            job,
            spec=replace(job.spec, **dict(focus.spec)),
            work=replace(job.work, **dict(focus.work)),
        )
        for job in plan.jobs
    )
    return replace(plan, jobs=jobs, **changes)


def simulate(seed: int, focus: Focus | None = None) -> World:
    """The world of a seed, after its end."""
    return play(plan_of(seed, focus))


def play(plan: Plan) -> World:
    """The world of a plan, after its end."""
    world = World(plan)
    plan_faults(world)
    world.run()
    return world
