"""Pause, resume, trigger and cancel from the command line, on a running sidecar (S29)."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from anarchon import SidecarUnavailableError
from anarchon.v1 import admin_pb2, run_pb2, session_pb2
from anarchon_server import cli
from anarchon_server.cli import _admin, trigger
from tests.unit.server.sidecars import (
    Sidecar,
    every,
    start_sidecar,
    stop_sidecar,
    subscribe_request,
)

Command = Callable[..., Coroutine[Any, Any, tuple[int, str, str]]]


@pytest.fixture
async def sidecar() -> AsyncIterator[Sidecar]:
    started = await start_sidecar()
    yield started
    await stop_sidecar(started)


@pytest.fixture
def command(sidecar: Sidecar, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command against the sidecar; its status, output and errors."""

    async def run(*arguments: str) -> tuple[int, str, str]:
        name, *rest = arguments
        status = await asyncio.to_thread(cli.main, [name, *rest, "--address", sidecar.address])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


class Client:
    """A session with one job, due once an hour."""

    def __init__(self, sidecar: Sidecar) -> None:
        self.sidecar = sidecar
        self.request = subscribe_request(every("report"))
        self.stream: Any = sidecar.sessions.Subscribe(self.request)

    async def attach(self) -> None:
        assert (await self.stream.read()).HasField("attached")
        await self.keep_alive()

    async def keep_alive(self, *tokens: str) -> None:
        named = session_pb2.KeepAliveRequest(session_id=self.request.session_id, in_flight=tokens)
        await self.sidecar.sessions.KeepAlive(named)

    async def assignment(self) -> session_pb2.Assignment:
        """The next attempt; an instance gives none to a client that it has not heard lately."""
        await self.keep_alive()
        event = await self.stream.read()
        assert event.HasField("runs"), event
        found: session_pb2.Assignment = event.runs.assignments[0]
        return found

    async def returns(self, assignment: session_pb2.Assignment, result: str = "done") -> None:
        outcome = run_pb2.Outcome(success=run_pb2.Success(result=result))
        report = session_pb2.Result(token=assignment.token, outcome=outcome)
        await self.sidecar.sessions.Complete(session_pb2.CompleteRequest(results=[report]))


@pytest.fixture
async def client(sidecar: Sidecar) -> Client:
    made = Client(sidecar)
    await made.attach()
    return made


async def test_a_job_is_paused_with_a_reason_and_resumed(command: Command, client: Client) -> None:
    status, out, err = await command("pause", "report", "--reason", "month's end")
    assert (status, err) == (0, "")
    assert out == (
        "report is paused: none of its slots runs until anarchon resume report; what is triggered "
        "does\n"
    )
    _, out, _ = await command("jobs", "--json")
    shown = json.loads(out)
    assert (shown["paused"], shown["pause_reason"], shown["next_slots"]) == (
        True,
        "month's end",
        [],
    )
    status, out, _ = await command("pause", "report", "--reason", "another", "--json")
    assert (status, json.loads(out)["pause_reason"]) == (0, "month's end"), "the first stays"
    status, out, _ = await command("resume", "report")
    assert status == 0
    assert out.startswith("report is not paused; next 2")
    status, out, _ = await command("resume", "report", "--json")
    assert (status, json.loads(out)["paused"]) == (0, False), "resuming twice is no error"


async def test_a_run_is_triggered_with_a_payload_from_a_file(
    command: Command, client: Client, tmp_path: Path
) -> None:
    (tmp_path / "payload").write_bytes(b"\x00seven")
    flags = ("--payload", str(tmp_path / "payload"), "--request-id", "r-1")
    status, out, err = await command("trigger", "report", *flags)
    assert (status, err) == (0, "")
    assert out.startswith("report 2")
    assert out.endswith((": due\n", ": claimed\n"))
    assignment = await client.assignment()
    assert assignment.payload == b"\x00seven"
    assert assignment.trigger == run_pb2.TRIGGER_MANUAL
    await client.returns(assignment)
    status, out, _ = await command("trigger", "report", *flags, "--json")
    again = json.loads(out)
    assert (again["slot"], again["state"]) == (assignment.slot, "success"), "the same run"
    assert again["request_id"] == "r-1"


