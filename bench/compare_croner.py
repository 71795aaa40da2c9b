"""Slots beside those of croner, in Node: over the shared vectors and random windows around clock
changes. Every difference must be of a kind that `docs/schedules.md` explains, or this fails.

    make croner

Needs node and npm. Windows are drawn from a fixed seed; ANARCHON_CRONER_WINDOWS says how many.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from anarchon_server.core.slots import TZDATA_VERSION, ClockChange, Cron, ScheduleError, zone_named
from anarchon_server.core.slots.grammar import Times, parse_expression
from anarchon_server.core.slots.zones import zone_names
from tests.unit.server.core.slot_chance import window_at_a_change

HERE = Path(__file__).parent
VECTORS = HERE.parent / "tests/conformance/vectors/crons.json"
WINDOWS = int(os.environ.get("ANARCHON_CRONER_WINDOWS", "10000"))
SEED = "croner"
MOST_SLOTS = 300
HOUR_MS = 3_600_000
DAY_S = 86_400
THREE_HOURS_S = 10_800
PROBES = 500
PEER_TIMEOUT_S = 300

ANOTHER_DAY = "a gap that ends on another day: fixed times in it are not made up for"
OVER_THREE_HOURS = "a change of more than three hours"
UNEXPLAINED = "UNEXPLAINED"
STEP = "a step without a star, such as 1-23/2: wildcard there, fixed here"
WRAP = "a range that wraps, such as 22-2: refused there"


class Question(NamedTuple):
    """An expression in a zone, and a span of time: later than `after`, not later than `upto`."""

    expression: str
    zone: str
    after: int
    upto: int


def main() -> int:
    """Compare, print the counts, and return 1 if a difference has no explanation."""
    versions = install()
    print(
        f"croner {versions['croner']}, node {versions['node']} with time zone database"
        f" {versions['tz']}; ours is {TZDATA_VERSION}"
    )
    unexplained = compare("shared vectors", vectors())
    unexplained += compare(f"random windows, seed {SEED!r}", random_windows())
    return 1 if unexplained else 0


def install() -> dict[str, str]:
    """Install croner as locked; return the versions of what is compared with."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            sys.exit(
                f"the comparison with croner needs {program}, and found none: install Node 18+"
            )
    subprocess.run(
        ["npm", "ci", "--no-audit", "--no-fund", "--loglevel=error"],
        cwd=HERE / "croner",
        check=True,
        stdout=subprocess.DEVNULL,
    )
    node = subprocess.run(
        ["node", "-p", "JSON.stringify(process.versions)"],
        check=True,
        capture_output=True,
        text=True,
    )
    locked = json.loads((HERE / "croner/package-lock.json").read_text(encoding="utf-8"))
    return {
        **json.loads(node.stdout),
        "croner": locked["packages"]["node_modules/croner"]["version"],
    }


# ── Questions ───────────────────────────────────────────────────────────────────────────────────


def vectors() -> list[Question]:
    """The shared vectors, each from its instant to its last slot."""
    cases = json.loads(VECTORS.read_text(encoding="utf-8"))["cases"]
    return [
        Question(case["schedule"], case["time_zone"] or "UTC", case["after"], case["slots"][-1])
        for case in cases
    ]


def random_windows() -> list[Question]:
    """Random expressions that have slots, in spans around changes of random zones."""
    chance = Random(SEED)
    zones = sorted(zone_names())
    questions: list[Question] = []
    while len(questions) < WINDOWS:
        window = window_at_a_change(chance, zones)
        try:
            Cron(window.expression)
        except ScheduleError:
            continue  # It names no date that comes.
        questions.append(
            Question(window.expression, window.zone, window.start * 1000, window.end * 1000)
        )
    return questions


