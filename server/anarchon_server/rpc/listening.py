"""One sidecar an address: locks, and Unix sockets that nobody else can reach or replace.

Imports the standard library, `config` and core's errors. gRPC by default lets two servers share an
address and splits the connections between them, and takes over a Unix socket's path silently; here
the second one is refused.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from anarchon_server.config import Address
from anarchon_server.core.errors import AnarchonError

_log = logging.getLogger("anarchon")

SOCKET_MODE = 0o660
_DIRECTORY_MODE = 0o700
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class ListenError(AnarchonError):
    """The sidecar cannot listen there. The message says why and what would be right."""


class Place:
    """An address, held against other sidecars until `release`. Raises `ListenError`."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._inode: int | None = None
        self._lock: _Lock | None = None
        if address.path is not None:
            directory = _socket_directory(address.path.parent)
            self._lock = _Lock(directory, f"{address.path.name}.lock", address)
            with self._released_on_error():
                _remove_dead_socket(address.path)
        elif address.port and (found := _lock_directory()) is not None:
            self._lock = _Lock(found, _lock_name(address), address)

    def bind(self, add_port: Callable[[str], int]) -> Address:
        """Have gRPC bind; return the address bound, its port known."""
        with self._released_on_error(), _only_for_owner_and_group():
            if self.address.path is None:
                _try(self.address)
            try:
                port = add_port(str(self.address))
            except RuntimeError as error:
                raise ListenError(f"cannot listen on {self.address}: {error}") from error
        if self.address.path is None:
            return Address(self.address.host, port)
        self._inode = self.address.path.stat().st_ino
        return self.address

    @property
    def still_ours(self) -> bool:
        """Whether the Unix socket's path still leads to this process; TCP ports always do."""
        if self._inode is None or self.address.path is None:
            return True
        try:
            return self.address.path.stat().st_ino == self._inode
        except OSError:
            return False

    def release(self) -> None:
        """Remove the socket, if it is still ours, and let others have the address."""
        if self._inode is not None and self.still_ours and self.address.path is not None:
            self.address.path.unlink(missing_ok=True)
        self._inode = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    @contextlib.contextmanager
    def _released_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.release()
            raise


class _Lock:
    """The lock of an address: a file in a directory, held until `release`, which removes it.

    Takes over the directory's descriptor, so that the directory cannot be exchanged meanwhile.
    """

    def __init__(self, directory: int, name: str, address: Address) -> None:
        self._directory = directory
        self._name = name
        self._file: int | None = None
        try:
            while self._file is None:
                self._file = self._take(address)
        except BaseException:
            os.close(directory)
            raise

    def release(self) -> None:
        """Remove the file while it is locked, and let go of it."""
        assert self._file is not None, "taken, and released once"
        with contextlib.suppress(OSError):
            os.unlink(self._name, dir_fd=self._directory)
        os.close(self._file)
        os.close(self._directory)
        self._file = None

    def _take(self, address: Address) -> int | None:
        """Return the locked file; None where it was removed before it was locked."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            file = os.open(self._name, flags, 0o600, dir_fd=self._directory)
        except OSError as error:
            raise ListenError(f"cannot create the lock {self._name}: {error.strerror}") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            raise ListenError(_in_use(address)) from None
        try:
            there = os.stat(self._name, dir_fd=self._directory, follow_symlinks=False).st_ino
        except FileNotFoundError:
            there = None
        if there == os.fstat(file).st_ino:
            return file
        os.close(file)
        return None


def _lock_directory() -> int | None:
    """Open where locks of TCP addresses lie: the user's runtime directory, else one of the temporary ones.

    None where there is neither, as in a container whose file system is read-only: there the kernel
    alone refuses a second server, since it is not asked to share the port.
    """
    try:
        directory = Path(_runtime_directory()) / f"anarchon-{os.getuid()}"
        directory.mkdir(mode=_DIRECTORY_MODE, exist_ok=True)
    except OSError as error:
        _log.warning("address_not_locked", extra={"fields": {"error": str(error)}})
        return None
    # In a directory that all share, somebody else may have been first: also with a symbolic link.
    remedy = "set XDG_RUNTIME_DIR to a directory of mode 0700 that belongs to"
    return _open_own(directory, os.O_NOFOLLOW, f"{remedy} user {os.getuid()}")


def _runtime_directory() -> str:
    own = os.environ.get("XDG_RUNTIME_DIR", "")
    return own if Path(own).is_absolute() else tempfile.gettempdir()


def _lock_name(address: Address) -> str:
    """One a network namespace and address: only there could two sidecars meet."""
    network = 0
    with contextlib.suppress(OSError):
        network = Path("/proc/self/ns/net").stat().st_ino
    return f"tcp-{network}-{address.host.replace(':', '_')}-{address.port}.lock"


def _socket_directory(directory: Path) -> int:
    """Open the directory of a Unix socket, which is made where it is missing."""
    try:
        directory.mkdir(mode=_DIRECTORY_MODE, parents=True, exist_ok=True)
    except OSError as error:
        raise ListenError(f"cannot create the directory {directory}: {error.strerror}") from None
    remedy = f"use a directory of mode 0700 that belongs to user {os.getuid()}"
    return _open_own(directory, 0, f"{remedy}; one that does not exist yet is made so")


def _open_own(directory: Path, flags: int, remedy: str) -> int:
    """Open a directory in which nobody else can replace anything."""
    try:
        opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | flags)
    except OSError as error:
        raise ListenError(
            f"{directory} is no directory of this user's own: {error.strerror}: {remedy}"
        ) from None
    status = os.fstat(opened)
    if status.st_uid != os.getuid() or status.st_mode & _OTHERS_WRITE:
        os.close(opened)
        mode = stat.S_IMODE(status.st_mode)
        raise ListenError(
            f"{directory} (mode {mode:04o}, owner {status.st_uid}) is not this user's alone, so "
            f"others could replace what is in it: {remedy}"
        )
    return opened


def _remove_dead_socket(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ListenError(f"{path} is there and is no socket: choose another path")
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise ListenError(
                f"{path} is a socket that cannot be tried: {error.strerror}"
            ) from None
        else:
            raise ListenError(_in_use(Address(path=path)))


@contextlib.contextmanager
def _only_for_owner_and_group() -> Iterator[None]:
    """A socket gets its mode from the umask when it is bound; changing it later would race."""
    before = os.umask(0o777 & ~SOCKET_MODE)
    try:
        yield
    finally:
        os.umask(before)


def _try(address: Address) -> None:
    """Bind and let go, because gRPC does not say why it could not."""
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ListenError(f"cannot listen on {address}: {error.strerror}") from None
    except UnicodeError:
        raise ListenError(f"cannot listen on {address}: that is no host name") from None
    missing = []
    for family, *_, place in found:
        with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(place)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise ListenError(_in_use(address)) from None
                missing.append(error.strerror)
    # Of the addresses of a name some may not be there: ::1 where IPv6 is off.
    if len(missing) == len(found):
        raise ListenError(f"cannot listen on {address}: {missing[0]}")


def _in_use(address: Address) -> str:
    return (
        f"{address} is in use by another process, perhaps another sidecar: stop that one, or "
        "choose another address with --listen"
    )
