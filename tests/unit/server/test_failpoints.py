"""Failpoints do nothing unless a test arms them."""

from __future__ import annotations

import pytest

from anarchon_server import failpoints


async def test_nothing_happens_at_a_point_that_is_not_armed() -> None:
    await failpoints.reached("store.claim.before")


async def test_an_armed_point_acts_as_long_as_the_block_lasts() -> None:
    seen: list[str] = []

    async def note() -> None:
        seen.append("here")

    with failpoints.arm("store.claim.before", note):
        await failpoints.reached("store.claim.before")
        await failpoints.reached("store.claim.after")
    await failpoints.reached("store.claim.before")
    assert seen == ["here"]


async def test_a_process_is_armed_by_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failpoints, "_armed", {})
    failpoints.arm_from("store.claim.after=error, store.beat.before=error")
    with pytest.raises(failpoints.FailpointError):
        await failpoints.reached("store.beat.before")


@pytest.mark.parametrize("text", ["store.claim.after", "store.claim.after=explode"])
def test_what_cannot_be_armed_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="kill, stop, error"):
        failpoints.arm_from(text)
