"""`anarchon exec`: commands as handlers, with real processes beside a real sidecar."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.integration.harness import Process
from tests.servers.ports import free_port

WAIT_S = 60


class Beside:
    """A sidecar on a SQLite file, and programs that run commands beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = f"127.0.0.1:{free_port()}"
        self.sidecar = Process(folder / "sidecar.log")
        self.programs: list[Process] = []
        self.env = {
            "ANARCHON_STORE": f"sqlite://{folder}/store.db",
            "ANARCHON_ADDRESS": self.address,
            "ANARCHON_TOKEN_FILE": "",
        }

    async def start(self) -> None:
        # The lease is as long as the default: on a busy machine a shorter one may end in mid-run.
        serve = ("-m", "anarchon_server", "serve", "--listen", self.address)
        await self.sidecar.spawn(*serve, env=self.env)

    async def exec(self, *arguments: str) -> Process:
        program = Process(self.folder / f"exec{len(self.programs)}.log")
        self.programs.append(program)
        await program.spawn("-m", "anarchon_server", "exec", *arguments, env=self.env)
        return program

    async def ask(self, *arguments: str) -> tuple[int, str]:
        """Run an admin command; its status and output, or what it said of there being none."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "anarchon_server", *arguments),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **self.env},
        )
        async with asyncio.timeout(WAIT_S):
            output, errors = await process.communicate()
        assert process.returncode is not None
        return process.returncode, (output or errors).decode()

    async def trigger(self, job: str, *flags: str) -> dict[str, Any]:
        """Trigger a run as soon as somebody handles the job; the run as it is then.

        Once, whatever becomes of the answer: a second run would be skipped while the first goes on.
        """
        if "--request-id" not in flags:
            flags = (*flags, "--request-id", str(uuid4()))
        async with asyncio.timeout(WAIT_S):
            while True:
                status, output = await self.ask("trigger", job, "--json", *flags)
                if output.startswith("{"):
                    found: dict[str, Any] = json.loads(output)
                    return found
                assert status == 1, output

    async def run(self, made: dict[str, Any]) -> dict[str, Any]:
        _, output = await self.ask(
            "runs", "--job", made["job"], "--slot", str(made["slot"]), "--json"
        )
        found: dict[str, Any] = json.loads(output)
        return found


@pytest.fixture
async def beside(tmp_path: Path) -> AsyncIterator[Beside]:
    made = Beside(tmp_path)
    await made.start()
    yield made
    for program in (*made.programs, made.sidecar):
        await program.destroy()


def lives(pid: int) -> bool:
    """Whether there is such a process, or what is left of one that nobody has waited for."""
    return Path(f"/proc/{pid}").exists()


async def gone(pid: int) -> bool:
    """Whether it goes: a signal that was sent has its effect later, and the test is not told."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(WAIT_S):
            while lives(pid):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    return not lives(pid)


def shell(line: str) -> tuple[str, ...]:
    return ("--", "/bin/sh", "-c", line)


async def line_of(path: Path) -> str:
    """What a command wrote into a named pipe."""

    def read() -> str:
        with path.open() as pipe:
            return pipe.readline().strip()

    async with asyncio.timeout(WAIT_S):
        return await asyncio.to_thread(read)


async def test_a_command_learns_its_run_and_its_output_is_the_result(beside: Beside) -> None:
    say = "echo $ANARCHON_JOB $ANARCHON_SLOT $ANARCHON_ATTEMPT $ANARCHON_FENCE; env | grep TOKEN"
    await beside.exec("--job", "report", "--every", "1h", *shell(say))
    made = await beside.trigger("report", "--wait")
    assert made["state"] == "success"
    (attempt,) = (await beside.run(made))["attempts"]
    first, *tokens = attempt["result"].splitlines()
    assert first == f"report {made['slot']} 1 {attempt['fence']}"
    assert len(tokens) == 1
    assert tokens[0].startswith(f"ANARCHON_RUN_TOKEN={made['slot']}.")


async def test_s29_a_triggered_command_reads_its_payload_and_another_reads_nothing(
    beside: Beside, tmp_path: Path
) -> None:
    payload = tmp_path / "payload"
    payload.write_bytes(b"x" * 65_535 + b"\n")
    await beside.exec("--job", "load", "--on-trigger", *shell("echo $ANARCHON_TRIGGER $(wc -c)"))
    for given, said in ((("--payload", str(payload)), "manual 65536"), ((), "manual 0")):
        made = await beside.trigger("load", *given, "--wait")
        (attempt,) = (await beside.run(made))["attempts"]
        assert (attempt["state"], attempt["result"]) == ("success", said)


