"""From a seed to a simulation that has happened."""

from __future__ import annotations

from tests.simulation.faults import FAULTS, ONLY_A_MACHINE, ONLY_A_NETWORK, plan_faults
from tests.simulation.plan import Plan, draw_plan
from tests.simulation.world import Mistakes, World


def plan_of(seed: int) -> Plan:
    """What a seed stands for."""
    return draw_plan(seed, tuple(FAULTS), ONLY_A_MACHINE, ONLY_A_NETWORK)


def simulate(seed: int, mistakes: Mistakes | None = None) -> World:
    """The world of a seed, after its end."""
    return play(plan_of(seed), mistakes)


def play(plan: Plan, mistakes: Mistakes | None = None) -> World:
    """The world of a plan, after its end."""
    world = World(plan, mistakes or Mistakes())
    plan_faults(world)
    world.run()
    return world
