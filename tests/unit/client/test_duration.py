"""Durations as text, as `timedelta` and on the wire."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest

from anarchon import _duration as d

VECTORS = json.loads(
    (Path(__file__).parents[2] / "conformance" / "vectors" / "durations.json").read_text()
)


@pytest.mark.parametrize("case", VECTORS["valid"], ids=lambda case: case["text"])
def test_a_text_means_what_the_shared_vectors_say(case: dict[str, object]) -> None:
    duration = d.to_timedelta(case["text"])
    assert d.to_ms(duration) == case["duration_ms"]
    assert d.to_text(duration) == case["canonical"]


@pytest.mark.parametrize("text", VECTORS["invalid"], ids=lambda text: repr(text)[:40])
def test_what_the_shared_vectors_refuse_is_refused(text: object) -> None:
    text = text["text"] if isinstance(text, dict) else text
    with pytest.raises(ValueError, match=r"write|white space|needs its unit|at most|fixed length"):
        d.to_timedelta(text)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (timedelta(seconds=-1), "cannot be negative"),
        (timedelta(microseconds=1_500), "whole milliseconds"),
        (timedelta(days=100_000), "a hundred years"),
        ("999999999999w", "a hundred years"),
        (10, "not int"),
        (None, "not NoneType"),
    ],
)
def test_what_is_no_duration_is_refused(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        d.to_timedelta(value)


@pytest.mark.parametrize("duration_ms", [0, 1, 999, 1_000, 61_001, 86_400_000 * 366])
def test_the_wire_keeps_every_millisecond(duration_ms: int) -> None:
    wire = d.ms_to_wire(duration_ms)
    assert d.wire_to_ms(wire) == duration_ms
    assert d.to_ms(wire.ToTimedelta()) == duration_ms
