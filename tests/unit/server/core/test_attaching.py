"""Sessions: how clients come, live, come back, and go."""

from __future__ import annotations

from typing import Any

import pytest

from anarchon_server.core.errors import (
    InvalidError,
    InvalidJobsError,
    NotFoundError,
    RefusedError,
    StoreUnavailable,
)
from anarchon_server.core.limits import NOTES_MAX, REPORT_AWAITED, SESSIONS_MAX
from anarchon_server.core.messages import (
    Attached,
    ClientExited,
    Closed,
    CloseSession,
    EndStream,
    KeepAliveAnswer,
    Lost,
    Method,
    StreamEnded,
    UnwatchClient,
    WatchClient,
)
from anarchon_server.core.model import (
    CancelReason,
    Client,
    CronSchedule,
    JobSpec,
    OverlapPolicy,
    RunState,
)
from anarchon_server.core.store import Renewal
from tests.unit.server.core.driver import (
    START,
    FakeClient,
    Sidecar,
    World,
    current,
    every,
    ran,
)

LONG = every(60_000)
FENCED = CancelReason.FENCED


def lone(*specs: JobSpec, **options: Any) -> tuple[World, Sidecar, FakeClient]:
    """One instance with one client, its jobs registered."""
    world = World()
    sidecar = Sidecar(world)
    return world, sidecar, sidecar.ready_client(*specs, **options)


def running(spec: JobSpec = LONG, **options: Any) -> tuple[World, Sidecar, FakeClient]:
    """The same, with the run of slot 60 handed over, and recorded as running."""
    world, sidecar, client = lone(spec, **options)
    world.run_until(60_000)
    client.keep_alive()
    sidecar.wait_for(Method.BEAT)
    sidecar.settle()
    assert world.run(60_000).run.state is RunState.RUNNING
    return world, sidecar, client


def renewals(sidecar: Sidecar) -> list[Renewal]:
    return [renewal for beat in sidecar.beats for renewal in beat.renewals]


# --- Subscribe ---------------------------------------------------------------------------


def test_protocol_a_session_begins_with_attached_and_its_numbers() -> None:
    _, sidecar, client = lone(every(lease_ms=6_000), every(name="b"))
    assert client.events[0] == Attached(keep_alive_ms=1_000, session_ttl_ms=3_000, lost=())
    (line,) = sidecar.logged("session_attached")
    assert (line.fields["jobs"], line.fields["language"]) == (2, "python")


def test_protocol_attached_tells_what_a_reader_might_not_expect_of_a_schedule() -> None:
    cron = JobSpec("odd", CronSchedule("0 0 13 * 5"), jitter_ms=0)
    _, _, client = lone(cron)
    assert client.attached is not None
    assert client.attached.notes
    assert all(note.startswith("odd: ") for note in client.attached.notes)


def test_protocol_attached_has_a_limited_number_of_notes() -> None:
    jobs = [
        JobSpec(f"odd-{n}", CronSchedule("0 0 13 * 5"), jitter_ms=0) for n in range(NOTES_MAX + 1)
    ]
    _, _, client = lone(*jobs)
    assert client.attached is not None
    notes = client.attached.notes
    assert len(notes) == NOTES_MAX + 1
    assert notes[-1] == f"these are the first {NOTES_MAX} notes"


def test_protocol_one_bad_job_refuses_the_call_and_leaves_nothing_behind() -> None:
    world = World()
    sidecar = Sidecar(world)
    client = sidecar.client(every(), every(99, "bad"), JobSpec("worse", by_name=True))
    error = client.error
    assert isinstance(error, InvalidJobsError)
    assert [name for _, name, _ in error.problems] == ["bad", "worse"]
    assert client.attached is None
    sidecar.settle()
    assert sidecar.engine.status(world.now).sessions == ()


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"max_concurrency": 0}, "max_concurrency"), ({"max_concurrency": 10_001}, "max_concurrency")],
)
def test_protocol_a_concurrency_out_of_range_is_refused(
    changes: dict[str, Any], field: str
) -> None:
    error = Sidecar(World()).client(**changes).error
    assert isinstance(error, InvalidError)
    assert error.field == field


