"""`anarchon demo`, the whole story, as a user runs it."""

from __future__ import annotations

import asyncio
import re
import sys

import pytest


async def _demo(*args: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "anarchon_server", "demo", *args),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()


@pytest.mark.timeout(150)
async def test_the_demo_shows_a_takeover_and_a_hand_over_and_checks_itself() -> None:
    status, output = await _demo("--seconds", "34")
    assert status == 0, output
    assert "KILLED (SIGKILL" in output
    assert "s after the kill, fence" in output
    assert "it hands its run over" in output
    assert "s after the stop, fence" in output
    assert "needed a second attempt" in output
    assert "not ended" not in output, "it stops when every run has ended"
    assert "self-check: every slot is accounted for, and none had two winners" in output


@pytest.mark.timeout(120)
async def test_a_short_demo_without_a_kill_loses_nothing() -> None:
    status, output = await _demo("--seconds", "10", "--instances", "2", "--no-kill")
    assert status == 0, output
    assert "KILLED" not in output
    assert "; 0 needed a second attempt" in output
    assert "not ended" not in output, "it stops when every run has ended"
    assert "starting 2 instances, each" in output
    times = [float(at) for at in re.findall(r"^ *([0-9.]+) s  ", output, re.MULTILINE)]
    assert times == sorted(times), "the time on the left counts from the start"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--instances", "0"), "--instances is 0: 1 to 20"),
        (("--seconds", "5"), "--seconds is 5: 10 to 3600"),
        (("--store", "memory:"), "lives in one process; the demo runs on"),
        (("--store", "nosuch://x"), "nosuch"),
    ],
)
async def test_bad_arguments_are_refused_in_one_line(args: tuple[str, ...], words: str) -> None:
    status, output = await _demo(*args)
    assert status == 2
    assert words in output
    assert len(output.splitlines()) == 1
