"""The wheel holds what it must, and asks for no more than it says."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
PACKAGES = ("anarchon", "anarchon_server", "anarchon_backends")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built without asking any network."""
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory"]
    subprocess.run([*build, str(out)], cwd=ROOT, check=True, capture_output=True, timeout=50)
    return zipfile.ZipFile(next(out.glob("*.whl")))


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    return Parser().parsestr(dist_info(wheel, "METADATA"))


def dist_info(wheel: zipfile.ZipFile, name: str) -> str:
    path = next(p for p in wheel.namelist() if p.endswith(f".dist-info/{name}"))
    return wheel.read(path).decode()


def test_the_three_packages_are_at_the_top_and_typed(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)
    for package in PACKAGES:
        assert f"{package}/py.typed" in wheel.namelist()


def test_the_stubs_are_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    for stub in (
        "session_pb2.py",
        "session_pb2.pyi",
        "session_pb2_grpc.py",
        "session_pb2_grpc.pyi",
    ):
        assert f"anarchon/v1/{stub}" in wheel.namelist()


def test_the_client_alone_asks_for_grpc_and_protobuf_only(metadata: Message) -> None:
    requirements = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    always = {r.name for r in requirements if r.marker is None}
    assert always == {"grpcio", "protobuf"}


def test_every_store_has_an_extra_and_all_brings_each(metadata: Message) -> None:
    extras = set(metadata.get_all("Provides-Extra", []))
    assert extras == {"server", "sqlite", "redis", "postgres", "rabbitmq", "nats", "all"}
    everything = {r.name for r in requirements_of("all", metadata)}
    assert {"aiosqlite", "redis", "asyncpg", "aiormq", "nats-py", "tzdata"} <= everything


def requirements_of(extra: str, metadata: Message) -> list[Requirement]:
    """What an extra brings, through the extras of ours that it names."""
    found: list[Requirement] = []
    for text in metadata.get_all("Requires-Dist", []):
        requirement = Requirement(text)
        if requirement.marker is None or not requirement.marker.evaluate({"extra": extra}):
            continue
        if requirement.name == "anarchon":
            for inner in requirement.extras:
                found += requirements_of(inner, metadata)
        else:
            found.append(requirement)
    return found


def test_the_command_and_the_backends_are_found_by_entry_point(wheel: zipfile.ZipFile) -> None:
    lines = dist_info(wheel, "entry_points.txt").splitlines()
    assert "anarchon = anarchon_server.cli:main" in lines
    assert "memory = anarchon_backends.memory:open_store" in lines
    assert "sqlite = anarchon_backends.sqlite:open_store" in lines


def test_the_source_distribution_has_all_that_a_clone_has(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    out = tmp_path_factory.mktemp("sdist")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory"]
    subprocess.run([*build, str(out)], cwd=ROOT, check=True, capture_output=True, timeout=50)
    with tarfile.open(next(out.glob("*.tar.gz"))) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True, timeout=50
    ).stdout.split("\n")
    missing = [n for n in tracked if n and (ROOT / n).exists() and n not in held]
    assert missing == []
