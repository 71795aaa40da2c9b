"""The application of the example deployments does what its deployment shows."""

from __future__ import annotations

import logging

import pytest

from anarchon import Cancelled
from anarchon.testing import cancel, make_context, run_handler
from deploy.example import app


async def test_the_async_handlers_return_what_is_kept_with_their_runs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        assert await run_handler(app.tick) == "ticked"
    assert "scheduled at 2026-10-10 12:00:10+00:00, fence 1" in caplog.text
    assert await run_handler(app.report) == "reported by test:1"


async def test_the_long_handler_stops_when_it_is_asked_to() -> None:
    context = make_context(sync=True)
    cancel(context)
    with pytest.raises(Cancelled):
        await run_handler(app.checksum, context)