def ask(questions: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put the questions to croner, in one process."""
    peer = subprocess.run(
        ["node", "next.mjs"],
        cwd=HERE / "croner",
        check=True,
        timeout=PEER_TIMEOUT_S,
        input="".join(json.dumps(question) + "\n" for question in questions),
        stdout=subprocess.PIPE,
        text=True,
    )
    return [json.loads(line) for line in peer.stdout.splitlines()]


def for_croner(question: Question, expression: str) -> dict[str, Any]:
    return {
        "expression": expression,
        "tz": question.zone,
        "after_ms": question.after,
        "count": MOST_SLOTS,
        "upto_ms": question.upto,
    }


# ── Zones that Node knows otherwise ─────────────────────────────────────────────────────────────


def with_equal_zones(questions: list[Question]) -> tuple[list[Question], dict[str, list[str]]]:
    """Keep the questions in whose span both databases have the same offsets; of the others, return
    the zones, by reason.
    """
    moments = [probes(question) for question in questions]
    answers = ask(
        {"tz": question.zone, "at_ms": at} for question, at in zip(questions, moments, strict=True)
    )
    kept: list[Question] = []
    left_out: dict[str, list[str]] = {}
    for question, at, answer in zip(questions, moments, answers, strict=True):
        if "refused" in answer:
            left_out.setdefault("unknown to Node", []).append(question.zone)
        elif answer["offsets_s"] != offsets(question.zone, at):
            left_out.setdefault("other offsets in Node", []).append(question.zone)
        else:
            kept.append(question)
    return kept, left_out


def probes(question: Question) -> list[int]:
    """Moments of the span and the day before it: hourly if it is short, and at each change."""
    start, end = max(question.after - 24 * HOUR_MS, 0) // 1000, question.upto // 1000 + 1
    step = max(3600, (end - start) // PROBES)
    changes = [change.at_ms // 1000 for change in zone_named(question.zone).changes(start, end)]
    around = [second for at in changes for second in (at - 1, at)]
    return [second * 1000 for second in sorted({*range(start, end, step), end, *around})]


def offsets(zone: str, at_ms: list[int]) -> list[int]:
    return [zone_named(zone).offset_s(at // 1000) for at in at_ms]


# ── Comparing ───────────────────────────────────────────────────────────────────────────────────


def compare(title: str, all_questions: list[Question]) -> int:
    """Print how the questions are answered, and return the number of unexplained differences."""
    questions, left_out = with_equal_zones(all_questions)
    answers = ask(for_croner(question, question.expression) for question in questions)
    ours = [slots_of(question) for question in questions]
    differing = [
        (question, slots, answer)
        for question, slots, answer in zip(questions, ours, answers, strict=True)
        if answer.get("slots") != slots
    ]
    lists = ask(for_croner(question, as_lists(question.expression)) for question, _, _ in differing)
    kinds, examples = Counter[str](), dict[str, str]()
    for (question, slots, answer), listed in zip(differing, lists, strict=True):
        kind = kind_of(question, slots, answer, listed)
        kinds[kind] += 1
        examples.setdefault(kind, described(question, slots, answer))
    print(f"\n{title}: {len(all_questions):,}")
    for reason, zones in left_out.items():
        print(f"  {len(zones):6,}  left out: {reason} ({', '.join(sorted(set(zones)))})")
    print(f"  {len(questions):6,}  compared, with {sum(map(len, ours)):,} slots")
    print(f"  {len(questions) - len(differing):6,}  the same slots")
    for kind, count in kinds.most_common():
        print(f"  {count:6,}  {kind}\n          {examples[kind]}")
    return kinds[UNEXPLAINED]


def slots_of(question: Question) -> list[int]:
    schedule = Cron(question.expression, question.zone)
    return list(islice(schedule.between(question.after, question.upto), MOST_SLOTS))


def kind_of(
    question: Question, ours: list[int], answer: dict[str, Any], listed: dict[str, Any]
) -> str:
    """Say why the slots differ. A spelling is the reason only if plain lists mend the difference,
    and a change only if all that differs lies at it.
    """
    if listed.get("slots") != ours:
        return change_between(question, ours, listed["slots"]) if "slots" in listed else UNEXPLAINED
    if "From value is larger than to value" in answer.get("refused", ""):
        return WRAP
    times_of_day = question.expression.split()[:-3]
    if "slots" in answer and any(re.fullmatch(r"[^*]+/.*", field) for field in times_of_day):
        return STEP
    return UNEXPLAINED


def change_between(question: Question, ours: list[int], theirs: list[int]) -> str:
    """Name the kind of clock change that alone accounts for the difference."""
    kinds = set()
    for slot in set(ours) ^ set(theirs):
        at = slot // 1000
        near = zone_named(question.zone).changes(at - 2 * DAY_S, at + 2 * DAY_S)
        change = next(near, None)
        if change is None:
            return UNEXPLAINED
        shift = change.after_s - change.before_s
        changed_at = change.at_ms // 1000
        if abs(shift) > THREE_HOURS_S and abs(at - changed_at) <= abs(shift):
            kinds.add(OVER_THREE_HOURS)
        elif slot == change.at_ms and slot in ours and ends_on_another_day(change):
            kinds.add(ANOTHER_DAY)
        else:
            return UNEXPLAINED
    return " and ".join(sorted(kinds))


def ends_on_another_day(change: ClockChange) -> bool:
    at = change.at_ms // 1000
    return (at + change.before_s) // DAY_S < (at + change.after_s) // DAY_S


def as_lists(expression: str) -> str:
    """Write the expression without ranges and steps, where that does not change its class."""
    times: Times = parse_expression(expression)
    if expression.startswith("@"):
        return expression
    fields = expression.split()
    masks = [times.seconds, times.minutes, times.hours, None, times.months, times.weekdays]
    for at, mask in enumerate(masks[-len(fields) :]):
        plain = not set(fields[at].upper()) & set("*?#") and not fields[at].upper().endswith("L")
        if mask is not None and plain:
            fields[at] = ",".join(str(n) for n in range(60) if mask >> n & 1)
    return " ".join(fields)


def described(question: Question, ours: list[int], answer: dict[str, Any]) -> str:
    """One line for an example: the expression, and what differs."""
    if "refused" in answer:
        difference = answer["refused"]
    else:
        only = sorted(set(ours) ^ set(answer["slots"]))
        whose = "only here" if only[0] in ours else "only there"
        difference = f"{len(only)} differ, the first at {only[0]} {whose}"
    return f"{question.expression!r} in {question.zone} after {question.after}: {difference}"


if __name__ == "__main__":
    sys.exit(main())
