"""Mistakes made on purpose in a copy of the Python client: a scenario finds each."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from tests.conformance.player import PuppetPlayer
from tests.conformance.registry import ROOT, language
from tests.conformance.scenario import ScenarioError, scenario
from tests.conformance.stage import Stage

CLIENT = ROOT / "client" / "python"
pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass(frozen=True, slots=True)
class Mutant:
    """A mistake: `edits` of the client's files, each (file, old, new). `found` is said about it."""

    what: str
    scenario: str
    found: str
    edits: tuple[tuple[str, str, str], ...]
    step_s: float = 4.0
    """What a mutant does not do is waited for no longer than this."""


MUTANTS = (
    Mutant(
        "trust is counted from the receiving",
        "trust-shrinks",
        "in_flight is ['t1']",
        (
            (
                "_session.py",
                "end_ms = sent.sent_at_ms + wire_to_ms(response.session_ttl)",
                "end_ms = now_ms + wire_to_ms(response.session_ttl)",
            ),
        ),
    ),
    Mutant(
        "a result without a receipt is not in flight",
        "run",
        "in_flight is []",
        (("_session.py", "return [*self._running, *self._finished]", "return [*self._running]"),),
    ),
    Mutant(
        "a token that is done is forgotten",
        "duplicate",
        "in_flight is",
        (("_session.py", " or token in self._known", ""),),
    ),
    Mutant(
        "LEASE_LOST and FENCED end no trust",
        "cancelled",
        "lost is False",
        (
            (
                "_session.py",
                "_TRUST_OVER = (run_pb2.CANCEL_REASON_LEASE_LOST, run_pb2.CANCEL_REASON_FENCED)",
                "_TRUST_OVER = (run_pb2.CANCEL_REASON_LEASE_LOST,)",
            ),
        ),
    ),
    Mutant(
        "the last reason counts",
        "lost",
        "reason is 'FENCED'",
        (
            (
                "_context.py",
                "            if self.reason is None:\n                self.reason = reason_of",
                "            if True:\n                self.reason = reason_of",
            ),
        ),
    ),
    Mutant(
        "another's session is closed",
        "replaced",
        "it sent what it should not have",
        (
            (
                "_session.py",
                "if not self._was_attached or isinstance(self._error, SessionReplacedError):",
                "if not self._was_attached:",
            ),
        ),
    ),
    Mutant(
        "a receipt that is not known is final",
        "store-unavailable",
        "in flight, without a receipt, and not named",
        (
            (
                "_session.py",
                "if receipt.status == session_pb2.RECEIPT_STATUS_RECORDED:",
                "if receipt.status not in (2, 3, 4, 5):",
            ),
        ),
    ),
    Mutant(
        "the token's file is read once",
        "token-changes",
        "waited",
        (("_transport.py", "if stamp != self._seen:", "if self._seen is None:"),),
    ),
    Mutant(
        "KeepAlive has long deadlines",
        "attach",
        "a deadline of",
        (
            (
                "_session.py",
                "timeout_ms = min(self._interval_ms, KEEP_ALIVE_TIMEOUT_MAX_MS)",
                "timeout_ms = KEEP_ALIVE_TIMEOUT_MAX_MS",
            ),
        ),
    ),
    Mutant(
        "a batch has no limit",
        "batches",
        "more than 2 MiB",
        (
            (
                "_session.py",
                "RESULTS_MAX, RESULTS_MAX_BYTES = 1_000, 2 * 1024 * 1024",
                "RESULTS_MAX, RESULTS_MAX_BYTES = 1_000, 3 * 1024 * 1024",
            ),
        ),
    ),
    Mutant(
        "there is no back-off",
        "pace",
        "calls of Subscribe",
        (("_session.py", "return round(longest_ms * (0.5 + 0.5 * self._random()))", "return 50"),),
    ),
    Mutant(
        "drain is taken for the end",
        "drain",
        "there is no open stream",
        (
            (
                "_session.py",
                'self._say("info", "the sidecar is going away: no more runs until it is back")',
                'self._reopen(now_ms, "drained")',
            ),
        ),
    ),
    Mutant(
        "a handler that still runs is said to have stopped",
        "leaving-hard",
        "stopped is",
        (
            (
                "_session.py",
                "stopped = list(self._held)\n",
                "stopped = [*self._held, *self._running]\n",
            ),
        ),
        step_s=30,
    ),
    Mutant(
        "what is held outlives a failed KeepAlive",
        "held",
        "in_flight is ['t2']",
        (
            (
                "_session.py",
                "sent = self._unanswered.pop(number)\n        self._held.clear()\n",
                "sent = self._unanswered.pop(number)\n",
            ),
        ),
    ),
    Mutant(
        "an answer that waited revives trust",
        "frozen",
        "waited",
        (
            (
                "_session.py",
                "        self._end_trust_if_over(now_ms)\n        self._take_in(now_ms, fact)",
                "        self._take_in(now_ms, fact)",
            ),
            (
                "_context.py",
                "if self.trusted and self._clock.now_ms() >= self._trust.end_ms:",
                "if not self.trusted:",
            ),
        ),
    ),
    Mutant(
        "a sidecar that we are not attached to extends trust",
        "not-attached",
        "waited",
        (
            (
                "_session.py",
                "if is_of_this_stream and response.stream_open:",
                "if response.stream_open:",
            ),
        ),
    ),
    Mutant(
        "a result of what never started does not say its length",
        "held",
        "a result without elapsed",
        (("_session.py", ", elapsed=ms_to_wire(0)", ""),),
    ),
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    folder = tmp_path_factory.mktemp("mutants")
    stage = Stage(
        {
            each.what: partial(play, each, folder / str(number))
            for number, each in enumerate(MUTANTS)
        }
    )
    yield stage
    await stage.close()


async def play(mutant: Mutant, folder: Path) -> None:
    """The scenario, with the mistake in it."""
    shutil.copytree(CLIENT, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name, old, new in mutant.edits:
        file = folder / "anarchon" / name
        text = file.read_text("utf-8")
        assert text.count(old) == 1, f"{mutant.what}: its place in {name} has changed"
        file.write_text(text.replace(old, new), "utf-8")
    player = PuppetPlayer(scenario(mutant.scenario), language("python"), folder)
    player.step_s = mutant.step_s
    player.env["PYTHONPATH"] = str(folder)
    await player.play()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what.replace(" ", "-"))
async def test_the_mistake_is_found(mutant: Mutant, stage: Stage) -> None:
    with pytest.raises(ScenarioError) as raised:
        await stage.played(mutant.what)
    assert mutant.found in str(raised.value)
