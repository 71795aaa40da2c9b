"""The tables of docs/stores/README.md: what is guaranteed on which store, by the tests that hold it.

Run as a module it writes them anew. Columns are the backends of the contract suite; a cell is the
number of tests that hold its row on its backend, and leads to them. Imports the tests' harness.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tests.contract.harness import BACKENDS, CLAIM_ONLY
from tests.docs.collected import Collected, tests
from tests.docs.rules import ROOT, rules

PAGE = ROOT / "docs" / "stores" / "README.md"
SUITE = "tests/contract/"
CLAIM_ONLY_SUITE = "tests/contract/claim_only/"
STORES = ("tests/contract/stores/", "tests/unit/backends/")

OWN: dict[str, dict[str, str]] = {
    "tests/unit/backends/test_memory.py": {"": "memory"},
    "tests/unit/backends/test_sqlite.py": {"": "sqlite"},
    "tests/unit/backends/test_sqlite_migration.py": {"": "sqlite"},
    "tests/unit/backends/test_nats.py": {"": "nats"},
    "tests/unit/backends/test_nats_lease.py": {"": "nats-lease"},
    "tests/contract/stores/test_postgres.py": {"": "postgres"},
    "tests/contract/stores/test_postgres_migration.py": {"": "postgres"},
    "tests/contract/stores/test_redis.py": {"": "redis", "valkey": "valkey"},
    "tests/contract/stores/test_redis_cluster.py": {"": "redis-cluster"},
    "tests/contract/stores/test_redis_claim.py": {
        "": "redis-script",
        "redis-stream-id": "redis-stream-id",
        "redis8-stream-id": "redis-stream-id",
        "redis-idmp": "redis-idmp",
        "valkey-script": "valkey-script",
        "valkey-stream-id": "redis-stream-id",
    },
    "tests/contract/stores/test_nats.py": {"": "nats"},
    "tests/contract/stores/test_nats_lease.py": {"": "nats-lease"},
    "tests/contract/stores/test_rabbitmq.py": {
        "": "rabbitmq",
        "rabbitmq4": "rabbitmq4",
        "rabbitmq-new": "rabbitmq-new",
    },
}
"""A store's own tests -> what they are parametrized with -> the backend that they are then about.
Where it is none of these it is that of "".
"""


@dataclass(frozen=True, slots=True)
class Guarantee:
    """A row: the tests that cite one of `rules`, or whose names have `named` in them.

    `leases`: backends without leases do not give it.
    """

    title: str
    rules: tuple[str, ...] = ()
    named: str = ""
    leases: bool = False

    def is_held_by(self, test: Collected) -> bool:
        """Whether this is a test of it."""
        by_name = bool(self.named) and re.search(self.named, test.name) is not None
        return by_name or not test.rules.isdisjoint(self.rules)


CONTRACT = (
    Guarantee("a slot has one winner", ("S10", "I1")),
    Guarantee("asked again with its token, a claim has the same answer", ("S11",)),
    Guarantee("no slot is won early, late, or once it was pruned", ("S2",)),
    Guarantee("a batch is answered item by item", ("S14",)),
    Guarantee("what a dead token says does not count", ("S17",)),
    Guarantee("a dead runner's run is taken over, once", ("S19",), leases=True),
    Guarantee("leases outlast a clock that is set", ("S1",), leases=True),
    Guarantee("`skip`: no slot starts beside an unfinished run", ("S18", "I4"), leases=True),
    Guarantee("slots that nobody ran are recorded", ("S20", "I6"), leases=True),
    Guarantee("timeouts and cancellations are kept", ("S21", "S21a")),
    Guarantee("what stops hands over, or ends its run", ("S23", "S24", "S25")),
    Guarantee("a restarted sidecar adopts its runs", ("S26",)),
    Guarantee("definitions in a rolling deploy", ("S28",)),
    Guarantee("history, and what is kept of it", ("S30",)),
    Guarantee("namespaces and names are told apart", ("S31", "S32")),
    Guarantee("random histories, answered as a reference answers", named="answers_as_the_rules"),
)
"""What every backend is held to by the contract suite."""

OF_STORES = (
    Guarantee("a reply that is lost, late or cut off is unknown, never lost", ("S11",)),
    Guarantee("`kill -9` of the server, or of a process that writes", named=r"kill"),
    Guarantee("another server takes over", named=r"fail_over|failover|standby|leader|replica"),
    Guarantee(
        "the server's own refusals", named=r"noscript|oom|readonly|loading|busy|deadlock|full_"
    ),
    Guarantee("checks at start, each made to fail", named=r"refused|doubt"),
    Guarantee("many that open it at once", named=r"twenty|at_once"),
    Guarantee("a layout of another version is refused", named=r"unknown_(schema|layout|version)"),
    Guarantee("least privileges", named=r"privileges|permi"),
    Guarantee("TLS and credentials", named=r"tls|password"),
)
"""What a store's own tests hold, with faults that only it can have."""


