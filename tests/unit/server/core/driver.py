"""Drives engines step by step in virtual time: no loop, no clock, no chance.

A `World` has one clock and one memory store; a `Sidecar` is an engine in it whose store calls wait
until a test answers them, by hand or by the store; a `FakeClient` is a session of a sidecar.
Where no test looks closer, `World.run_for` plays everything at the pace of the engines' timers.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from anarchon_backends.memory import MemoryDatabase, MemoryStore
from anarchon_server.core.engine import Engine
from anarchon_server.core.errors import AnarchonError
from anarchon_server.core.messages import (
    Answer,
    Assigned,
    Assignment,
    Attached,
    CallStore,
    Cancelled,
    ClientExited,
    Closed,
    CloseSession,
    Command,
    Complete,
    CompleteAnswer,
    EndStream,
    Input,
    KeepAlive,
    KeepAliveAnswer,
    Level,
    Log,
    Method,
    Receipt,
    Send,
    Stop,
    Stopped,
    StoreFailed,
    StoreReplied,
    StreamEnded,
    Subscribe,
    Tick,
    UnwatchClient,
    WatchClient,
)
from anarchon_server.core.model import (
    CancelReason,
    CatchUpPolicy,
    Client,
    EverySchedule,
    Failure,
    JobSpec,
    Outcome,
    Run,
    RunView,
)
from anarchon_server.core.policy import Draw
from anarchon_server.core.settings import Settings
from anarchon_server.core.store import (
    Beat,
    Capabilities,
    Claim,
    OpenOptions,
    Reply,
    RunQuery,
)
from tests.checker.inside import timers_of_nothing

START = 1_800_000_000_000
"""The store's time when every world begins: a whole minute."""

T = TypeVar("T")


def ran(work: Coroutine[Any, Any, T]) -> T:
    """What a coroutine that never waits returns."""
    try:
        work.send(None)
    except StopIteration as done:
        value: T = done.value
        return value
    raise AssertionError("the memory store waited")


def every(period_ms: int = 10_000, name: str = "sync", **policies: Any) -> JobSpec:
    """A job on a grid; without jitter and catch-up, where the test does not say."""
    usual = {"jitter_ms": 0, "catch_up": CatchUpPolicy.NONE}
    return JobSpec(name, EverySchedule(period_ms), **{**usual, **policies})


class World:
    """One moment for all. `now` is every sidecar's boot-time clock.

    `store_step` moves the store's wall clock; `boot_leases` false lets it judge leases too;
    `leases` false: the store is claim-only.
    """

    def __init__(self, *, boot_leases: bool = True, leases: bool = True) -> None:
        self.now = 0
        self.store_step = 0
        self.boot_id = "boot"
        self.database = MemoryDatabase("database")
        self.options = OpenOptions("default", self, boot_leases=boot_leases, leases=leases)
        self.store = MemoryStore(self.database, self.options)
        self.sidecars: list[Sidecar] = []

    def wall_us(self) -> int:
        return self.store_at * 1_000

    def boot_ms(self) -> int:
        return self.now

    @property
    def store_at(self) -> int:
        """The store's time."""
        return START + self.now + self.store_step

    def restore(self) -> None:
        """The store is another one from now on: empty, as after a restore of nothing."""
        self.database = MemoryDatabase("restored")
        self.store = MemoryStore(self.database, self.options)

    def runs(self, job: str = "") -> list[RunView]:
        """History, oldest slot first."""
        reply = ran(self.store.runs(RunQuery(job=job, limit=100_000)))
        return list(reversed(reply.answers))

    def run(self, slot: int, job: str = "sync") -> RunView:
        """The run at `slot`, counted from `START`."""
        (found,) = [view for view in self.runs(job) if view.run.slot == START + slot]
        return found

    def slots(self, job: str = "sync") -> list[int]:
        """The slots that have a row, counted from `START`."""
        return [view.run.slot - START for view in self.runs(job)]

    def run_until(self, end: int) -> None:
        """Plays until `end`: engines are woken, calls answered at once, clients live."""
        assert end >= self.now
        for sidecar in self.sidecars:
            sidecar.tick()
            sidecar.settle()
        while True:
            moments = [m for s in self.sidecars for m in s.moments()]
            upcoming = min(moments, default=None)
            if upcoming is None or upcoming > end:
                break
            self.now = max(self.now, upcoming)
            for sidecar in self.sidecars:
                sidecar.play()
        self.now = end

    def run_for(self, duration: int) -> None:
        """Plays for so long."""
        self.run_until(self.now + duration)

    def jump(self, duration: int) -> None:
        """Lets time pass in which nothing happens: nobody is woken."""
        self.now += duration


