"""The Lua scripts: the steps of the port's methods, each after the parts that it needs.

Imports the limits, the rows' fields and the standard library.
"""

from __future__ import annotations

from importlib import resources

from anarchon_backends.redis._script import Script, script_of
from anarchon_backends.redis_lease._rows import RUN_FIELDS
from anarchon_server.core import limits

SCHEMA = 3  # the layout of the keys; 2 is made 3 when it is first touched (`store.lua`)
LOOKED_AT = 1_000  # runs of one job that one pruning may look at in vain


def _constants() -> str:
    names = ", ".join(f"'{name}'" for name in RUN_FIELDS)
    kinds = ", ".join(f"{name} = '{kind}'" for name, kind in RUN_FIELDS.items())
    return (
        f"local FIELDS = {{ {names} }}\n"
        f"local KIND = {{ {kinds} }}\n"
        f"local SCHEMA = '{SCHEMA}'\n"
        f"local MARGIN_SHARE = {limits.MARGIN_SHARE}\n"
        f"local EARLY_MAX = {limits.EARLY_MAX}\n"
        f"local ATTEMPTS_MAX = {limits.ATTEMPTS_MAX}\n"
        f"local MISSED_LISTED_MAX = {limits.MISSED_LISTED_MAX}\n"
        f"local TRIGGERED_WAITING_MAX = {limits.TRIGGERED_WAITING_MAX}\n"
        f"local LOST_SHOWN = {limits.LOST_SHOWN}\n"
        f"local LOOKED_AT = {LOOKED_AT}\n"
    )


def _script(name: str, *parts: str) -> Script:
    """The script `name`, with those of `life`, `missed` and `holders` that it needs."""
    folder = resources.files(__package__) / "lua"
    names = ("store", "records", *parts, "answers", name)
    texts = [(folder / f"{each}.lua").read_text(encoding="utf-8") for each in names]
    return script_of("".join([_constants(), *texts]))


# On jobs' keys, and on one server with the namespace's besides.
CLAIM = _script("claim", "life")
SETTLE = _script("settle", "life", "missed")
BEAT = _script("beat", "life", "holders")
COMPLETE = _script("complete", "life")
RELEASE = _script("release", "life")
CONTROL = _script("control", "life", "missed", "holders")
REGISTER = _script("register", "holders")
LET_GO = _script("let_go", "holders")
PRUNE = _script("prune", "holders")
PROBE = _script("probe")

# On the namespace's keys alone.
MOMENT = _script("moment")
ALIVE = _script("alive", "holders")
LIVE = _script("live", "holders")
NEWS = _script("news")
ENROL = _script("enrol", "holders")
ENROLLED = _script("enrolled", "holders")
SURVEY = _script("survey", "holders")
FORGOTTEN = _script("forgotten", "holders")
LIST = _script("list", "holders")
