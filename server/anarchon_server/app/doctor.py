"""What `anarchon doctor` finds out about a store: it is opened as `serve` would, and tried.

Imports the opening, the configuration, the clock and the port.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from datetime import timedelta
from enum import StrEnum

from anarchon_server.app import trial
from anarchon_server.app.stores import OPEN_TIMEOUT_S, find_store, open_store
from anarchon_server.clock import SystemClock
from anarchon_server.config import Config, redact
from anarchon_server.core.errors import StoreError, StoreRefused
from anarchon_server.core.limits import OP_TIMEOUT
from anarchon_server.core.store import Capabilities, Store

OFFSET_MAX_MS = 2_000
"""How far apart the clocks may be before it is worth a warning; `max_clock_offset` is the end."""

ROUND_TRIP_MAX_MS = OP_TIMEOUT // 4
"""How long a round trip may take before it is worth a warning."""


class Kind(StrEnum):
    """What a finding means. All but `VERIFIED` come with a fix; `strict` accepts no other."""

    VERIFIED = "verified"
    UNVERIFIED = "unverified"  # could not be found out
    WARNING = "warning"  # it serves, but may lose something as it is
    FATAL = "fatal"  # a sidecar would not start, or would claim nothing


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence about the store, and what to change where it is no success.

    Where opening was refused, `text` is the refusal as `serve` says it, with what to change.
    """

    kind: Kind
    text: str
    fix: str = ""


@dataclass(slots=True)
class Examination:
    """All that was found out. What could not be measured is None."""

    namespace: str
    strict: bool
    location: str = ""
    capabilities: Capabilities | None = None
    round_trip_ms: float | None = None
    clock_offset_ms: float | None = None
    findings: list[Finding] = field(default_factory=list)

    @property
    def serves(self) -> bool:
        """Whether a sidecar with this configuration would start, and claim."""
        accepted = {Kind.VERIFIED} if self.strict else set(Kind) - {Kind.FATAL}
        return all(finding.kind in accepted for finding in self.findings)

    def add(self, kind: Kind, text: str, fix: str = "") -> None:
        """Note a finding."""
        self.findings.append(Finding(kind, text, fix))


async def examine(config: Config, clock: SystemClock) -> Examination:
    """Open the store as `serve` would, try a claim on it, and compare the clocks.

    What is missing in the store is made, and what an earlier version made is brought forward, as
    `serve` does it: a finding says so. No error of the store is raised: each is a finding.
    """
    found = Examination(config.namespace, config.strict)
    async with AsyncExitStack() as stack:
        if await _open(config, clock, found, stack):
            await _try_claims(config, clock, found, stack)
    found.findings = [_without_secrets(each, config) for each in found.findings]
    return found


async def _open(
    config: Config, clock: SystemClock, found: Examination, stack: AsyncExitStack
) -> bool:
    """Whether the store could be opened."""
    found.location = f"{config.store.reveal().partition(':')[0]}: (not opened)"
    try:
        store = find_store(config, clock)
        found.capabilities = store.capabilities
        stack.push_async_callback(store.close)
        report = await open_store(store, strict=False)
    except StoreRefused as error:
        found.add(Kind.FATAL, str(error))
    except (StoreError, TimeoutError) as error:
        said = str(error) or f"no answer within {OPEN_TIMEOUT_S:g} s"
        found.add(
            Kind.FATAL, f"it could not be reached: {said}", "see that it runs and may be reached"
        )
    else:
        found.location = report.location
        if found.capabilities.shared:
            found.add(Kind.VERIFIED, _laid_out(config, found.capabilities.backend))
        for text in report.verified:
            found.add(Kind.VERIFIED, text)
        for doubt in report.doubts:
            kind = Kind.UNVERIFIED if doubt.unverified else Kind.WARNING
            found.add(kind, str(doubt), doubt.fix)
        return True
    return False


def _laid_out(config: Config, backend: str) -> str:
    """What opening a store leaves in it, which decides something later."""
    if ":" not in backend:
        return "the store has this version's layout: this look has made it, if it was not there"
    return (
        f"the namespace {config.namespace} has the layout of {backend}: this look has made it, if it "
        "was not there, and another strategy needs another namespace"
    )


# ── The claim ───────────────────────────────────────────────────────────────────────────────────


async def _try_claims(
    config: Config, clock: SystemClock, found: Examination, stack: AsyncExitStack
) -> None:
    assert found.capabilities is not None
    namespace = trial.namespace_for(found.capabilities.backend)
    try:
        stores = await _stores_to_try(replace(config, namespace=namespace), clock, stack)
        async with asyncio.timeout(OPEN_TIMEOUT_S):
            tried = await trial.try_claims(stores, clock)
    except (StoreError, TimeoutError, trial.NotTried) as error:
        said = str(error) or f"not done within {OPEN_TIMEOUT_S:g} s"
        found.add(
            Kind.UNVERIFIED,
            f"the claim was not tried: {said}",
            f"let this user use the namespace {namespace} too, in which it is tried; "
            "otherwise run it again",
        )
        return
    for broken in tried.broken:
        found.add(
            Kind.FATAL,
            f"the claim does not hold: {broken}",
            "use another store, and report this one with its version",
        )
    if not tried.broken:
        found.add(
            Kind.VERIFIED,
            "the claim holds: of two tokens for one slot one won, also when both asked again",
        )
    if tried.samples:
        _measure(config, tried.samples, found)


async def _stores_to_try(
    config: Config, clock: SystemClock, stack: AsyncExitStack
) -> Sequence[Store]:
    """Two connections; one where the store is this process's own."""
    stores: list[Store] = []
    while not stores or (len(stores) < 2 and stores[0].capabilities.shared):
        stores.append(find_store(config, clock))
        stack.push_async_callback(stores[-1].close)
        await open_store(stores[-1], strict=False)
    return stores


def _measure(config: Config, samples: Sequence[trial.Sample], found: Examination) -> None:
    """The median round trip; the offset by the shortest, which bounds the error best."""
    median_us = samples[len(samples) // 2].took_us
    found.round_trip_ms = round(median_us / 1_000, 3)
    text = f"a claim takes {found.round_trip_ms:g} ms"
    if median_us < ROUND_TRIP_MAX_MS * 1_000:
        found.add(Kind.VERIFIED, text)
    else:
        found.add(
            Kind.WARNING,
            f"{text}, and is given up after {OP_TIMEOUT} ms",
            "bring the store nearer, or make it less busy",
        )
    least = samples[0]
    found.clock_offset_ms = round(least.offset_us / 1_000, 1)
    text = (
        f"the clock that decides is {found.clock_offset_ms:+.1f} ms from this machine's, "
        f"to within {least.took_us // 2_000 + 1} ms"
    )
    fix = "have both machines' clocks set by the same time servers (NTP)"
    limit_ms = config.max_clock_offset / timedelta(milliseconds=1)
    if abs(found.clock_offset_ms) > limit_ms:
        found.add(Kind.FATAL, f"{text}: beyond max_clock_offset nothing is claimed", fix)
    elif abs(found.clock_offset_ms) > OFFSET_MAX_MS:
        found.add(Kind.WARNING, text, fix)
    else:
        found.add(Kind.VERIFIED, text)


def _without_secrets(finding: Finding, config: Config) -> Finding:
    known = config.store.parts
    return replace(finding, text=redact(finding.text, known), fix=redact(finding.fix, known))
