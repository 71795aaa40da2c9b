"""What can go wrong, by name. Each fault is drawn from the world's own random source."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.simulation.host import Host
from tests.simulation.plan import STARTED_BY
from tests.simulation.storage import Weather
from tests.simulation.world import World

Fault = Callable[[World, Host, random.Random], None]

ONLY_A_MACHINE = ("reboot",)
ONLY_A_NETWORK = ("host_clock",)


def _back_after(rng: random.Random) -> int:
    """Soon enough to adopt what runs, or not."""
    return rng.choice((rng.randint(10, 500), rng.randint(500, 3_000), rng.randint(3_000, 15_000)))


def kill_sidecar(world: World, host: Host, rng: random.Random) -> None:
    host.kill_sidecar(_back_after(rng))


def kill_app(world: World, host: Host, rng: random.Random) -> None:
    host.kill_app(_back_after(rng), seen=rng.random() < 0.5)


def kill_both(world: World, host: Host, rng: random.Random) -> None:
    host.kill_app(None, seen=False)
    host.kill_sidecar(None)
    world.timeline.after(_back_after(rng), host.start)


def kill_all(world: World, host: Host, rng: random.Random) -> None:
    down_for = _back_after(rng)
    for each in world.hosts:
        each.kill_app(None, seen=False)
        each.kill_sidecar(None)
        world.timeline.after(down_for + rng.randint(0, 1_000), each.start)


def freeze_app(world: World, host: Host, rng: random.Random) -> None:
    app = host.app
    if app is not None:
        app.freeze()
        world.timeline.after(_pause(rng), app.thaw)


def freeze_sidecar(world: World, host: Host, rng: random.Random) -> None:
    sidecar = host.sidecar
    if sidecar is not None and sidecar.up:
        pause = _pause(rng)
        host.disturb(pause)
        sidecar.freeze()
        world.timeline.after(pause, sidecar.thaw)


def freeze_both(world: World, host: Host, rng: random.Random) -> None:
    sidecar, app, pause = host.sidecar, host.app, _pause(rng)
    host.disturb(pause)
    if sidecar is not None and sidecar.up:
        sidecar.freeze()
        world.timeline.after(pause + rng.randint(0, 20), sidecar.thaw)
    if app is not None:
        app.freeze()
        world.timeline.after(pause + rng.randint(0, 20), app.thaw)


def _pause(rng: random.Random) -> int:
    return rng.choice(
        (rng.randint(50, 1_000), rng.randint(1_000, 4_000), rng.randint(3_000, 12_000))
    )


def bad_network(world: World, host: Host, rng: random.Random) -> None:
    share = rng.choice((0.1, 0.3, 0.6))
    weather = Weather(
        lost=share * rng.random(),
        reply_lost=share * rng.random(),
        reply_late=share * rng.random(),
        done_late=share * rng.random(),
        doubled=share * rng.random(),
        unsure=share * rng.random(),
    )
    _weather(world, [host], weather, rng.randint(500, 8_000))


def cut_off(world: World, host: Host, rng: random.Random) -> None:
    silent = rng.random() < 0.5
    _weather(world, [host], Weather(silent=silent, refused=not silent), rng.randint(300, 9_000))


def store_away(world: World, host: Host, rng: random.Random) -> None:
    silent = rng.random() < 0.5
    _weather(
        world, world.hosts, Weather(silent=silent, refused=not silent), rng.randint(300, 9_000)
    )


def _weather(world: World, hosts: list[Host], weather: Weather, for_ms: int) -> None:
    for host in hosts:
        sidecar = host.sidecar
        if sidecar is None:
            continue
        host.disturb(for_ms + world.plan.op_timeout_ms, store=True)
        sidecar.link.weather = weather
        world.timeline.after(for_ms, sidecar.link.clear_up)


def lose_stream(world: World, host: Host, rng: random.Random) -> None:
    if host.sidecar is not None and host.app is not None:
        host.disturb(0)
        for client in host.app.clients:
            host.sidecar.break_stream(client)


def lose_answers(world: World, host: Host, rng: random.Random) -> None:
    if host.app is not None:
        for_ms = rng.randint(200, 4_000)
        host.disturb(for_ms)
        host.app.answers_lost_until = world.timeline.now + for_ms


def slow_client_calls(world: World, host: Host, rng: random.Random) -> None:
    if host.app is not None:
        for_ms = rng.randint(500, 6_000)
        host.disturb(for_ms + 1_500)
        host.app.stalled_until = world.timeline.now + for_ms


def stop_sidecar(world: World, host: Host, rng: random.Random) -> None:
    host.stop_sidecar(_back_after(rng))
    if rng.random() < 0.2 and host.sidecar is not None:
        world.timeline.after(rng.randint(1, 1_000), host.sidecar.stop)


def replace_sidecar(world: World, host: Host, rng: random.Random) -> None:
    """A sidecar that hangs on unseen: it still reaches the store, and its clients have another."""
    host.replace_sidecar(rng.randint(2_000, 15_000))


def stop_app(world: World, host: Host, rng: random.Random) -> None:
    host.stop_app(rng.choice((0, 500, 3_000)), _back_after(rng))


def stop_both(world: World, host: Host, rng: random.Random) -> None:
    """As an orchestrator stops a pod: the application, then its sidecar."""
    host.stop_app(rng.choice((0, 500, 3_000)), _back_after(rng))
    back_after = _back_after(rng)
    stops_at = min(world.timeline.now + rng.randint(0, 4_000), world.plan.calm_at - 1)
    world.timeline.at(stops_at, lambda: host.stop_sidecar(back_after))


def deploy(world: World, host: Host, rng: random.Random) -> None:
    """The other version, host by host: politely, or not."""
    version = 1 - host.version
    gap = rng.randint(0, 3_000)
    hosts = world.hosts if rng.random() < 0.7 else [host]
    for number, each in enumerate(hosts):
        world.timeline.after(number * gap, _update(each, version, rng))


def _update(host: Host, version: int, rng: random.Random) -> Callable[[], None]:
    def update() -> None:
        host.version = version
        if rng.random() < 0.5:
            host.stop_app(500, rng.randint(10, 1_000))
        else:
            host.kill_app(rng.randint(10, 1_000), seen=rng.random() < 0.5)

    return update


def reboot(world: World, host: Host, rng: random.Random) -> None:
    world.reboot()
    for each in world.hosts:
        world.timeline.after(_back_after(rng), each.start)


def host_clock(world: World, host: Host, rng: random.Random) -> None:
    host.disturb(0)
    host.clock.set_wall(rng.choice((0, 4_000, -4_000, 60_000, -60_000, 3_600_000)))


def store_clock(world: World, host: Host, rng: random.Random) -> None:
    """A step of the store's wall clock; a large one is mended, soon or after a while."""
    small = rng.randint(-450, 450)
    by_ms = rng.choice((small, rng.randint(-9_000, 9_000), 40_000, -40_000, 3_600_000, -3_600_000))
    if world.plan.kept_ms is not None:  # slots that come again find a record, or are won again
        by_ms = small
    world.set_store_clock(by_ms)
    if abs(by_ms) > 20_000:
        calm_in = world.plan.calm_at - world.timeline.now - 1
        mended_in = min(rng.choice((rng.randint(100, 1_000), rng.randint(1_000, 9_000))), calm_in)
        world.timeline.after(mended_in, lambda: world.set_store_clock(-by_ms))


