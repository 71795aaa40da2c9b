"""The command `anarchon`: its subcommands, and what it says where a part is missing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from anarchon_server import cli

USAGE_ERROR = cli.USAGE_ERROR


def test_the_version_is_the_distributions(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"anarchon {version('anarchon')}\n"


def test_without_a_command_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == USAGE_ERROR
    shown = capsys.readouterr().out
    for command in ("serve", "next", "jobs", "runs", "instances", "health", "demo"):
        assert re.search(rf"^  {command} +\w", shown, re.MULTILINE)


def test_an_unknown_command_is_refused_with_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["srve"])
    assert ended.value.code == USAGE_ERROR
    assert "'serve'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "--port", "7420"], "there is no flag --port: did you mean --listen?"),
        (["next", "10s", "--zone", "UTC"], "there is no flag --zone: did you mean --tz?"),
        (["runs", "--limt=3"], "there is no flag --limt: did you mean --limit?"),
        (["runs", "sync"], "'sync' is one argument too many: did you mean --job sync?"),
        (["jobs", "sync"], "'sync' is one argument too many"),
        (["health", "--xyzzy"], "there is no flag --xyzzy"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_wrong_flag_is_refused_with_the_subcommands_usage_and_what_was_meant(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == USAGE_ERROR
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"usage: anarchon {arguments[0]} [-h]")
    assert lines[-1] == f"anarchon {arguments[0]}: error: {said}"


def test_help_of_a_command_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    from anarchon_server.config import SETTINGS, flag_of

    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for name in SETTINGS:
        assert flag_of(name) in shown


def test_a_missing_extra_is_named_with_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(_: str) -> None:
        raise ModuleNotFoundError("No module named 'grpc_health'", name="grpc_health.v1")

    monkeypatch.setattr(cli, "import_module", missing)
    assert cli.main(["health"]) == USAGE_ERROR
    assert capsys.readouterr().err == (
        'anarchon health: needs the extra "server": pip install "anarchon[server]", '
        'or pip install ".[server]" in a clone\n'
    )


def test_a_module_of_ours_that_is_missing_is_a_mistake_and_shows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(_: str) -> None:
        raise ModuleNotFoundError("no", name="anarchon_server.core.gone")

    monkeypatch.setattr(cli, "import_module", missing)
    with pytest.raises(ModuleNotFoundError):
        cli.main(["health"])


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt, 130), (BrokenPipeError, 0)])
def test_an_interrupt_or_a_reader_that_has_gone_ends_it_quietly(
    error: type[BaseException], status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Module:
        @staticmethod
        def add_parser(subparsers: object) -> None:
            subparsers.add_parser("health")  # type: ignore[attr-defined]

        @staticmethod
        def run(_: object) -> int:
            raise error

    monkeypatch.setattr(cli, "import_module", lambda _: Module)
    with (tmp_path / "out").open("w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert cli.main(["health"]) == status


@pytest.mark.parametrize(
    "arguments",
    [
        ["next", "* * * * *", "-n", "3"],  # all of it in one buffer, written at the end
        ["next", "* * * * *", "-n", "10000"],
        ["next", "10s", "--json"],
        ["next", "--help"],
        ["runs", "--help"],
        ["--version"],
    ],
    ids=" ".join,
)
def test_output_that_nobody_reads_any_more_is_no_error(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "anarchon_server", *arguments],
            stdout=writer,
            stderr=subprocess.PIPE,
            env={k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"},
            text=True,
            timeout=30,
            check=False,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def in_shell(command: str) -> subprocess.CompletedProcess[str]:
    """Run a command line in which $ANARCHON stands for ours."""
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    return subprocess.run(
        ["sh", "-c", command],
        capture_output=True,
        env={**inherited, "ANARCHON": f"{sys.executable} -m anarchon_server"},
        text=True,
        timeout=30,
        check=False,
    )


@pytest.mark.parametrize("arguments", ["next 10s", "next 10s --json", "--version"])
def test_where_there_is_no_standard_output_what_is_written_goes_nowhere(arguments: str) -> None:
    done = in_shell(f"$ANARCHON {arguments} >&-")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_where_there_is_no_standard_error_an_error_is_not_taken_for_output() -> None:
    done = in_shell("$ANARCHON next nonsense 2>&-")
    assert (done.returncode, done.stdout) == (USAGE_ERROR, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is full")
@pytest.mark.parametrize(
    "arguments", ["next 10s", "next 10s -n 10000", "next 10s --json", "next --help"]
)
def test_output_that_cannot_be_written_is_one_line(arguments: str) -> None:
    done = in_shell(f"$ANARCHON {arguments} >/dev/full")
    said = "anarchon next: cannot write its output: No space left on device\n"
    assert (done.returncode, done.stderr) == (cli.FAILED, said)


def test_the_command_line_imports_only_the_standard_library_until_a_command_is_chosen() -> None:
    code = (
        "import sys, anarchon_server.cli as c\n"
        "try: c.main(['--version'])\n"
        "except SystemExit: pass\n"
        "assert not {'grpc', 'google', 'croniter', 'tzdata', 'anarchon'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
