"""The client over real gRPC, against a real server in the same process."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
from grpc import aio

import anarchon
from anarchon._errors import error_from_status
from anarchon._transport import CallToken, Endpoint
from anarchon.admin import AdminClient
from anarchon.testing import FakeSidecar
from tests.unit.client.puppet_server import PuppetServer

ADVICE = "{}; start one with `anarchon serve`, or give the address of another"


class Application:
    """A handler that waits to be let go, and says what it was told."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.go_on = asyncio.Event()
        self.count = 0
        self.context: anarchon.Context | None = None
        self.told: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @anarchon.every("10s")
    async def work(self, ctx: anarchon.Context) -> str:
        self.count += 1
        self.context = ctx
        self.started.set()
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.told.set_result(None)
            raise
        return "done"


@pytest.fixture
async def sidecar() -> FakeSidecar:
    # Short, for this is real time.
    return FakeSidecar(session_ttl="1500ms", keep_alive_interval="250ms")


@pytest.fixture
async def server(sidecar: FakeSidecar) -> AsyncIterator[PuppetServer]:
    server = PuppetServer(sidecar)
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def app() -> Application:
    return Application()


@pytest.fixture
async def client(server: PuppetServer) -> AsyncIterator[anarchon.AnarchonClient]:
    client = anarchon.AnarchonClient(server.address, stop_grace="0s")
    yield client
    await client.stop()


# ── Sessions ────────────────────────────────────────────────────────────────────────────────────


async def test_a_run_from_assignment_to_receipt(
    client: anarchon.AnarchonClient, sidecar: FakeSidecar, server: PuppetServer, app: Application
) -> None:
    subscription = client.subscribe([app.work])
    assert await subscription.ready() == "fake:1"
    run = sidecar.assign("work")
    await app.started.wait()
    app.go_on.set()
    assert (await run.outcome).success.result == "done"
    await subscription.stop()
    assert sidecar.closes[0].session_id == subscription.session_id
    assert 0 < server.times_left_s["KeepAlive"] < 0.5
    assert 8 < server.times_left_s["Complete"] < 11
    assert 4 < server.times_left_s["CloseSession"] < 6


async def test_s24_a_lost_stream_is_attached_again_and_the_handler_does_not_notice(
    client: anarchon.AnarchonClient, sidecar: FakeSidecar, app: Application
) -> None:
    await client.subscribe([app.work]).ready()
    run = sidecar.assign("work")
    await app.started.wait()
    sidecar.break_stream()
    await sidecar.wait_for(lambda: len(sidecar.subscribes) == 2)
    assert list(sidecar.subscribes[1].in_flight) == [run.token]
    app.go_on.set()
    assert (await run.outcome).success.result == "done"
    assert app.count == 1


async def test_s26_a_restarted_sidecar_is_told_what_runs(
    client: anarchon.AnarchonClient, sidecar: FakeSidecar, server: PuppetServer, app: Application
) -> None:
    await client.subscribe([app.work]).ready()
    run = sidecar.assign("work")
    await app.started.wait()
    address = server.address
    await server.stop()
    sidecar.forget_session()
    await server.start(address)
    await sidecar.wait_for(lambda: len(sidecar.subscribes) == 2)
    assert list(sidecar.subscribes[1].in_flight) == [run.token]
    app.go_on.set()
    assert (await run.outcome).success.result == "done"


async def test_a_session_that_is_not_found_is_subscribed_again(
    client: anarchon.AnarchonClient, sidecar: FakeSidecar, app: Application
) -> None:
    await client.subscribe([app.work]).ready()
    run = sidecar.assign("work")
    await app.started.wait()
    sidecar.forget_session()
    await sidecar.wait_for(lambda: len(sidecar.subscribes) == 2)
    assert list(sidecar.subscribes[1].in_flight) == [run.token]


async def test_a_replaced_session_stops_with_an_error(
    server: PuppetServer, sidecar: FakeSidecar, app: Application
) -> None:
    subscription = anarchon.AnarchonClient(server.address).subscribe([app.work])
    await subscription.ready()
    sidecar.assign("work")
    await app.started.wait()
    sidecar.replace_session()
    with pytest.raises(anarchon.SessionReplacedError, match="another stream") as raised:
        await subscription.closed
    assert raised.value.reason == "SESSION_REPLACED"
    assert app.told.done()


