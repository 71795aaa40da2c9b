"""Every test of the contract suite runs once for each backend."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.contract.harness import BACKENDS, Cluster, Node


@pytest.fixture(params=list(BACKENDS))
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
async def cluster(backend: str, tmp_path: Path) -> AsyncIterator[Cluster]:
    made = Cluster(BACKENDS[backend](tmp_path))
    async with made.stack:
        yield made


@pytest.fixture
async def one(cluster: Cluster) -> Node:
    """An instance that has registered the usual job at T0."""
    (node,) = await cluster.nodes_of(1)
    return node


@pytest.fixture
async def two(cluster: Cluster) -> tuple[Node, Node]:
    """Two instances of one service."""
    first, second = await cluster.nodes_of(2)
    return first, second
