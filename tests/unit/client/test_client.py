"""`AnarchonClient` and `Subscription` against a puppet of a sidecar, in virtual time."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import traceback
from pathlib import Path

import pytest

import anarchon
from anarchon import _client
from anarchon.testing import FakeRun, FakeSidecar
from tests.unit.client.virtual import VirtualClock, VirtualLoop, virtual

TTL_S, INTERVAL_S = 15, 5


class Application:
    """Handlers that record what becomes of them."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.contexts: list[anarchon.Context] = []
        self.go_on = asyncio.Event()
        self.started = asyncio.Event()

    @anarchon.every("10s")
    async def work(self, ctx: anarchon.Context) -> str:
        """Runs until it is let go, and obeys."""
        self.contexts.append(ctx)
        self.started.set()
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.told.append("cancelled")
            raise
        return "done"

    @anarchon.every("10s")
    async def stubborn(self, ctx: anarchon.Context) -> str:
        """Does not obey."""
        self.contexts.append(ctx)
        self.started.set()
        while not self.go_on.is_set():
            try:
                await self.go_on.wait()
            except asyncio.CancelledError:
                self.told.append("cancelled")
        return "done all the same"


class World:
    """A client, its application and its sidecar, on the running loop."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.clock = VirtualClock(loop)
        self.sidecar = FakeSidecar()
        self.app = Application()
        self.client = anarchon.AnarchonClient(
            transport=self.sidecar, clock=self.clock, random=lambda: 0.0, max_concurrency=3
        )
        self.subscription = self.client.subscribe([self.app.work, self.app.stubborn])

    async def running(self, job: str = "work") -> FakeRun:
        """Wait until a handler of `job` runs."""
        await self.subscription.ready()
        self.app.started.clear()
        run = self.sidecar.assign(job)
        await self.app.started.wait()
        return run

    def passed_s(self, since_ms: int) -> float:
        return (self.clock.now_ms() - since_ms) / 1_000


# ── Running ─────────────────────────────────────────────────────────────────────────────────────


@virtual
async def test_a_handler_runs_and_its_result_is_reported() -> None:
    world = World()
    assert await world.subscription.ready() == "fake:1"
    run = await world.running()
    world.app.go_on.set()
    outcome = await run.outcome
    assert outcome.success.result == "done"
    await world.client.stop()
    assert world.subscription.closed.done()


@virtual
async def test_keep_alives_name_what_runs_every_interval() -> None:
    world = World()
    run = await world.running()
    await asyncio.sleep(3 * INTERVAL_S + 0.1)
    assert [list(sent.in_flight) for sent in world.sidecar.keep_alives] == [
        [],
        [run.token],
        [run.token],
        [run.token],
    ]
    await world.client.stop(grace="0s")


@virtual
async def test_a_duplicate_assignment_runs_once() -> None:
    world = World()
    run = await world.running()
    world.sidecar.deliver(run, run)
    await asyncio.sleep(1)
    assert len(world.app.contexts) == 1
    world.app.go_on.set()
    await run.outcome
    world.sidecar.deliver(run)
    await asyncio.sleep(1)
    assert len(world.app.contexts) == 1
    await world.client.stop()


@virtual
async def test_a_cancellation_reaches_the_handler_and_the_answer_says_stopped() -> None:
    world = World()
    run = await world.running()
    world.sidecar.cancel(run, anarchon.CancelReason.TIMEOUT)
    outcome = await run.outcome
    assert outcome.WhichOneof("result") == "stopped"
    assert outcome.stopped.reason == 1
    assert world.app.told == ["cancelled"]
    with pytest.raises(anarchon.Cancelled, match="timeout"):
        world.app.contexts[0].check()
    await world.client.stop()


@virtual
async def test_a_handler_that_ignores_a_cancellation_reports_how_it_ended() -> None:
    world = World()
    run = await world.running("stubborn")
    world.sidecar.cancel(run)
    await asyncio.sleep(1)
    assert world.app.told == ["cancelled"]
    world.app.go_on.set()
    assert (await run.outcome).success.result == "done all the same"
    await world.client.stop()


# ── Losing the sidecar ──────────────────────────────────────────────────────────────────────────


@virtual
async def test_s24_a_broken_stream_is_not_noticed_by_handlers() -> None:
    world = World()
    run = await world.running()
    world.sidecar.break_stream()
    await asyncio.sleep(1)
    assert list(world.sidecar.subscribes[1].in_flight) == [run.token]
    assert world.sidecar.subscribes[1].session_id == world.subscription.session_id
    await asyncio.sleep(60)
    world.app.contexts[0].check()
    world.app.go_on.set()
    assert (await run.outcome).success.result == "done"
    await world.client.stop()


@virtual
async def test_s26_a_sidecar_back_in_time_is_told_what_runs_and_handlers_go_on() -> None:
    world = World()
    run = await world.running()
    world.sidecar.go_away()
    await asyncio.sleep(10)
    world.sidecar.come_back()
    await asyncio.sleep(30)
    assert list(world.sidecar.subscribes[-1].in_flight) == [run.token]
    world.app.contexts[0].check()
    world.app.go_on.set()
    await run.outcome
    await world.client.stop()


@virtual
async def test_s26_a_sidecar_gone_for_good_ends_trust_15_s_after_the_last_answer_was_asked() -> (
    None
):
    world = World()
    await world.running()
    last_ms = world.clock.now_ms()
    world.sidecar.go_away()
    context = world.app.contexts[0]
    await asyncio.sleep(TTL_S - 0.01)
    context.check()
    assert world.app.told == []
    await asyncio.sleep(0.01)
    assert world.passed_s(last_ms) == TTL_S
    with pytest.raises(anarchon.LeaseLost):
        context.check()
    await asyncio.sleep(0)
    assert world.app.told == ["cancelled"]
    world.sidecar.come_back()
    await world.client.stop()


@virtual
async def test_s25_keep_alives_without_an_answer_end_trust() -> None:
    world = World()
    await world.running()
    world.sidecar.is_silent = True
    await asyncio.sleep(TTL_S - 0.01)
    assert world.app.told == []
    await asyncio.sleep(0.02)
    assert world.app.told == ["cancelled"]
    world.sidecar.is_silent = False
    await world.client.stop()


@virtual
async def test_a_result_of_an_outage_is_reported_when_the_sidecar_is_back() -> None:
    world = World()
    run = await world.running()
    world.sidecar.go_away()
    world.app.go_on.set()
    await asyncio.sleep(60)
    assert not run.outcome.done()
    world.sidecar.come_back()
    assert (await run.outcome).success.result == "done"
    await world.client.stop()


@virtual
async def test_a_session_that_is_not_known_is_subscribed_again() -> None:
    world = World()
    run = await world.running()
    world.sidecar.forget_session()
    await asyncio.sleep(INTERVAL_S + 1)
    assert list(world.sidecar.subscribes[1].in_flight) == [run.token]
    assert world.app.told == []
    await world.client.stop(grace="0s")


@virtual
async def test_s17_a_run_that_was_taken_over_is_cancelled_as_fenced() -> None:
    world = World()
    run = await world.running()
    world.sidecar.lose(run)
    await asyncio.sleep(INTERVAL_S + 0.1)
    assert world.app.told == ["cancelled"]
    with pytest.raises(anarchon.Fenced):
        world.app.contexts[0].check()
    assert world.app.contexts[0].cancelled
    await world.client.stop()


@virtual
async def test_a_missing_sidecar_is_no_error_and_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop = asyncio.get_running_loop()
    sidecar = FakeSidecar()
    sidecar.go_away()
    client = anarchon.AnarchonClient(transport=sidecar, clock=VirtualClock(loop))
    with caplog.at_level(logging.INFO, "anarchon"):
        subscription = client.subscribe([Application().work])
        await asyncio.sleep(600)
        assert len(sidecar.subscribes) > 100
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        sidecar.come_back()
        await subscription.ready()
    await client.stop()


@virtual
async def test_s25_a_blocked_loop_is_named_as_what_cost_the_lease(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World()
    await world.running()
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.jump(INTERVAL_S + 16)  # as time.sleep in a handler that is async
    world.sidecar.forget_session()
    await asyncio.sleep(1)
    told = [r.getMessage() for r in caplog.records]
    assert "no keep-alive was sent for at least 16.0 s: the event loop was blocked" in told[0]
    assert "plain functions" in told[0]
    assert "stopped (lease_lost: no keep-alive was answered in time)" in caplog.text
    assert "the sidecar no longer knows our session; subscribing again" in caplog.text
    assert len([line for line in told if "blocked" in line]) == 1
    await world.client.stop()


@virtual
async def test_a_sidecar_that_is_slow_is_not_taken_for_a_blocked_loop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World()
    await world.running()
    world.sidecar.is_silent = True
    await asyncio.sleep(60)
    assert "blocked" not in caplog.text
    world.sidecar.is_silent = False
    await world.client.stop()


# ── Errors ──────────────────────────────────────────────────────────────────────────────────────


@virtual
async def test_what_the_sidecar_refuses_is_raised_in_its_own_words() -> None:
    sidecar = FakeSidecar()
    sidecar.refuse(anarchon.UnsupportedError("catch_up: nats cannot; redis can", "UNSUPPORTED"))
    client = anarchon.AnarchonClient(
        transport=sidecar, clock=VirtualClock(asyncio.get_running_loop())
    )
    subscription = client.subscribe([Application().work])
    with pytest.raises(anarchon.UnsupportedError, match="nats cannot; redis can"):
        await subscription.ready()
    with pytest.raises(anarchon.RefusedError):
        await subscription.closed
    with pytest.raises(anarchon.RefusedError):
        await client.stop()


@virtual
async def test_what_is_raised_is_not_logged_too_and_what_nobody_asks_for_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = VirtualClock(asyncio.get_running_loop())

    def refused() -> anarchon.Subscription:
        sidecar = FakeSidecar()
        sidecar.refuse(anarchon.RefusedError("no"))
        return anarchon.AnarchonClient(transport=sidecar, clock=clock).subscribe([nothing])

    for waiter in (refused().ready(), refused().closed):
        with pytest.raises(anarchon.RefusedError):
            await waiter
    assert "the client stops" not in caplog.text
    refused()
    await asyncio.sleep(1)
    assert "the client stops: no" in caplog.text


@virtual
async def test_an_error_after_ready_is_logged_though_ready_was_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World()
    await world.subscription.ready()
    world.sidecar.replace_session()
    await asyncio.sleep(1)
    assert "the client stops: " in caplog.text


def test_run_raises_what_is_refused_without_the_way_it_came(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sidecar = FakeSidecar()
    sidecar.refuse(anarchon.RefusedError("job 'nothing': minute is '61': 61 is outside 0 to 59"))
    with pytest.raises(anarchon.RefusedError) as raised:
        anarchon.AnarchonClient(transport=sidecar).run([nothing])
    assert [frame.name for frame in raised.traceback][1:] == ["run"]
    shown = "".join(traceback.format_exception(raised.value))
    assert shown.count("61 is outside") == 1
    assert "The above exception" not in shown
    assert "During handling" not in shown
    assert caplog.records == []


@anarchon.every("1s")
def nothing() -> None:
    """A handler."""


@virtual
async def test_a_replaced_session_stops_with_an_error() -> None:
    world = World()
    await world.running()
    world.sidecar.replace_session()
    with pytest.raises(anarchon.SessionReplacedError):
        await world.subscription.closed
    assert world.app.told == ["cancelled"]
    assert world.sidecar.closes == []


@virtual
async def test_ready_says_so_when_the_client_is_stopped_first() -> None:
    sidecar = FakeSidecar()
    sidecar.go_away()
    client = anarchon.AnarchonClient(
        transport=sidecar, clock=VirtualClock(asyncio.get_running_loop())
    )
    subscription = client.subscribe([Application().work])
    await client.stop()
    with pytest.raises(anarchon.AnarchonError, match="stopped before it was ready"):
        await subscription.ready()


@virtual
async def test_giving_up_waiting_undoes_nothing() -> None:
    world = World()
    await world.running()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(_wait_for(world.subscription), 1)
    world.app.go_on.set()
    await world.client.stop()
    await world.subscription.closed


async def _wait_for(subscription: anarchon.Subscription) -> None:
    await subscription.closed


def test_giving_up_waiting_for_a_sidecar_that_never_came_leaves_nothing_unheard() -> None:
    heard: list[dict[str, object]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: heard.append(context))
        sidecar = FakeSidecar()
        sidecar.go_away()
        async with anarchon.AnarchonClient(transport=sidecar, clock=VirtualClock(loop)) as client:
            await client.subscribe([Application().work]).ready()

    async def interrupted() -> None:
        task = asyncio.create_task(main())
        await asyncio.sleep(1)
        task.cancel()  # as Ctrl-C does
        with pytest.raises(asyncio.CancelledError):
            await task

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(interrupted())
        gc.collect()
    assert heard == []


@virtual
async def test_an_error_of_our_own_ends_the_subscription_loudly(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    await world.subscription.ready()

    async def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(world.sidecar, "keep_alive", broken)
    with pytest.raises(ZeroDivisionError):
        await world.subscription.closed
    assert "an error of Anarchon's own" in caplog.text
    with pytest.raises(ZeroDivisionError):
        await world.subscription._driver._main


# ── Stopping ────────────────────────────────────────────────────────────────────────────────────


@virtual
async def test_s23_stop_lets_handlers_finish_and_closes_the_session() -> None:
    world = World()
    run = await world.running()
    stopping = world.subscription.stop()
    await asyncio.sleep(10)
    assert world.sidecar.keep_alives[-1].draining
    assert world.app.told == []
    world.app.go_on.set()
    await stopping
    assert (await run.outcome).success.result == "done"
    assert len(world.sidecar.closes) == 1


@virtual
async def test_s23_stopping_says_for_what_it_waits(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    await world.running("work")
    await world.running("work")
    await world.running("stubborn")
    caplog.set_level(logging.INFO)
    stopping = world.subscription.stop("20s")
    await asyncio.sleep(1)
    _ = world.subscription.stop("10s")
    await asyncio.sleep(1)
    world.app.go_on.set()
    await stopping
    assert [r.getMessage() for r in caplog.records if "stopping" in r.getMessage()] == [
        "stopping: waiting up to 20s for 3 handlers (stubborn, work)"
    ]


@virtual
async def test_s23_stopping_without_a_sidecar_says_that_results_wait(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World()
    await world.running()
    world.sidecar.go_away()
    world.app.go_on.set()
    await asyncio.sleep(1)
    caplog.set_level(logging.INFO)
    stopping = world.subscription.stop("20s")
    await asyncio.sleep(1)
    world.sidecar.come_back()
    await stopping
    assert "stopping: waiting up to 25s for 1 result to be reported" in caplog.text


@virtual
async def test_s23_stopping_with_nothing_to_wait_for_says_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World()
    await world.subscription.ready()
    caplog.set_level(logging.INFO)
    await world.subscription.stop()
    assert "stopping" not in caplog.text


@virtual
async def test_s23_after_the_grace_handlers_are_cancelled_for_shutdown() -> None:
    world = World()
    run = await world.running()
    began_ms = world.clock.now_ms()
    await world.subscription.stop(grace="8s")
    assert world.passed_s(began_ms) == pytest.approx(8)
    assert world.app.told == ["cancelled"]
    assert (await run.outcome).stopped.reason == 4


@virtual
async def test_s23_stopping_again_skips_the_grace() -> None:
    world = World()
    await world.running()
    began_ms = world.clock.now_ms()
    first = world.subscription.stop()
    await asyncio.sleep(1)
    await world.subscription.stop(grace="0s")
    await first
    assert world.passed_s(began_ms) == pytest.approx(1)


@virtual
async def test_a_handler_that_does_not_stop_is_told_that_nobody_renews_any_more() -> None:
    world = World()
    await world.running("stubborn")
    began_ms = world.clock.now_ms()
    await world.subscription.stop(grace="1s")
    assert world.passed_s(began_ms) == pytest.approx(6)
    with pytest.raises(anarchon.LeaseLost):
        world.app.contexts[0].check()
    world.app.go_on.set()


@virtual
async def test_leaving_the_context_stops() -> None:
    sidecar = FakeSidecar()
    clock = VirtualClock(asyncio.get_running_loop())
    async with anarchon.AnarchonClient(transport=sidecar, clock=clock) as client:
        subscription = client.subscribe([Application().work])
        await subscription.ready()
    assert subscription.closed.done()
    async with client.subscribe([Application().work]) as subscription:
        await subscription.ready()
    assert subscription.closed.done()
    assert len(sidecar.closes) == 2


@virtual
async def test_an_error_in_the_context_is_not_hidden_by_one_of_the_sidecar() -> None:
    sidecar = FakeSidecar()
    sidecar.refuse(anarchon.RefusedError("no"))
    clock = VirtualClock(asyncio.get_running_loop())

    async def fail_inside(error: type[Exception] | None) -> None:
        async with anarchon.AnarchonClient(transport=sidecar, clock=clock) as client:
            client.subscribe([Application().work])
            await asyncio.sleep(1)
            if error is not None:
                raise error

    with pytest.raises(KeyError):
        await fail_inside(KeyError)
    with pytest.raises(anarchon.RefusedError):
        await fail_inside(None)


# ── confirm() ───────────────────────────────────────────────────────────────────────────────────


@virtual
async def test_confirm_asks_the_store_now() -> None:
    world = World()
    run = await world.running()
    await world.app.contexts[0].confirm()
    assert list(world.sidecar.keep_alives[-1].confirm) == [run.token]
    world.sidecar.can_confirm = False
    with pytest.raises(anarchon.NotConfirmedError):
        await world.app.contexts[0].confirm()
    world.sidecar.lose(run)
    with pytest.raises(anarchon.Fenced):
        await world.app.contexts[0].confirm()
    with pytest.raises(anarchon.Fenced):
        await world.app.contexts[0].confirm()
    await world.client.stop()


@virtual
async def test_confirm_of_a_silent_sidecar_is_answered_in_5_s() -> None:
    world = World()
    await world.running()
    world.sidecar.is_silent = True
    began_ms = world.clock.now_ms()
    with pytest.raises(anarchon.NotConfirmedError):
        await world.app.contexts[0].confirm()
    assert world.passed_s(began_ms) == pytest.approx(5)
    world.sidecar.is_silent = False
    await world.client.stop(grace="0s")


# ── Set up wrongly ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("number", [0, 10_001, 1.5, "3", True])
def test_a_bad_max_concurrency_is_refused(number: object) -> None:
    with pytest.raises(anarchon.ClientError, match="from 1 to 10,000"):
        anarchon.AnarchonClient(max_concurrency=number)  # type: ignore[arg-type]


def test_a_bad_choice_on_lease_lost_is_refused() -> None:
    with pytest.raises(anarchon.ClientError, match='"cancel" or "exit"'):
        anarchon.AnarchonClient(on_lease_lost="die")  # type: ignore[arg-type]


@pytest.mark.parametrize("grace", ["20", -1, "1.5s"])
def test_a_bad_grace_is_refused(grace: str) -> None:
    with pytest.raises(anarchon.ClientError, match="stop_grace"):
        anarchon.AnarchonClient(stop_grace=grace)


def test_a_subscribe_over_4_mib_is_refused_before_anything_is_started() -> None:
    client = anarchon.AnarchonClient(transport=FakeSidecar())
    labels = {f"k{number}": "v" * 128 for number in range(16)}
    jobs = [
        anarchon.Job(lambda: None, anarchon.Every("1s"), name=f"job{number}", labels=labels)
        for number in range(2_000)
    ]
    before = threading.active_count()
    with pytest.raises(anarchon.RefusedError, match="at most 4,194,304"):
        client.subscribe(jobs)
    assert threading.active_count() <= before


@virtual
async def test_only_one_subscription_of_a_process_may_say_exit() -> None:
    clock = VirtualClock(asyncio.get_running_loop())
    client = anarchon.AnarchonClient(transport=FakeSidecar(), clock=clock, on_lease_lost="exit")
    subscription = client.subscribe([Application().work])
    with pytest.raises(anarchon.ClientError, match='"exit" is in use'):
        client.subscribe([Application().work])
    await subscription.stop()
    await client.subscribe([Application().work]).stop()


@virtual
async def test_s16_exit_stays_armed_after_stop_until_the_last_handler_on_the_loop_has_ended() -> (
    None
):
    clock, sidecar, app = VirtualClock(asyncio.get_running_loop()), FakeSidecar(), Application()
    client = anarchon.AnarchonClient(transport=sidecar, clock=clock, on_lease_lost="exit")
    subscription = client.subscribe([app.stubborn])
    await subscription.ready()
    sidecar.assign("stubborn")
    await app.started.wait()
    await subscription.stop("0s")
    with pytest.raises(anarchon.ClientError, match='"exit" is in use'):
        client.subscribe([app.work])
    app.go_on.set()
    await asyncio.sleep(1)
    await client.subscribe([app.work]).stop()


def test_s16_exit_stays_armed_after_stop_until_the_last_handler_in_a_thread_has_ended() -> None:
    started, go_on = threading.Event(), threading.Event()

    def stubborn() -> None:
        started.set()
        go_on.wait(10)

    def threads(name: str) -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == name]

    sidecar = FakeSidecar()
    client = anarchon.AnarchonClient(transport=sidecar, on_lease_lost="exit")
    job = anarchon.Job(stubborn, anarchon.Every("1s"), cancel_grace="0s")
    with client.subscribe([job]) as subscription:
        subscription.ready().result("10s")
        sidecar.assign("stubborn")
        assert started.wait(10)
        subscription.stop("0s").result("10s")
    for thread in threads("anarchon-client"):
        thread.join(10)
    with pytest.raises(anarchon.ClientError, match='"exit" is in use'):
        client.subscribe([job])
    told = threading.Event()
    handler = Tells(told)
    logging.getLogger("anarchon").addHandler(handler)
    go_on.set()
    assert told.wait(10)
    logging.getLogger("anarchon").removeHandler(handler)
    client.subscribe([job]).stop().result("10s")


class Tells(logging.Handler):
    """Sets an event when it is logged that a handler has ended too late."""

    def __init__(self, told: threading.Event) -> None:
        super().__init__(logging.WARNING)
        self.told = told

    def emit(self, record: logging.LogRecord) -> None:
        if "ended after its client had stopped" in record.getMessage():
            self.told.set()


@virtual
async def test_run_on_a_loop_says_what_to_do_instead() -> None:
    with pytest.raises(RuntimeError, match=r"await client\.subscribe"):
        anarchon.AnarchonClient().run([Application().work])


def test_the_client_says_who_it_is() -> None:
    info = _client._client_info(watched=True)
    assert info.language == "python"
    assert info.version
    assert info.host
    assert info.process_id > 0
    stat = Path("/proc/self/stat").read_text()
    assert str(info.process_start_ticks) == stat.rsplit(")", 1)[1].split()[19]
    assert info.pid_namespace > 0
    unwatched = _client._client_info(watched=False)
    assert (unwatched.process_start_ticks, unwatched.pid_namespace) == (0, 0)
