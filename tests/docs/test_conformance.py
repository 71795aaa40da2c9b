"""The table of client/README.md is that of the scenarios, and each scenario has its place in the page."""

from __future__ import annotations

import pytest

from tests.conformance.registry import languages
from tests.conformance.scenario import Scenario, scenarios
from tests.docs.conformance import PAGE, headings, table, written


def test_the_page_has_the_table_of_the_scenarios_as_they_are() -> None:
    text = PAGE.read_text("utf-8")
    assert written(text) == text, "write the table of client/README.md anew: make docs"


def test_every_scenario_is_a_row_and_every_language_a_column() -> None:
    head, _, *rows = table().splitlines()
    assert [cell.strip() for cell in head.split("|")[2:-1]] == [each.name for each in languages()]
    for scenario in scenarios():
        (row,) = [
            row
            for row in rows
            if f"/{scenario.name.removeprefix('live-')}.toml)" in row
            and ("/live/" in row) is scenario.is_live
        ]
        cells = [cell.strip() for cell in row.split("|")[2:-1]]
        assert [cell == "✓" for cell in cells] == [
            not set(scenario.needs) & each.lacks.keys() for each in languages()
        ]


@pytest.mark.parametrize("scenario", scenarios(), ids=lambda each: each.name)
def test_a_scenario_names_the_part_of_the_specification_that_it_holds_to(
    scenario: Scenario,
) -> None:
    assert scenario.spec in headings()
    assert scenario.shows.endswith(".")
