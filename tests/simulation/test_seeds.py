"""Many seeds, each a cluster in which things go wrong: no promise is broken (I1 to I8, F1 to F16).

`ANARCHON_SIM_SEEDS` says how many (200), `ANARCHON_SIM_FIRST` which is the first (0). A seed replays
exactly: `python -m tests.simulation --seed N`.
"""

from __future__ import annotations

import os

import pytest

from tests.checker.events import to_lines
from tests.simulation.__main__ import explained
from tests.simulation.mutants import MUTANTS, Mutant
from tests.simulation.seeds import simulate

SEEDS = int(os.environ.get("ANARCHON_SIM_SEEDS", "200"))
FIRST = int(os.environ.get("ANARCHON_SIM_FIRST", "0"))
BATCH = 25
"""Seeds a test: few enough that a failure names a small range, and that the time limit means something."""


@pytest.mark.parametrize("first", range(FIRST, FIRST + SEEDS, BATCH))
def test_i1_to_i8_no_seed_breaks_a_promise(first: int) -> None:
    for seed in range(first, min(first + BATCH, FIRST + SEEDS)):
        world = simulate(seed)
        violations = world.violations()
        assert not violations, "\n".join(explained(world, v) for v in violations[:2])


def test_a_seed_replays_exactly() -> None:
    seed = FIRST + 3
    assert list(to_lines(simulate(seed).events)) == list(to_lines(simulate(seed).events))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_simulation_finds_what_is_broken_on_purpose(mutant: Mutant) -> None:
    seed = _first_that_tells(mutant)
    assert seed is not None, f"no seed below {mutant.seeds} breaks {sorted(mutant.rules)}"
    untouched = simulate(seed, mutant.focus).violations()
    assert not untouched, f"seed {seed} breaks {untouched[0]} without the mistake, too"


def _first_that_tells(mutant: Mutant) -> int | None:
    """The first seed whose history breaks one of the rules that the mistake is about."""
    for seed in range(mutant.seeds):
        with mutant.mistake():
            found = simulate(seed, mutant.focus).violations()
        if mutant.rules.intersection(violation.rule for violation in found):
            return seed
    return None