# ── Columns and cells ───────────────────────────────────────────────────────────────────────────


def backends_of(test: Collected) -> frozenset[str]:
    """The columns that a test belongs to."""
    if test.file in OWN:
        by_parameter = OWN[test.file]
        named = test.parameters & by_parameter.keys()
        return frozenset(by_parameter[name] for name in named or ("",))
    known = CLAIM_ONLY if test.file.startswith(CLAIM_ONLY_SUITE) else BACKENDS
    return test.parameters.intersection(known)


def contract_tests() -> list[Collected]:
    """The tests that every backend of their suite runs."""
    return [test for test in tests() if test.file.startswith(SUITE) and not _is_own(test.file)]


def own_tests() -> list[Collected]:
    """The tests that are about one store."""
    return [test for test in tests() if _is_own(test.file)]


def _is_own(file: str) -> bool:
    return file.startswith(STORES)


def problems() -> list[str]:
    """What keeps the tables from being whole: a guarantee without a test, a file of no store."""
    unknown = sorted({test.file for test in own_tests()} - OWN.keys())
    found = [f"{file}: say in OWN which backends it is about" for file in unknown]
    named = {column for by_parameter in OWN.values() for column in by_parameter.values()}
    found += [
        f"OWN names {column}, which the harness does not have"
        for column in sorted(named - BACKENDS.keys() - CLAIM_ONLY.keys())
    ]
    found += [
        f"no test of the contract suite holds on {backend}: {row.title}"
        for row in CONTRACT
        for backend in (*BACKENDS, *CLAIM_ONLY)
        if not (row.leases and backend in CLAIM_ONLY) and not _of(contract_tests(), row, backend)
    ]
    return found


def _of(among: Iterable[Collected], row: Guarantee, backend: str) -> list[Collected]:
    return [test for test in among if row.is_held_by(test) and backend in backends_of(test)]


def _contract_cell(row: Guarantee, backend: str) -> str:
    if row.leases and backend in CLAIM_ONLY:
        return "no"
    return _counted(_of(contract_tests(), row, backend))


def _own_cell(row: Guarantee, backend: str) -> str:
    return _counted(_of(own_tests(), row, backend))


def _counted(held_by: Sequence[Collected]) -> str:
    """How many, with a link to the file that has the most."""
    if not held_by:
        return ""
    ((file, _),) = Counter(sorted(test.file for test in held_by)).most_common(1)
    return f"[{len(held_by)}]({os.path.relpath(ROOT / file, PAGE.parent)})"


# ── The page ────────────────────────────────────────────────────────────────────────────────────


def tables() -> dict[str, str]:
    """Each table by its name in the page."""
    with_own = {column for test in own_tests() for column in backends_of(test)}
    return {
        "leases": _table([*BACKENDS], CONTRACT, _contract_cell, _suite_count),
        "claims": _table([*CLAIM_ONLY], CONTRACT, _contract_cell, _suite_count),
        "own-leases": _table([b for b in BACKENDS if b in with_own], OF_STORES, _own_cell),
        "own-claims": _table([b for b in CLAIM_ONLY if b in with_own], OF_STORES, _own_cell),
    }


def _suite_count(backend: str) -> str:
    return str(sum(backend in backends_of(test) for test in contract_tests()))


def _table(
    columns: Sequence[str],
    rows: Sequence[Guarantee],
    cell: Callable[[Guarantee, str], str],
    total: Callable[[str], str] | None = None,
) -> str:
    lines = [_row("", (f"`{column}`" for column in columns)), "|---" * (len(columns) + 1) + "|"]
    lines += [_row(_headed(row), (cell(row, column) for column in columns)) for row in rows]
    if total is not None:
        lines.append(_row("**tests of the suite**", map(total, columns)))
    return "\n".join(lines) + "\n"


def _row(head: str, cells: Iterable[str]) -> str:
    return f"| {' | '.join([head, *cells])} |".replace("|  |", "| |").replace("|  |", "| |")


def _headed(row: Guarantee) -> str:
    titles = {rule.number: rule.title for rule in rules()}
    links = [f"[{n}](../semantics.md#{_anchor(n, titles[n])})" for n in row.rules]
    return f"{row.title} ({', '.join(links)})" if links else row.title


def _anchor(number: str, title: str) -> str:
    plain = re.sub(r"[^\w\- ]", "", f"{number} {title}".lower())
    return plain.replace(" ", "-")


def written(text: str) -> str:
    """The page with its tables written anew, between the comments that name them."""
    for name, table in tables().items():
        text = with_table(text, name, table)
    return text


def with_table(text: str, name: str, table: str) -> str:
    """The page with one table written anew."""
    before, begins, rest = text.partition(f"<!-- {name} begins -->\n")
    _, ends, after = rest.partition(f"<!-- {name} ends -->")
    if not ends:
        raise ValueError(f"{PAGE.name} has no place for the table {name!r}")
    return f"{before}{begins}\n{table}\n{ends}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.exit("\n".join(problems()) or 0)
