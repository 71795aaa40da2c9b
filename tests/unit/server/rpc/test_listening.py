"""One sidecar an address; Unix sockets that only the user can reach or replace."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from grpc import aio

from anarchon.v1 import admin_pb2, admin_pb2_grpc
from anarchon_server.config import Address
from anarchon_server.rpc import listening
from anarchon_server.rpc.listening import ListenError, Place
from tests.servers.tools import openssl
from tests.unit.server.sidecars import start_sidecar, stop_sidecar

Bind = Callable[[str], int]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "anarchon.sock"


@pytest.fixture
def bind() -> Iterator[Bind]:
    """What gRPC does with an address, without gRPC."""
    bound: list[socket.socket] = []

    def listen(address: str) -> int:
        family = socket.AF_UNIX if address.startswith("unix:") else socket.AF_INET
        bound.append(socket.socket(family))
        try:
            if family == socket.AF_UNIX:
                bound[-1].bind(address.removeprefix("unix:"))
            else:
                host, _, port = address.rpartition(":")
                bound[-1].bind((host, int(port)))
        except OSError:
            raise RuntimeError("Failed to bind") from None
        bound[-1].listen()
        return 1 if family == socket.AF_UNIX else int(bound[-1].getsockname()[1])

    yield listen
    for one in bound:
        one.close()


# ── TCP ─────────────────────────────────────────────────────────────────────────────────────────


async def test_a_second_sidecar_on_a_port_is_refused() -> None:
    first = await start_sidecar()
    try:
        with pytest.raises(ListenError, match=r"is in use by another process.*--listen"):
            await start_sidecar(listen=first.address)
    finally:
        await stop_sidecar(first)


async def test_a_port_in_use_is_refused_also_without_the_lock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gRPC by default lets two servers bind one port: it must not."""
    first = await start_sidecar()
    monkeypatch.setattr(listening, "_lock_directory", lambda: None)
    try:
        with pytest.raises(ListenError, match="is in use by another process"):
            await start_sidecar(listen=first.address)
    finally:
        await stop_sidecar(first)


def test_a_port_is_held_by_its_lock_until_it_is_released(bind: Bind) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = Address("127.0.0.1", probe.getsockname()[1])
    first = Place(address)
    with pytest.raises(ListenError, match="is in use"):
        Place(address)
    first.release()
    second = Place(address)
    assert second.bind(bind) == address
    assert second.still_ours
    second.release()
    second.release()


def test_where_no_lock_can_be_made_the_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "file"))
    Place(Address("127.0.0.1", 7420)).release()
    assert [r.getMessage() for r in caplog.records] == ["address_not_locked"]


def test_a_lock_directory_that_others_may_write_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / f"anarchon-{os.getuid()}").mkdir()
    (tmp_path / f"anarchon-{os.getuid()}").chmod(0o777)
    with pytest.raises(ListenError, match=r"this user's alone.*: set XDG_RUNTIME_DIR to a"):
        Place(Address("127.0.0.1", 7420))


def test_a_lock_directory_that_is_a_link_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / f"anarchon-{os.getuid()}").symlink_to("elsewhere")
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ListenError, match=r"no directory of this user's own.*set XDG_RUNTIME_DIR"):
        Place(Address("127.0.0.1", 7420))
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_runtime_directory_that_is_relative_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    Place(Address("127.0.0.1", 7420)).release()
    assert [entry.name for entry in tmp_path.iterdir()] == [f"anarchon-{os.getuid()}"]


def test_a_lock_is_removed_with_its_release_and_one_that_was_left_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    locks = tmp_path / f"anarchon-{os.getuid()}"
    place = Place(Address("127.0.0.1", 7420))
    (lock,) = locks.iterdir()
    place.release()
    assert list(locks.iterdir()) == []
    lock.write_text("")
    Place(Address("127.0.0.1", 7420)).release()
    assert list(locks.iterdir()) == []


