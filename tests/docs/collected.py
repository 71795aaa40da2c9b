"""The tests of the stores, as pytest collects them. Run as a module it prints them as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from functools import cache

import pytest

from tests.docs.rules import ROOT, cited_by

FOLDERS = ("tests/contract", "tests/unit/backends")


@dataclass(frozen=True, slots=True)
class Collected:
    """One test: where it is, the rules it cites, and, as texts, what it is parametrized with."""

    file: str
    name: str
    rules: frozenset[str]
    parameters: frozenset[str]


@cache
def tests() -> tuple[Collected, ...]:
    """Every test of the contract suite and of the stores' own."""
    command = [sys.executable, "-m", "tests.docs.collected"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100
    )
    if done.returncode:
        raise RuntimeError(f"the tests could not be collected:\n{done.stdout}{done.stderr}")
    found = json.loads(done.stdout.splitlines()[-1])
    return tuple(
        Collected(each["file"], each["name"], frozenset(each["rules"]), frozenset(each["texts"]))
        for each in found
    )


class _Collector:
    """A plugin of pytest that keeps what is collected."""

    def __init__(self) -> None:
        self.found: list[dict[str, object]] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            assert isinstance(item, pytest.Function)
            spec = getattr(item, "callspec", None)
            texts = map(str, spec.params.values()) if spec else ()
            documents = [item.function.__doc__, item.cls.__doc__ if item.cls else None]
            cited = cited_by(item.originalname, *(each or "" for each in documents))
            self.found.append(
                {
                    "file": item.path.relative_to(ROOT).as_posix(),
                    "name": item.originalname,
                    "rules": sorted(cited),
                    "texts": sorted(texts),
                }
            )


def _main() -> int:
    collector = _Collector()
    status = pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", *FOLDERS], [collector])
    sys.stdout.write(f"\n{json.dumps(collector.found)}\n")
    return int(status)


if __name__ == "__main__":
    sys.exit(_main())
