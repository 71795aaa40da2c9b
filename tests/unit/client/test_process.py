"""The client in processes of its own: signals, forks, threads, and the process that must end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import anarchon
from anarchon.testing import FakeSidecar
from tests.unit.client.puppet_server import PuppetServer

APPLICATION = """
import asyncio, ctypes, logging, signal, sys, time
import anarchon

logging.basicConfig(level=logging.INFO)

@anarchon.every("1s")
async def waits(ctx):
    print("started", flush=True)
    try:
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        print("cancelled", flush=True)
        raise

@anarchon.every("1s")
async def finishes(ctx):
    go_on = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, go_on.set)
    print("started", flush=True)
    await go_on.wait()
    return "finished"

@anarchon.every("1s")
async def holds_everything(ctx):
    print("started", flush=True)
    # PyDLL keeps the interpreter's lock: no other thread of Python runs.
    ctypes.PyDLL(None).sleep(60)

address, mode = sys.argv[1:]
client = anarchon.AnarchonClient(address, on_lease_lost=mode)
try:
    client.run([waits, finishes, holds_everything])
except anarchon.AnarchonError as error:
    print(type(error).__name__, flush=True)
print("gone", flush=True)
"""


class Process:
    """The application above, in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def line(self) -> str:
        assert self.process.stdout is not None
        return (await self.process.stdout.readline()).decode().strip()

    async def rest(self) -> list[str]:
        out, _ = await self.process.communicate()
        return out.decode().split()


class Machine:
    """A sidecar's puppet, and applications that use it."""

    def __init__(self, sidecar: FakeSidecar, address: str) -> None:
        self.sidecar = sidecar
        self.address = address
        self.processes: list[asyncio.subprocess.Process] = []

    async def start(self, mode: str = "cancel", *, source: str = APPLICATION) -> Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-c", source, self.address, mode),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        self.processes.append(process)
        await self.sidecar.wait_for(lambda: self.sidecar.keep_alives)
        return Process(process)


@pytest.fixture
async def machine() -> AsyncIterator[Machine]:
    sidecar = FakeSidecar(session_ttl="1500ms", keep_alive_interval="500ms")
    server = PuppetServer(sidecar)
    machine = Machine(sidecar, await server.start())
    yield machine
    for process in machine.processes:
        if process.returncode is None:
            process.kill()
            await process.communicate()
    await server.stop()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_s23_a_signal_lets_handlers_finish(machine: Machine, number: int) -> None:
    application = await machine.start()
    run = machine.sidecar.assign("finishes")
    assert await application.line() == "started"
    application.process.send_signal(number)
    await machine.sidecar.wait_for(lambda: machine.sidecar.keep_alives[-1].draining)
    application.process.send_signal(signal.SIGUSR1)
    assert (await run.outcome).success.result == "finished"
    assert await application.rest() == ["gone"]
    assert application.process.returncode == 0
    assert len(machine.sidecar.closes) == 1


async def test_s23_a_second_signal_skips_the_grace(machine: Machine) -> None:
    application = await machine.start()
    run = machine.sidecar.assign("waits")
    assert await application.line() == "started"
    application.process.send_signal(signal.SIGTERM)
    await machine.sidecar.wait_for(lambda: machine.sidecar.keep_alives[-1].draining)
    application.process.send_signal(signal.SIGTERM)
    assert (await run.outcome).stopped.reason == 4
    out, err = await application.process.communicate()
    assert out.split() == [b"cancelled", b"gone"]
    waits = "stopping: waiting up to 20s for 1 handler (waits); once more to cancel them"
    assert f"INFO:anarchon:{waits}\n" in err.decode()


async def test_run_raises_what_ends_the_subscription(machine: Machine) -> None:
    application = await machine.start()
    machine.sidecar.replace_session()
    assert await application.rest() == ["SessionReplacedError", "gone"]


async def test_s16_exit_ends_a_process_whose_handler_holds_the_interpreter(
    machine: Machine,
) -> None:
    application = await machine.start("exit")
    machine.sidecar.assign("holds_everything")
    assert await application.line() == "started"
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    out, stacks = await application.process.communicate()
    assert 1.0 < loop.time() - began_s < 10, "trust of 1.5 s and an interval of 0.5 s"
    assert application.process.returncode == 1
    assert out == b""
    assert b"in holds_everything" in stacks


async def test_s16_exit_lets_a_process_live_whose_handler_obeys(machine: Machine) -> None:
    application = await machine.start("exit")
    machine.sidecar.assign("waits")
    assert await application.line() == "started"
    machine.sidecar.is_silent = True
    assert await application.line() == "cancelled"
    machine.sidecar.is_silent = False
    seen = len(machine.sidecar.keep_alives)
    await machine.sidecar.wait_for(lambda: len(machine.sidecar.keep_alives) > seen + 3)
    application.process.send_signal(signal.SIGTERM)
    assert await application.rest() == ["gone"]
    assert application.process.returncode == 0


STOPPED = """
import sys, threading
import anarchon

@anarchon.every("1s", cancel_grace="0s")
def never_ends():
    print("started", flush=True)
    threading.Event().wait()

subscription = anarchon.AnarchonClient(sys.argv[1], on_lease_lost="exit").subscribe([never_ends])
sys.stdin.readline()
subscription.stop("0s").result()
print("stopped", flush=True)
threading.Event().wait()
"""


