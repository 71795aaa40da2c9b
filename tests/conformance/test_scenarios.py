"""Every language's client in every scenario."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from tests.conformance.live import LivePlayer
from tests.conformance.player import PuppetPlayer
from tests.conformance.registry import built, language, languages
from tests.conformance.scenario import Scenario, scenario, scenarios
from tests.conformance.stage import Stage

CASES = [
    pytest.param(each.key, played.name, id=f"{each.key}-{played.name}")
    for each in languages()
    for played in scenarios()
    if not set(played.needs) & each.lacks.keys()
]
pytestmark = pytest.mark.asyncio(loop_scope="module")


async def play(key: str, played: Scenario, folder: Path) -> None:
    player = LivePlayer if played.is_live else PuppetPlayer
    await player(played, built(key), folder).play()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stage]:
    """All the scenarios that were selected, for the languages that can be had."""
    folder = tmp_path_factory.mktemp("conformance")
    selected = [
        (str(item.callspec.params["key"]), str(item.callspec.params["name"]))
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.originalname == test_the_client_does_as_the_scenario_says.__name__
    ]
    had = [(key, name) for key, name in selected if not language(key).missing_tools()]
    for key in dict.fromkeys(key for key, _ in had):
        with suppress(RuntimeError):  # each of its tests says it
            await asyncio.to_thread(built, key)
    stage = Stage(
        {
            f"{key}-{name}": partial(play, key, scenario(name), folder / f"{key}-{name}")
            for key, name in had
        }
    )
    yield stage
    await stage.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("key", [each.key for each in languages()])
async def test_the_testee_is_built(key: str) -> None:
    check_tools(key)
    await asyncio.to_thread(built, key)


@pytest.mark.timeout(60, func_only=True)  # the fixture builds what is not built yet
@pytest.mark.parametrize(("key", "name"), CASES)
async def test_the_client_does_as_the_scenario_says(key: str, name: str, stage: Stage) -> None:
    check_tools(key)
    await stage.played(f"{key}-{name}")


def check_tools(key: str) -> None:
    """Skip where the language's toolchain is not on this machine."""
    if missing := language(key).missing_tools():
        pytest.skip(f"no toolchain: {key}: {', '.join(missing)} not on PATH")