def test_protocol_a_session_without_jobs_is_refused() -> None:
    sidecar = Sidecar(World())
    client = FakeClient(sidecar, "client", ())
    client.subscribe()
    assert isinstance(client.error, InvalidError)
    assert client.error.field == "jobs"


def test_protocol_a_sidecar_has_at_most_64_sessions_and_known_ones_come_again() -> None:
    sidecar = Sidecar(World())
    clients = [sidecar.client(name=f"c{n}") for n in range(SESSIONS_MAX)]
    late = sidecar.client(name="late")
    assert isinstance(late.error, RefusedError)
    assert late.error.reason == "LIMIT_EXCEEDED"
    clients[0].subscribe()
    assert clients[0].attached is not None


def test_s23_a_sidecar_that_stops_takes_no_new_clients() -> None:
    _, sidecar, _ = running()
    sidecar.stop()
    late = sidecar.client(name="late")
    assert isinstance(late.error, RefusedError)
    assert late.error.reason == "DRAINING"


def test_protocol_while_the_store_is_away_a_client_is_attached_all_the_same() -> None:
    world = World()
    sidecar = Sidecar(world)
    sidecar.away = "refused"
    client = sidecar.client()
    assert client.attached is not None
    world.run_until(15_000)
    assert sidecar.claims == []
    sidecar.away = None
    world.run_until(25_000)
    assert client.only().slot == START + 20_000


def test_protocol_a_second_stream_ends_the_first_and_runs_do_not_notice() -> None:
    world, sidecar, client = running()
    first = client.stream_id
    client.subscribe()
    (end,) = [c for c in sidecar.said if isinstance(c, EndStream)]
    assert end.stream_id == first
    assert isinstance(end.error, RefusedError)
    assert end.error.reason == "SESSION_REPLACED"
    assert client.attached is not None
    assert client.attached.lost == ()
    client.keep_alive()
    world.run_until(80_000)
    assert client.cancelled == []
    assert current(world.run(60_000)) == (1, "running", "")


def test_s24_a_broken_stream_is_not_a_death() -> None:
    world, sidecar, client = running()
    client.lose_stream()
    assert client.keep_alive().stream_open is False
    world.run_until(110_000)
    client.subscribe()
    assert client.keep_alive().stream_open is True
    assert current(world.run(60_000)) == (1, "running", "")
    assert not sidecar.logged("session_lost")


def test_s24_the_end_of_a_stream_that_was_replaced_means_nothing() -> None:
    _, sidecar, client = running()
    old = client.stream_id
    client.subscribe()
    assert old is not None
    sidecar.feed(StreamEnded("client", old))
    sidecar.feed(StreamEnded("nobody", 99))
    assert client.keep_alive().stream_open is True


def test_s13_after_a_new_stream_nothing_is_claimed_before_a_keep_alive() -> None:
    world, sidecar, client = lone()
    client.subscribe()
    client.silent = True
    world.run_until(10_500)
    assert [claim.may_run for claim in sidecar.claims] == [False]


def test_protocol_nothing_is_claimed_for_a_client_before_what_it_brought_is_judged() -> None:
    world, sidecar, client = running()
    sidecar.die()
    new = Sidecar(world, "b")
    new.tick()
    new.settle()
    new.tick()
    again = new.client(LONG, every(1_000, "other"), name="again", in_flight=tuple(client.running))
    new.answer(Method.REGISTER)
    again.ask_to_live(*client.running)
    world.now += 1_000
    again.ask_to_live(*client.running)
    assert new.waits(Method.CLAIM)
    assert [claim.may_run for claim in new.claims] == [False]


# --- Coming back with attempts in flight -------------------------------------------------


def restarted(world: World, old: Sidecar, client: FakeClient, **options: Any) -> FakeClient:
    """The sidecar dies; its client comes to the next one and names what it runs."""
    old.die()
    return Sidecar(world, "b", **options).client(
        *client.specs, in_flight=tuple(client.running), name="again"
    )


