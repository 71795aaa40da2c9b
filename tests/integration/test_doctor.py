"""`anarchon doctor` on real stores, good ones and bad ones: what it finds, and what it leaves."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from anarchon_backends.memory import MemoryDatabase, MemoryStore
from anarchon_server import cli
from anarchon_server.app import doctor, trial
from anarchon_server.app.doctor import Examination, Kind, examine
from anarchon_server.cli import FAILED, USAGE_ERROR
from anarchon_server.clock import SystemClock
from anarchon_server.config import Config, load
from anarchon_server.core import store as port
from anarchon_server.core.errors import OutcomeUnknown, StoreUnavailable
from anarchon_server.core.store import OpenOptions, Store
from anarchon_server.opening import open_store
from tests.contract.harness import BACKENDS, CLAIM_ONLY
from tests.servers import redis
from tests.servers.ports import free_port

STORES = {
    name: factory
    for name, factory in (BACKENDS | CLAIM_ONLY).items()
    if not name.startswith("memory")
}
"""Every backend of the contract suite that a process can open by its URL."""

HOLDS = "the claim holds: of two tokens for one slot one won"


@pytest.fixture(params=list(STORES))
def store(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def url(store: str, tmp_path: Path) -> str:
    """The URL of a real store, fit to serve."""
    return url_of(store, tmp_path)


def url_of(store: str, directory: Path) -> str:
    return STORES[store](directory).url.partition("#")[0]


def config_of(url: str, **flags: str) -> Config:
    return load({"store": url, **flags}, {})


def texts(found: Examination, *kinds: Kind) -> str:
    return "\n".join(each.text for each in found.findings if each.kind in (kinds or tuple(Kind)))


# ── The command ─────────────────────────────────────────────────────────────────────────────────


def test_a_store_that_serves_is_shown_with_what_holds(
    store: str, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", "--store", url, "--namespace", store]) == 0
    shown = capsys.readouterr().out
    assert re.search(rf"(?m)^namespace +{store}$", shown)
    dies = "yes: a run whose instance dies is taken over" if store in BACKENDS else "no: "
    assert re.search(rf"(?m)^leases +{dies}", shown)
    assert re.search(r"(?m)^verified .*this look has made it, if it was not there", shown)
    assert re.search(rf"(?m)^verified +{HOLDS}", shown)
    assert re.search(r"(?m)^verified +a claim takes [\d.]+ ms$", shown)
    assert re.search(
        r"(?m)^verified +the clock that decides is [+-][\d.]+ ms from this machine's", shown
    )
    assert re.search(r"(?m)^ +it can serve: ", shown)


def test_as_json_it_is_one_object(store: str, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--store", url, "--namespace", store, "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert (found["serves"], found["namespace"], found["strict"]) == (True, store, False)
    assert re.match(r"sqlite|postgres|redis:|nats:|rabbitmq", found["backend"])
    assert found["can"]["leases"] is (store in BACKENDS)
    overlaps = ["allow", "cancel", "queue", "skip"] if store in BACKENDS else ["allow"]
    assert found["can"]["overlap"] == overlaps
    assert 0 < found["round_trip_ms"] < 2_000
    assert abs(found["clock_offset_ms"]) < 500
    assert {each["kind"] for each in found["findings"]} <= set(Kind)
    assert any(each["text"].startswith(HOLDS) for each in found["findings"])
    assert all(each["fix"] for each in found["findings"] if each["kind"] != "verified")


async def test_nothing_is_left_in_the_namespace_that_is_served(store: str, url: str) -> None:
    namespace = f"{store}.untouched"
    config = config_of(url, namespace=namespace)
    for _ in range(2):
        assert HOLDS in texts(await examine(config, SystemClock()))
    opened = open_store(url, OpenOptions(namespace, SystemClock()))
    await opened.open()
    try:
        assert (await opened.jobs((), "", 10)).answers == ()
        assert (await opened.runs(port.RunQuery())).answers == ()
        assert (await opened.instances()).answers == ()
    finally:
        await opened.close()


async def test_many_doctors_at_once_do_not_mistake_each_other_for_a_broken_store(
    store: str, url: str
) -> None:
    config = config_of(url, namespace=store)
    found = await asyncio.gather(*(examine(config, SystemClock()) for _ in range(6)))
    for each in found:
        assert HOLDS in texts(each, Kind.VERIFIED), each.findings
        assert each.serves


@pytest.mark.parametrize(
    ("strict", "environ", "status"),
    [((), "", 0), (("--strict",), "", FAILED), ((), "true", FAILED)],
    ids=["lax", "flag", "environment"],
)
def test_strict_makes_a_doubt_a_failure_and_each_has_its_fix(
    strict: Sequence[str],
    environ: str,
    status: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "a.db"
    file.touch(mode=0o644)
    file.chmod(0o644)
    monkeypatch.setenv("ANARCHON_STRICT", environ)
    assert cli.main(["doctor", "--store", f"sqlite://{file}", *strict]) == status
    shown = capsys.readouterr().out
    warning = r"(?m)^warning +others on this machine may use the file \(mode 0644\)\n +fix: (.*)$"
    fix = re.search(warning, shown)
    assert fix is not None
    assert fix[1] == f"chmod 600 {file}"
    assert ("strict: it leaves" in shown) is (status == FAILED)


def test_a_store_that_serve_would_refuse_is_fatal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", "--store", f"sqlite://{tmp_path}/none/a.db"]) == FAILED
    shown = capsys.readouterr().out
    assert re.search(r"(?m)^fatal +.*there is no directory .*; make it first$", shown)
    assert shown.endswith("it cannot serve\n")


def test_a_server_that_would_throw_claims_away_is_fatal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with redis.private("redis", "--maxmemory-policy", "allkeys-lru") as server:
        assert cli.main(["doctor", "--store", server.url]) == FAILED
    assert re.search(r"(?m)^fatal .*allkeys-lru.*set it to noeviction$", capsys.readouterr().out)


def test_a_store_that_is_away_is_fatal_and_no_password_is_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = f"redis://anarchon:hunter22@127.0.0.1:{free_port()}/0"
    assert cli.main(["doctor", "--store", url]) == FAILED
    out, err = capsys.readouterr()
    assert re.search(r"(?m)^fatal +it could not be reached: .*\n +fix: see that it runs", out)
    assert "hunter22" not in out + err
    assert "other users of this machine can see the password" in err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--namespace", "no spaces"), "anarchon doctor: namespace is 'no spaces': use 1 to 128"),
        (("--store", "a.db"), "anarchon doctor: store is 'a.db': write a URL"),
    ],
)
def test_a_wrong_setting_is_a_mistake_of_usage(
    flags: Sequence[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", *flags]) == USAGE_ERROR
    assert said in capsys.readouterr().err


def test_an_unknown_store_is_one_finding(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--store", "mongo://u:hunter22@h/db", "--json"]) == FAILED
    found = json.loads(capsys.readouterr().out)
    (finding,) = found["findings"]
    assert finding["kind"] == "fatal"
    assert "known ones: " in finding["text"]
    assert (found["backend"], found["can"]) == (None, None)
    assert "hunter22" not in json.dumps(found)


# ── Clocks ──────────────────────────────────────────────────────────────────────────────────────


class Fast(SystemClock):
    """A machine whose wall clock is set ahead, by `ahead_ms`."""

    def __init__(self, ahead_ms: int) -> None:
        self._ahead_us = ahead_ms * 1_000

    def wall_us(self) -> int:
        return super().wall_us() + self._ahead_us


@pytest.mark.parametrize("store", ["postgres", "redis"])
@pytest.mark.parametrize(
    ("ahead_ms", "kind"),
    [(1_500, Kind.VERIFIED), (-10_000, Kind.WARNING), (40_000, Kind.FATAL)],
)
async def test_s1_clocks_that_are_apart_are_measured_and_judged(
    store: str, ahead_ms: int, kind: Kind, tmp_path: Path
) -> None:
    """Beyond `max_clock_offset`, 30 s, an instance claims nothing."""
    found = await examine(config_of(url_of(store, tmp_path), namespace=store), Fast(ahead_ms))
    assert found.clock_offset_ms is not None
    assert abs(found.clock_offset_ms + ahead_ms) < 500
    (judged,) = [each for each in found.findings if re.search(r"clock that decides is ", each.text)]
    assert judged.kind is kind
    assert ("(NTP)" in judged.fix) is (kind is not Kind.VERIFIED)
    assert found.serves is (kind is not Kind.FATAL)


async def test_what_a_trial_left_behind_goes_with_a_later_one(tmp_path: Path) -> None:
    """On SQLite, whose time is the machine's."""
    config = config_of(f"sqlite://{tmp_path}/a.db")
    later = Fast(ahead_ms=200_000)
    for clock in (SystemClock(), SystemClock(), later):
        assert HOLDS in texts(await examine(config, clock))
    url, namespace = config.store.reveal(), trial.namespace_for("sqlite")
    opened = open_store(url, OpenOptions(namespace, later))
    await opened.open()
    try:
        assert len((await opened.runs(port.RunQuery())).answers) == 1 + trial.SAMPLES
        assert len((await opened.jobs((), "", 10)).answers) == 1
    finally:
        await opened.close()


