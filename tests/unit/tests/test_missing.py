"""A store or a toolchain that is not there is named at the end; where `CI` is `true` its tests fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def run(directory: Path, reason: str, ci: str, *, whole_file: bool = False) -> tuple[int, str]:
    """A run of pytest over two tests that skip for this reason, and one that passes."""
    skip = f"pytest.skip({reason!r}, allow_module_level=True)"
    tests = f"""
import pytest
{skip if whole_file else ""}
@pytest.mark.parametrize("_", [1, 2])
def test_on_the_store(_):
    pytest.skip({reason!r})
def test_on_none(): pass
"""
    (directory / "test_it.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-c", os.devnull, "--rootdir", str(directory), str(directory)],
        cwd=ROOT,
        env={**os.environ, "CI": ci, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("store", "ci", "status", "became"),
    [
        ("redis", "", 0, "skipped"),
        ("redis", "true", 1, "failed"),
        ("redis8", "", 0, "skipped"),
        ("redis8", "true", 0, "skipped"),
    ],
)
def test_only_idmp_may_go_untested_where_all_must_be_there(
    store: str, ci: str, status: int, became: str, tmp_path: Path
) -> None:
    ended, said = run(tmp_path, f"no store: {store}: nothing listens: at all", ci)
    assert ended == status
    assert f"could not be had: {store}: nothing listens: at all" in said
    assert f"(2 tests {became})" in said
    assert ("strategy idmp is not tested" in said) is (store == "redis8")


def test_a_file_that_is_left_out_as_a_whole_fails_too(tmp_path: Path) -> None:
    ended, said = run(tmp_path, "no store: nats: no server", "true", whole_file=True)
    assert ended != 0
    assert "could not be had: nats: no server (1 tests failed)" in said
    ended, said = run(tmp_path, "no store: nats: no server", "", whole_file=True)
    assert "could not be had: nats: no server (1 tests skipped)" in said


@pytest.mark.parametrize(("ci", "status", "became"), [("", 0, "skipped"), ("true", 1, "failed")])
def test_a_toolchain_is_said_as_loudly(ci: str, status: int, became: str, tmp_path: Path) -> None:
    ended, said = run(tmp_path, "no toolchain: node: npm not on PATH", ci)
    assert ended == status
    _, toolchains = said.split(" toolchains ")
    assert f"could not be had: node: npm not on PATH (2 tests {became})" in toolchains
    assert "every store that these tests ask for was there" in said


def test_a_harness_that_fails_by_itself_is_named_as_well(tmp_path: Path) -> None:
    (tmp_path / "test_more.py").write_text("""
import pytest
def test_it():
    pytest.fail("no store: rabbitmq: no broker")
""")
    ended, said = run(tmp_path, "root may write anywhere", "true")
    assert ended == 1
    assert "could not be had: rabbitmq: no broker (1 tests failed)" in said


def test_other_reasons_are_left_alone(tmp_path: Path) -> None:
    ended, said = run(tmp_path, "root may write anywhere", "true")
    assert ended == 0
    assert "every store that these tests ask for was there" in said
