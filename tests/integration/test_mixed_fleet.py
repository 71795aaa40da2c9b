"""Four applications, one a language, with four sidecars on one store; each is killed in its turn.

`make test TESTS=tests/integration/test_mixed_fleet.py PYTEST=-s` shows the report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.conformance.registry import Language, built
from tests.conformance.test_scenarios import check_tools
from tests.integration.account import FINAL
from tests.integration.fleet import JOBS, LONG, Fleet
from tests.integration.fleet_account import Takeover, Witnessed, judge, report
from tests.servers import postgres, redis

KEYS = ("python", "go", "node", "java")
WINS = 200
"""So many, while all live, that an even spread shows: of four equals none has a tenth or less."""
LEAST_SHARE = 0.1
WINS_AFTER = 5
"""So many more each has when all have been killed and started again."""


@pytest.fixture(scope="module")
def languages() -> list[Language]:
    """Those of the fleet, built; skips where one cannot be had."""
    for key in KEYS:
        check_tools(key)
    return [built(key) for key in KEYS]


@pytest.fixture(params=["postgres", "redis"])
def store(request: pytest.FixtureRequest) -> Iterator[str]:
    """A server of the test's own, and empty."""
    if request.param == "redis":
        with redis.private() as server:
            yield server.url
    else:
        database = postgres.start_server()
        yield database.url
        database.stop()


@pytest.fixture
async def fleet(languages: list[Language], store: str, tmp_path: Path) -> AsyncIterator[Fleet]:
    fleet = Fleet(tmp_path, store, languages)
    yield fleet
    await fleet.destroy()


@pytest.mark.timeout(400, func_only=True)  # a fixture builds what is not built yet
async def test_i1_i6_s24_a_mixed_fleet_loses_and_doubles_nothing_while_each_is_killed_in_turn(
    fleet: Fleet, languages: list[Language]
) -> None:
    await fleet.start()
    all_lived = await _wins_while_all_live(fleet)
    kept = {(r.job, r.slot): r for r in await fleet.runs() if r.state in FINAL}
    left = set(KEYS)
    while left:
        name = await fleet.kill_in_mid_run(left)
        await fleet.start_again(name)
        left.remove(name)
    await _all_win_again(fleet)
    until = max(start["slot"] for _, start in fleet.starts())
    await fleet.settled(until)
    assert await fleet.stop_applications() == [(key, 0, "") for key in KEYS]
    runs = await fleet.runs()
    assert await fleet.stop_sidecars() == [0] * len(KEYS)
    found = judge(JOBS, runs, fleet.lives(), until)
    print(f"\n{report(found, all_lived, {each.key: each.name for each in languages})}")  # noqa: T201
    assert not found.wrong, "\n".join([*found.wrong, fleet.told()])
    now = {(run.job, run.slot): run for run in runs}
    assert [now.get(which) for which in kept] == list(kept.values()), "I3: what is final stays"
    assert {takeover.before.who for takeover in _of_the_long_job(found)} == set(KEYS)
    assert all(each.before.who != each.after.who for each in _of_the_long_job(found))


async def _wins_while_all_live(fleet: Fleet) -> Counter[str]:
    """Once there are enough, and each has its share (S12: a draw for each instance and slot)."""
    before = fleet.firsts()

    def spread() -> Counter[str] | None:
        wins = fleet.firsts() - before
        least = wins.total() * LEAST_SHARE
        return wins if wins.total() >= WINS and min(wins[key] for key in KEYS) >= least else None

    found = await fleet.until(spread, f"{WINS} wins, {LEAST_SHARE:.0%} of them or more by each")
    assert found is not None
    return found


async def _all_win_again(fleet: Fleet) -> None:
    before = fleet.firsts()
    await fleet.until(
        lambda: min((fleet.firsts() - before)[key] for key in KEYS) >= WINS_AFTER,
        f"each has {WINS_AFTER} more wins",
    )


def _of_the_long_job(found: Witnessed) -> list[Takeover]:
    return [takeover for takeover in found.takeovers if takeover.before.job == LONG]