def test_a_lock_that_is_removed_while_it_is_being_taken_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    first = Place(Address("127.0.0.1", 7420))
    real, tries = fcntl.flock, 0

    def flock(file: int, operation: int) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            first.release()  # between the second one's open and its lock
        real(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    second = Place(Address("127.0.0.1", 7420))
    assert tries == 2
    with pytest.raises(ListenError, match="is in use"):
        Place(Address("127.0.0.1", 7420))
    second.release()


def test_what_is_no_host_name_is_refused(bind: Bind) -> None:
    place = Place(Address("a..b", 0))
    with pytest.raises(ListenError, match=r"cannot listen on a\.\.b:0: that is no host name"):
        place.bind(bind)


def test_an_address_that_is_not_this_machines_is_refused_with_the_reason(bind: Bind) -> None:
    place = Place(Address("192.0.2.1", 7420))
    with pytest.raises(ListenError, match=r"cannot listen on 192\.0\.2\.1:7420: Cannot assign"):
        place.bind(bind)
    Place(Address("192.0.2.1", 7420)).release()  # the lock was given back


# ── Unix sockets ────────────────────────────────────────────────────────────────────────────────


async def test_a_sidecar_serves_on_a_unix_socket_of_mode_0660_in_a_directory_of_0700(
    path: Path,
) -> None:
    sidecar = await start_sidecar(listen=f"unix:{path}")
    assert (_mode(path), _mode(path.parent)) == (0o660, 0o700)
    await sidecar.admin.ListJobs(admin_pb2.ListJobsRequest())
    assert sidecar.server.address_is_ours
    with pytest.raises(ListenError, match="is in use by another process"):
        await start_sidecar(listen=f"unix:{path}")
    await sidecar.admin.ListJobs(admin_pb2.ListJobsRequest())
    await stop_sidecar(sidecar)
    assert not _is_there(path)


def test_a_dead_sidecars_socket_is_replaced(path: Path, bind: Bind) -> None:
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    place = Place(Address(path=path))
    place.bind(bind)
    assert place.still_ours
    place.release()


def test_a_living_socket_without_our_lock_is_not_replaced(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as alive:
        alive.bind(str(path))
        alive.listen()
        with pytest.raises(ListenError, match="is in use by another process"):
            Place(Address(path=path))


def test_a_file_that_is_no_socket_is_not_replaced(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    path.write_text("precious")
    with pytest.raises(ListenError, match="is no socket"):
        Place(Address(path=path))
    assert path.read_text() == "precious"


def test_a_directory_that_others_may_write_to_is_refused(path: Path) -> None:
    path.parent.mkdir()
    path.parent.chmod(0o777)
    with pytest.raises(ListenError, match=r"mode 0777.*use a directory of mode 0700"):
        Place(Address(path=path))


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ListenError, match="cannot create the directory"):
        Place(Address(path=tmp_path / "file" / "run" / "s"))


def test_a_lock_that_cannot_be_made_is_refused(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    path.with_name(path.name + ".lock").symlink_to("elsewhere")
    with pytest.raises(ListenError, match="cannot create the lock"):
        Place(Address(path=path))


def test_a_socket_that_was_replaced_is_noticed(path: Path, bind: Bind) -> None:
    place = Place(Address(path=path))
    place.bind(bind)
    other = path.with_name("other")
    with socket.socket(socket.AF_UNIX) as thief:
        thief.bind(str(other))
        other.rename(path)
        assert not place.still_ours
        place.release()
        assert path.exists(), "it is not ours to remove"


def test_a_socket_that_was_removed_is_noticed(path: Path, bind: Bind) -> None:
    place = Place(Address(path=path))
    place.bind(bind)
    path.unlink()
    assert not place.still_ours
    place.release()


def _is_there(path: Path) -> bool:
    return path.exists()


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# ── TLS ─────────────────────────────────────────────────────────────────────────────────────────


async def test_a_certificate_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ListenError, match=r"tls_certificate .*: No such file"):
        await start_sidecar(
            tls_certificate=str(tmp_path / "none.pem"), tls_key=str(tmp_path / "none.key")
        )


async def test_with_tls_a_plain_caller_gets_nowhere(tmp_path: Path) -> None:
    certificate, key = _self_signed(tmp_path)
    sidecar = await start_sidecar(
        listen="localhost:0", tls_certificate=str(certificate), tls_key=str(key)
    )
    try:
        with pytest.raises(aio.AioRpcError):
            await sidecar.admin.ListJobs(admin_pb2.ListJobsRequest(), timeout=5)
        trusted = grpc.ssl_channel_credentials(certificate.read_bytes())
        async with aio.secure_channel(sidecar.address, trusted) as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            await stub.ListJobs(admin_pb2.ListJobsRequest(), timeout=5)
    finally:
        await stop_sidecar(sidecar)


def _self_signed(directory: Path) -> tuple[Path, Path]:
    certificate, key = directory / "cert.pem", directory / "key.pem"
    command = [openssl(), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key)]
    command += ["-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    return certificate, key