async def test_s25_keep_alives_without_an_answer_end_trust(
    client: anarchon.AnarchonClient, sidecar: FakeSidecar, app: Application
) -> None:
    await client.subscribe([app.work]).ready()
    sidecar.assign("work")
    await app.started.wait()
    loop = asyncio.get_running_loop()
    sidecar.is_silent = True
    began_s = loop.time()
    await app.told
    assert 1.0 < loop.time() - began_s < 5
    assert app.context is not None
    with pytest.raises(anarchon.LeaseLost):
        app.context.check()
    sidecar.is_silent = False


async def test_a_duplicate_assignment_runs_once(
    client: anarchon.AnarchonClient, sidecar: FakeSidecar, app: Application
) -> None:
    await client.subscribe([app.work]).ready()
    run = sidecar.assign("work")
    await app.started.wait()
    sidecar.deliver(run, run)
    app.go_on.set()
    await run.outcome
    sidecar.deliver(run)
    last = sidecar.assign("work")  # comes after, on the same stream
    await last.outcome
    assert app.count == 2


async def test_a_drain_ends_nothing_and_the_next_sidecar_is_found(
    client: anarchon.AnarchonClient,
    sidecar: FakeSidecar,
    app: Application,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    await client.subscribe([app.work]).ready()
    run = sidecar.assign("work")
    await app.started.wait()
    sidecar.drain()
    sidecar.break_stream()
    await sidecar.wait_for(lambda: len(sidecar.subscribes) == 2)
    app.go_on.set()
    await run.outcome
    assert "going away" in caplog.text


async def test_s23_stop_hands_over_what_it_cancels(
    client: anarchon.AnarchonClient, sidecar: FakeSidecar, app: Application
) -> None:
    subscription = client.subscribe([app.work])
    await subscription.ready()
    run = sidecar.assign("work")
    await app.started.wait()
    await subscription.stop(grace="50ms")
    assert (await run.outcome).stopped.reason == 4
    assert sidecar.keep_alives[-1].draining
    assert len(sidecar.closes) == 1


async def test_a_missing_sidecar_is_told_once_and_found_when_it_comes(
    sidecar: FakeSidecar, app: Application
) -> None:
    told = Told()
    logging.getLogger("anarchon").addHandler(told)
    server = PuppetServer(sidecar)
    address = await server.start()
    await server.stop()
    client = anarchon.AnarchonClient(address)
    subscription = client.subscribe([app.work])
    await told.first
    await server.start(address)
    await subscription.ready()
    await client.stop()
    logging.getLogger("anarchon").removeHandler(told)
    absence = ADVICE.format(f"no sidecar answers at {address}")
    assert told.messages == [f"{absence}; trying again until one answers"]
    await server.stop()


class Told(logging.Handler):
    """Done when a warning has been logged; counts them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []
        self.first: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        if not self.first.done():
            self.first.set_result(None)


# ── Errors ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "error",
    [
        anarchon.RefusedError("jobs[0].jitter: must be less than the gap", "INVALID_FIELD"),
        anarchon.UnsupportedError("overlap: rabbitmq cannot; redis can", "UNSUPPORTED"),
    ],
)
async def test_what_is_refused_raises_the_servers_words(
    server: PuppetServer, sidecar: FakeSidecar, app: Application, error: anarchon.RefusedError
) -> None:
    sidecar.refuse(error)
    subscription = anarchon.AnarchonClient(server.address).subscribe([app.work])
    with pytest.raises(type(error)) as raised:
        await subscription.ready()
    assert str(raised.value) == str(error)
    assert raised.value.reason == error.reason
    with pytest.raises(type(error)):
        await subscription.closed


async def test_a_server_that_is_no_sidecar_is_told_so(app: Application) -> None:
    stranger = aio.server()
    port = stranger.add_insecure_port("127.0.0.1:0")
    await stranger.start()
    subscription = anarchon.AnarchonClient(f"127.0.0.1:{port}").subscribe([app.work])
    with pytest.raises(anarchon.VersionError, match=r"does not speak anarchon\.v1"):
        await subscription.ready()
    await stranger.stop(0)


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        ("INVALID_ARGUMENT", "INVALID_SCHEDULE", anarchon.RefusedError),
        ("FAILED_PRECONDITION", "UNSUPPORTED", anarchon.UnsupportedError),
        ("FAILED_PRECONDITION", "VERSION", anarchon.VersionError),
        ("FAILED_PRECONDITION", "RUN_FINAL", anarchon.RefusedError),
        ("FAILED_PRECONDITION", "LATER_THAN_THIS", anarchon.RefusedError),
        ("NOT_FOUND", "SESSION_NOT_FOUND", anarchon.SessionNotFoundError),
        ("NOT_FOUND", "JOB_NOT_FOUND", anarchon.NotFoundError),
        ("ABORTED", "SESSION_REPLACED", anarchon.SessionReplacedError),
        ("ABORTED", "", anarchon.SidecarUnavailableError),
        ("UNAUTHENTICATED", "BAD_CREDENTIALS", anarchon.CredentialsError),
        ("UNAVAILABLE", "STORE_UNAVAILABLE", anarchon.SidecarUnavailableError),
        ("RESOURCE_EXHAUSTED", "LIMIT_EXCEEDED", anarchon.RefusedError),
        ("RESOURCE_EXHAUSTED", "", anarchon.SidecarUnavailableError),
        ("INTERNAL", "", anarchon.SidecarUnavailableError),
        ("UNIMPLEMENTED", "", anarchon.VersionError),
    ],
)
def test_a_status_becomes_the_exception_of_what_can_be_done(
    code: str, reason: str, kind: type[anarchon.SidecarError]
) -> None:
    error = error_from_status(code, reason, "")
    assert type(error) is kind
    assert error.reason == reason
    assert str(error) == code


@pytest.mark.parametrize(
    ("endpoint", "message"),
    [
        (Endpoint("127.0.0.1:7420"), ADVICE),
        (Endpoint("unix:/run/a/s"), ADVICE),
        (Endpoint("far:1", grpc.ssl_channel_credentials()), "{}: failed to connect to all: TLS"),
    ],
    ids=["default", "local", "far"],
)
def test_that_no_sidecar_answers_is_said_for_people(endpoint: Endpoint, message: str) -> None:
    error = endpoint.error(Failed(grpc.StatusCode.UNAVAILABLE, "failed to connect to all: TLS"))
    assert type(error) is anarchon.SidecarUnavailableError
    assert str(error) == message.format(f"no sidecar answers at {endpoint.address}")


def test_a_connection_that_broke_is_told_from_one_that_was_never_made() -> None:
    error = Endpoint("localhost:1").error(Failed(grpc.StatusCode.UNAVAILABLE, "Socket closed"))
    assert str(error) == "the connection to the sidecar at localhost:1 is lost: Socket closed"


class Failed(grpc.RpcError):
    """A call that failed."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> tuple[()]:
        return ()


def test_admin_calls_say_so_too() -> None:
    with AdminClient("127.0.0.1:1") as admin, pytest.raises(anarchon.SidecarError) as raised:
        admin.get_instance()
    said = ADVICE.format("no sidecar answers at 127.0.0.1:1")
    assert str(raised.value) == said


# ── Endpoints ───────────────────────────────────────────────────────────────────────────────────


async def test_a_unix_socket_works(sidecar: FakeSidecar, app: Application, tmp_path: Path) -> None:
    server = PuppetServer(sidecar)
    await server.start(f"unix:{tmp_path}/sidecar.sock")
    async with anarchon.AnarchonClient(server.address) as client:
        await client.subscribe([app.work]).ready()
    await server.stop()


def bound(path: Path) -> str:
    """Put a socket there; return its address."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    return f"unix:{path}"


def test_a_socket_where_others_may_write_is_not_trusted(short: Path) -> None:
    address = bound(short / "s")
    for mode in (0o770, 0o757, 0o1777):
        short.chmod(mode)
        with pytest.raises(anarchon.ClientError, match=rf"mode {mode:04o}, so it may be somebody"):
            anarchon.AnarchonClient(address).subscribe([NOTHING])
        with pytest.raises(anarchon.ClientError, match="nobody else may write in the directory"):
            AdminClient(address)
    short.chmod(0o750)
    AdminClient(address).close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a socket away")
def test_a_socket_of_another_user_than_its_directorys_is_not_trusted(short: Path) -> None:
    address = bound(short / "s")
    os.chown(short / "s", 12_345, -1)
    with pytest.raises(anarchon.ClientError, match="belongs to user 12345 and lies in"):
        Endpoint(address).check_socket()
    os.chown(short, 12_345, -1)
    Endpoint(address).check_socket()  # as with a sidecar of its own user


def test_a_socket_that_is_not_there_yet_is_no_error(short: Path) -> None:
    Endpoint(f"unix:{short}/none").check_socket()
    Endpoint(f"unix:{short}/no/directory").check_socket()


async def test_a_socket_that_is_replaced_gets_no_token_and_no_call(
    sidecar: FakeSidecar, app: Application, short: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = PuppetServer(sidecar)
    await server.start(f"unix:{short}/s")
    async with anarchon.AnarchonClient(server.address) as client:
        await client.subscribe([app.work]).ready()
        os.chmod(short, 0o777)  # noqa: PTH101 - on a loop
        told = Told()
        logging.getLogger("anarchon").addHandler(told)
        sidecar.break_stream()
        await told.first
        logging.getLogger("anarchon").removeHandler(told)
        seen = len(server.metadata)
    assert len(server.metadata) == seen
    assert "may be somebody else's" in caplog.text
    await server.stop()


NOTHING = anarchon.Job(lambda: None, anarchon.Every("1s"), name="nothing")


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory of our own whose name leaves room in a socket's address."""
    with tempfile.TemporaryDirectory(prefix="an-") as name:
        yield Path(name)


async def test_the_call_token_goes_with_every_call_and_is_read_again_when_it_changes(
    server: PuppetServer, sidecar: FakeSidecar, app: Application, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text("first\n")
    async with anarchon.AnarchonClient(server.address, token_file=file) as client:
        await client.subscribe([app.work]).ready()
        assert {data["authorization"] for data in server.metadata} == {"Bearer first"}
        replacement = tmp_path / "new"
        replacement.write_text("second")
        replacement.replace(file)
        await sidecar.wait_for(lambda: server.metadata[-1]["authorization"] == "Bearer second")
        file.unlink()
        seen = len(server.metadata)
        await sidecar.wait_for(lambda: len(server.metadata) > seen + 1)
        assert server.metadata[-1]["authorization"] == "Bearer second"


@pytest.mark.parametrize("content", ["", "two words", "ünicode", " \n ", "x" * 5_000])
def test_a_bad_token_file_is_refused_at_once(tmp_path: Path, content: str) -> None:
    file = tmp_path / "token"
    file.write_text(content)
    with pytest.raises(anarchon.ClientError, match="must begin with one line"):
        CallToken(file)


def test_of_several_tokens_the_first_is_sent(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("\nnew\nold\n")
    assert CallToken(file).metadata() == (("authorization", "Bearer new"),)


def test_a_missing_token_file_is_refused_on_subscribing(tmp_path: Path) -> None:
    client = anarchon.AnarchonClient(token_file=tmp_path / "none")
    with pytest.raises(anarchon.ClientError, match=r"none': No such file"):
        client.subscribe([anarchon.Job(lambda: None, anarchon.Every("1s"), name="job")])


def test_the_environment_says_where_the_sidecar_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANARCHON_ADDRESS", raising=False)
    monkeypatch.delenv("ANARCHON_TOKEN_FILE", raising=False)
    assert Endpoint.of(None, None, None) == Endpoint("127.0.0.1:7420")
    monkeypatch.setenv("ANARCHON_ADDRESS", "unix:/run/anarchon/sidecar.sock")
    monkeypatch.setenv("ANARCHON_TOKEN_FILE", "/run/token")
    endpoint = Endpoint.of(None, None, None)
    assert endpoint.address == "unix:/run/anarchon/sidecar.sock"
    assert endpoint.token_file == Path("/run/token")
    assert Endpoint.of("[::1]:1", None, "/x") == Endpoint("[::1]:1", None, Path("/x"))


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("localhost", 'must be "host:port"'),
        ("localhost:0", 'must be "host:port"'),
        ("localhost:65536", 'must be "host:port"'),
        ("http://localhost:7420", 'must be "host:port"'),
        ("unix:relative", "must be unix:/absolute/path"),
        ("unix-abstract:name", 'must be "host:port"'),
        ("unix:/" + "x" * 107, "at most 107 bytes"),
        ("10.0.0.1:7420", "calls to it need TLS"),
        ("sidecar:7420", "calls to it need TLS"),
    ],
)
def test_a_bad_address_is_refused_at_once(address: str, message: str) -> None:
    with pytest.raises(anarchon.ClientError) as raised:
        anarchon.AnarchonClient(address)
    assert message in str(raised.value)


def test_another_machine_may_be_called_with_credentials() -> None:
    credentials = grpc.ssl_channel_credentials()
    assert Endpoint("sidecar.example:7420", credentials).address == "sidecar.example:7420"


def test_no_proxy_stands_between_a_client_and_its_sidecar() -> None:
    assert ("grpc.enable_http_proxy", 0) in Endpoint("localhost:7420").options()
    assert os.environ.get("ANARCHON_ADDRESS") is None
