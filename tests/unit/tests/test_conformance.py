"""The conformance suite's own parts: what differs is seen, what is wrong in a file is said."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anarchon.v1 import run_pb2, session_pb2
from tests.conformance import registry, scenario
from tests.conformance.matching import Bound, differences, made

KEEP_ALIVE = session_pb2.KeepAliveRequest(session_id="s", in_flight=["a", "b"], draining=True)
FAILURE = run_pb2.Failure(type="E", message="x" * 10)
FAILURE.retry_after.FromMilliseconds(1_500)


@pytest.mark.parametrize(
    ("wanted", "message", "differs"),
    [
        ({"in_flight": ["b", "a"], "draining": True}, KEEP_ALIVE, False),
        ({"in_flight": ["a"]}, KEEP_ALIVE, True),
        ({"in_flight": {"count": 2}}, KEEP_ALIVE, False),
        ({"in_flight": {"more_than": 2}}, KEEP_ALIVE, True),
        ({"draining": False}, KEEP_ALIVE, True),
        ({"session_id": {"some": True}}, KEEP_ALIVE, False),
        ({"retry_after": "1s500ms", "permanent": False}, FAILURE, False),
        ({"retry_after": "2s"}, FAILURE, True),
        ({"retry_after": {"at_most": "1s"}}, FAILURE, True),
        ({"retry_after": {"absent": True}}, FAILURE, True),
        ({"retry_after": "1s"}, run_pb2.Failure(), True),
        ({"message": {"bytes": 10}, "type": {"has": "E"}}, FAILURE, False),
        ({"message": {"bytes_at_most": 9}}, FAILURE, True),
        ({"stopped": {"reason": "FENCED"}}, run_pb2.Outcome(), True),
        ({"stopped": {"reason": "FENCED"}}, run_pb2.Outcome(stopped={"reason": 3}), False),
        ({"stopped": {"reason": 77}}, run_pb2.Outcome(stopped={"reason": 6}), True),
        (
            {"success": {"result": {"json": {"n": 1}}}},
            run_pb2.Outcome(success={"result": '{"n":1}'}),
            False,
        ),
        ({"success": {"result": {"json": {}}}}, run_pb2.Outcome(success={"result": "no"}), True),
    ],
)
def test_a_message_is_compared_as_far_as_it_is_written(
    wanted: dict[str, Any], message: Any, differs: bool
) -> None:
    assert bool(differences(wanted, message, {})) is differs


def test_a_line_without_what_is_wanted_differs() -> None:
    assert differences({"token": "t"}, {"what": "started"}, {})
    assert differences({"left": {"nothing": True}}, {"left": 0}, {})
    assert not differences({"fence": {"digits": "7"}}, {"fence": 7}, {})


def test_a_name_is_bound_where_it_is_met_first() -> None:
    bound: Bound = {}
    assert not differences({"session_id": "$s"}, KEEP_ALIVE, bound)
    assert bound == {"$s": "s"}
    other = session_pb2.KeepAliveRequest(session_id="other")
    assert differences({"session_id": "$s"}, other, bound)


def test_a_field_of_a_later_version_is_on_the_wire() -> None:
    message = made(session_pb2.SubscribeResponse, {"unknown_field": 900}, {})
    assert message.SerializeToString().endswith(b"\x03new")
    assert not message.ListFields()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(scenario, "FOLDER", tmp_path)
    monkeypatch.setattr(registry, "REGISTRY", tmp_path / "testees.toml")
    for cached in (scenario.scenarios, registry.languages, registry._build):
        cached.cache_clear()
    yield tmp_path
    for cached in (scenario.scenarios, registry.languages, registry._build):
        cached.cache_clear()


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("steps = []", "no title"),
        ('steps = [{ tolled = "ready" }]', "step 1: no such step"),
        ('steps = [{ told = "ready", whit = {} }]', "step 1: told has no whit"),
        ('listen = "fax"', "listen fax: must be one of"),
        ('needs = ["luck"]', "no such capability: luck"),
        ("colour = 1", "no such key: colour"),
        ("steps = [", "x.toml"),
    ],
)
def test_what_is_wrong_in_a_scenario_is_said(folder: Path, lines: str, said: str) -> None:
    (folder / "x.toml").write_text(lines)
    with pytest.raises(ValueError, match=r"x\.toml: ") as raised:
        scenario.scenarios()
    assert said in str(raised.value)


LANGUAGE = """
[go]
name = "Go"
tools = ["no-such-tool"]
folder = "."
build = [["{python}", "-c", "print('what it says'); raise SystemExit(1)"]]
run = ["{python}"]
"""


def test_a_build_that_fails_shows_what_its_tool_said(folder: Path) -> None:
    (folder / "testees.toml").write_text(LANGUAGE)
    assert registry.language("go").missing_tools() == ["no-such-tool"]
    with pytest.raises(RuntimeError, match="what it says"):
        registry.built("go")


@pytest.mark.parametrize("line", ['speed = "high"', "[go.lacks]\nluck = 'none'"])
def test_what_is_wrong_in_the_registry_is_said(folder: Path, line: str) -> None:
    (folder / "testees.toml").write_text(f"{LANGUAGE}{line}\n")
    with pytest.raises(ValueError, match=r"testees\.toml: \[go\]: it has (speed|luck)"):
        registry.languages()
