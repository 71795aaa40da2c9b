"""Every test of this folder runs once for each backend that has no leases."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.contract.harness import CLAIM_ONLY, ClaimOnlyNode, Cluster


@pytest.fixture(params=list(CLAIM_ONLY))
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
async def cluster(backend: str, directory: Path) -> AsyncIterator[Cluster]:
    made = Cluster(CLAIM_ONLY[backend](directory), node_type=ClaimOnlyNode)
    async with made.stack:
        yield made