async def test_the_exit_status_is_the_result(beside: Beside) -> None:
    await beside.exec("--job", "bad", "--every", "1h", *shell("echo no such invoice >&2; exit 3"))
    made = await beside.trigger("bad", "--wait")
    assert made["state"] == "failed"
    (attempt,) = (await beside.run(made))["attempts"]
    assert attempt["failure"]["type"] == "ExitStatus"
    assert attempt["failure"]["message"] == "exit status 3"
    assert attempt["failure"]["stack_trace"] == "no such invoice", "no trace of Python's"
    log = beside.programs[0].log.read_text()
    assert f"ERROR bad {made['slot']} attempt 1: failed: exit status 3" in log
    assert "Traceback" not in log


async def test_a_command_that_has_vanished_has_failed(beside: Beside, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho ran\n")
    program.chmod(0o755)
    await beside.exec("--job", "none", "--every", "1h", "--", str(program))
    assert (await beside.trigger("none", "--wait"))["state"] == "success"
    program.unlink()
    made = await beside.trigger("none", "--wait")
    (attempt,) = (await beside.run(made))["attempts"]
    assert attempt["failure"]["message"] == "exit status 127"
    assert f"{program}: No such file or directory" in attempt["failure"]["stack_trace"]


async def test_s21a_a_cancel_is_sigterm_to_the_whole_group(beside: Beside, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    line = f"trap 'echo told; exit 0' TERM; sleep 600 & echo $! >{pipe}; wait"
    await beside.exec("--job", "long", "--every", "1h", *shell(line))
    made = await beside.trigger("long")
    child = int(await line_of(pipe))
    status, _ = await beside.ask("cancel", "long", str(made["slot"]))
    assert status == 0
    ended = await beside.trigger("long", "--request-id", made["request_id"], "--wait")
    assert (ended["state"], ended["reason"]) == ("failed", "cancelled")
    assert await gone(child), "what it had started is gone too"


async def test_s21a_a_command_that_does_not_listen_is_killed_after_its_grace(
    beside: Beside, tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    line = f"trap '' TERM; echo $$ >{pipe}; while :; do sleep 600; done"
    flags = ("--job", "deaf", "--every", "1h", "--cancel-grace", "500ms")
    await beside.exec(*flags, *shell(line))
    made = await beside.trigger("deaf")
    command = int(await line_of(pipe))
    await beside.ask("cancel", "deaf", str(made["slot"]))
    ended = await beside.trigger("deaf", "--request-id", made["request_id"], "--wait")
    assert ended["state"] == "failed"
    assert await gone(command)


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
async def test_s24_a_command_dies_with_its_runner_and_another_takes_over(
    beside: Beside, tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    line = f"echo $$ $ANARCHON_ATTEMPT >{pipe}; test $ANARCHON_ATTEMPT = 2 || exec sleep 600"
    first = await beside.exec("--job", "long", "--every", "1h", *shell(line))
    made = await beside.trigger("long")
    command, attempt = map(int, (await line_of(pipe)).split())
    assert attempt == 1
    descriptor = os.pidfd_open(command)
    await beside.exec("--job", "long", "--every", "1h", *shell(line))
    first.signal(signal.SIGKILL)
    async with asyncio.timeout(WAIT_S):
        await asyncio.get_running_loop().run_in_executor(None, _wait_for, descriptor)
    assert (await line_of(pipe)).endswith(" 2")
    ended = await beside.trigger("long", "--request-id", made["request_id"], "--wait")
    assert ended["state"] == "success"
    history = await beside.run(made)
    assert [a["cause"] for a in history["attempts"]] == ["claim", "takeover"]
    assert history["attempts"][0]["reason"] == "runner_lost"


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
async def test_s24_what_a_shell_has_started_dies_with_the_runner_too(
    beside: Beside, tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    line = f"sleep 600 & echo $! >{pipe}; wait"
    program = await beside.exec("--job", "long", "--every", "1h", *shell(line))
    await beside.trigger("long")
    descriptor = os.pidfd_open(int(await line_of(pipe)))
    program.signal(signal.SIGKILL)
    async with asyncio.timeout(WAIT_S):
        await asyncio.get_running_loop().run_in_executor(None, _wait_for, descriptor)


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_CHILD_SUBREAPER is Linux's")
@pytest.mark.parametrize("how", ["cancel", "kill the runner"])
async def test_s24_what_has_left_the_group_dies_too_once_the_command_was_told_to_stop(
    beside: Beside, tmp_path: Path, how: str
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    # An orphan in a session of its own, whose own child is in a third.
    inner = f"setsid sleep 600 & echo $$ $! >{pipe}; trap '' TERM; wait; sleep 600"
    line = f'(setsid sh -c "{inner.replace("$", chr(92) + "$")}" &); exec sleep 600'
    program = await beside.exec("--job", "long", "--every", "1h", *shell(line))
    made = await beside.trigger("long")
    left = [os.pidfd_open(int(pid)) for pid in (await line_of(pipe)).split()]
    if how == "cancel":
        await beside.ask("cancel", "long", str(made["slot"]))
    else:
        program.signal(signal.SIGKILL)
    async with asyncio.timeout(WAIT_S):
        for descriptor in left:
            await asyncio.get_running_loop().run_in_executor(None, _wait_for, descriptor)


async def test_a_command_has_ended_also_where_what_left_its_group_holds_its_output(
    beside: Beside, tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    line = f"setsid sleep 600 & echo $! >{pipe}; echo done"
    await beside.exec("--job", "leaves", "--every", "1h", *shell(line))
    made = await beside.trigger("leaves")
    left = int(await line_of(pipe))
    try:
        ended = await beside.trigger("leaves", "--request-id", made["request_id"], "--wait")
        assert ended["state"] == "success"
        assert (await beside.run(made))["attempts"][0]["result"] == "done"
    finally:
        os.kill(left, signal.SIGKILL)


@pytest.mark.parametrize(
    ("number", "said"),
    [
        pytest.param(signal.SIGTERM, "killed by SIGTERM", id="sigterm"),
        pytest.param(signal.SIGKILL, "killed by SIGKILL", id="sigkill"),
        pytest.param(signal.SIGPIPE, "killed by SIGPIPE", id="what-python-ignores"),
        pytest.param(40, "killed by signal 40", id="without-a-name"),
    ],
)
async def test_a_signal_that_ended_the_command_is_the_result(
    beside: Beside, number: int, said: str
) -> None:
    await beside.exec("--job", "killed", "--every", "1h", *shell(f"kill -{number:d} $$"))
    made = await beside.trigger("killed", "--wait")
    (attempt,) = (await beside.run(made))["attempts"]
    assert attempt["failure"]["message"] == said


async def test_the_end_of_output_that_is_no_text_is_kept(beside: Beside) -> None:
    line = "head -c 20000 /dev/zero | tr '\\0' '\\377'; echo the end"
    await beside.exec("--job", "binary", "--every", "1h", *shell(line))
    made = await beside.trigger("binary", "--wait")
    result = (await beside.run(made))["attempts"][0]["result"]
    assert result.endswith("the end")
    assert len(result.encode()) <= 16 * 1024


async def test_a_run_ends_also_where_nobody_reads_the_programs_output(beside: Beside) -> None:
    line = "head -c 100000 /dev/zero | tr '\\0' x; echo the end"
    arguments = ("exec", "--job", "loud", "--every", "1h", *shell(line))
    read_end, write_end = os.pipe()
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "anarchon_server", *arguments),
        stdout=write_end,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, **beside.env},
    )
    try:
        made = await beside.trigger("loud", "--wait")
        assert made["state"] == "success"
        assert (await beside.run(made))["attempts"][0]["result"].endswith("the end")
    finally:
        program.kill()
        await program.wait()
        os.close(read_end)
        os.close(write_end)


def _wait_for(descriptor: int) -> None:
    select.select([descriptor], [], [])
    os.close(descriptor)


async def test_s23_a_stop_lets_the_command_finish(beside: Beside, tmp_path: Path) -> None:
    begun, go_on = tmp_path / "begun", tmp_path / "go-on"
    os.mkfifo(begun)
    os.mkfifo(go_on)
    line = f"echo begun >{begun}; read line <{go_on}; echo done"
    program = await beside.exec("--job", "careful", "--every", "1h", *shell(line))
    made = await beside.trigger("careful")
    await line_of(begun)
    program.signal(signal.SIGTERM)
    await asyncio.to_thread(go_on.write_text, "\n")
    assert await program.ended() == 0
    assert (await beside.run(made))["state"] == "success"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--job", "a", "--every", "1h"), "name a command after --"),
        (("--job", "a b", "--every", "1h", "--", "true"), "--job 'a b': must be"),
        (
            ("--job", "a", "--", "true"),
            "one of the arguments --every --cron --on-trigger --by-name is required",
        ),
    ],
)
async def test_what_is_wrong_is_said_in_one_line(
    tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    program = Process(tmp_path / "log")
    await program.spawn("-m", "anarchon_server", "exec", *arguments)
    assert await program.ended() == 2
    assert said in program.log.read_text()