async def test_trigger_waits_for_the_end_and_says_how_it_went(
    command: Command, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trigger, "WAIT_EVERY_S", 0.01)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"from a pipe")))
    waiting = asyncio.create_task(command("trigger", "report", "--payload", "-", "--wait"))
    assignment = await client.assignment()
    assert assignment.payload == b"from a pipe"
    await client.returns(assignment)
    status, out, _ = await waiting
    assert status == 0
    assert out.endswith(": success\n")
    waiting = asyncio.create_task(command("trigger", "report", "--wait"))
    assignment = await client.assignment()
    failure = run_pb2.Failure(type="ValueError", message="no\x1b[31m")
    report = session_pb2.Result(token=assignment.token, outcome=run_pb2.Outcome(failure=failure))
    await client.sidecar.sessions.Complete(session_pb2.CompleteRequest(results=[report]))
    status, out, _ = await waiting
    assert status == 1
    assert out.endswith(": failed, ValueError: no\\x1b[31m\n")


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (run_pb2.Failure(type="ValueError"), "failed, ValueError"),
        (run_pb2.Failure(message="no rows"), "failed, no rows"),
        (run_pb2.Failure(), "failed"),
    ],
)
def test_what_is_not_known_of_a_failure_leaves_no_gap(failure: run_pb2.Failure, said: str) -> None:
    made = run_pb2.Run(state=run_pb2.RUN_STATE_FAILED)
    assert trigger._outcome(made) == "failed"
    made.attempts.add(failure=failure)
    assert trigger._outcome(made) == said


async def test_a_trigger_that_is_skipped_says_why(command: Command, client: Client) -> None:
    await command("trigger", "report")
    await client.assignment()
    status, out, _ = await command("trigger", "report")
    assert status == 1
    assert out.endswith(": skipped, overlap\n")


async def test_a_run_is_cancelled(command: Command, client: Client) -> None:
    await command("trigger", "report")
    assignment = await client.assignment()
    await client.keep_alive(assignment.token)
    status, out, _ = await command("cancel", "report", str(assignment.slot), "--reason", "wrong")
    assert status == 0
    assert out.endswith("asked to stop\n")
    event = await client.stream.read()
    assert event.cancel.reason == run_pb2.CANCEL_REASON_REQUESTED
    assert event.cancel.message == "wrong"
    stopped = run_pb2.Outcome(stopped=run_pb2.Stopped(reason=run_pb2.CANCEL_REASON_REQUESTED))
    report = session_pb2.Result(token=assignment.token, outcome=stopped)
    await client.sidecar.sessions.Complete(session_pb2.CompleteRequest(results=[report]))
    status, _, err = await command("cancel", "report", str(assignment.slot))
    assert status == 1
    slot = _admin.shown_slot(assignment.slot)
    assert err.endswith(f"the run report {slot} has ended: failed\n")
    _, out, _ = await command("runs", "--job", "report", "--slot", slot)
    assert "\nrequest  " in out
    assert "\ncancel   requested: wrong\n" in out
    _, out, _ = await command("runs", "--job", "report", "--slot", slot, "--json")
    assert json.loads(out)["cancel_message"] == "wrong"


@pytest.mark.parametrize(
    "arguments",
    [
        ("pause", "nobody"),
        ("resume", "nobody"),
        ("trigger", "nobody"),
        ("cancel", "nobody", "1000"),
    ],
)
async def test_what_there_is_not_is_said_in_one_line(
    command: Command, client: Client, arguments: tuple[str, ...]
) -> None:
    status, out, err = await command(*arguments)
    assert (status, out) == (1, "")
    assert err.startswith(f"anarchon {arguments[0]}: no ")
    assert err.count("\n") == 1


async def test_what_is_too_large_is_refused_by_its_name(
    command: Command, client: Client, tmp_path: Path
) -> None:
    with (tmp_path / "payload").open("wb") as file:
        file.truncate(10**12)  # no more of it is read than could be sent
    status, _, err = await command("trigger", "report", "--payload", str(tmp_path / "payload"))
    assert status == 2
    assert "payload: more than 65536 bytes, the most" in err
    status, _, err = await command("pause", "report", "--reason", "x" * 1_025)
    assert (status, "reason of 1025 bytes: must be at most 1024" in err) == (2, True)
    status, _, err = await command("trigger", "report", "--payload", str(tmp_path / "none"))
    assert status == 2
    assert err.endswith("none: No such file or directory\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ("cancel", "report", "9" * 30),
        ("cancel", "report", "5", "--reason", "\udcff"),
        ("pause", "\udcff"),
        ("resume", "\udcff"),
        ("trigger", "report", "--request-id", "\udcff"),
        ("runs", "--job", "report", "--slot", "9" * 30),
        ("runs", "--job", "\udcff"),
    ],
)
async def test_an_argument_that_cannot_be_sent_is_one_line(
    command: Command, arguments: tuple[str, ...]
) -> None:
    status, _, errors = await command(*arguments)
    assert status == 2
    assert errors.startswith(f"anarchon {arguments[0]}: an argument cannot be sent: ")
    assert errors.count("\n") == 1


class Answers:
    """An admin side that makes one run, and says of it what it is told to.

    `handlers` are the instances that handle its job, as they are when it is asked; the last stays.
    """

    def __init__(
        self,
        *answers: run_pb2.Run | BaseException,
        handlers: tuple[str, ...] = ("host:1",),
    ) -> None:
        self._answers = list(answers)
        self._handlers = list(handlers)

    def trigger_run(self, job: str, **_: object) -> run_pb2.Run:
        return run_pb2.Run(job=job, slot=1_000, state=run_pb2.RUN_STATE_DUE)

    def get_run(self, _job: str, _slot: int) -> run_pb2.Run:
        answer = self._answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def get_job(self, job: str) -> admin_pb2.Job:
        handler = self._handlers.pop(0) if len(self._handlers) > 1 else self._handlers[0]
        return admin_pb2.Job(spec={"name": job}, instance_ids=[handler] if handler else [])


