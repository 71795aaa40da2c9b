"""`anarchon exec` before it begins: what is wrong is named by the flag that was typed."""

from __future__ import annotations

from pathlib import Path

import pytest

from anarchon_server import cli
from anarchon_server.cli import exec as exec_


@pytest.fixture(autouse=True)
def _nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANARCHON_ADDRESS", "unix:/nonexistent/socket")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--job", "bad name", "--every", "1m"], "--job 'bad name': must be 1 to 128 characters"),
        (["--every", "10"], "--every '10': a number needs its unit"),
        (["--every", "1ms"], "--every '1ms': must be 100ms to 366d"),
        (["--every", "1m", "--offset", "2m"], "--offset '2m': must be less than the period 1m"),
        (["--every", "1m", "--tz", "UTC"], "--tz goes with --cron"),
        (["--cron", "99 * * * *"], "--cron '99 * * * *': minute is '99': 99 is outside 0 to 59"),
        (["--cron", "* *"], "--cron '* *': must have five fields"),
        (["--cron", "@daily", "--tz", "a b"], "--tz 'a b': must be an IANA name"),
        (["--every", "1m", "--lease", "1s"], "--lease '1s': must be 3s to 1h"),
        (["--every", "1m", "--catch-up-window", "x"], "--catch-up-window 'x': write whole numbers"),
        (["--every", "1m", "--cancel-grace", "1"], "--cancel-grace '1': a number needs its unit"),
        (["--every", "1m", "--max-attempts", "0"], "--max-attempts 0: must be a whole number"),
        (
            ["--every", "1m", "--retry-delay", "2s"],
            "--retry-delay '2s': set --retries to 1 or more",
        ),
        (
            ["--every", "1m", "--retries", "1", "--retry-delay", "2h"],
            "--retry-delay '2h': must be more than zero and at most --retry-max-delay, 1h",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_wrong_is_named_by_the_flag_that_was_typed(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job = [] if "--job" in flags else ["--job", "x"]
    assert cli.main(["exec", *job, *flags, "--", "true"]) == cli.USAGE_ERROR
    assert capsys.readouterr().err.startswith(f"anarchon exec: {said}")


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (
            "job 'x': expression is '0 0 31 2 *': it never fires again",
            "job 'x': --cron is '0 0 31 2 *': it never fires again",
        ),
        ("job 'x': day of week is 'FOO': no", "job 'x': --cron: day of week is 'FOO': no"),
        ("job 'x': time zone is 'Mars': no", "job 'x': --tz is 'Mars': no"),
        ("job 'x': retry.delay is '2d': no", "job 'x': --retry-delay is '2d': no"),
        ("job 'x': start_deadline is '2s': no", "job 'x': --start-deadline is '2s': no"),
        (
            "job 'x': overlap=queue is not supported by redis:script",
            "job 'x': overlap=queue is not supported by redis:script",
        ),
        ("this sidecar has 100 sessions, its limit", "this sidecar has 100 sessions, its limit"),
    ],
)
def test_what_the_sidecar_refuses_is_named_by_the_flag_too(said: str, shown: str) -> None:
    assert exec_._said_by_flag(said) == shown


def test_a_program_that_cannot_be_run_is_refused_before_the_job_is_offered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("no program")
    for program, status, why in (
        ("no-such-program-anywhere", 127, "there is no such program in PATH"),
        (f"{tmp_path}/gone", 127, "there is no such program"),
        (str(text), 126, "is no program that this user may run"),
        (str(tmp_path), 126, "is no program that this user may run"),
    ):
        assert cli.main(["exec", "--job", "x", "--every", "1m", "--", program]) == status
        assert capsys.readouterr().err == f"anarchon exec: {program}: {why}\n"
