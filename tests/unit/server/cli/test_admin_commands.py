"""The admin commands against a running sidecar: tables for people, JSON for programs, and one line
where something is wrong.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from anarchon.admin import AdminClient
from anarchon.v1 import admin_pb2, run_pb2, session_pb2
from anarchon_server import cli
from anarchon_server.cli import _admin, jobs, runs
from anarchon_server.core.store import Capabilities
from tests.unit.server.sidecars import (
    Sidecar,
    every,
    start_sidecar,
    stop_sidecar,
    subscribe_request,
)

Command = Callable[..., Coroutine[Any, Any, tuple[int, str, str]]]


@pytest.fixture
def command(sidecar: Sidecar, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command against the sidecar; its status, output and errors."""

    async def run(name: str, *flags: str) -> tuple[int, str, str]:
        arguments = [name, "--address", sidecar.address, *flags]
        status = await asyncio.to_thread(cli.main, arguments)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
async def history(sidecar: Sidecar) -> session_pb2.Assignment:
    """One run of `fast` that has failed."""
    request = subscribe_request(every("fast", 100), every("slow", 3_600_000))
    stream = sidecar.sessions.Subscribe(request)
    await stream.read()
    await sidecar.sessions.KeepAlive(session_pb2.KeepAliveRequest(session_id=request.session_id))
    assignment: session_pb2.Assignment = (await stream.read()).runs.assignments[0]
    failure = run_pb2.Failure(type="ValueError", message="no\x1b[31m", stack_trace="line 1")
    result = session_pb2.Result(token=assignment.token, outcome=run_pb2.Outcome(failure=failure))
    await sidecar.sessions.Complete(session_pb2.CompleteRequest(results=[result]))
    await sidecar.sessions.KeepAlive(
        session_pb2.KeepAliveRequest(session_id=request.session_id, draining=True)
    )
    return assignment


