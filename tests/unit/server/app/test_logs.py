"""Log lines cannot be forged, hold no secrets, and have a bound."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from anarchon_server.app import logs

TOKEN = "1791633610000.0123456789abcdef0123456789abcdef.nightly/report"
Lines = Callable[[], list[str]]


@pytest.fixture
def made(request: pytest.FixtureRequest) -> Iterator[Lines]:
    """Set up with the format that the test names; gives the lines written since."""
    stream = io.StringIO()
    root, ours = logging.getLogger(), logging.getLogger("anarchon")
    before = root.handlers[:], root.level, ours.level
    handler = logs.set_up(request.param, "info", ("p4ssw0rd",), stream)

    def lines() -> list[str]:
        handler.flush()
        return stream.getvalue().splitlines()

    yield lines
    handler.close()
    root.handlers, level, own_level = before
    root.setLevel(level)
    ours.setLevel(own_level)


text = pytest.mark.parametrize("made", ["text"], indirect=True)
as_json = pytest.mark.parametrize("made", ["json"], indirect=True)
both = pytest.mark.parametrize("made", ["text", "json"], indirect=True)


def say(event: str, **fields: Any) -> None:
    logging.getLogger("anarchon").info(event, extra={"fields": fields})


@text
def test_a_line_for_people_has_time_level_event_and_fields(made: Lines) -> None:
    say("serving", listen="127.0.0.1:7420", why="two words", n=3, none=None)
    (line,) = made()
    time, level, event, rest = line.split(None, 3)
    assert (time[10], time[-1], level, event) == ("T", "Z", "INFO", "serving")
    assert rest == 'listen=127.0.0.1:7420 why="two words" n=3 none=None'


@as_json
def test_a_line_for_programs_is_one_object(made: Lines) -> None:
    say("serving", n=3, ready=True, jobs=("a", "b"))
    (line,) = map(json.loads, made())
    assert line["time"].endswith("Z")
    del line["time"]
    assert line == {"level": "info", "event": "serving", "n": 3, "ready": True, "jobs": "a, b"}


@both
def test_control_characters_are_escaped_so_that_no_line_can_be_forged(made: Lines) -> None:
    say("x", error="a\n2026 INFO serving\r\x1b[31m\u2028\u2029\x00\x85")
    (line,) = made()
    assert line.isprintable()


@both
def test_passwords_and_tokens_are_not_shown(made: Lines) -> None:
    say("x", a="redis://u:hunter2@h", b="it was p4ssw0rd", c=f"token {TOKEN} is fenced")
    (line,) = made()
    assert "hunter2" not in line
    assert "p4ssw0rd" not in line
    assert "89abcdef" not in line
    assert "token 01234567 is fenced" in line


@both
def test_a_field_has_a_bound(made: Lines) -> None:
    say("x", error="é" * 10_000)
    (line,) = made()
    assert len(line.encode()) < 4_000


@both
def test_what_a_driver_says_is_a_field_and_cleaned(made: Lines) -> None:
    logging.getLogger("some.driver").warning("cannot reach %s\n", "redis://u:hunter2@h")
    (line,) = made()
    assert "library" in line
    assert "some.driver" in line
    assert "hunter2" not in line


@text
def test_a_traceback_follows_for_people_and_is_cleaned(made: Lines) -> None:
    try:
        raise ValueError("redis://u:hunter2@h")
    except ValueError:
        logging.getLogger("anarchon").exception("broke")
    lines = made()
    assert lines[0].endswith("ERROR   broke")
    assert lines[-1].strip() == "ValueError: redis://u:***@h"


@as_json
def test_a_traceback_is_a_field_for_programs_and_its_end_is_kept(made: Lines) -> None:
    try:
        raise ValueError("x" * 20_000 + " the end")
    except ValueError:
        logging.getLogger("anarchon").exception("broke")
    (line,) = map(json.loads, made())
    assert line["traceback"].startswith("...")
    assert line["traceback"].endswith("the end")
    assert len(line["traceback"]) < 9_000


@both
def test_what_is_below_the_level_is_not_written(made: Lines) -> None:
    logging.getLogger("anarchon").debug("quiet")
    logging.getLogger("other").info("quiet")
    assert made() == []


def test_a_reader_that_does_not_read_holds_nobody_up_and_is_told_what_it_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logs, "LINES_MAX", 3)
    reads, blocked = threading.Event(), threading.Event()
    written: list[str] = []

    def write(text: str) -> None:
        blocked.set()
        assert reads.wait(10)
        written.append(text)

    writer = logs.LineWriter(write)
    writer.setFormatter(logs.JsonFormatter())
    record = logging.LogRecord("anarchon", logging.INFO, "", 0, "said", None, None)
    writer.handle(record)
    assert blocked.wait(10), "the first line is being written"
    for _ in range(5):
        writer.handle(record)
    with monkeypatch.context() as patience:
        patience.setattr(logs, "FLUSH_S", 0.001)
        writer.flush()
    assert written == []
    reads.set()
    writer.flush()
    writer.handle(record)
    writer.flush()
    writer.close()
    lines = [json.loads(line) for line in written]
    assert [line["event"] for line in lines] == [*["said"] * 4, "log_lines_dropped", "said"]
    assert lines[4]["count"] == 2
    assert lines[4]["level"] == "warning"


def test_lines_that_cannot_be_written_are_lost_and_later_ones_are_not() -> None:
    written: list[str] = []

    def write(text: str) -> None:
        if not text.startswith("b"):
            raise OSError(28, "No space left on device")
        written.append(text)

    writer = logs.LineWriter(write)
    for event in ("a", "b"):
        writer.handle(logging.LogRecord("anarchon", logging.INFO, "", 0, event, None, None))
    writer.flush()
    writer.close()
    assert written == ["b\n"]