AWAY = SidecarUnavailableError("no sidecar answers")
DUE = run_pb2.Run(job="report", slot=1_000, state=run_pb2.RUN_STATE_DUE)
CLAIMED = run_pb2.Run(job="report", slot=1_000, state=run_pb2.RUN_STATE_CLAIMED)
RETRYING = run_pb2.Run(job="report", slot=1_000, state=run_pb2.RUN_STATE_RETRYING)
SUCCESS = run_pb2.Run(job="report", slot=1_000, state=run_pb2.RUN_STATE_SUCCESS)
LEFT = (
    "anarchon trigger: report 1970-01-01T00:00:01Z was triggered, and is not waited for: "
    "anarchon runs --job report --slot 1970-01-01T00:00:01Z shows it\n"
)
NOBODY = "anarchon trigger: no instance handles report now; it runs when one does"


def trigger_and_wait(admin: Answers, monkeypatch: pytest.MonkeyPatch, *flags: str) -> int:
    monkeypatch.setattr(trigger, "WAIT_EVERY_S", 0)

    def with_admin(_command: str, _args: object, work: Callable[[Any], int]) -> int:
        return _admin.in_one_line("trigger", lambda: work(admin))

    monkeypatch.setattr(_admin, "with_admin", with_admin)
    return cli.main(["trigger", "report", "--wait", *flags])


async def test_a_wait_for_a_job_that_no_instance_handles_says_so_and_ends_with_its_timeout(
    command: Command, client: Client
) -> None:
    closing = session_pb2.CloseSessionRequest(session_id=client.request.session_id)
    await client.sidecar.sessions.CloseSession(closing)
    await client.sidecar.loop.settled()
    status, out, err = await command("trigger", "report", "--wait", "--timeout", "1ms")
    assert status == 124
    assert out.endswith(": due\n")
    said, over, left = err.splitlines()
    assert said == f"{NOBODY}; waiting 1ms at most"
    assert over == "anarchon trigger: it had not ended when --timeout 1ms was over"
    assert "was triggered, and is not waited for: anarchon runs --job report --slot 2" in left


def test_a_wait_says_each_time_whether_an_instance_handles_the_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = Answers(*[DUE] * 5, SUCCESS, handlers=("", "", "host:1\x1b", "host:1\x1b", ""))
    assert trigger_and_wait(answers, monkeypatch) == 0
    there = "anarchon trigger: host:1\\x1b handles report now"
    assert capsys.readouterr().err.splitlines() == [NOBODY, there, NOBODY]


def test_a_run_that_an_instance_has_may_be_of_a_job_that_none_takes_any_more(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trigger_and_wait(Answers(CLAIMED, SUCCESS, handlers=("",)), monkeypatch) == 0
    assert capsys.readouterr().err == ""
    assert trigger_and_wait(Answers(RETRYING, SUCCESS, handlers=("",)), monkeypatch) == 0
    assert capsys.readouterr().err == f"{NOBODY}\n"


@pytest.mark.parametrize(
    ("flags", "wrong"),
    [
        (("--timeout", "5s"), "--timeout goes with --wait"),
        (("--wait", "--timeout", "5"), "--timeout '5': "),
        (("--wait", "--timeout", "0s"), "--timeout '0s': must be more than 0"),
    ],
)
async def test_a_timeout_that_is_none_is_refused_before_anything_is_triggered(
    command: Command, client: Client, flags: tuple[str, ...], wrong: str
) -> None:
    status, out, err = await command("trigger", "report", *flags)
    assert (status, out) == (2, "")
    assert err.startswith(f"anarchon trigger: {wrong}")
    _, out, _ = await command("runs", "--job", "report", "--json")
    assert out == ""


def test_a_wait_outlasts_a_sidecar_that_restarts_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trigger_and_wait(Answers(AWAY, AWAY, SUCCESS), monkeypatch) == 0
    captured = capsys.readouterr()
    assert captured.out == "report 1970-01-01T00:00:01Z: success\n"
    assert captured.err == "anarchon trigger: no sidecar answers; asking again for 60 s\n"


def test_a_wait_for_a_sidecar_that_stays_away_ends_and_names_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trigger, "AWAY_MAX_S", -1)
    assert trigger_and_wait(Answers(AWAY), monkeypatch) == 1
    assert capsys.readouterr().err.startswith(LEFT)


def test_an_interrupted_wait_names_the_run_that_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trigger_and_wait(Answers(KeyboardInterrupt()), monkeypatch) == 130
    assert capsys.readouterr().err == LEFT