class Sidecar:
    """One engine, and all it has said. `away`: the store fails its calls (None: it answers, but for
    those of the methods in `failing`).
    """

    def __init__(
        self,
        world: World,
        label: str = "a",
        *,
        draw: Draw = lambda most: 0,
        capabilities: Capabilities | None = None,
        **settings: Any,
    ) -> None:
        self.world = world
        self.label = label
        self.dead = False
        self.away: str | None = None
        self.failing: frozenset[Method] = frozenset()
        self.host_offset = 0
        self.clients: dict[str, FakeClient] = {}
        self.calls: dict[int, CallStore] = {}
        self.said: list[Command] = []
        self.answers: dict[int, Any] = {}
        self._numbers = 0
        self._nonces = 0
        self.engine = Engine(
            Settings(label, f"incarnation-{label}", **settings),
            capabilities or world.store.capabilities,
            draw=lambda most: draw(most),
            new_nonce=self._new_nonce,
        )
        world.sidecars.append(self)

    def _new_nonce(self) -> str:
        self._nonces += 1
        return f"{self.label}{self._nonces}"

    def number(self) -> int:
        """A number for a request or a stream."""
        self._numbers += 1
        return self._numbers

    # --- Steps ---------------------------------------------------------------------------

    def feed(self, event: Input) -> list[Command]:
        """One step at the world's moment. Store calls wait in `calls`."""
        if self.dead:
            return []
        commands = self.engine.step(self.world.now, event)
        assert not timers_of_nothing(self.engine)
        self.said += commands
        for command in commands:
            if isinstance(command, CallStore):
                self.calls[command.call_id] = command
            if isinstance(command, Answer):
                assert command.request_id not in self.answers, "a request is answered once"
                self.answers[command.request_id] = command.answer
            if isinstance(command, Send):
                self.clients[command.session_id].receive(command)
            if isinstance(command, EndStream) and command.session_id in self.clients:
                self.clients[command.session_id].stream_ended(command)
        return commands

    def tick(self) -> list[Command]:
        return self.feed(Tick())

    @property
    def wall_at(self) -> int:
        """The host's clock."""
        return START + self.world.now + self.host_offset

    # --- The store -----------------------------------------------------------------------

    def pending(self, method: Method) -> CallStore:
        """The one call of this kind that waits for its answer."""
        (call,) = [call for call in self.calls.values() if call.method is method]
        return call

    def waits(self, method: Method) -> bool:
        """Whether such a call waits for its answer."""
        return any(call.method is method for call in self.calls.values())

    def execute(self, call: CallStore) -> Reply[Any]:
        """What the store answers now; the engine does not hear of it yet."""
        return ran(getattr(self.world.store, call.method)(*call.arguments))

    def reply(self, call: CallStore, reply: Reply[Any]) -> list[Command]:
        """The engine hears an answer."""
        del self.calls[call.call_id]
        return self.feed(StoreReplied(call.call_id, reply, self.wall_at))

    def answer(self, method: Method) -> list[Command]:
        """The store carries out the waiting call of this kind and answers."""
        call = self.pending(method)
        return self.reply(call, self.execute(call))

    def answer_by_hand(self, method: Method, *answers: Any, **extra: Any) -> list[Command]:
        """The waiting call of this kind is answered with these, the store left as it is."""
        values = {"store_at": self.world.store_at, "store_id": "database", **extra}
        return self.reply(self.pending(method), Reply(answers=tuple(answers), **values))

    def fail(self, method: Method, *, unknown: bool = False) -> list[Command]:
        """The waiting call of this kind fails."""
        call = self.pending(method)
        del self.calls[call.call_id]
        return self.feed(StoreFailed(call.call_id, f"{method} failed", unknown))

    def wait_for(self, method: Method, within_ms: int = 60_000) -> CallStore:
        """Plays until such a call waits for its answer; the others are answered."""
        end = self.world.now + within_ms
        while not self.waits(method):
            for call in tuple(self.calls.values()):
                self.reply(call, self.execute(call))
            if not self.calls:
                wake_at = self.engine.wake_at
                assert wake_at is not None, "nothing more will happen"
                assert wake_at <= end, f"no {method} came"
                self.world.now = max(self.world.now, wake_at)
                self.tick()
        return self.pending(method)

    def settle(self) -> None:
        """Answers, or fails, what waits, until nothing waits."""
        while self.calls and not self.dead:
            call = next(iter(self.calls.values()))
            if self.away is None and call.method not in self.failing:
                self.reply(call, self.execute(call))
            else:
                del self.calls[call.call_id]
                unknown = self.away == "unknown"
                self.feed(StoreFailed(call.call_id, "the store is away", unknown))

    # --- Time ----------------------------------------------------------------------------

    def moments(self) -> Iterable[int]:
        """When something is to happen here."""
        if self.dead:
            return
        if self.engine.wake_at is not None:
            yield self.engine.wake_at
        for client in self.clients.values():
            yield from client.moments()

    def play(self) -> None:
        """What is due here happens."""
        for client in tuple(self.clients.values()):
            client.play()
        wake_at = self.engine.wake_at
        if not self.dead and wake_at is not None and wake_at <= self.world.now:
            self.tick()
        self.settle()

    # --- What was said -------------------------------------------------------------------

    def logged(self, event: str) -> list[Log]:
        """The log lines of one kind."""
        return [c for c in self.said if isinstance(c, Log) and c.event == event]

    def called(self, method: Method) -> list[Any]:
        """The first argument of every call of one kind."""
        calls = [c for c in self.said if isinstance(c, CallStore) and c.method is method]
        return [call.arguments[0] for call in calls]

    @property
    def claims(self) -> list[Claim]:
        """Every claim ever sent."""
        return [claim for batch in self.called(Method.CLAIM) for claim in batch]

    @property
    def beats(self) -> list[Beat]:
        """Every heartbeat ever sent."""
        beats: list[Beat] = self.called(Method.BEAT)
        return beats

    @property
    def stopped(self) -> bool:
        return any(isinstance(command, Stopped) for command in self.said)

    def answer_to(self, number: int) -> Any:
        """The answer to a request; None: there is none yet."""
        return self.answers.get(number)

    def watches(self) -> list[WatchClient | UnwatchClient]:
        return [c for c in self.said if isinstance(c, WatchClient | UnwatchClient)]

    # --- Clients -------------------------------------------------------------------------

    def client(self, *specs: JobSpec, name: str = "client", **options: Any) -> FakeClient:
        """A client that has subscribed and said that it lives; it keeps doing so in `run_for`."""
        client = FakeClient(self, name, specs or (every(),), **options)
        client.subscribe()
        if client.attached is not None:
            client.keep_alive()
        return client

    def ready_client(self, *specs: JobSpec, **options: Any) -> FakeClient:
        """Such a client, with its jobs registered."""
        self.tick()
        self.settle()
        client = self.client(*specs, **options)
        self.settle()
        return client

    def stop(self) -> None:
        self.feed(Stop())

    def die(self) -> None:
        """The process is killed, and its clients with it."""
        self.dead = True
        for client in self.clients.values():
            client.silent = True