def test_s26_a_restarted_sidecar_adopts_what_its_client_runs() -> None:
    world, sidecar, client = running()
    token = client.only().token
    before = world.run(60_000).run
    world.run_for(3_000)
    again = restarted(world, sidecar, client)
    assert again.events == [], "not before the store has answered"
    again.sidecar.settle()
    assert again.attached is not None
    assert again.attached.lost == ()
    after = world.run(60_000).run
    assert before.current is not None
    assert after.current is not None
    assert (after.token, after.attempt) == (token, 1)
    assert (after.current.fence, after.current.instance_id) == (before.current.fence, "b")
    again.running = dict(client.running)
    again.keep_alive()
    world.run_until(110_000)
    assert again.cancelled == []
    number = again.complete(result="done")
    again.sidecar.settle()
    assert again.receipts(number)[0].state is RunState.SUCCESS
    assert again.sidecar.logged("run_adopted")


def test_s26_a_run_whose_start_was_not_recorded_is_running_once_it_is_adopted() -> None:
    world, sidecar, client = lone(LONG)
    world.run_until(60_000)
    client.keep_alive()
    again = restarted(world, sidecar, client)
    again.sidecar.settle()
    again.running = dict(client.running)
    again.keep_alive()
    world.run_until(66_000)
    assert world.run(60_000).run.state is RunState.RUNNING


def test_s26_a_timeout_goes_on_from_the_recorded_start() -> None:
    world, sidecar, client = running(every(60_000, timeout_ms=20_000))
    world.run_until(70_000)
    again = restarted(world, sidecar, client)
    again.running = dict(client.running)
    again.sidecar.settle()
    again.keep_alive()
    world.run_until(79_999)
    assert again.cancelled == []
    world.run_until(80_000)
    assert again.reasons() == [CancelReason.TIMEOUT]


def test_s21_a_timeout_that_is_gone_on_with_counts_from_the_start_and_not_from_the_claim() -> None:
    world, sidecar, client = lone(every(60_000, timeout_ms=20_000))
    world.run_until(72_000)
    attempt = world.run(60_000).run.current
    assert attempt is not None
    assert attempt.started_at is not None
    assert attempt.started_at > attempt.claimed_at
    again = restarted(world, sidecar, client)
    again.running = dict(client.running)
    again.sidecar.settle()
    world.run_until(attempt.started_at - START + 19_999)
    assert again.cancelled == []
    world.run_for(1)
    assert again.reasons() == [CancelReason.TIMEOUT]


def test_s21_what_ended_in_its_time_while_the_sidecar_was_away_counts_as_it_ended() -> None:
    """Its client reports only once it has subscribed, and by then the timeout is over."""
    world, sidecar, client = running(every(60_000, timeout_ms=4_000))
    sidecar.die()
    world.run_until(66_000)
    again = Sidecar(world, "b").client(*client.specs, in_flight=tuple(client.running), name="again")
    again.running = dict(client.running)
    again.sidecar.settle()
    assert again.cancelled == []
    again.complete(result="done", elapsed_ms=4_000)
    again.sidecar.settle()
    run = world.run(60_000).run
    assert (run.state, run.reason, run.cancel) == (RunState.SUCCESS, "", None)


def test_s21_what_has_nothing_to_report_when_its_timeout_is_over_is_cancelled() -> None:
    world, sidecar, client = running(every(60_000, timeout_ms=4_000))
    sidecar.die()
    world.run_until(66_000)
    again = Sidecar(world, "b").client(*client.specs, in_flight=tuple(client.running), name="again")
    again.running = dict(client.running)
    again.sidecar.settle()
    world.run_for(REPORT_AWAITED)
    assert again.reasons() == [CancelReason.TIMEOUT]


def test_s21a_a_cancel_that_the_run_carries_is_delivered_by_who_adopts_it() -> None:
    world, sidecar, client = running(every(60_000, timeout_ms=7_000, cancel_grace_ms=30_000))
    world.run_until(69_000)
    assert world.run(60_000).run.cancel is CancelReason.TIMEOUT
    again = restarted(world, sidecar, client)
    again.running = dict(client.running)
    again.sidecar.settle()
    assert again.reasons() == [CancelReason.TIMEOUT]
    again.keep_alive()
    world.run_until(75_000)
    assert again.reasons() == [CancelReason.TIMEOUT], "its timer adds nothing"


