"""`anarchon doctor`: look at a store as `serve` would, without serving."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
from collections import Counter

from anarchon_server.app.doctor import Examination, Kind, examine
from anarchon_server.cli import FAILED, USAGE_ERROR, _settings
from anarchon_server.cli._admin import add_json, printable
from anarchon_server.clock import SystemClock
from anarchon_server.core.slots import format_duration
from anarchon_server.core.store import Capabilities

_SETTINGS = ("store", "namespace", "max_clock_offset", "strict")

_EPILOG = """\
The store is opened as anarchon serve would: what is missing in it is made, a layout of an earlier
version is brought forward, and a namespace that nobody has used yet takes the layout of the URL's
strategy (give another --namespace to leave it free). Then a claim is tried, in a namespace of its
own: two tokens for one slot, of which one must win.

Exit status: 0, it can serve; 1, it cannot, or with --strict leaves a doubt; 2, a wrong argument or
setting. Variables and the file of --config count as for anarchon serve.
"""


# The subparsers object has no public type.
def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand `doctor`."""
    parser = subparsers.add_parser(
        "doctor",
        help="look at a store as serve would, without serving",
        description="Say what can be relied on in a store, and what to change.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _settings.add_flags(parser, *_SETTINGS)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Examine a store, and show what was found."""
    config = _settings.read("doctor", args, *_SETTINGS)
    if config is None:
        return USAGE_ERROR
    found = asyncio.run(examine(config, SystemClock()))
    if args.json:
        print(json.dumps(_as_json(found), ensure_ascii=False))
    else:
        _print(found)
    return 0 if found.serves else FAILED


def _as_json(found: Examination) -> dict[str, object]:
    can = found.capabilities
    return {
        "serves": found.serves,
        "store": found.location,
        "backend": can.backend if can else None,
        "namespace": found.namespace,
        "strict": found.strict,
        "can": _plain(can) if can else None,
        "round_trip_ms": found.round_trip_ms,
        "clock_offset_ms": found.clock_offset_ms,
        "findings": [
            {"kind": each.kind, "text": each.text, "fix": each.fix} for each in found.findings
        ],
    }


def _plain(can: Capabilities) -> dict[str, object]:
    """The capabilities by their names in the port."""
    fields = {each.name: getattr(can, each.name) for each in dataclasses.fields(can)}
    del fields["backend"]
    return {
        name: sorted(value) if isinstance(value, frozenset) else value
        for name, value in fields.items()
    }


def _print(found: Examination) -> None:
    rows = [("store", found.location), ("namespace", found.namespace)]
    if found.capabilities is not None:
        rows.insert(1, ("backend", found.capabilities.backend))
        rows += _abilities(found.capabilities).items()
    rows.append(("", ""))
    for each in found.findings:
        rows.append((each.kind, each.text))
        if each.fix:
            rows.append(("", f"fix: {each.fix}"))
    rows += [("", ""), ("", _verdict(found))]
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        print(f"{name:<{width}}  {printable(text)}".rstrip())


def _abilities(can: Capabilities) -> dict[str, str]:
    return {
        "leases": _takeover(can),
        "freed runs": "noticed at once" if can.notifies else "noticed when an instance looks",
        "overlap": ", ".join(sorted(can.overlap)),
        "catch-up": ", ".join(sorted(can.catch_up)),
        "retries": "yes" if can.retries else "no",
        "history": "of all instances" if can.history else "each instance's own",
        "shared": "between instances" if can.shared else "no: this process has it alone",
    } | _bounds(can)


def _bounds(can: Capabilities) -> dict[str, str]:
    bounds = {}
    if can.least_gap_ms:
        bounds["slots"] = f"at least {format_duration(can.least_gap_ms)} apart"
    if can.kept_ms is not None:
        bounds["claims"] = f"kept for {format_duration(can.kept_ms)}"
    if can.kept_slots is not None:
        bounds["claims kept"] = f"of a job's newest {can.kept_slots} slots"
    return bounds


def _takeover(can: Capabilities) -> str:
    if not can.leases:
        return "no: the store keeps claims only, and a run whose instance dies is not gone on with"
    if can.boot_leases:
        return "yes: a run whose instance dies is taken over, once its lease has ended"
    return (
        "yes: a run whose instance dies is taken over, once its lease has ended, by an instance "
        "that has watched the store's clock for a lease"
    )


def _verdict(found: Examination) -> str:
    counts = Counter(each.kind for each in found.findings)
    doubts = counts[Kind.WARNING] + counts[Kind.UNVERIFIED]
    some = "no doubts" if not doubts else "1 doubt" if doubts == 1 else f"{doubts} doubts"
    if found.serves:
        return f"it can serve: {some}"
    if counts[Kind.FATAL]:
        return "it cannot serve"
    return f"strict: it leaves {some}"
