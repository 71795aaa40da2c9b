"""What every test shares: how they are spread (`spreading`), and a closing word on what is missing.

A test that needs a store which is not on this machine skips with a reason that begins with
`no store:` and names it, as in `no store: redis: nothing listens on 127.0.0.1:6379`; one that needs
another program, or another language's tools, with `no toolchain:`, as in `no toolchain: go: go is not
on PATH`. Each such reason is listed once at the end, so that a green run never hides what it did not
try. Where `CI` is `true` all must be there, and such a skip is a failure; but for those in
`MAY_BE_MISSING`.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import pytest

from tests import spreading

# What a skip's reason begins with -> what is missing then.
KINDS = {"no store:": "store", "no toolchain:": "toolchain"}

MAY_BE_MISSING = {
    "redis8": "no system has a package of it: the strategy idmp is not tested here",
    "csharp": "no package has its generator: the stubs for C# are not tested here",
}
"""What even CI may lack, and what that leaves untested."""


def pytest_configure() -> None:
    """Let programs that the tests start hear SIGINT and SIGHUP.

    A shell's background and `nohup` have us ignore them, and so all that we start; a handler is not
    inherited.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)


def must_be_there(name: str) -> bool:
    """Whether the run fails without it."""
    return os.environ.get("CI") == "true" and name not in MAY_BE_MISSING


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """`-n auto`."""
    return spreading.processes()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadgroup`: in our groups."""
    return spreading.scheduler(config, log) if config.getoption("dist") == "loadgroup" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Which tests are not measured; where several processes run them, which go first."""
    for item in items:
        if not spreading.is_measured(item):
            item.add_marker(pytest.mark.no_cover)
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: spreading.turn_of(item.nodeid))


@dataclass(frozen=True, slots=True)
class Missing:
    """A store or a toolchain that could not be had: its name, and why."""

    kind: str
    name: str
    why: str

    def __str__(self) -> str:
        leaves = MAY_BE_MISSING.get(self.name)
        return f"{self.name}: {self.why}" + (f" ({leaves})" if leaves else "")


def missing_in(reason: str) -> Missing | None:
    """The store or the toolchain that a skip's reason names, if it names one."""
    said = reason.removeprefix("Skipped: ").removeprefix("Failed: ")
    for prefix, kind in KINDS.items():
        if said.startswith(prefix):
            name, _, why = said.removeprefix(prefix).partition(":")
            return Missing(kind, name.strip(), " ".join(why.split()))
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Makes a failure of a skip for what must be there."""
    report = yield
    _hold_to_it(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Makes a failure of the skip of a whole file, too."""
    report = yield
    _hold_to_it(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """What one process tells another of a test must be UTF-8; what a test says need not be."""
    return _encodable((yield))


def _encodable(data: Any) -> Any:
    if isinstance(data, str):
        return data.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(data, dict):
        return {_encodable(key): _encodable(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return type(data)(_encodable(each) for each in data)
    return data


def _hold_to_it(report: pytest.TestReport | pytest.CollectReport) -> None:
    missing = missing_in(reason_of(report)) if report.skipped else None
    if missing is not None and must_be_there(missing.name):
        report.outcome = "failed"
        report.longrepr = f"no {missing.kind}: {missing}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Lists what could not be had, or says that nothing was missing."""
    counts: Counter[Missing] = Counter()
    for kind in ("skipped", "failed", "error"):
        for report in terminalreporter.stats.get(kind, []):
            if missing := missing_in(reason_of(report)):
                counts[missing] += 1
    for kind in dict.fromkeys(KINDS.values()):
        terminalreporter.section(f"{kind}s")
        of_kind = [(missing, tests) for missing, tests in counts.items() if missing.kind == kind]
        for missing, tests in sorted(of_kind, key=lambda item: str(item[0])):
            became = "failed" if must_be_there(missing.name) else "skipped"
            said = f"could not be had: {missing} ({tests} tests {became})"
            terminalreporter.line(said, yellow=True)
        if not of_kind:
            terminalreporter.line(f"every {kind} that these tests ask for was there")


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Why a test, or a whole file, was skipped, or failed."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2]
    crash = getattr(report.longrepr, "reprcrash", None)
    return crash.message if crash else str(report.longrepr or "")