def test_s26_what_was_taken_over_meanwhile_is_lost() -> None:
    world, sidecar, client = running(every(60_000, lease_ms=3_000))
    sidecar.die()
    Sidecar(world, "c").ready_client(every(60_000, lease_ms=3_000))
    world.run_until(70_000)
    again = restarted(world, sidecar, client)
    again.sidecar.settle()
    assert again.attached is not None
    assert again.attached.lost == (Lost(client.only().token, FENCED),)


def test_s26_what_ended_while_the_store_was_asked_to_adopt_it_is_not_held() -> None:
    """The result came by another call, and its answer before that of the heartbeat."""
    world, sidecar, client = running()
    token = client.only().token
    again = restarted(world, sidecar, client)
    adopting = again.sidecar.pending(Method.BEAT)
    renewed = again.sidecar.execute(adopting)
    again.complete(token, result="done")
    again.sidecar.answer(Method.COMPLETE)
    again.sidecar.reply(adopting, renewed)
    assert again.attached is not None
    assert again.attached.lost == (), "it has its receipt"
    assert not again.sidecar.logged("run_adopted")
    assert current(world.run(60_000)) == (1, "success", "")


def test_s26_what_cannot_be_adopted_is_named_without_asking_the_store() -> None:
    _, _, client = lone()
    strange = ("no token", f"{START}.x.unknown-job")
    other = client.sidecar.client(name="other", in_flight=(*strange, *strange))
    assert other.attached is not None
    assert other.attached.lost == tuple(Lost(token, FENCED) for token in strange)
    assert not client.sidecar.waits(Method.BEAT)


def test_s26_what_another_session_of_this_sidecar_runs_is_not_adopted() -> None:
    world, sidecar, client = running()
    token = client.only().token
    thief = sidecar.client(LONG, name="thief", in_flight=(token,))
    assert thief.attached is not None
    assert thief.attached.lost == (Lost(token, FENCED),)
    world.run_until(80_000)
    assert client.cancelled == []


def test_s26_of_two_sessions_that_bring_one_token_the_first_has_it() -> None:
    world, sidecar, client = running()
    sidecar.die()
    new = Sidecar(world, "b")
    tokens = tuple(client.running)
    one = new.client(LONG, name="one", in_flight=tokens)
    other = new.client(LONG, name="other", in_flight=tokens)
    new.settle()
    assert one.attached is not None
    assert other.attached is not None
    assert (one.attached.lost, other.attached.lost) == ((), (Lost(tokens[0], FENCED),))


def test_s26_a_token_that_was_adopted_and_lost_while_another_asked_is_not_adopted_twice() -> None:
    world, sidecar, client = running(every(60_000, lease_ms=3_000))
    sidecar.die()
    new = Sidecar(world, "b")
    tokens = tuple(client.running)
    one = new.client(*client.specs, name="one", in_flight=tokens)
    new.settle()
    one.running = dict(client.running)
    one.keep_alive()
    other = new.client(*client.specs, name="other", in_flight=tokens)
    assert other.attached is not None
    assert other.attached.lost == (Lost(tokens[0], FENCED),)
    assert one.attached is not None
    assert world.run(60_000).run.attempt == 1


def test_protocol_with_strange_tokens_a_client_waits_for_the_store() -> None:
    world, sidecar, client = running()
    sidecar.die()
    new = Sidecar(world, "b")
    new.away = "refused"
    again = new.client(LONG, name="again", in_flight=tuple(client.running))
    new.settle()
    assert isinstance(again.error, StoreUnavailable)
    assert again.events == []
    assert isinstance(new.answer_to(again.ask_to_live(*client.running)), StoreUnavailable)
    new.away = None
    again.in_flight = tuple(client.running)
    again.subscribe()
    world.run_for(1_000)
    assert again.attached is not None
    assert again.attached.lost == ()


def test_protocol_a_client_that_comes_a_third_time_is_answered_on_its_newest_stream() -> None:
    world, sidecar, client = running()
    sidecar.die()
    new = Sidecar(world, "b")
    again = new.client(LONG, name="again", in_flight=tuple(client.running))
    first = again.stream_id
    again.subscribe()
    new.settle()
    ended = [c for c in new.said if isinstance(c, EndStream)]
    assert [end.stream_id for end in ended] == [first]
    assert again.attached is not None
    assert again.attached.lost == ()
    assert len(new.logged("session_attached")) == 1


