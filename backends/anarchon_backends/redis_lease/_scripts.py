"""The Lua scripts: the steps of the port's methods, each after the rules that they share.

Imports the limits, the rows' fields and the standard library.
"""

from __future__ import annotations

from importlib import resources

from anarchon_backends.redis._script import Script, script_of
from anarchon_backends.redis_lease._rows import RUN_FIELDS
from anarchon_server.core import limits

SCHEMA = 2  # the layout of the keys
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
        f"local LOST_SHOWN = {limits.LOST_SHOWN}\n"
        f"local LOOKED_AT = {LOOKED_AT}\n"
    )


def _script(name: str) -> Script:
    folder = resources.files(__package__) / "lua"
    texts = [(folder / f"{each}.lua").read_text(encoding="utf-8") for each in ("rules", name)]
    source = "".join([_constants(), *texts])
    return script_of(source)


# On jobs' keys, and on one server with the namespace's besides.
CLAIM = _script("claim")
SETTLE = _script("settle")
BEAT = _script("beat")
COMPLETE = _script("complete")
RELEASE = _script("release")
REGISTER = _script("register")
LET_GO = _script("let_go")
PRUNE = _script("prune")
PROBE = _script("probe")

# On the namespace's keys alone.
MOMENT = _script("moment")
ALIVE = _script("alive")
NEWS = _script("news")
ENROL = _script("enrol")
ENROLLED = _script("enrolled")
SURVEY = _script("survey")
FORGOTTEN = _script("forgotten")
LIST = _script("list")
