"""A machine that lacks something is told so in one line, before anything is half made."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """A folder with what `make` reads, and no environment yet."""
    parts = [
        part.relative_to(ROOT) for part in (*ROOT.glob("client/*/*.mk"), *ROOT.glob("proto/*/*.mk"))
    ]
    for name in (Path("Makefile"), Path("pyproject.toml"), *parts):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # A make that runs these tests must not hand its own flags on.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    command = ["make", "--no-print-directory", "-C", str(folder), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=30, env=environment
    )


def test_make_alone_lists_the_targets(fresh: Path) -> None:
    listed = make(fresh).stdout
    for target in ("demo", "test", "check", "format", "proto", "clean"):
        assert f"make {target} " in listed


def test_a_machine_without_a_recent_python_is_told_which_it_needs(fresh: Path) -> None:
    result = make(fresh, "PYTHON=", "demo")
    assert result.returncode != 0
    assert "Anarchon needs Python 3.11 or newer" in result.stderr


def test_a_machine_without_venv_is_told_what_to_install(fresh: Path) -> None:
    python = fresh / "python-without-venv"
    python.write_text('#!/bin/sh\nmkdir -p "$3"; exit 1\n')
    python.chmod(stat.S_IRWXU)
    result = make(fresh, f"PYTHON={python}", "demo")
    assert result.returncode != 0
    assert "apt install python3-venv" in result.stderr
    assert not (fresh / ".venv").exists(), "a half made environment would be taken for a whole one"


@pytest.mark.parametrize(("target", "said"), [("demo", "Anarchon"), ("test", "tests and checks")])
def test_what_takes_long_is_said_before_it_is_done(fresh: Path, target: str, said: str) -> None:
    planned = make(fresh, "--dry-run", f"PYTHON={sys.executable}", target).stdout.splitlines()
    installs = [n for n, line in enumerate(planned) if " install " in line]
    announced = [n for n, line in enumerate(planned) if line.startswith("echo") and said in line]
    assert announced
    assert announced[0] < installs[-1]


def test_ci_runs_what_everybody_runs() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & stat.S_IXUSR
    commands = [line for line in script.read_text().splitlines() if line.startswith("make ")]
    assert commands == ["make check", "make test"]
