"""Slots are the same on every machine (S5): under other Pythons, zones, hash seeds and options."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ANSWERS = Path(__file__).with_name("slot_answers.py")
SERVER = Path(__file__).parents[4] / "server"
HERE = {"PATH": os.environ.get("PATH", "")}


def answers(python: str, *options: str, **environment: str) -> str:
    site = str(Path(sys.modules["tzdata"].__file__ or "").parents[1])
    path = os.pathsep.join((str(SERVER), site))
    run = subprocess.run(
        [python, *options, str(ANSWERS)],
        env=HERE | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@cache
def expected() -> str:
    return answers(sys.executable, TZ="UTC", PYTHONHASHSEED="0")


@pytest.mark.parametrize(
    ("options", "environment"),
    [
        ((), {"TZ": "America/New_York", "PYTHONHASHSEED": "1"}),
        (("-O",), {"TZ": "Asia/Kathmandu", "PYTHONHASHSEED": "2"}),
        (("-OO",), {"TZ": ":nonsense", "PYTHONHASHSEED": "random"}),
        ((), {"PYTHONTZPATH": "/nowhere", "LC_ALL": "C", "PYTHONHASHSEED": "4"}),
        (("-X", "utf8=0"), {"LC_ALL": "C", "LANG": "tr_TR"}),
    ],
    ids=["zone-of-the-machine", "-O", "-OO", "zones-of-the-machine", "locale"],
)
def test_s05_the_environment_does_not_matter(
    options: tuple[str, ...], environment: dict[str, str]
) -> None:
    assert answers(sys.executable, *options, **environment) == expected()


def test_s05_the_zone_files_of_the_machine_are_not_read(tmp_path: Path) -> None:
    """They are searched first by `zoneinfo`, and here they are wrong for all zones."""
    utc = Path(sys.modules["tzdata"].__file__ or "").parent / "zoneinfo" / "UTC"
    for name in ("Europe/Athens", "Australia/Lord_Howe", "America/New_York"):
        wrong = tmp_path / name
        wrong.parent.mkdir(parents=True, exist_ok=True)
        wrong.write_bytes(utc.read_bytes())
    assert answers(sys.executable, PYTHONTZPATH=str(tmp_path)) == expected()


def other_pythons() -> list[str]:
    """Interpreters of other supported versions on this machine."""
    homes = Path("~/.pyenv/versions").expanduser().glob("3.*/bin/python3")
    found = {f"python3.{minor}": shutil.which(f"python3.{minor}") for minor in range(11, 16)}
    candidates = [path for path in found.values() if path] + sorted(map(str, homes))
    return [path for path in candidates if version_of(path) > (3, 10)]


def version_of(python: str) -> tuple[int, int]:
    """The interpreter's version; (0, 0) for one that does not start, or is this one's."""
    code = "import sys; print(*sys.version_info[:2])"
    run = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    version = tuple(map(int, run.stdout.split())) if run.returncode == 0 else (0, 0)
    return (0, 0) if version == sys.version_info[:2] else (version[0], version[1])


def test_s05_the_version_of_python_does_not_matter() -> None:
    pythons = other_pythons()
    if not pythons:
        pytest.skip("no other Python from 3.11 on is on this machine")
    for python in pythons:
        assert answers(python) == expected(), python
