"""Where the sidecar listens: a TCP address or a Unix socket. Imports the standard library and core's
errors.
"""

from __future__ import annotations

import ipaddress
import sys
from dataclasses import dataclass
from pathlib import Path

from anarchon_server.core.errors import InvalidError

# sockaddr_un.sun_path, with its closing zero.
UNIX_PATH_MAX_BYTES = (104 if sys.platform == "darwin" else 108) - 1

_TCP_FORM = "write HOST:PORT, as in 127.0.0.1:7420 or [::1]:7420"


@dataclass(frozen=True, slots=True)
class Address:
    """`host` and `port`, or `path` of a Unix socket. Port 0 is any free one."""

    host: str = ""
    port: int = 0
    path: Path | None = None

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it."""
        if self.path is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        if self.path is not None:
            return f"unix:{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def parse_tcp(field: str, text: str) -> Address:
    """Return the TCP address that `text` means. Raises `InvalidError`."""
    _check_utf8(field, text)
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise InvalidError(field, text, f"an IPv6 address stands in brackets; {_TCP_FORM}")
    if not colon or not host or any(c.isspace() or c == "/" for c in host):
        raise InvalidError(field, text, _TCP_FORM)
    if not (port.isascii() and port.isdigit() and int(port) <= 65_535):
        raise InvalidError(field, text, f"the port is 0 to 65535; {_TCP_FORM}")
    return Address(host=host, port=int(port))


def parse_address(field: str, text: str) -> Address:
    """Return the address that `text` means: HOST:PORT or unix:/PATH. Raises `InvalidError`."""
    _check_utf8(field, text)
    if text.startswith(("unix-abstract:", "unix:@")):
        raise InvalidError(
            field, text, "abstract sockets have no permissions: use a path, unix:/run/anarchon/s"
        )
    if not text.startswith("unix:"):
        return parse_tcp(field, text)
    path = Path(text.removeprefix("unix:").removeprefix("//"))
    if not path.is_absolute():
        raise InvalidError(
            field, text, "a Unix socket needs an absolute path: unix:/run/anarchon/s"
        )
    size = len(str(path).encode())
    if size > UNIX_PATH_MAX_BYTES:
        raise InvalidError(
            field,
            text,
            f"the path has {size} bytes, and a socket's has at most {UNIX_PATH_MAX_BYTES}",
        )
    return Address(path=path)


def _check_utf8(field: str, text: str) -> None:
    """Refuse bytes of the command line that are no text: gRPC takes addresses in UTF-8 only."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidError(field, text, "an address is written in UTF-8") from None