def test_protocol_what_the_store_answers_after_the_client_has_gone_is_dropped() -> None:
    world, sidecar, client = running()
    sidecar.die()
    new = Sidecar(world, "b")
    again = new.client(LONG, name="again", in_flight=tuple(client.running))
    again.lose_stream()
    new.settle()
    assert again.attached is None
    assert new.engine.status(world.now).instance.running == 0


def test_s26_no_trust_is_extended_in_what_the_store_has_not_judged() -> None:
    world, sidecar, client = running()
    sidecar.die()
    new = Sidecar(world, "b")
    again = new.client(LONG, name="again", in_flight=tuple(client.running))
    assert isinstance(new.answer_to(again.ask_to_live(*client.running)), StoreUnavailable)
    new.settle()
    assert again.keep_alive(*client.running).lost == ()
    assert world.run(60_000).run.attempt == 1


def test_protocol_a_result_on_its_way_is_neither_adopted_nor_lost() -> None:
    _, sidecar, client = running()
    token = client.only().token
    client.complete()
    client.subscribe(in_flight=(token,))
    assert client.attached is not None
    assert client.attached.lost == ()
    assert client.keep_alive(token).lost == ()
    sidecar.settle()


def test_protocol_what_this_session_was_told_to_stop_is_lost_for_that_reason() -> None:
    world, _, client = running(every(60_000, timeout_ms=7_000))
    world.run_until(73_000)
    client.subscribe()
    assert client.attached is not None
    assert client.attached.lost == (Lost(client.only().token, CancelReason.TIMEOUT),)


def test_s17_a_client_that_moved_to_another_sidecar_is_not_released_by_the_first() -> None:
    world, sidecar, client = running()
    moved = Sidecar(world, "b").client(LONG, in_flight=tuple(client.running), name="moved")
    moved.sidecar.settle()
    moved.running = dict(client.running)
    moved.keep_alive()
    client.silent = True
    world.run_until(100_000)
    assert sidecar.logged("session_lost")
    assert current(world.run(60_000)) == (1, "running", "")
    assert moved.cancelled == []


# --- KeepAlive ---------------------------------------------------------------------------


def test_protocol_a_keep_alive_of_an_unknown_session_sends_the_client_to_subscribe() -> None:
    sidecar = Sidecar(World())
    client = FakeClient(sidecar, "nobody", (every(),))
    error = sidecar.answer_to(client.ask_to_live())
    assert isinstance(error, NotFoundError)
    assert "subscribe again" in str(error)


def test_protocol_a_keep_alive_is_answered_with_the_sessions_numbers() -> None:
    _, _, client = lone()
    assert client.keep_alive() == KeepAliveAnswer(15_000, 5_000, True, (), ())


def test_s27_trust_shrinks_with_the_leases_while_the_store_is_away() -> None:
    world, sidecar, client = running()
    sidecar.away = "refused"
    world.run_for(8_000)
    first = client.keep_alive().session_ttl_ms
    world.run_for(4_000)
    second = client.keep_alive().session_ttl_ms
    assert first <= 15_000
    assert second == pytest.approx(min(first, 17_000) - 4_000, abs=4_000)
    assert second < 15_000
    world.run_for(20_000)
    assert client.reasons() == [CancelReason.LEASE_LOST]


def test_protocol_confirm_is_answered_after_a_fresh_renewal() -> None:
    _, sidecar, client = running()
    token = client.only().token
    number = client.ask_to_live(token, confirm=(token, "strange"))
    assert sidecar.answer_to(number) is None
    sidecar.answer(Method.BEAT)
    assert sidecar.answer_to(number).confirmed == (token,)
    assert renewals(sidecar)[-1].token == token


def test_protocol_what_the_store_does_not_confirm_is_not_confirmed() -> None:
    world, sidecar, client = running()
    token = client.only().token
    number = client.ask_to_live(token, confirm=(token,))
    sidecar.fail(Method.BEAT, unknown=True)
    assert sidecar.answer_to(number).confirmed == ()
    world.run_for(2_000)
    world.restore()
    number = client.ask_to_live(token, confirm=(token,))
    sidecar.settle()
    assert sidecar.answer_to(number).confirmed == ()
    assert client.reasons() == [FENCED]


