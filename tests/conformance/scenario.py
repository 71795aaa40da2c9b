"""Scenarios as data: the files of `scenarios/`, read and checked."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.conformance.registry import CAPABILITIES

FOLDER = Path(__file__).with_name("scenarios")
STEPS = {
    # what a step may begin with -> what it may have besides
    "expect": {"with", "metadata"},
    "until": {"with", "metadata"},
    "next": {"with", "metadata"},
    "count": {"during", "at_least", "at_most"},
    "result": {"is"},
    "results": {"prefix", "is"},
    "next_result": {"is"},
    "drop_results": set(),
    "attach": set(),
    "assign": set(),
    "batch": {"job", "prefix", "payload", "payload_bytes"},
    "cancel": set(),
    "drain": set(),
    "send": set(),
    "end": set(),
    "keep_alives": set(),
    "answer": set(),
    "receipts": set(),
    "away": set(),
    "back": set(),
    "token": set(),
    "accepts": set(),
    "refuse": set(),
    "told": {"with", "times"},
    "may_tell": {"with"},
    "say": set(),
    "signal": set(),
    "pause": set(),
    "exit": set(),
    "sidecar": set(),
    "testee": set(),
    "trigger": {"payload", "as"},
    "cancel_run": set(),
    "run": {"is"},
    "job": {"is"},
}
_KEYS = {
    "title",
    "shows",
    "spec",
    "needs",
    "listen",
    "token",
    "config",
    "testee",
    "steps",
    "scaled",
    "away",
    "env",
}
_LISTEN = {"tcp", "unix", "unix-open", "tls"}


class ScenarioError(AssertionError):
    """The client did not do what the scenario expects."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One file."""

    name: str
    title: str
    """The row of the table: what happens."""
    shows: str
    """What the client is to do."""
    spec: str
    """The heading of `client/README.md` that it holds the client to."""
    is_live: bool
    """Played with the real sidecar, not with the puppet."""
    needs: tuple[str, ...]
    listen: str
    token: str
    config: str
    """Of the real sidecar, in TOML."""
    away: bool
    """The sidecar is not there at first."""
    scaled: str
    """Which times are shorter than in life."""
    env: dict[str, str]
    """Of the testee, over what the suite sets."""
    testee: dict[str, Any]
    steps: tuple[dict[str, Any], ...]


@cache
def scenarios() -> tuple[Scenario, ...]:
    """All of them: the puppet's, then those of the real sidecar. Raises `ValueError`."""
    files = sorted(FOLDER.glob("*.toml")) + sorted(FOLDER.glob("live/*.toml"))
    return tuple(_read(file) for file in files)


def scenario(name: str) -> Scenario:
    """The one of this name."""
    return next(each for each in scenarios() if each.name == name)


def _read(file: Path) -> Scenario:
    try:
        table = tomllib.loads(file.read_text("utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{file.name}: {error}") from None
    is_live = file.parent != FOLDER
    steps = tuple(table.get("steps", ()))
    wrong = [f"no such key: {key}" for key in table.keys() - _KEYS]
    wrong += [
        f"no {key}" for key in ("title", "shows", "spec", "testee", "steps") if key not in table
    ]
    wrong += [f"no such capability: {need}" for need in set(table.get("needs", ())) - CAPABILITIES]
    listen = table.get("listen", "tcp")
    wrong += [f"listen {listen}: must be one of {', '.join(sorted(_LISTEN))}"] * (
        listen not in _LISTEN
    )
    for number, step in enumerate(steps, 1):
        kind = next(iter(step), "")
        unknown = step.keys() - {kind} - STEPS.get(kind, set())
        wrong += [f"step {number}: no such step: {step}"] * (kind not in STEPS)
        wrong += [f"step {number}: {kind} has no {', '.join(unknown)}"] * bool(unknown)
    if wrong:
        raise ValueError(f"{file.name}: {'; '.join(wrong)}")
    return Scenario(
        name=f"live-{file.stem}" if is_live else file.stem,
        title=table["title"],
        shows=table["shows"],
        spec=table["spec"],
        is_live=is_live,
        needs=tuple(table.get("needs", ())),
        listen=listen,
        token=table.get("token", ""),
        config=table.get("config", ""),
        away=table.get("away", False),
        scaled=table.get("scaled", ""),
        env=table.get("env", {}),
        testee=table["testee"],
        steps=steps,
    )
