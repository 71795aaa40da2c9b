"""The tables of docs/stores/README.md are those of the tests, and none of their cells is empty-handed."""

from __future__ import annotations

import pytest

from tests.contract.harness import BACKENDS, CLAIM_ONLY
from tests.docs import guarantees
from tests.docs.collected import Collected
from tests.docs.guarantees import CONTRACT, OF_STORES, PAGE, Guarantee

REMEDY = "write the tables of docs/stores/README.md anew: make docs"


def test_every_guarantee_has_a_test_on_every_backend_that_gives_it() -> None:
    assert guarantees.problems() == []


def test_the_page_has_the_tables_of_the_tests_as_they_are() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert guarantees.written(text) == text, REMEDY


def test_what_a_backend_without_leases_does_not_give_is_said() -> None:
    said = {name: table.splitlines() for name, table in guarantees.tables().items()}
    for name, backends in (("leases", BACKENDS), ("claims", CLAIM_ONLY)):
        (takeover,) = [line for line in said[name] if "is taken over" in line]
        cells = [cell.strip() == "no" for cell in takeover.split("|")[2:-1]]
        assert cells == [backends is CLAIM_ONLY] * len(backends)


@pytest.mark.parametrize("row", OF_STORES, ids=lambda row: row.title)
def test_every_row_of_the_stores_own_tests_has_some(row: Guarantee) -> None:
    assert any(row.is_held_by(test) for test in guarantees.own_tests())


def test_the_columns_are_the_backends_of_the_harness() -> None:
    for name, backends in (("leases", BACKENDS), ("claims", CLAIM_ONLY)):
        head = guarantees.tables()[name].splitlines()[0]
        assert [cell.strip("` ") for cell in head.split("|")[2:-1]] == [*backends]


@pytest.mark.parametrize(
    ("test", "columns"),
    [
        (("tests/contract/test_claim.py", {"redis"}), {"redis"}),
        (("tests/contract/test_claim.py", {"redis", "handed_over"}), {"redis"}),
        (("tests/contract/claim_only/test_claim.py", {"memory-claim"}), {"memory-claim"}),
        (("tests/contract/claim_only/test_claim.py", {"redis"}), set()),
        (("tests/contract/stores/test_redis.py", {"valkey"}), {"valkey"}),
        (("tests/contract/stores/test_redis.py", set()), {"redis"}),
        (("tests/unit/backends/test_sqlite.py", {"nfs"}), {"sqlite"}),
    ],
)
def test_a_test_belongs_to_the_backend_it_is_parametrized_with(
    test: tuple[str, set[str]], columns: set[str]
) -> None:
    file, parameters = test
    made = Collected(file, "test_x", frozenset({"S10"}), frozenset(parameters))
    assert guarantees.backends_of(made) == columns
    assert CONTRACT[0].is_held_by(made)
