"""Every example of the README runs as it stands there.

Named blocks are the files of one folder, in which all runs, beside one real sidecar that the README's
own command starts. `console` blocks are compared to the letter; `sh` lines are run where they end by
themselves, and otherwise are those that a reader starts and stops by hand.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, Block, blocks

README = ROOT / "README.md"
FILES = {b.words[0]: b for b in blocks(README, "python") if b.words}
SNIPPETS = [b for b in blocks(README, "python") if not b.words]
SAYS = {True: "of the whole namespace", False: "accepted by"}
"""What a snippet prints, by whether it asks as an operator does."""
COMMANDS = [line for b in blocks(README, "sh") for line in b.text.splitlines()]
ANSWERED = ("anarchon jobs", "anarchon runs", "anarchon instances", "anarchon health")
WITHIN_S = 30


class Program:
    """A program that goes on until it is told to stop; its output is read as it comes."""

    def __init__(self, arguments: list[str], folder: Path, environ: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            arguments,
            cwd=folder,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._lines: list[str] = []

    def wait_for(self, pattern: str) -> str:
        """The first line in which `pattern` is found. The program is killed if it does not come."""
        assert self.process.stdout is not None
        alarm = threading.Timer(WITHIN_S, self.process.kill)
        alarm.start()
        try:
            for line in self.process.stdout:
                self._lines.append(line)
                if re.search(pattern, line):
                    return line
        finally:
            alarm.cancel()
        raise AssertionError(f"ended without {pattern!r}:\n{''.join(self._lines)}")

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.communicate(timeout=WITHIN_S)
        finally:
            self.process.kill()
        return self.process.returncode


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Where the examples are. Its name is short, for a socket's path may be no longer than 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="an-") as name:
        place = Path(name)
        for file, block in FILES.items():
            (place / file).write_text(block.text, encoding="utf-8")
        yield place


@pytest.fixture(scope="module")
def environ(folder: Path) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("ANARCHON_")}
    return ours | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(folder),
        "XDG_STATE_HOME": str(folder / "state"),
        "ANARCHON_LISTEN": f"unix:{folder}/run/socket",
        "ANARCHON_ADDRESS": f"unix:{folder}/run/socket",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONWARNINGS": "error",
    }


@pytest.fixture(scope="module")
def sidecar(folder: Path, environ: dict[str, str]) -> Iterator[Program]:
    assert "anarchon serve" in COMMANDS
    program = Program(["anarchon", "serve"], folder, environ)
    program.wait_for(r"\bready\b")
    yield program
    assert program.stop() == 0


def ran(arguments: list[str], folder: Path, environ: dict[str, str]) -> str:
    done = subprocess.run(
        arguments,
        cwd=folder,
        env=environ,
        capture_output=True,
        check=False,
        text=True,
        timeout=WITHIN_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_application_runs_a_slot_and_stops_in_order(
    folder: Path, environ: dict[str, str], sidecar: Program
) -> None:
    application = Program([sys.executable, "app.py"], folder, environ)
    application.wait_for("attempt 1, on ")
    assert application.stop() == 0
    runs = ran(["anarchon", "runs", "--job", "sync", "--state", "success"], folder, environ)
    assert "sync" in runs


@pytest.mark.parametrize("snippet", SNIPPETS, ids=str)
def test_a_snippet_runs_to_its_end(
    folder: Path, environ: dict[str, str], sidecar: Program, snippet: Block
) -> None:
    said = ran([sys.executable, "-c", snippet.text], folder, environ)
    assert SAYS["AdminClient" in snippet.text] in said


@pytest.mark.parametrize("block", blocks(README, "python"), ids=str)
def test_python_is_written_as_the_project_writes_it(block: Block) -> None:
    ruff = [sys.executable, "-m", "ruff", "--config", str(ROOT / "pyproject.toml"), "--quiet"]
    for how in (["format", "--diff", "-"], ["check", "--select", "E,F,B,UP,RUF", "-"]):
        checked = subprocess.run(
            [*ruff, *how], input=block.text, capture_output=True, check=False, text=True
        )
        assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_tests_of_the_handler_pass(folder: Path, environ: dict[str, str]) -> None:
    pytest_here = [sys.executable, "-m", "pytest", "-q", "-p", "no:asyncio", "--rootdir=."]
    files = sorted(name for name in FILES if name.startswith("test_"))
    assert files
    assert "passed" in ran([*pytest_here, *files], folder, environ)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith(ANSWERED)])
def test_a_question_to_the_sidecar_is_answered(
    folder: Path, environ: dict[str, str], sidecar: Program, command: str
) -> None:
    ran(shlex.split(command), folder, environ)


@pytest.mark.parametrize("block", blocks(README, "console"), ids=str)
def test_a_console_shows_what_the_commands_print(
    folder: Path, environ: dict[str, str], block: Block
) -> None:
    for session in re.split(r"(?m)^\$ ", block.text)[1:]:
        command, _, output = session.partition("\n")
        assert ran(shlex.split(command), folder, environ) == output


def test_every_other_command_is_one_that_there_is() -> None:
    targets = re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    for command in COMMANDS:
        words = [word for word in shlex.split(command) if not re.match(r"[A-Z_]+=", word)]
        match words:
            case ["make", target]:
                assert target in targets
            case [".", activation]:
                assert activation == ".venv/bin/activate"
            case ["pip", "install", what]:
                assert re.fullmatch(r"\.\[(\w+)\]", what)
                assert what[2:-1] in extras
            case ["python", file]:
                assert file in FILES
            case ["anarchon", "serve", *flags]:
                assert flags in ([], ["--listen", "127.0.0.1:7421"])
            case ["anarchon", "exec", *_]:
                assert command == _only_exec()
            case _:
                assert command.startswith(ANSWERED), f"nobody runs: {command}"


def _only_exec() -> str:
    (command,) = (each for each in COMMANDS if each.startswith("anarchon exec "))
    return command


def test_a_job_by_name_is_what_the_sidecars_file_says(
    folder: Path, environ: dict[str, str]
) -> None:
    (block,) = blocks(README, "toml")
    (folder / block.words[0]).write_text(block.text, encoding="utf-8")
    comment = block.text.splitlines()[0].removeprefix("# ").partition(";")[0]
    elsewhere = environ | {
        "ANARCHON_LISTEN": f"unix:{folder}/by-name/s",
        "ANARCHON_ADDRESS": f"unix:{folder}/by-name/s",
        "ANARCHON_STORE": "memory:",
    }
    program = Program(shlex.split(comment), folder, elsewhere)
    try:
        program.wait_for(r"\bready\b")
        application = Program([sys.executable, "by_name.py"], folder, elsewhere)
        application.wait_for("attached to instance")
        assert application.stop() == 0
    finally:
        assert program.stop() == 0


def test_a_command_is_run_as_a_job(folder: Path, environ: dict[str, str], sidecar: Program) -> None:
    words = shlex.split(_only_exec())
    program = Program([*words[: words.index("--")], "--", "true"], folder, environ)
    program.wait_for("attached to instance")
    made = ran(["anarchon", "trigger", "backup", "--wait"], folder, environ)
    assert made.rstrip().endswith(": success")
    assert program.stop() == 0