@dataclass
class FakeClient:
    """A session. `running` are the attempts it runs: all it was assigned and has not reported.

    `lasts_ms`: it reports success so long after an assignment (None: when a test says so).
    `deaf`: it takes nothing in; `silent`: it says nothing.
    """

    sidecar: Sidecar
    name: str
    specs: tuple[JobSpec, ...]
    max_concurrency: int = 10
    in_flight: tuple[str, ...] = ()
    watchable: bool = False
    lasts_ms: int | None = None
    deaf: bool = False
    silent: bool = False
    running: dict[str, Assignment] = field(default_factory=dict)
    assigned: list[Assignment] = field(default_factory=list)
    cancelled: list[Cancelled] = field(default_factory=list)
    attached: Attached | None = None
    end: EndStream | None = None
    stream_id: int | None = None
    events: list[Any] = field(default_factory=list)
    next_at: int | None = None
    _ends: dict[str, int] = field(default_factory=dict)

    # --- What it does --------------------------------------------------------------------

    def subscribe(self, **changes: Any) -> list[Command]:
        """Opens its stream, or opens it again."""
        self.sidecar.clients[self.name] = self
        self.attached, self.end = None, None
        self.stream_id = self.sidecar.number()
        event = Subscribe(
            session_id=self.name,
            stream_id=self.stream_id,
            client=Client("python", "1", "host", 4711),
            specs=self.specs,
            max_concurrency=self.max_concurrency,
            in_flight=self.in_flight or tuple(self.running),
            wall_at=self.sidecar.wall_at,
            watchable=self.watchable,
        )
        return self.sidecar.feed(replace(event, **changes))

    def ask_to_live(self, *in_flight: str, **options: Any) -> int:
        """Sends a KeepAlive; the number of the request."""
        number = self.sidecar.number()
        tokens = in_flight or tuple(self.running)
        self.sidecar.feed(KeepAlive(number, self.name, tokens, **options))
        return number

    def keep_alive(self, *in_flight: str, **options: Any) -> KeepAliveAnswer:
        """Sends a KeepAlive that is answered at once."""
        answer = self.sidecar.answer_to(self.ask_to_live(*in_flight, **options))
        assert isinstance(answer, KeepAliveAnswer), answer
        self.next_at = self.sidecar.world.now + answer.keep_alive_ms
        return answer

    def complete(self, *tokens: str, **outcome: Any) -> int:
        """Reports these (or all it runs) with one outcome; the number of the request."""
        number = self.sidecar.number()
        reported = tokens or tuple(self.running)
        for token in reported:
            self.running.pop(token, None)
        results = tuple((token, Outcome(**outcome)) for token in reported)
        self.sidecar.feed(Complete(number, results))
        return number

    def receipts(self, number: int) -> tuple[Receipt, ...]:
        answer = self.sidecar.answer_to(number)
        assert isinstance(answer, CompleteAnswer), answer
        return answer.receipts

    def lose_stream(self) -> None:
        assert self.stream_id is not None
        self.sidecar.feed(StreamEnded(self.name, self.stream_id))

    def exit(self) -> None:
        """Its process is gone, and the sidecar has seen it."""
        self.silent = True
        self.running.clear()
        self.sidecar.feed(ClientExited(self.name))

    def close(self, *stopped: str) -> None:
        self.silent = True
        number = self.sidecar.number()
        self.sidecar.feed(CloseSession(number, self.name, stopped))
        assert self.sidecar.answer_to(number) == Closed()

    # --- What happens to it --------------------------------------------------------------

    def receive(self, send: Send) -> None:
        assert send.stream_id == self.stream_id
        self.events.append(send.event)
        if isinstance(send.event, Attached):
            self.attached = send.event
        if isinstance(send.event, Cancelled):
            self.cancelled.append(send.event)
        if isinstance(send.event, Assigned) and not self.deaf:
            for assignment in send.event.assignments:
                if assignment.token not in {known.token for known in self.assigned}:
                    self.assigned.append(assignment)
                    self.running[assignment.token] = assignment
                    if self.lasts_ms is not None:
                        self._ends[assignment.token] = self.sidecar.world.now + self.lasts_ms

    def stream_ended(self, end: EndStream) -> None:
        if end.stream_id == self.stream_id:
            self.end = end
            self.stream_id = None

    @property
    def error(self) -> AnarchonError | None:
        """What its stream ended with."""
        return self.end.error if self.end is not None else None

    def reasons(self) -> list[CancelReason]:
        return [cancelled.reason for cancelled in self.cancelled]

    def only(self) -> Assignment:
        """The one attempt that it runs."""
        (assignment,) = self.running.values()
        return assignment

    # --- Its life in `run_for` -----------------------------------------------------------

    def moments(self) -> Iterable[int]:
        if self.silent:
            return
        if self.next_at is not None:
            yield self.next_at
        yield from self._ends.values()

    def play(self) -> None:
        now = self.sidecar.world.now
        if self.silent:
            return
        for token in [token for token, at in self._ends.items() if at <= now]:
            del self._ends[token]
            if token in self.running:
                self.complete(token, result="done")
        if self.next_at is not None and self.next_at <= now:
            answer = self.sidecar.answer_to(self.ask_to_live())
            pause = 1_000
            if isinstance(answer, KeepAliveAnswer):
                pause = answer.keep_alive_ms
            self.next_at = now + pause


FAILED: dict[str, Any] = {"failure": Failure("ValueError", "no")}
"""An outcome: the handler raised."""


def current(view: RunView) -> tuple[int, str, str]:
    """A run in short: its attempts, its state, its reason."""
    return view.run.attempt, view.run.state.value, view.run.reason


def holder(run: Run) -> str:
    """The label of the instance that has, or had, the run."""
    assert run.current is not None
    return run.current.instance_id


def warnings(sidecar: Sidecar) -> list[str]:
    """What was said louder than INFO."""
    loud = (Level.WARNING, Level.ERROR)
    return [c.event for c in sidecar.said if isinstance(c, Log) and c.level in loud]
