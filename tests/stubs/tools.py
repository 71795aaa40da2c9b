"""What the tests of generated stubs share: `make stubs`, and programs that must succeed."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "client" / "examples" / "rust"
CARGO_TARGET = ROOT / ".cache" / "rust"
WITHIN_S = 600
"""The first time whatever is needed is downloaded, and compiled too."""

TOOLS = {
    "cpp": ("protoc", "grpc_cpp_plugin", "g++"),
    "go": ("go",),
    "java": ("java", "mvn"),
    "kotlin": ("java", "mvn"),
    "php": ("protoc", "grpc_php_plugin", "php"),
    "ruby": ("protoc", "grpc_ruby_plugin", "ruby"),
    "rust": ("cargo",),
    "typescript": ("node", "npm"),
}
"""What each language's generator and compiler need of the machine."""


def need_tools(language: str) -> None:
    """Skip where the language's toolchain is not on this machine."""
    if missing := [tool for tool in TOOLS[language] if shutil.which(tool) is None]:
        pytest.skip(f"no toolchain: {language}: {', '.join(missing)} not on PATH")


def run(*command: str | Path, folder: Path = ROOT, env: Mapping[str, str] | None = None) -> str:
    """What it printed; the test fails with it where the command fails."""
    done = ended(*command, folder=folder, env=env)
    said = f"{done.stdout}{done.stderr}"
    assert done.returncode == 0, f"{' '.join(map(str, command))} failed:\n{said[-8_000:]}"
    return said


def ended(
    *command: str | Path, folder: Path = ROOT, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The command, when it has ended. Of a `make` that runs these tests it knows nothing."""
    outside = {
        key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))
    }
    return subprocess.run(
        command,
        cwd=folder,
        env={**outside, **(env or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=WITHIN_S,
    )


def make_stubs(language: str, out: Path) -> None:
    run("make", "stubs", f"LANG={language}", f"OUT={out}")


@cache
def rust_example() -> Path:
    """The example's program, built from stubs that were made anew; once a session."""
    run("make", "stubs", "LANG=rust")
    run("cargo", "build", "--quiet", "--locked", "--target-dir", CARGO_TARGET, folder=EXAMPLE)
    return CARGO_TARGET / "debug" / "anarchon-example"
