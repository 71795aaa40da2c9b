"""What every test shares: a closing word on the stores that could not be had.

A test that needs a store which is not on this machine skips with a reason that begins with
`no store:` and names it, as in `no store: redis: nothing listens on 127.0.0.1:6379`. Each such
reason is listed once at the end, so that a green run never hides what it did not try.
"""

from __future__ import annotations

import pytest

NO_STORE = "no store:"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Lists the stores that could not be had, or says that none was missing."""
    missing: dict[str, int] = {}
    for report in terminalreporter.stats.get("skipped", []):
        reason = skip_reason(report)
        if NO_STORE in reason:
            store = reason.split(NO_STORE, 1)[1].strip()
            missing[store] = missing.get(store, 0) + 1
    terminalreporter.section("stores")
    for store, tests in sorted(missing.items()):
        terminalreporter.line(f"could not be had: {store} ({tests} tests skipped)", yellow=True)
    if not missing:
        terminalreporter.line("every store that these tests ask for was there")


def skip_reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Why a test, or a whole file, was skipped."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2]
    return str(report.longrepr or "")
