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
    "kotlin": ("java", "mvn"),
    "php": ("protoc", "grpc_php_plugin", "php"),
    "ruby": ("protoc", "grpc_ruby_plugin", "ruby"),
    "rust": ("cargo", "rustfmt"),
    "typescript": ("node", "npm"),
}
"""The programs that each language's generator and compiler need."""

LIBRARIES = {
    "cpp": ("g++", "-E", "-x", "c++", "-include", "grpcpp/grpcpp.h", os.devnull),
    "php": ("php", "-r", "exit(is_dir('/usr/share/php/Google/Protobuf') ? 0 : 1);"),
    "ruby": ("ruby", "-e", "require 'grpc'"),
}
"""What ends well where the libraries are there, too, that the stubs stand upon."""

# These programs are small, and start often: the JVM is to compile quickly rather than well.
MAVEN = {"MAVEN_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}


def need_tools(language: str) -> None:
    """Skip where the language's toolchain is not on this machine."""
    if missing := [tool for tool in TOOLS[language] if shutil.which(tool) is None]:
        pytest.skip(f"no toolchain: {language}: {', '.join(missing)} not on PATH")
    if language in LIBRARIES and ended(*LIBRARIES[language]).returncode != 0:
        pytest.skip(f"no toolchain: {language}: its gRPC and protobuf are not installed")


def run(*command: str | Path, folder: Path = ROOT) -> str:
    """What it printed; the test fails with it where the command fails."""
    done = ended(*command, folder=folder)
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
        env={**outside, **MAVEN, **(env or {})},
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
    run("cargo", "build", "--quiet", "--target-dir", CARGO_TARGET, folder=EXAMPLE)
    return CARGO_TARGET / "debug" / "anarchon-example"
