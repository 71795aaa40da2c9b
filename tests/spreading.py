"""How the tests are spread over several processes (pytest-xdist), and which are measured.

Every process has servers of its own: the tests of a store go to one, so that few are started. Seeds
of the simulation go one by one to whichever process is free; elsewhere the tests of a file stay
together. What takes longest begins first, so that nobody is left with it at the end. Tests that go
by the real clock are not spread: see ALONE in the Makefile.
"""

from __future__ import annotations

import os
import re
from typing import Any

import pytest

SINGLY = ("tests/simulation/",)
LONGEST_FIRST = (
    "tests/contract/stores/test_rabbitmq.py",
    "tests/simulation/",
    "tests/contract/",
    "tests/docs/",
    "tests/unit/server/core/test_slots_oracle.py",
)
_STORE = re.compile(
    r"\[(?:.*-)?(memory|sqlite|postgres|redis8|redis-cluster|redis|valkey|nats-cluster|nats"
    r"|rabbitmq4|rabbitmq-new|rabbitmq)\b.*\]$"
)

MEASURED = (
    "tests/unit/",
    "tests/simulation/test_scenarios.py",
    "tests/simulation/test_claim_only.py",
)
"""What the core's coverage is measured with, besides the contract suite on the `memory` store."""

UNMEASURED = (
    "tests/unit/server/core/test_slots_oracle.py",
    "tests/unit/server/core/test_slots_mutants.py",
    "tests/unit/server/core/test_slots_peers.py",
)
"""What of it is left out, as it computes much and covers nothing new."""


def scheduler(config: pytest.Config, log: Any) -> Any:
    """What hands the tests out, in their order and in the groups of `group_of`."""
    from xdist.scheduler import LoadScopeScheduling  # only there where several run

    class Spreading(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return Spreading(config, log)


def processes() -> int:
    """As many as there are cores; not more than can help."""
    return min(os.cpu_count() or 1, 8)


def group_of(nodeid: str) -> str:
    """The name of the group of tests that one process runs."""
    if nodeid.startswith(SINGLY):
        return nodeid
    file = nodeid.partition("::")[0]
    if file.startswith("tests/contract/") and (store := _STORE.search(nodeid)):
        return store[1]
    return file


def turn_of(nodeid: str) -> int:
    """Tests with a lower number are handed out first."""
    for turn, start in enumerate(LONGEST_FIRST):
        if nodeid.startswith(start):
            return turn
    return len(LONGEST_FIRST)


def is_measured(item: pytest.Item) -> bool:
    """Whether a test counts for coverage. Tracing what it runs makes it take twice as long."""
    file = item.nodeid.partition("::")[0]
    if file.startswith("tests/contract/") and not file.endswith("test_model.py"):
        return "[memory" in item.nodeid
    return file.startswith(MEASURED) and file not in UNMEASURED
