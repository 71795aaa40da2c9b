"""`make stubs LANG=...`: what it writes for a language is what the language's own compiler takes.

Ruby and PHP have no compiler: there the stubs are loaded, and a message makes its way into bytes and out again.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.stubs.tools import (
    EXAMPLE,
    ROOT,
    ended,
    make_stubs,
    need_tools,
    run,
    rust_example,
)

pytestmark = pytest.mark.timeout(600)
CHECKS = Path(__file__).parent
LANGUAGES = "cpp csharp go java kotlin php ruby rust typescript"


def test_stubs_for_cpp_compile(tmp_path: Path) -> None:
    need_tools("cpp")
    make_stubs("cpp", tmp_path)
    sources = sorted(tmp_path.rglob("*.cc"))
    assert len(sources) == 7, "five files, two of them with services"
    flags = ("-std=c++17", "-fsyntax-only", f"-I{tmp_path}")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda source: run("g++", *flags, source), sources))


def test_stubs_for_csharp_are_made_where_the_registry_of_buf_is_reached(tmp_path: Path) -> None:
    made = ended("make", "stubs", "LANG=csharp", f"OUT={tmp_path}")
    if made.returncode != 0 and "the server hosted at that remote is unavailable" in made.stderr:
        pytest.skip("no toolchain: csharp: the registry of buf cannot be reached")
    assert made.returncode == 0, made.stderr
    assert {"Session.cs", "SessionGrpc.cs"} <= {file.name for file in tmp_path.rglob("*.cs")}


def test_stubs_for_go_compile(tmp_path: Path) -> None:
    need_tools("go")
    make_stubs("go", tmp_path)
    for file in ("go.mod", "go.sum"):
        (tmp_path / file).write_bytes((ROOT / "client" / "go" / file).read_bytes())
    run("go", "vet", "./anarchonv1", folder=tmp_path)


def test_stubs_for_java_and_kotlin_compile(tmp_path: Path) -> None:
    need_tools("kotlin")
    java, kotlin = tmp_path / "java", tmp_path / "kotlin"
    make_stubs("java", java)
    make_stubs("kotlin", kotlin)
    assert next(kotlin.rglob("SessionProtoGrpcKt.kt"), None), "the coroutine stubs"
    assert _sources(java) == _sources(kotlin), "Kotlin's stand upon the same: one build for both"
    pom = ROOT / "proto" / "stubs" / "kotlin" / "pom.xml"
    run("mvn", "--quiet", "--batch-mode", "--file", pom, "compile", f"-Dstubs={kotlin}")


def _sources(stubs: Path) -> dict[Path, str]:
    return {file.relative_to(stubs): file.read_text("utf-8") for file in stubs.rglob("*.java")}


def test_stubs_for_php_are_loaded(tmp_path: Path) -> None:
    need_tools("php")
    make_stubs("php", tmp_path)
    assert "a session and a job" in run("php", CHECKS / "check.php", tmp_path)
    for service in ("Admin", "Session"):  # what they inherit from is in gRPC's extension
        run("php", "--syntax-check", tmp_path / "Anarchon" / "V1" / f"{service}ServiceClient.php")


def test_stubs_for_ruby_are_loaded(tmp_path: Path) -> None:
    need_tools("ruby")
    make_stubs("ruby", tmp_path)
    assert "a session and a job" in run("ruby", "-W", "-I", tmp_path, CHECKS / "check.rb")


def test_stubs_for_rust_compile_with_the_example(tmp_path: Path) -> None:
    need_tools("rust")
    rust_example()
    run("cargo", "fmt", "--check", folder=EXAMPLE)
    run("cargo", "fmt", "--check", folder=ROOT / "proto" / "stubs" / "rust")


def test_stubs_for_typescript_compile(tmp_path: Path) -> None:
    need_tools("typescript")
    make_stubs("typescript", tmp_path)
    modules = ROOT / "client" / "node" / "node_modules"
    (tmp_path / "node_modules").symlink_to(modules)
    flags = ("--noEmit", "--strict", "--target", "es2022", "--module", "node16", "--skipLibCheck")
    run(modules / ".bin" / "tsc", *flags, *sorted((tmp_path / "anarchon").rglob("*.ts")))


def test_the_language_is_not_the_locale() -> None:
    said = ended("make", "stubs", env={"LANG": "rust"})
    assert said.returncode != 0
    assert f"LANG=... on make's command line; it may be: {LANGUAGES}" in said.stderr


def test_a_language_that_it_does_not_know_is_named_beside_those_that_it_does() -> None:
    said = ended("make", "stubs", "LANG=cobol")
    assert said.returncode != 0
    assert f"LANG is 'cobol'; it may be: {LANGUAGES}" in said.stderr
