"""Whether a server is still the one it was, or may have lost what it acknowledged (S27a).

Imports the standard library and redis-py's errors.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from redis.exceptions import NoPermissionError, RedisError

_FIELD = re.compile(r"^(master_replid|evicted_keys|maxmemory_policy):([^\r\n]*)", re.MULTILINE)


def is_hidden(error: RedisError) -> bool:
    """Whether the server keeps this from its users, as managed ones do."""
    text = str(error).lower()
    return isinstance(error, NoPermissionError) or "unknown" in text or "not allowed" in text


class Identity:
    """What is known of one server: its history, and whether it has thrown keys away.

    A server draws a new `master_replid` when it starts and when a fail-over makes it the master:
    either may have cost it what it acknowledged last, and nobody can tell from outside. `losses`
    counts these changes, and the looks that found keys evicted while every key may be.
    `visible` is false where the server does not let it be seen.
    """

    # Each in a command of its own: before Redis 7, INFO takes one section.
    QUESTIONS: ClassVar = (["INFO", "replication"], ["INFO", "stats"], ["INFO", "memory"])

    def __init__(self) -> None:
        self.losses = 0
        self.visible = True
        self.lineage = ""
        self._evicted = 0

    def learn(self, answers: Sequence[object]) -> None:
        """Takes in the answers to the `QUESTIONS`."""
        told = [each.decode("utf-8", "replace") for each in answers if isinstance(each, bytes)]
        found = dict(_FIELD.findall("\n".join(told)))
        lineage = found.get("master_replid", "")
        if not lineage:  # for good, or because the server is busy
            self.visible = not any(isinstance(e, RedisError) and is_hidden(e) for e in answers)
            return
        evicted = int(found.get("evicted_keys", "0"))
        changed = bool(self.lineage) and lineage != self.lineage
        thrown_away = (
            not changed
            and evicted > self._evicted
            and found.get("maxmemory_policy", "").startswith("allkeys")
            and bool(self.lineage)
        )
        self.losses += changed or thrown_away
        self.lineage, self._evicted = lineage, evicted