def pause_job(world: World, host: Host, rng: random.Random) -> None:
    """An operator pauses a job, for a while."""
    del host
    job = rng.choice(world.plan.jobs).spec.name
    world.pause(job)
    world.timeline.after(rng.randint(100, 8_000), lambda: world.resume(job))


def trigger_run(world: World, host: Host, rng: random.Random) -> None:
    """An operator triggers a run, and may repeat the request."""
    del host
    job, request_id = rng.choice(world.plan.jobs).spec.name, f"{rng.getrandbits(32)}"
    for _ in range(rng.choice((1, 1, 2))):
        world.timeline.after(rng.randint(0, 500), lambda: world.trigger(job, request_id))


def cancel_run(world: World, host: Host, rng: random.Random) -> None:
    """An operator cancels a run that has not ended."""
    del host
    runs = [run for runs in world.storage.space.unfinished.values() for run in runs.values()]
    if runs:
        run = rng.choice(sorted(runs, key=lambda each: (each.job, each.slot)))
        world.cancel(run.job, run.slot)


FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        kill_sidecar,
        kill_app,
        kill_both,
        kill_all,
        freeze_app,
        freeze_sidecar,
        freeze_both,
        bad_network,
        cut_off,
        store_away,
        lose_stream,
        lose_answers,
        slow_client_calls,
        stop_sidecar,
        replace_sidecar,
        stop_app,
        stop_both,
        deploy,
        reboot,
        host_clock,
        store_clock,
        pause_job,
        trigger_run,
        cancel_run,
    )
}


def plan_faults(world: World) -> None:
    """Plans the faults of the world's plan, and the calm after them."""
    plan, rng = world.plan, random.Random(world.plan.seed + 2)
    for _ in range(plan.fault_count if plan.faults else 0):
        moment = rng.randint(STARTED_BY, plan.calm_at)
        name = rng.choice(plan.faults)
        host = rng.choice(world.hosts)
        world.timeline.at(moment, _befall(world, name, host, random.Random(rng.getrandbits(64))))
    world.timeline.at(plan.calm_at, lambda: _calm(world))


def _befall(world: World, name: str, host: Host, rng: random.Random) -> Callable[[], None]:
    def befall() -> None:
        world.note(f"{name} on {host.name}")
        FAULTS[name](world, host, rng)

    return befall


def _calm(world: World) -> None:
    """Nothing goes wrong any more; somebody is there, or comes."""
    world.note("calm")
    clock = world.storage.clock
    for host in world.hosts:
        host.recover()
        off = host.clock.wrong_by_ms - clock.wrong_by_ms
        if abs(off) > 5_000:
            host.clock.set_wall(clock.wrong_by_ms)