async def test_s16_exit_also_ends_a_process_whose_handler_outlives_stop(machine: Machine) -> None:
    application = await machine.start(source=STOPPED)
    machine.sidecar.assign("never_ends")
    assert await application.line() == "started"
    assert application.process.stdin is not None
    application.process.stdin.write(b"stop\n")
    out, stacks = await application.process.communicate()
    assert out.split() == [b"stopped"]
    assert application.process.returncode == 1
    assert b"in never_ends" in stacks


FORK = """
import os, sys
import anarchon
from anarchon.testing import FakeSidecar

@anarchon.every("1s")
def job(): ...

client = anarchon.AnarchonClient(transport=FakeSidecar())
subscription = client.subscribe([job])
subscription.ready().result("10s")
child = os.fork()
if child == 0:
    for call in (subscription.stop, subscription.ready, lambda: client.subscribe([job])):
        try:
            call()
        except anarchon.ForkedError as error:
            print("refused", flush=True)
    os._exit(0)
os.waitpid(child, 0)
subscription.stop().result("10s")
"""


async def test_a_fork_after_connecting_is_a_clear_error() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", FORK, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert out.split() == [b"refused"] * 3
    assert process.returncode == 0


# ── A thread of its own ─────────────────────────────────────────────────────────────────────────


@anarchon.every("1s")
async def on_its_loop(ctx: anarchon.Context) -> str:
    await ctx.confirm()
    return threading.current_thread().name


@anarchon.every("1s")
def in_a_thread(ctx: anarchon.SyncContext) -> str:
    ctx.confirm()
    return threading.current_thread().name


def test_without_a_loop_everything_happens_on_one_thread_of_its_own() -> None:
    sidecar = FakeSidecar()
    client = anarchon.AnarchonClient(transport=sidecar)
    with client.subscribe([on_its_loop, in_a_thread]) as subscription:
        assert subscription.ready().result("10s") == "fake:1"
        names = [
            sidecar.assign(job).outcome.result("10s").success.result
            for job in ("on_its_loop", "in_a_thread")
        ]
    assert names == ["anarchon-client", "anarchon-handler-1"]
    assert len(sidecar.closes) == 1
    assert subscription.closed.done()
    subscription.stop().result("10s")  # once more is no error


def test_waiting_in_a_thread_has_a_limit_that_says_for_what() -> None:
    sidecar = FakeSidecar()
    sidecar.go_away()
    client = anarchon.AnarchonClient("127.0.0.1:7421", transport=sidecar)
    subscription = client.subscribe([in_a_thread])
    with pytest.raises(TimeoutError, match=r"waited 10ms for the sidecar at 127\.0\.0\.1:7421"):
        subscription.ready().result("10ms")
    client.stop().result("10s")


async def test_waiting_as_in_a_thread_is_refused_on_a_loop() -> None:
    subscription = anarchon.AnarchonClient(transport=FakeSidecar()).subscribe([in_a_thread])
    with pytest.raises(RuntimeError, match="await it instead"):
        subscription.ready().result()
    await subscription.stop()


def test_a_refusal_is_raised_on_leaving_the_context() -> None:
    sidecar = FakeSidecar()
    sidecar.refuse(anarchon.RefusedError("no"))

    def subscribe(error: type[Exception] | None) -> None:
        with anarchon.AnarchonClient(transport=sidecar).subscribe([in_a_thread]) as subscription:
            with pytest.raises(anarchon.RefusedError):
                subscription.closed.result("10s")
            if error is not None:
                raise error

    with pytest.raises(anarchon.RefusedError):
        subscribe(None)
    with pytest.raises(KeyError):
        subscribe(KeyError)


def test_run_in_another_thread_leaves_the_signals_alone() -> None:
    sidecar = FakeSidecar()
    client = anarchon.AnarchonClient(transport=sidecar)
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=client.run, args=([in_a_thread],))
    thread.start()
    sidecar.wait_for(lambda: sidecar.keep_alives).result("10s")
    assert signal.getsignal(signal.SIGTERM) is before
    client.stop().result("10s")
    thread.join(10)
    assert not thread.is_alive()


def test_run_puts_back_the_signals_that_were_there() -> None:
    sidecar = FakeSidecar()
    client = anarchon.AnarchonClient(transport=sidecar)
    told: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: told.append(number))

    def end() -> None:
        sidecar.wait_for(lambda: sidecar.keep_alives).result("10s")
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=end)
    thread.start()
    try:
        client.run([in_a_thread])
        thread.join(10)
        assert told == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert told == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_loop_that_ends_first_is_told_of() -> None:
    sidecar = FakeSidecar()
    subscriptions: list[anarchon.Subscription] = []

    async def main() -> None:
        subscriptions.append(anarchon.AnarchonClient(transport=sidecar).subscribe([in_a_thread]))
        await subscriptions[0].ready()

    asyncio.run(main())
    with pytest.raises(anarchon.AnarchonError, match="ended before the client was stopped"):
        subscriptions[0].closed.result("10s")


async def test_python_m_anarchon_is_the_command() -> None:
    outs = []
    for arguments in (("anarchon", "--version"), ("anarchon_server", "--version")):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", *arguments, stdout=asyncio.subprocess.PIPE
        )
        out, _ = await process.communicate()
        outs.append((process.returncode, out))
    assert outs[0] == outs[1]
    assert outs[0][0] == 0
    assert b"anarchon" in outs[0][1]


def test_the_client_needs_no_server() -> None:
    source = Path(anarchon.__file__).parent
    for module in source.glob("*.py"):
        assert "anarchon_server" not in module.read_text(), module
