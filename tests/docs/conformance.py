"""The table of client/README.md: which language's client is held to which scenario.

Run as a module it writes it anew. Rows are the scenarios, columns the languages of the registry: a
cell says that the tests play it, and so that it is green, or why the language cannot have it.
"""

from __future__ import annotations

import re
import sys

from tests.conformance.registry import ROOT, Language, languages
from tests.conformance.scenario import FOLDER, Scenario, scenarios

PAGE = ROOT / "client" / "README.md"
BEGINS, ENDS = "<!-- conformance begins -->\n", "<!-- conformance ends -->"
HEADINGS = {False: "with a puppet for a sidecar", True: "with a real sidecar on SQLite"}


def table() -> str:
    """The table, and under it why a cell is empty."""
    notes: list[str] = []
    lines = ["| | " + " | ".join(each.name for each in languages()) + " |"]
    lines.append("|---" * (len(languages()) + 1) + "|")
    for is_live, heading in HEADINGS.items():
        lines.append(f"| **{heading}** |" + " |" * len(languages()))
        for scenario in scenarios():
            if scenario.is_live is is_live:
                cells = [_cell(each, scenario, notes) for each in languages()]
                lines.append(f"| {_headed(scenario)} | {' | '.join(cells)} |")
    said = [f"{number}. {note}" for number, note in enumerate(notes, 1)]
    return "\n".join([*lines, *([""] * bool(said)), *said]) + "\n"


def _cell(language: Language, scenario: Scenario, notes: list[str]) -> str:
    lacking = [need for need in scenario.needs if need in language.lacks]
    if not lacking:
        return "✓"
    note = f"{language.name}: {language.lacks[lacking[0]]}."
    if note not in notes:
        notes.append(note)
    return f"no ({notes.index(note) + 1})"


def _headed(scenario: Scenario) -> str:
    file = FOLDER.relative_to(ROOT) / (f"{scenario.name}.toml")
    if scenario.is_live:
        file = FOLDER.relative_to(ROOT) / "live" / f"{scenario.name.removeprefix('live-')}.toml"
    scaled = f" ({scenario.scaled})" if scenario.scaled else ""
    return f"[{scenario.title}](../{file.as_posix()}){scaled}"


def headings() -> set[str]:
    """Those of the page, that a scenario may name."""
    return set(re.findall(r"^#+ (.+)$", PAGE.read_text("utf-8"), re.MULTILINE))


def written(text: str) -> str:
    """The page with its table written anew, between the comments around it."""
    before, begins, rest = text.partition(BEGINS)
    _, ends, after = rest.partition(ENDS)
    if not ends:
        raise ValueError(f"{PAGE.name} has no place for the table of the scenarios")
    return f"{before}{begins}\n{table()}\n{ends}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text("utf-8")), "utf-8")
    sys.exit(0)