def test_protocol_a_session_that_ends_while_its_confirm_is_out_is_not_found() -> None:
    _, sidecar, client = running()
    token = client.only().token
    number = client.ask_to_live(token, confirm=(token,))
    client.close()
    sidecar.settle()
    assert isinstance(sidecar.answer_to(number), NotFoundError)


def test_s15_a_longer_session_counts_at_once() -> None:
    _, _, client = lone(every(lease_ms=6_000))
    client.specs = (every(lease_ms=30_000),)
    client.subscribe()
    assert client.keep_alive().session_ttl_ms == 15_000


def test_s15_a_shorter_lease_counts_once_every_older_promise_has_run_out() -> None:
    world, sidecar, client = lone(every(1_000))
    world.run_until(500)
    shorter = every(1_000, lease_ms=3_000)
    client.specs = (shorter,)
    client.lasts_ms = 1
    client.subscribe()
    assert client.keep_alive().session_ttl_ms == 1_500
    world.run_until(15_499)
    assert not [claim for claim in sidecar.claims if claim.may_run]
    world.run_until(17_600)
    won = [claim for claim in sidecar.claims if claim.may_run]
    assert won
    assert {claim.lease_ms for claim in won} == {3_000}
    assert not sidecar.logged("session_lost")


def test_s15_a_job_that_another_client_made_shorter_shortens_every_session_that_has_it() -> None:
    world, sidecar, client = lone(LONG)
    sidecar.client(every(60_000, lease_ms=3_000), name="newer")
    assert client.keep_alive().session_ttl_ms == 1_500
    world.run_until(20_000)
    assert not sidecar.logged("session_lost")
    session = sidecar.engine._context.sessions.get("client")
    assert session is not None
    assert session.ttl_ms == 1_500


def test_s15_an_offer_that_grows_again_clears_the_shorter_one() -> None:
    world, sidecar, client = lone(every(60_000, lease_ms=30_000))
    newer = sidecar.client(every(60_000, lease_ms=3_000), name="newer")
    assert client.keep_alive().session_ttl_ms == 1_500
    newer.close()
    client.subscribe()
    assert client.keep_alive().session_ttl_ms == 15_000
    world.run_until(40_000)
    session = sidecar.engine._context.sessions.get("client")
    assert session is not None
    assert session.ttl_ms == 15_000


# --- Endings -----------------------------------------------------------------------------


def test_s25_a_client_that_says_nothing_for_its_sessions_time_is_lost() -> None:
    world, sidecar, client = running()
    world.run_until(64_000)
    client.keep_alive()
    client.next_at = None  # it freezes
    last = world.now
    world.run_until(last + 14_999)
    assert not [c for c in sidecar.said if isinstance(c, EndStream)]
    world.run_until(last + 15_000)
    assert isinstance(client.error, NotFoundError)
    assert sidecar.called(Method.RELEASE) == [], "its client stops trusting a margin earlier"
    world.run_until(last + 19_999)
    assert current(world.run(60_000)) == (1, "running", "")
    world.run_until(last + 20_000)
    assert current(world.run(60_000)) == (1, "interrupted", "runner_lost")
    assert isinstance(sidecar.answer_to(client.ask_to_live()), NotFoundError)


def test_s25_on_a_thaw_a_client_learns_what_it_lost() -> None:
    world, _, client = running()
    client.next_at = None
    world.run_until(90_000)
    client.subscribe()
    client.sidecar.settle()
    assert client.attached is not None
    assert [lost.token for lost in client.attached.lost] == [client.only().token]


def test_s25_a_lost_session_without_a_stream_ends_none() -> None:
    world, sidecar, client = running()
    client.next_at = None
    client.lose_stream()
    world.run_until(90_000)
    assert sidecar.logged("session_lost")
    assert not [c for c in sidecar.said if isinstance(c, EndStream)]


def test_s24_the_runs_of_a_dead_process_are_released_at_once() -> None:
    world, sidecar, client = running(watchable=True)
    client.exit()
    sidecar.settle()
    assert current(world.run(60_000)) == (1, "interrupted", "runner_lost")
    assert client.end == EndStream("client", client_stream(client), None)
    assert sidecar.logged("client_exited")


def client_stream(client: FakeClient) -> int:
    assert client.end is not None
    return client.end.stream_id


