"""Many seeds, each a cluster in which things go wrong: no promise is broken (I1 to I8, F1 to F16).

`ANARCHON_SIM_SEEDS` says how many (200), `ANARCHON_SIM_FIRST` which is the first (0). A seed replays
exactly: `python -m tests.simulation --seed N`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.checker.events import to_lines
from tests.simulation.mutants import MUTANTS, Mutant
from tests.simulation.seeds import simulate

SEEDS = int(os.environ.get("ANARCHON_SIM_SEEDS", "200"))
FIRST = int(os.environ.get("ANARCHON_SIM_FIRST", "0"))
PROCESSES = 2
ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(120 + SEEDS * 2)
def test_i1_to_i8_no_seed_breaks_a_promise() -> None:
    """In processes of their own: that uses every core, and no tracer of this one slows them down."""
    share = -(-SEEDS // PROCESSES)
    with ExitStack() as stack:
        processes = [
            stack.enter_context(_simulation(first, min(share, FIRST + SEEDS - first)))
            for first in _firsts(share)
        ]
        outputs = [process.communicate()[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(outputs)


def _firsts(share: int) -> range:
    return range(FIRST, FIRST + SEEDS, share)


@contextmanager
def _simulation(first: int, count: int) -> Iterator[subprocess.Popen[str]]:
    """A process with a share of the seeds; it ends with the test, however that ends."""
    command = [
        sys.executable,
        "-m",
        "tests.simulation",
        "--first",
        str(first),
        "--seeds",
        str(count),
    ]
    out, err = subprocess.PIPE, subprocess.STDOUT
    with subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=err, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_seed_replays_exactly() -> None:
    seed = FIRST + 3
    assert list(to_lines(simulate(seed).events)) == list(to_lines(simulate(seed).events))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_simulation_finds_what_is_broken_on_purpose(mutant: Mutant) -> None:
    seed = _first_that_tells(mutant)
    assert seed is not None, f"{mutant.seeds} seeds, and none breaks {sorted(mutant.rules)}"
    untouched = simulate(seed, mutant.focus).violations()
    assert not untouched, f"seed {seed} breaks {untouched[0]} without the mistake, too"


def _first_that_tells(mutant: Mutant) -> int | None:
    """The first seed whose history breaks one of the rules that the mistake is about."""
    for seed in range(mutant.first, mutant.first + mutant.seeds):
        with mutant.mistake():
            found = simulate(seed, mutant.focus).violations()
        if mutant.rules.intersection(violation.rule for violation in found):
            return seed
    return None
