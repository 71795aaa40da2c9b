"""`python -m tests.simulation --seed N` replays one seed; `--seeds N` runs many and counts."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from itertools import count, filterfalse, islice
from pathlib import Path

from tests.checker.check import Violation, about
from tests.checker.events import shown, to_lines
from tests.simulation.plan import has_leases
from tests.simulation.seeds import simulate
from tests.simulation.world import World

EXPLAINED = 3
"""How many violations are shown with their history."""


def main(argv: list[str] | None = None) -> int:
    """Runs what the command line asks for; 1 if any seed broke a promise."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay this seed and show what it breaks")
    parser.add_argument("--seeds", type=int, help="run so many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--claim-only", action="store_true", help="those without leases alone")
    parser.add_argument("--log", action="store_true", help="with --seed: show everything")
    parser.add_argument("--history", type=Path, help="with --seed: write the history, JSON lines")
    options = parser.parse_args(argv)
    if options.seed is not None:
        return _replay(options.seed, everything=options.log, history=options.history)
    seeds: Iterator[int] = count(options.first)
    if options.claim_only:
        seeds = filterfalse(has_leases, seeds)
    return _many(islice(seeds, options.seeds or 100))


def _replay(seed: int, *, everything: bool, history: Path | None) -> int:
    world = simulate(seed)
    violations = world.violations()
    _say(world.plan)
    if everything:
        for event in world.events:
            _say(shown(event))
    if history is not None:
        history.write_text("".join(f"{line}\n" for line in to_lines(world.events)))
    for violation in violations[:EXPLAINED]:
        _say(explained(world, violation))
    _say(f"seed {seed}: {len(violations)} violations")
    return 1 if violations else 0


def _many(seeds: Iterable[int]) -> int:
    start, done, bad = time.perf_counter(), 0, []
    for seed in seeds:
        done += 1
        try:
            world = simulate(seed)
        except Exception:  # noqa: BLE001 - whatever it is, the seed is not clean
            bad.append(seed)
            _say(f"seed {seed}: {traceback.format_exc()}")
            continue
        violations = world.violations()
        if violations:
            bad.append(seed)
            _say(explained(world, violations[0]) if len(bad) <= EXPLAINED else violations[0])
    rate = done / (time.perf_counter() - start)
    not_clean = f"; not clean: {bad}" if bad else ""
    _say(f"{done} seeds: {done - len(bad)} clean, {rate:.1f} seeds/s{not_clean}")
    return 1 if bad else 0


def _say(text: object) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def explained(world: World, violation: Violation) -> str:
    """A violation with the history that concerns it and how to see it again."""
    lines = [f"seed {world.plan.seed}: {violation}"]
    lines += [shown(event) for event in about(world.events, violation)]
    lines.append(f"again: python -m tests.simulation --seed {world.plan.seed}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
