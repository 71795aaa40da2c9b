"""Writes one hash over a few thousand answers of `anarchon_server.core.slots`, for the tests that
run it under other Pythons and in other environments. Needs the standard library and tzdata only.
"""

from __future__ import annotations

import hashlib
import json
import sys
from itertools import islice
from pathlib import Path

from anarchon_server.core.slots import TZDATA_VERSION, Cron, ScheduleError

VECTORS = Path(__file__).parents[3] / "conformance" / "vectors"
STARTS = range(1, 4_000_000_000, 444_444_444)


def main() -> None:
    """Write the version of the time zone database and the hash."""
    digest = hashlib.sha256()
    for case in json.loads((VECTORS / "crons.json").read_text("utf-8"))["cases"]:
        schedule = Cron(case["schedule"], case["time_zone"])
        digest.update(f"{schedule.identity} {schedule.description}".encode())
        for start in STARTS:
            forwards = list(islice(schedule.between(start * 1000, 10**15), 3))
            answers = (forwards, schedule.previous_upto(start * 1000))
            digest.update(repr(answers).encode())
        digest.update(str(schedule.shortest_gap_ms(case["after"], 10)).encode())
    for case in json.loads((VECTORS / "refused.json").read_text("utf-8"))["cases"]:
        try:
            Cron(case["expression"], case["time_zone"])
        except ScheduleError as error:
            digest.update(str(error).encode())
    for job in ("sync", "reports/nightly"):
        digest.update(Cron("H H H * *", job=job).identity.encode())
    sys.stdout.write(f"{TZDATA_VERSION} {digest.hexdigest()}\n")


if __name__ == "__main__":
    main()