def test_s24_what_a_dead_process_had_reported_is_not_released() -> None:
    world, sidecar, client = running(watchable=True)
    client.complete(result="done")
    client.exit()
    assert not sidecar.waits(Method.RELEASE)
    sidecar.settle()
    assert current(world.run(60_000)) == (1, "success", "")


def test_s24_a_process_that_exits_while_it_drains_hands_over() -> None:
    world, sidecar, client = running(watchable=True)
    client.keep_alive(draining=True)
    client.lose_stream()
    client.exit()
    sidecar.settle()
    assert current(world.run(60_000)) == (1, "interrupted", "handed_over")


def test_s24_the_exit_of_a_process_nobody_knows_means_nothing() -> None:
    _, sidecar, _ = lone()
    assert sidecar.feed(ClientExited("nobody")) == []


def test_s24_only_a_client_that_can_be_seen_is_watched_and_only_while_it_is_here() -> None:
    _, sidecar, client = lone(watchable=True)
    sidecar.client(name="far", watchable=False)
    assert sidecar.watches() == [WatchClient("client", 4711)]
    client.close()
    assert sidecar.watches()[-1] == UnwatchClient("client")


def test_s23_a_client_that_leaves_hands_over_what_stopped_and_leaves_the_rest_to_its_lease() -> (
    None
):
    world, sidecar, client = lone(LONG, every(60_000, "other"))
    world.run_until(60_000)
    stopped, kept = client.running
    client.close(stopped)
    sidecar.settle()
    jobs = {stopped: "", kept: ""}
    for view in [*world.runs("sync"), *world.runs("other")]:
        jobs[view.run.token] = view.run.freed
    assert (jobs[stopped], jobs[kept]) == ("handed_over", "")
    assert sidecar.engine.status(world.now).instance.running == 0
    assert isinstance(client.end, EndStream)
    assert client.error is None
    world.run_until(120_000)
    assert len(renewals(sidecar)) <= 2


def test_s23_what_a_client_left_running_is_handed_over_when_its_process_ends() -> None:
    world, sidecar, client = running(watchable=True)
    client.close()
    assert sidecar.watches() == [WatchClient("client", 4711)]
    world.run_for(1_000)
    assert current(world.run(60_000)) == (1, "running", "")
    sidecar.feed(ClientExited("client"))
    sidecar.settle()
    assert current(world.run(60_000)) == (1, "interrupted", "handed_over")


def test_s23_a_process_that_goes_on_is_watched_for_as_long_as_its_lease() -> None:
    world, sidecar, client = running(every(60_000, lease_ms=10_000), watchable=True)
    client.close()
    world.run_for(9_999)
    assert sidecar.watches() == [WatchClient("client", 4711)]
    world.run_for(1)
    assert sidecar.watches()[-1] == UnwatchClient("client")
    assert sidecar.feed(ClientExited("client")) == []


def test_s23_a_client_that_comes_back_has_not_left_what_it_runs() -> None:
    world, sidecar, client = running(every(60_000, lease_ms=10_000), watchable=True)
    kept = tuple(client.running)
    client.close()
    client.silent = False
    client.subscribe(in_flight=kept)
    sidecar.settle()
    world.run_for(20_000)
    assert UnwatchClient("client") not in sidecar.watches()
    assert current(world.run(60_000)) == (1, "running", "")


def test_s23_a_process_that_left_is_watched_no_more_when_another_opens_its_session() -> None:
    _, sidecar, client = running(watchable=True)
    client.close()
    client.subscribe(watchable=False)
    assert sidecar.watches()[-1] == UnwatchClient("client")


def test_s23_closing_without_a_stream_or_a_session_is_answered_too() -> None:
    _, sidecar, client = lone()
    client.lose_stream()
    client.close()
    number = sidecar.number()
    sidecar.feed(CloseSession(number, "nobody", ()))
    assert sidecar.answer_to(number) == Closed()
    assert not [c for c in sidecar.said if isinstance(c, EndStream)]


def test_s25_a_result_on_its_way_survives_its_session() -> None:
    world, sidecar, client = running()
    client.complete(result="done")
    call = sidecar.pending(Method.COMPLETE)
    client.close()
    world.now += 100
    sidecar.reply(call, sidecar.execute(call))
    assert current(world.run(60_000)) == (1, "success", "")


