"""The pages hold together: links lead somewhere, code that is pointed at is there, rules are tested."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs import rules
from tests.docs.pages import ROOT, anchors, links, pages
from tests.docs.rules import Rule

RULES = {rule.number: rule for rule in rules.rules()}
DECISIONS = ROOT / "docs" / "decisions"
REMEDY = "write the Tests lines of docs/semantics.md anew: make docs"


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", pages(), ids=named)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    broken = [link for link in links(page) if not leads_somewhere(page, link)]
    assert not broken


def leads_somewhere(page: Path, link: str) -> bool:
    if re.match(r"(https?|mailto):", link):
        return True  # no network here
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.exists() or not target.is_relative_to(ROOT):
        return False
    return not anchor or (target.suffix == ".md" and anchor in anchors(target))


@pytest.mark.parametrize("page", pages(), ids=named)
def test_code_that_a_page_points_at_is_there(page: Path) -> None:
    pointed_at = rules.references(page.read_text(encoding="utf-8"))
    assert [reference for reference in pointed_at if not rules.stands(reference)] == []


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.number)
def test_a_rule_that_is_there_is_cited_by_a_test(rule: Rule) -> None:
    assert rule.status.startswith(rules.STATUSES)
    assert rule.code
    if not rule.status.startswith("not yet"):
        assert rules.citing_files().get(rule.number), f"no test cites {rule.number}, {rule.title}"


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.number)
def test_the_tests_that_the_page_names_do_cite_the_rule(rule: Rule) -> None:
    citing = rules.citing_files().get(rule.number, frozenset())
    wrong = sorted(set(rule.tests) - citing)
    assert not wrong, REMEDY
    assert rule.tests or rule.status.startswith("not yet"), REMEDY


def test_every_rule_that_a_test_cites_stands_in_the_page() -> None:
    citing = rules.citing_files()
    assert {number: sorted(citing[number]) for number in citing if number not in RULES} == {}


@pytest.mark.parametrize(
    ("source", "cited"),
    [
        ("def test_s07_a_cron(): ...", {"S7"}),
        ("async def test_s19_s21a_and_i4_too(): ...", {"S19", "S21a", "I4"}),
        ("def test_i1_to_i3_whatever_happens(): ...", {"I1", "I2", "I3"}),
        ("def test_x():\n    '''S1, and I1 to I3.'''", {"S1", "I1", "I2", "I3"}),
        ("class TestS10:\n    def test_x(self): ...", set()),
        ("class TestClaims:\n    '''S10.'''", {"S10"}),
        ("def helper_s10():\n    '''S10'''", set()),
        ("def test_keys3_are_not_rules(): ...", set()),
    ],
)
def test_citations_are_read_from_names_and_docstrings(source: str, cited: set[str]) -> None:
    assert rules.cited_in(source) == cited


def test_decisions_are_numbered_once_and_listed() -> None:
    records = sorted(p.name for p in DECISIONS.glob("*.md") if p.name != "README.md")
    numbers = [name[:4] for name in records]
    assert all(re.fullmatch(r"\d{4}-[a-z0-9-]+\.md", name) for name in records)
    assert len(set(numbers)) == len(numbers)
    assert sorted(set(links(DECISIONS / "README.md"))) == records


@pytest.mark.parametrize("heading", ["## Context", "## Decision", "## Consequences"])
def test_a_decision_says_why_what_and_what_follows(heading: str) -> None:
    records = [p for p in DECISIONS.glob("*.md") if p.name != "README.md"]
    assert [p.name for p in records if heading not in p.read_text(encoding="utf-8")] == []
