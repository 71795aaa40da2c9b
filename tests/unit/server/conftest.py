"""A sidecar in the test's own process, for tests of what is reached through gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.unit.server.sidecars import Sidecar, start_sidecar, stop_sidecar


@pytest.fixture
async def sidecar() -> AsyncIterator[Sidecar]:
    """A sidecar on a free port, in the namespace `default` of a memory store."""
    started = await start_sidecar()
    yield started
    await stop_sidecar(started)
