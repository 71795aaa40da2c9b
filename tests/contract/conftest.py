"""Every test of the contract suite runs once for each backend."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.contract.harness import BACKENDS, Cluster, Node


@pytest.fixture(params=list(BACKENDS))
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def directory() -> Iterator[Path]:
    """Where stores keep their files: in memory where possible, as these tests never cut power."""
    in_memory = Path("/dev/shm")
    with TemporaryDirectory(dir=in_memory if in_memory.is_dir() else None) as made:
        yield Path(made)


@pytest.fixture
async def cluster(backend: str, directory: Path) -> AsyncIterator[Cluster]:
    made = Cluster(BACKENDS[backend](directory))
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