def objects(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


# ── Runs ────────────────────────────────────────────────────────────────────────────────────────


async def test_runs_are_objects_in_the_protocols_words(
    command: Command, history: session_pb2.Assignment
) -> None:
    status, out, _ = await command("runs", "--job", "fast", "--state", "failed", "--json")
    assert status == 0
    (found,) = objects(out)
    assert (found["job"], found["slot"]) == ("fast", history.slot)
    assert (found["trigger"], found["state"], found["reason"]) == ("schedule", "failed", "")
    (attempt,) = found["attempts"]
    assert attempt["attempt"] == 1
    assert attempt["instance_id"] == "test:1"
    assert attempt["fence"] == history.fence
    assert (attempt["state"], attempt["cause"]) == ("failed", "claim")
    assert attempt["claim_time"].endswith("Z")
    assert attempt["end_time"].endswith("Z")
    assert attempt["failure"] == {
        "type": "ValueError",
        "message": "no\x1b[31m",
        "stack_trace": "",
        "permanent": False,
        "retry_after": None,
    }
    assert "\x1b" not in out


@pytest.mark.usefixtures("history")
async def test_runs_are_a_table_for_people(command: Command) -> None:
    status, out, err = await command("runs", "--state", "FAILED,skipped", "--limit", "1")
    assert (status, err) == (0, "")
    head, row = out.splitlines()
    assert head.split()[:2] == ["JOB", "SLOT"]
    assert row.startswith("fast  2")
    assert row.endswith("  ValueError: no\\x1b[31m")


async def test_one_run_is_shown_in_full_with_its_traces(
    command: Command, history: session_pb2.Assignment
) -> None:
    status, out, _ = await command("runs", "--job", "fast", "--slot", str(history.slot))
    assert status == 0
    lines = out.splitlines()
    assert lines[0] == "job      fast"
    assert lines[3] == "state    failed"
    assert "attempt 1 on test:1" in lines
    assert "  raised   ValueError: no\\x1b[31m" in lines
    assert lines[-1] == "    line 1"
    shown = _admin.shown_slot(history.slot)
    _, out, _ = await command("runs", "--job", "fast", "--slot", shown, "--json")
    (found,) = objects(out)
    assert found["attempts"][0]["failure"]["stack_trace"] == "line 1"


async def test_one_run_is_shown_with_all_that_is_known_of_it(
    sidecar: Sidecar, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run_pb2.Run(
        job="a",
        slot=1_791_633_610_000,
        trigger=run_pb2.TRIGGER_MANUAL,
        state=run_pb2.RUN_STATE_SKIPPED,
        reason="overlap",
        blocking_slot=1_791_633_600_500,
        slots_covered=10_000,
        request_id="r-1",
        cancel_requested=True,
    )
    found.next_attempt_time.FromMilliseconds(1_791_633_620_000)
    found.lease_end_time.FromMilliseconds(1_791_633_630_000)
    monkeypatch.setattr(AdminClient, "get_run", lambda *_: found)
    status, out, _ = await command("runs", "--job", "a", "--slot", "1791633610000")
    assert status == 0
    assert out.splitlines() == [
        "job      a",
        "slot     2026-10-10T12:00:10Z  1791633610000",
        "covers   at least 10,000 slots, the newest of which is this",
        "trigger  manual",
        "request  r-1",
        "state    skipped (overlap)",
        "blocked  by the run of 2026-10-10T12:00:00.500Z",
        "cancel   requested",
        "retry    due 2026-10-10T12:00:20Z",
        "lease    until 2026-10-10T12:00:30Z",
    ]


@pytest.mark.parametrize(
    ("reason", "shown"),
    [("cancelled", "requested"), ("timeout", "timeout"), ("superseded", "superseded")],
)
def test_s21a_a_cancel_is_shown_with_what_it_was_for(reason: str, shown: str) -> None:
    assert runs._cancel(run_pb2.Run(reason=reason)) == ""
    assert runs._cancel(run_pb2.Run(reason=reason, cancel_requested=True)) == shown


@pytest.mark.parametrize("name", ["jobs", "runs", "instances"])
async def test_s30_a_list_of_one_instances_own_says_so(
    sidecar: Sidecar, command: Command, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert "only" not in (await command(name))[2]
    without = property(lambda _: Capabilities("rabbitmq", history=False))
    monkeypatch.setattr(type(sidecar.store), "capabilities", without)
    status, _, err = await command(name)
    assert status == 0
    assert f"anarchon {name}: this is only what the instance test:1 knows of itself" in err


@pytest.mark.usefixtures("history")
async def test_what_there_is_not_is_said(command: Command) -> None:
    assert await command("runs", "--job", "slow") == (0, "", "no runs\n")
    status, out, err = await command("runs", "--job", "nope")
    assert (status, out) == (1, "")
    assert err.startswith("anarchon runs: no job 'nope'")
    status, out, err = await command("runs", "--job", "fast", "--slot", "5")
    assert (status, out) == (1, "")
    assert err.startswith("anarchon runs: no run 'fast 1970-01-01T00:00:00.005Z'")
    status, out, err = await command("runs", "--slot", "5")
    assert (status, out, err) == (2, "", "anarchon runs: --slot needs the job too: --job NAME\n")


def test_the_outcome_of_a_run_is_its_reason_its_error_and_its_result() -> None:
    found = run_pb2.Run(job="a", state=run_pb2.RUN_STATE_SKIPPED, reason="overlap")
    assert runs._row(found)[-1] == "overlap"
    found.blocking_slot = 1_791_633_600_000
    assert runs._row(found)[-1] == "overlap (2026-10-10T12:00:00Z)"
    found = run_pb2.Run(state=run_pb2.RUN_STATE_SKIPPED, reason="missed", slots_covered=1_200)
    assert runs._row(found)[-1] == "missed (1,200 slots)"
    found = run_pb2.Run(job="a", state=run_pb2.RUN_STATE_RUNNING, cancel_requested=True)
    assert runs._row(found)[-1] == "asked to stop"
    found = run_pb2.Run(job="a", state=run_pb2.RUN_STATE_SUCCESS)
    last = found.attempts.add(attempt=1, result="x" * 200)
    last.start_time.FromMilliseconds(1_000)
    last.end_time.FromMilliseconds(3_800)
    assert runs._row(found)[-2:] == ("2.8s", "x" * 97 + "...")


@pytest.mark.parametrize(
    ("elapsed_ms", "shown"),
    [(-5, "0ms"), (35, "35ms"), (1_000, "1.0s"), (59_999, "60.0s"), (5_400_500, "1h30m")],
)
def test_durations_are_as_exact_as_people_need(elapsed_ms: int, shown: str) -> None:
    attempt = run_pb2.Attempt()
    attempt.start_time.FromMilliseconds(10_000)
    assert _admin.shown_duration(attempt, "start_time", "end_time") == ""
    attempt.end_time.FromMilliseconds(10_000 + elapsed_ms)
    assert _admin.shown_duration(attempt, "start_time", "end_time") == shown


def runs_args(*flags: str) -> Any:
    parser, _ = cli._parser("runs", runs)
    return parser.parse_args(["runs", *flags])


def run(slot: int, state: Any = run_pb2.RUN_STATE_SUCCESS, lease: int = 1) -> run_pb2.Run:
    found = run_pb2.Run(job="a", slot=slot, state=state)
    found.lease_end_time.seconds = lease
    return found


Watch = Callable[..., str]


class Watched:
    """A sidecar that has these runs, newest first, when it is asked, and then sees these changes."""

    scope = ""

    def __init__(self, runs: list[run_pb2.Run], changes: list[run_pb2.Run]) -> None:
        self._runs = runs
        self._changes = changes
        self.begun = False

    @contextmanager
    def watch_runs(self, job: str) -> Iterator[Iterator[run_pb2.Run]]:
        self.begun = True
        yield iter(self._changes)

    def list_runs(self, limit: int, states: Any, **_: Any) -> Iterator[run_pb2.Run]:
        assert self.begun, "or what changes meanwhile would be missed"
        wanted = list(states)
        return islice((r for r in self._runs if not wanted or r.state in wanted), limit)


@pytest.fixture
def watch(capsys: pytest.CaptureFixture[str]) -> Watch:
    """What watching prints."""

    def watched(
        runs_: list[run_pb2.Run], changes: list[run_pb2.Run], flags: tuple[str, ...] = ()
    ) -> str:
        admin: Any = Watched(runs_, changes)
        assert runs._list(runs_args("--watch", *flags), admin) == 0
        return capsys.readouterr().out

    return watched


def test_watching_prints_what_is_new_or_has_changed_and_not_a_moved_lease(watch: Watch) -> None:
    out = watch(
        [run(2, run_pb2.RUN_STATE_RUNNING), run(1)],
        [
            run(2, run_pb2.RUN_STATE_RUNNING, lease=9),
            run(1),
            run(2, run_pb2.RUN_STATE_FAILED, lease=9),
            run(1, run_pb2.RUN_STATE_RUNNING),
            run(3, run_pb2.RUN_STATE_CLAIMED),
        ],
        flags=("--json",),
    )
    shown = [(found["slot"], found["state"]) for found in objects(out)]
    assert shown == [(1, "success"), (2, "running"), (2, "failed"), (3, "claimed")]


def test_watching_shows_no_more_old_runs_than_were_asked_for(watch: Watch) -> None:
    old = [run(slot) for slot in range(200, 0, -1)]
    out = watch(old, [run(201)], flags=("--json", "--limit", "3"))
    assert [found["slot"] for found in objects(out)] == [198, 199, 200, 201]


def test_watching_shows_runs_that_come_into_the_states_asked_for(watch: Watch) -> None:
    out = watch(
        [run(2, run_pb2.RUN_STATE_RUNNING), run(1, run_pb2.RUN_STATE_FAILED)],
        [run(3, run_pb2.RUN_STATE_CLAIMED), run(3, run_pb2.RUN_STATE_FAILED), run(2)],
        flags=("--json", "--state", "failed"),
    )
    assert [(found["slot"], found["state"]) for found in objects(out)] == [
        (1, "failed"),
        (3, "failed"),
    ]


def test_watching_remembers_no_more_than_it_must(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "_SEEN_MAX", 2)
    out = watch([], [run(1), run(2), run(2), run(3), run(1)], flags=("--json",))
    assert [found["slot"] for found in objects(out)] == [1, 2, 3, 1]


def test_watched_runs_stand_below_their_heads(watch: Watch) -> None:
    slot = 1_791_633_610_000
    won = run(slot, run_pb2.RUN_STATE_RUNNING)
    won.attempts.add(attempt=1, instance_id="demo-1")
    out = watch([], [won, run(slot + 1_000, run_pb2.RUN_STATE_SKIPPED)])
    head, first, second = out.splitlines()
    assert head.split()[:2] == ["JOB", "SLOT"]
    assert first[head.index("INSTANCE") :].startswith("demo-1")
    assert second[head.index("STATE") :].startswith("skipped")


@pytest.mark.parametrize(
    ("flags", "right"),
    [
        (["--state", "success,done"], "'done': there are due, claimed"),
        (["--slot", "yesterday"], "2026-10-10T12:00:10Z, or in milliseconds"),
        (["--limit", "0"], "a whole number from 1"),
        (["--limit", "many"], "a whole number from 1"),
    ],
)
def test_bad_flags_are_refused_with_what_would_be_right(
    flags: list[str], right: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["runs", *flags])
    assert ended.value.code == 2
    assert right in capsys.readouterr().err


# ── Jobs, instances, health ─────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("history")
async def test_jobs_are_listed(command: Command) -> None:
    _, out, _ = await command("jobs", "--json")
    fast, slow = objects(out)
    assert fast["spec"]["name"] == "fast"
    assert fast["spec"]["every"] == {"period": "0.100s", "offset": None}
    assert fast["spec"]["overlap"] is None
    assert fast["last_run"]["state"] == "failed"
    assert slow["instance_ids"] == ["test:1"]
    assert len(slow["next_slots"]) == 5
    _, table, _ = await command("jobs")
    assert [line.split()[0] for line in table.splitlines()] == ["JOB", "fast", "slow"]
    assert "every 1h" in table
    assert "no instance handles it" not in table


def test_a_job_that_nobody_handles_shows_no_next_slot() -> None:
    job = admin_pb2.Job(spec=every("a"), next_slots=[1_791_633_610_000], instance_ids=["a:1"])
    assert jobs._row(job)[2:] == ("2026-10-10T12:00:10Z", "", "1", "")
    del job.instance_ids[:]
    assert jobs._row(job)[2:] == ("-", "", "0", "no instance handles it")


@pytest.mark.usefixtures("history")
async def test_instances_are_listed(command: Command) -> None:
    _, out, _ = await command("instances", "--json")
    (found,) = objects(out)
    assert (found["instance_id"], found["state"]) == ("test:1", "active")
    assert found["namespace"] == "default"
    assert "sessions" not in found
    _, table, _ = await command("instances")
    assert "VERSION  TZDATA" in " ".join(table.splitlines()[0].split()).replace(" ", "  ")
    assert table.splitlines()[1].startswith("test:1    active")


async def test_health_is_told_by_the_exit_status(sidecar: Sidecar, command: Command) -> None:
    status, out, err = await command("health")
    assert (status, out) == (1, "")
    assert err.startswith("anarchon health: not ready")
    sidecar.server.health.set_ready(True)
    assert await command("health") == (0, "ready\n", "")


# ── Errors ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["jobs", "runs", "instances", "health"])
def test_a_sidecar_that_is_not_there_is_one_line(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([name, "--address", "127.0.0.1:1"]) == 1
    assert capsys.readouterr().err == (
        f"anarchon {name}: no sidecar answers at 127.0.0.1:1; start one with `anarchon serve`, "
        "or give the address of another\n"
    )


@pytest.mark.parametrize(
    ("flags", "right"),
    [
        (("--address", "somewhere"), '"host:port"'),
        (("--address", "10.0.0.1:7420"), "need TLS"),
        (("--address", "127.0.0.1:1", "--token-file", "/nonexistent"), "No such file"),
        (("--address", "10.0.0.1:7420", "--tls-ca", "/nonexistent"), "No such file"),
    ],
)
def test_what_cannot_be_called_is_refused_before_it_is_tried(
    flags: tuple[str, ...], right: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["jobs", *flags]) == 2
    err = capsys.readouterr().err
    assert err.startswith("anarchon jobs: ")
    assert right in err


async def test_the_token_is_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "token"
    _write(file, "s3cret\n")
    sidecar = await start_sidecar(token_file=str(file))
    try:
        address = ["--address", sidecar.address]
        assert await asyncio.to_thread(cli.main, ["jobs", *address]) == 1
        assert "call token is missing or wrong" in capsys.readouterr().err
        with_token = ["jobs", *address, "--token-file", str(file)]
        assert await asyncio.to_thread(cli.main, with_token) == 0
    finally:
        await stop_sidecar(sidecar)


def _write(file: Path, text: str) -> None:
    file.write_text(text)


# ── Showing ─────────────────────────────────────────────────────────────────────────────────────


def test_times_and_durations_that_no_text_form_has_are_shown_all_the_same() -> None:
    attempt = run_pb2.Attempt(claim_time=Timestamp(seconds=2**62))
    attempt.failure.retry_after.seconds = 2**62
    attempt.failure.retry_after.nanos = -5
    shown = _admin.plain(attempt)
    assert shown["claim_time"] == "4611686018427387904s+0ns"
    assert shown["failure"]["retry_after"] == "4611686018427387904s-5ns"
    assert _admin.shown_time(attempt, "claim_time").endswith("s since 1970")
    assert _admin.shown_slot(-(2**63)).endswith("s since 1970")


def test_a_word_that_is_not_known_is_shown_as_its_number() -> None:
    found = run_pb2.Run()
    found.MergeFromString(b"\x20\x63")  # state = 99
    assert _admin.plain(found)["state"] == 99
    assert _admin.plain(run_pb2.Run())["state"] is None
    assert _admin.word_of(run_pb2.Run(), "state") == ""


def test_a_map_is_an_object() -> None:
    job = admin_pb2.Job(spec=every("a"))
    job.spec.labels["team"] = "shop"
    assert _admin.plain(job)["spec"]["labels"] == {"team": "shop"}


def test_a_terminal_is_shown_one_printable_line_a_row(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _admin.print_table(("A", "B"), [("x\x1b[2J\n", "y" * 100), ("z" * 100, "")])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert all(line.isprintable() for line in lines)
    assert lines[1].endswith("y" * 100), "what stands last is shown whole"
    assert lines[2].endswith("z...")
