"""Every language's client in every scenario. Most of a scenario is waiting, so several are played at
a time; each is a test of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.conformance.live import LivePlayer
from tests.conformance.player import PuppetPlayer
from tests.conformance.registry import Language, built, language, languages
from tests.conformance.scenario import Scenario, scenarios

AT_A_TIME = 4
CASES = [
    pytest.param(each.key, scenario, id=f"{each.key}-{scenario.name}")
    for each in languages()
    for scenario in scenarios()
    if not set(scenario.needs) & each.lacks.keys()
]
pytestmark = pytest.mark.asyncio(loop_scope="module")


class Stage:
    """Plays the scenarios that were selected, in the order of their tests."""

    def __init__(self, cases: list[tuple[str, Scenario]], folder: Path) -> None:
        self._folder = folder
        self._room = asyncio.Semaphore(AT_A_TIME)
        keys = dict.fromkeys(key for key, _ in cases)
        self._builds = {key: asyncio.create_task(self._build(key)) for key in keys}
        self._plays = {
            (key, scenario.name): asyncio.create_task(self._play(key, scenario))
            for key, scenario in cases
        }

    async def _build(self, key: str) -> Language:
        return await asyncio.to_thread(built, key)

    async def _play(self, key: str, scenario: Scenario) -> None:
        made = await self.built(key)
        folder = self._folder / f"{key}-{scenario.name}"
        folder.mkdir()
        async with self._room:
            player = LivePlayer if scenario.is_live else PuppetPlayer
            await player(scenario, made, folder).play()

    async def built(self, key: str) -> Language:
        """Wait for the testee of a language."""
        return await asyncio.shield(self._builds[key])

    async def played(self, key: str, scenario: Scenario) -> None:
        """Wait for one scenario."""
        await self._plays[key, scenario.name]

    async def close(self) -> None:
        """Break off what nobody waits for any more."""
        tasks = [*self._builds.values(), *self._plays.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stage]:
    cases = [
        (item.callspec.params["key"], item.callspec.params["scenario"])
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.originalname == test_the_client_does_as_the_scenario_says.__name__
    ]
    stage = Stage(
        [case for case in cases if not language(case[0]).missing_tools()],
        tmp_path_factory.mktemp("conformance"),
    )
    yield stage
    await stage.close()


def check_tools(key: str) -> None:
    """Skip where the language's toolchain is not on this machine."""
    if missing := language(key).missing_tools():
        pytest.skip(f"no toolchain: {key}: {', '.join(missing)} not on PATH")


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("key", "scenario"), CASES)
async def test_the_client_does_as_the_scenario_says(
    key: str, scenario: Scenario, stage: Stage
) -> None:
    check_tools(key)
    await stage.played(key, scenario)