def test_s13_a_lost_sessions_waiting_run_goes_to_a_client_that_has_room() -> None:
    world, sidecar, client = lone(LONG, max_concurrency=9)
    world.run_until(59_999)
    sidecar.wait_for(Method.CLAIM)
    client.lose_stream()
    other = sidecar.client(LONG, name="other")
    sidecar.answer(Method.CLAIM)
    assert other.running == {}
    client.silent = True
    world.run_until(80_000)
    assert other.only().attempt == 1


def test_s13_a_lost_sessions_waiting_run_of_a_job_nobody_has_is_given_back() -> None:
    world, sidecar, client = lone(LONG)
    world.run_until(59_999)
    sidecar.wait_for(Method.CLAIM)
    client.lose_stream()
    sidecar.answer(Method.CLAIM)
    client.silent = True
    world.run_until(80_000)
    assert world.run(60_000).run.freed == "not_accepted"


def test_s26_a_sidecar_whose_store_is_away_answers_for_nothing_that_another_held() -> None:
    world, sidecar, client = running()
    token = client.only().token
    sidecar.die()
    new = Sidecar(world, "b")
    new.away = "refused"
    again = new.client(LONG, name="again", in_flight=(token,))
    for _ in range(12):  # for longer than the lease
        world.run_for(5_000)
        asked = again.ask_to_live(token, confirm=(token,))
        assert isinstance(new.answer_to(asked), StoreUnavailable)


def test_s23_what_is_adopted_while_the_instance_stops_goes_along_to_the_successor() -> None:
    world, sidecar, client = running()
    token = client.only().token
    sidecar.die()
    new = Sidecar(world, "b")
    again = new.client(LONG, name="again", in_flight=(token,))
    new.stop()
    new.settle()
    assert isinstance(again.error, RefusedError)
    assert again.error.reason == "DRAINING"
    assert again.attached is None
    assert new.stopped
    third = Sidecar(world, "c").client(LONG, name="again", in_flight=(token,))
    third.sidecar.settle()
    assert third.attached is not None
    assert third.attached.lost == ()


@pytest.mark.parametrize("held", [True, False])
def test_s24_a_process_that_ends_while_it_is_adopted_leaves_nothing_to_its_lease(
    held: bool,
) -> None:
    world, sidecar, client = running()
    token = client.only().token
    if not held:
        client.complete(token, result="done")
        sidecar.settle()
    sidecar.die()
    new = Sidecar(world, "b")
    again = new.client(LONG, name="again", in_flight=(token,), watchable=True)
    again.exit()
    new.settle()
    run = world.run(60_000).run
    assert (run.freed, run.state.final) == (("runner_lost", False) if held else ("", True))


def test_s24_a_session_opened_again_by_a_process_that_cannot_be_seen_is_not_watched() -> None:
    _, sidecar, client = lone(watchable=True)
    client.watchable = False
    client.subscribe()
    assert sidecar.watches()[1:] == [UnwatchClient("client")]


def test_status_shows_the_sessions_by_the_stores_clock() -> None:
    world = World()
    sidecar = Sidecar(world)
    sidecar.client(LONG, every(name="b"), max_concurrency=3)
    (before,) = sidecar.engine.status(world.now).sessions
    assert before.kept_alive_at is None
    world.run_until(60_000)
    (seen,) = sidecar.engine.status(world.now).sessions
    assert (seen.session_id, seen.jobs, seen.max_concurrency) == ("client", ("sync", "b"), 3)
    assert seen.client == Client("python", "1", "host", 4711)
    assert seen.running == 2
    assert seen.kept_alive_at is not None
    assert 55_000 <= seen.kept_alive_at - START <= 60_000


def test_overlap_is_the_same_for_all_clients_of_one_job() -> None:
    world, sidecar, client = lone(every(overlap=OverlapPolicy.ALLOW), max_concurrency=1)
    second = sidecar.client(every(overlap=OverlapPolicy.ALLOW), name="second", max_concurrency=1)
    world.run_until(25_000)
    assert len(client.running) == len(second.running) == 1
    assert ran(world.store.instances()).answers[0].running == 2
