"""The Lua scripts of a strategy: for what is asked of runs, for what operators ask of jobs, for
definitions, and for the namespace. None of them touches keys of two jobs, or of a job and the namespace, for one item.

Imports the limits, the rows' fields, the strategies and the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources

from anarchon_backends.redis._script import Script, script_of
from anarchon_backends.redis_claim._rows import ATTEMPT_FIELDS, RUN_FIELDS
from anarchon_backends.redis_claim._strategies import WINDOW_S, WINDOW_SLOTS, Strategy
from anarchon_server.core import limits

LAYOUT = 2  # of the keys; 1, which knew no pause, is made 2 when it is first touched (`rules.lua`)
KEPT_LEAST_MS = limits.HOUR  # of `script`: how long a claim is kept at least ...
KEPT_OVER_DEADLINE_MS = 10 * limits.MINUTE  # ... and by how much longer than its start deadline
KEPT_MS = limits.DAY + limits.HOUR  # no slot so old is claimed: a start deadline is a day at most
KEPT_OVER_WINDOW_MS = limits.HOUR  # of `idmp`: entries outlive the ids that name them by so much
LOOKED_AT = 1_000  # runs of one job that one pruning may look at in vain


@dataclass(frozen=True, slots=True)
class Scripts:
    """The scripts of one strategy. `schema` is the layout that they know."""

    schema: str
    runs: Script
    control: Script
    definitions: Script
    namespace: Script


@cache
def scripts_of(strategy: Strategy) -> Scripts:
    """The scripts of the strategy."""
    schema, before = f"{strategy.name} {LAYOUT}", f"{strategy.name} {LAYOUT - 1}"
    start, claim = _constants(schema, before, strategy), _text(strategy.name)
    rules = start + _text("rules") + claim
    return Scripts(
        schema=schema,
        runs=script_of(rules + _text("runs")),
        control=script_of(rules + _text("jobs") + _text("control")),
        definitions=script_of(rules + _text("jobs") + _text("definitions")),
        namespace=script_of(start + _text("namespace")),
    )


def _constants(schema: str, before: str, strategy: Strategy) -> str:
    oldest = [int(part) for part in (strategy.oldest or "0.0.0").split(".")]
    names = ", ".join(f"'{name}'" for name in RUN_FIELDS)
    of_attempt = ", ".join(f"'{name}'" for name in ATTEMPT_FIELDS)
    kinds = ", ".join(f"{name} = '{kind}'" for name, kind in RUN_FIELDS.items())
    return (
        f"local FIELDS = {{ {names} }}\n"
        f"local KIND = {{ {kinds} }}\n"
        f"local ATTEMPT_FIELDS = {{ {of_attempt} }}\n"
        f"local SCHEMA = '{schema}'\n"
        f"local SCHEMA_BEFORE = '{before}'\n"
        f"local OLDEST = {int.from_bytes(bytes(oldest))}\n"  # as redis.REDIS_VERSION_NUM says it
        f"local EARLY_MAX = {limits.EARLY_MAX}\n"
        f"local MISSED_LISTED_MAX = {limits.MISSED_LISTED_MAX}\n"
        f"local TRIGGERED_WAITING_MAX = {limits.TRIGGERED_WAITING_MAX}\n"
        f"local LOST_SHOWN = {limits.LOST_SHOWN}\n"
        f"local LOOKED_AT = {LOOKED_AT}\n"
        f"local KEPT_LEAST_MS = {KEPT_LEAST_MS}\n"
        f"local KEPT_OVER_DEADLINE_MS = {KEPT_OVER_DEADLINE_MS}\n"
        f"local KEPT_MS = {KEPT_MS}\n"
        f"local KEPT_OVER_WINDOW_MS = {KEPT_OVER_WINDOW_MS}\n"
        f"local WINDOW_S = {WINDOW_S}\n"
        f"local WINDOW_SLOTS = {WINDOW_SLOTS}\n"
    )


def _text(name: str) -> str:
    return (resources.files(__package__) / "lua" / f"{name}.lua").read_text(encoding="utf-8")
