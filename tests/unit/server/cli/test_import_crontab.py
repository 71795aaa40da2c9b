"""A crontab, and the jobs it would become."""

from __future__ import annotations

import io
import shlex
from pathlib import Path

import pytest

from anarchon_server import cli
from anarchon_server.cli.import_crontab import Entry, read_crontab


def entries(text: str, **options: bool) -> list[Entry]:
    return list(read_crontab(text, "Europe/Athens", **options))


def only(text: str, **options: bool) -> Entry:
    (entry,) = entries(text, **options)
    return entry


def test_a_line_becomes_a_job_of_its_programs_name() -> None:
    entry = only("0 3 * * 1-5 /usr/local/bin/backup --all  >/dev/null 2>&1\n")
    assert (entry.name, entry.expression, entry.zone) == ("backup", "0 3 * * 1-5", "Europe/Athens")
    assert entry.command == ("/bin/sh", "-c", "/usr/local/bin/backup --all  >/dev/null 2>&1")
    assert (entry.differs, entry.refused) == ([], "")


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("cd /srv/app && ./sync.sh now", "sync.sh"),
        ("LANG=C /opt/x/report", "report"),
        ("report%input", "report"),
        ("[ -x /bin/true ]", "job"),
        ("'quoted program'", "quoted"),
    ],
)
def test_a_name_is_taken_from_what_is_run(command: str, name: str) -> None:
    assert only(f"* * * * * {command}").name == name


def test_names_are_given_once() -> None:
    text = "0 1 * * * a\n0 2 * * * a\n@reboot a\n0 3 * * * a\n"
    assert [entry.name for entry in entries(text) if not entry.refused] == ["a", "a-2", "a-3"]


def test_a_name_with_a_number_is_not_given_to_another() -> None:
    text = "0 1 * * * a\n0 2 * * * a\n0 3 * * * a-2\n"
    assert [entry.name for entry in entries(text)] == ["a", "a-2", "a-2-2"]


@pytest.mark.parametrize("separator", ["\f", "\v", "\x1c", "\x85", "\u2028"])
def test_what_ends_no_line_for_cron_ends_none(separator: str) -> None:
    assert only(f"0 1 * * * echo {separator}a\n").command[-1] == f"echo {separator}a"


def test_lines_may_end_as_in_windows() -> None:
    first, second = entries("A=1\r\n0 1 * * * a\r\n\r\n# b\r\n0 2 * * * b c\r\n")
    assert first.command == ("env", "A=1", "/bin/sh", "-c", "a")
    assert (second.number, second.command[-1]) == (5, "b c")


def test_comments_and_empty_lines_are_nothing_and_lines_are_counted() -> None:
    assert [e.number for e in entries("# a\n\n   # b\n0 1 * * * a\n\n0 2 * * * b\n")] == [4, 6]


def test_variables_count_from_their_line_on() -> None:
    text = 'A=1\n0 1 * * * a\nPATH = "/x y:/bin"\nSHELL=/bin/bash\nMAILTO=ops\n0 2 * * * b\n'
    first, second = entries(text)
    assert first.command == ("env", "A=1", "/bin/sh", "-c", "a")
    assert second.command == ("env", "A=1", "PATH=/x y:/bin", "/bin/bash", "-c", "b")
    assert second.differs == ["its output was mailed to ops, and is not"]


def test_a_zone_of_the_crontab_is_the_jobs() -> None:
    assert only("CRON_TZ=Asia/Tokyo\n0 1 * * * a\n").zone == "Asia/Tokyo"
    by_tz = only("TZ=Asia/Tokyo\n0 1 * * * a\n")
    assert by_tz.zone == "Asia/Tokyo"
    assert by_tz.differs == [
        "TZ is taken for the zone of the times; some crons give it to the command only"
    ]


def test_what_follows_a_percent_sign_is_piped() -> None:
    entry = only("0 1 * * * mail -s 50\\% ops%Dear all,%it's late\n")
    script = entry.command[-1]
    assert script == "printf %s 'Dear all,\nit'\"'\"'s late\n' | { mail -s 50% ops; }"
    assert entry.differs == ["what stood after % is piped to the command"]


def test_a_system_crontab_names_users() -> None:
    entry = only("17 * * * * root run-parts /etc/cron.hourly\n", system=True)
    assert entry.command[-1] == "run-parts /etc/cron.hourly"
    assert entry.differs == ["cron ran it as root: run anarchon exec as that user"]


@pytest.mark.parametrize(
    ("line", "refused"),
    [
        ("@reboot x", "@reboot is no time: "),
        ("0 25 * * * x", "hour '25': "),
        ("0 3 * *", "it has too few fields"),
        ("@daily", "it has too few fields"),
        ("@fortnightly x", "expression '@fortnightly': "),
        ("0 0 30 2 * x", "expression '0 0 30 2 *': "),
    ],
)
def test_what_becomes_no_job_says_why(line: str, refused: str) -> None:
    assert only(line).refused.startswith(refused)


def test_days_of_month_and_week_are_noted_as_cron_means_them() -> None:
    entry = only("0 0 13 * 5 x")
    assert entry.expression == "0 0 13 * 5"
    assert not entry.refused


def test_the_command_prints_lines_that_a_shell_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tab").write_text("0 3 * * * /bin/echo it's\n")
    assert cli.main(["import-crontab", str(tmp_path / "tab"), "--tz", "UTC"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("# What differs for every job: ")
    line = out.splitlines()[-1]
    words = shlex.split(line)
    assert words[:6] == ["anarchon", "exec", "--job", "echo", "--cron", "0 3 * * *"]
    assert words[6:] == ["--tz", "UTC", "--", "/bin/sh", "-c", "/bin/echo it's"]


def test_the_exit_status_says_that_a_line_became_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("@reboot x\n"))
    assert cli.main(["import-crontab", "-"]) == 1
    assert "# becomes no job: @reboot is no time" in capsys.readouterr().out


def test_a_file_that_cannot_be_read_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tab").write_bytes(b"\xff")
    assert cli.main(["import-crontab", str(tmp_path / "none")]) == 2
    assert cli.main(["import-crontab", str(tmp_path / "tab")]) == 2
    err = capsys.readouterr().err
    assert "none: No such file or directory" in err
    assert "tab: is not text in UTF-8" in err
