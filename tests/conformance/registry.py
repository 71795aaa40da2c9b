"""The languages that have a testee: `testees.toml`, read and checked, and built once a session."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
REGISTRY = Path(__file__).with_name("testees.toml")
CAPABILITIES = frozenset({"block", "exit"})
_BUILD_S = 600
_KEYS = {"name", "tools", "folder", "build", "run", "lacks"}


@dataclass(frozen=True, slots=True)
class Language:
    """How a language's testee is built and started, and what the language cannot have."""

    key: str
    name: str
    tools: tuple[str, ...]
    folder: Path
    build: tuple[tuple[str, ...], ...]
    run: tuple[str, ...]
    lacks: Mapping[str, str]

    def missing_tools(self) -> list[str]:
        """What of its toolchain is not on PATH."""
        return [tool for tool in self.tools if shutil.which(tool) is None]


@cache
def languages() -> tuple[Language, ...]:
    """All of them, in the registry's order. Raises `ValueError` for what is wrong in the file."""
    tables = tomllib.loads(REGISTRY.read_text("utf-8"))
    return tuple(_language(key, table) for key, table in tables.items())


def language(key: str) -> Language:
    """The one with this key."""
    return next(each for each in languages() if each.key == key)


def _language(key: str, table: dict[str, Any]) -> Language:
    lacks = table.get("lacks", {})
    wrong = sorted(table.keys() - _KEYS) + sorted(lacks.keys() - CAPABILITIES)
    if wrong or not table.keys() >= _KEYS - {"lacks"}:
        raise ValueError(
            f"{REGISTRY.name}: [{key}]: it has {', '.join(wrong) or 'not all its keys'}"
        )
    return Language(
        key=key,
        name=table["name"],
        tools=tuple(table["tools"]),
        folder=ROOT / table["folder"],
        build=tuple(_command(parts) for parts in table["build"]),
        run=_command(table["run"]),
        lacks=lacks,
    )


def _command(parts: list[str]) -> tuple[str, ...]:
    return tuple(part.replace("{python}", sys.executable) for part in parts)


def built(key: str) -> Language:
    """The language, once its testee is built. Raises `RuntimeError` with what the tools said."""
    if failed := _build(key):
        raise RuntimeError(failed)
    return language(key)


@cache
def _build(key: str) -> str:
    """Once a session, also where it fails: what the tools said then."""
    made = language(key)
    for command in made.build:
        done = subprocess.run(
            command,
            cwd=made.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=_BUILD_S,
        )
        if done.returncode:
            said = f"{done.stdout}{done.stderr}"[-8_000:]
            return f"{made.name}: {' '.join(command)} failed:\n{said}"
    return ""