# ── Stores that break their promise, or do not let themselves be tried ──────────────────────────


class Shared(MemoryStore):
    """A memory store that says it is shared, whatever it is."""

    def __init__(self, database: MemoryDatabase, options: OpenOptions) -> None:
        super().__init__(database, options)
        self.claims = 0


class ForgetsWinners(Shared):
    """Answers the repeat of a win as a loss."""

    async def claim(self, claims: Sequence[port.Claim]) -> port.Reply[port.ClaimAnswer]:
        reply = await super().claim(claims)
        self.claims += 1
        if self.claims == 1:
            return reply
        lost = (port.ClaimAnswer(port.ClaimOutcome.LOST),)
        return replace(reply, answers=lost)


class HidesWinners(Shared):
    """Does not say to whom a claim was lost."""

    async def claim(self, claims: Sequence[port.Claim]) -> port.Reply[port.ClaimAnswer]:
        reply = await super().claim(claims)
        return replace(
            reply,
            answers=tuple(
                answer if answer.outcome == "won" else replace(answer, run=None)
                for answer in reply.answers
            ),
        )


class Denies(Shared):
    """Does not let anybody register."""

    async def register(self, *_: object) -> Any:
        raise StoreUnavailable("no permission for this namespace")


class Silent(Shared):
    """Says of no claim what became of it."""

    async def claim(self, claims: Sequence[port.Claim]) -> port.Reply[port.ClaimAnswer]:
        reply = await super().claim(claims)
        unknown = port.ClaimAnswer(port.ClaimOutcome.UNKNOWN)
        return replace(reply, answers=tuple(unknown for _ in reply.answers))


class Breaks(Shared):
    """Loses its connection when it is asked for a claim."""

    async def claim(self, _: Sequence[port.Claim]) -> port.Reply[port.ClaimAnswer]:
        raise OutcomeUnknown("connection reset")


async def examined(
    make: Callable[[OpenOptions], Store], monkeypatch: pytest.MonkeyPatch, **flags: str
) -> Examination:
    def find(config: Config, clock: SystemClock) -> Store:
        return make(OpenOptions(config.namespace, clock))

    monkeypatch.setattr(doctor, "find_store", find)
    return await examine(config_of("memory:", **flags), SystemClock())


async def test_i1_two_winners_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each connection leads to a database of its own, as behind an address of several masters."""
    found = await examined(lambda options: Shared(MemoryDatabase(), options), monkeypatch)
    (finding,) = [each for each in found.findings if each.kind is Kind.FATAL]
    assert finding.text == "the claim does not hold: two tokens won the same slot"
    assert "another store" in finding.fix
    assert not found.serves


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (ForgetsWinners, "a token that had won was answered lost when it asked again"),
        (HidesWinners, "the token that lost was not shown the winner's"),
    ],
)
async def test_s11_a_store_that_forgets_or_hides_who_won_is_found(
    kind: type[Shared], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = MemoryDatabase()
    found = await examined(lambda options: kind(database, options), monkeypatch)
    assert said in texts(found, Kind.FATAL)
    assert HOLDS not in texts(found)
    assert not found.serves


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Denies, "the claim was not tried: no permission for this namespace"),
        (Breaks, "the claim was not tried: connection reset"),
        (Silent, "the claim was not tried: what became of a claim stayed unknown"),
    ],
)
async def test_a_claim_that_could_not_be_tried_is_unverified(
    kind: type[Shared], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = MemoryDatabase()
    for strict in ("false", "true"):
        found = await examined(lambda options: kind(database, options), monkeypatch, strict=strict)
        assert said in texts(found, Kind.UNVERIFIED)
        assert (found.round_trip_ms, found.clock_offset_ms) == (None, None)
        assert found.serves is (strict == "false")


async def test_slots_that_others_took_are_given_up_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where very many doctors are at work at once."""
    database = MemoryDatabase()

    class Taken(Shared):
        async def claim(self, claims: Sequence[port.Claim]) -> port.Reply[port.ClaimAnswer]:
            others = [replace(claim, token="theirs") for claim in claims]
            await super().claim(others)
            return await super().claim(claims)

    found = await examined(lambda options: Taken(database, options), monkeypatch)
    assert "no claim was won in 10 rounds (the last answers: lost)" in texts(found, Kind.UNVERIFIED)


async def test_a_backend_without_leases_is_tried_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    database = MemoryDatabase()
    found = await examined(
        lambda options: MemoryStore(database, replace(options, leases=False)), monkeypatch
    )
    assert HOLDS in texts(found, Kind.VERIFIED)
    assert found.capabilities is not None
    assert not found.capabilities.leases


async def test_a_user_that_may_use_one_namespace_only_leaves_the_claim_untried(
    tmp_path: Path,
) -> None:
    page = Path(__file__).parents[2] / "docs/stores/redis.md"
    (rules,) = re.findall(r"(?m)^ACL SETUSER anarchon (.*)$", page.read_text())
    namespace = trial.namespace_for("redis:lease")
    keys = f"anarchon:{{{len(namespace)}:{namespace}}}"
    with redis.private("redis") as server:
        config = config_of(f"redis://anarchon:a-secret@127.0.0.1:{server.port}/0")
        server.send("ACL", "SETUSER", "anarchon", *rules.split())
        found = await examine(config, SystemClock())
        assert "the claim was not tried: " in texts(found, Kind.UNVERIFIED)
        assert found.serves
        more = (f"~{keys[:-1]}*", f"&{keys}:news")
        server.send("ACL", "SETUSER", "anarchon", *more)
        assert HOLDS in texts(await examine(config, SystemClock()), Kind.VERIFIED)
