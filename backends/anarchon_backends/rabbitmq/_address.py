"""Where the broker is, read from a URL; what is wrong with it is said without showing it.

Imports the errors and the standard library.
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from anarchon_server.core.errors import StoreRefused

USER_VARIABLE = "RABBITMQ_USERNAME"
PASSWORD_VARIABLE = "RABBITMQ_PASSWORD"
RETENTION_LEAST_MS = 10 * 60_000
RETENTION_MOST_MS = 31 * 24 * 3_600_000  # the broker's timers end at 49 days
_RETENTION_MS = 3_600_000
_FORM = "amqp://[user:password@]host[:port][,host[:port]]/virtual-host"
_PORTS = {"amqp": 5672, "amqps": 5671}
_OPTIONS = (
    "management",
    "password_file",
    "queue_type",
    "retention",
    "tls_ca",
    "tls_cert",
    "tls_key",
    "tls_verify",
)
_UNITS_MS = {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1_000}
_DURATION = re.compile(r"(?:\d+[dhms])+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Address:
    """Nodes of one broker, a virtual host on it, and how to be let in. `location` may be shown.

    `queue_type` is that of the queues by which slots are claimed, and `retention_ms` how long
    they are kept. `management` is where its HTTP API is (empty: it is not asked).
    """

    location: str
    hosts: tuple[tuple[str, int], ...]
    virtual_host: str
    username: str = field(repr=False)
    password: str = field(repr=False)
    queue_type: str = "classic"
    retention_ms: int = _RETENTION_MS
    management: str = ""
    tls: bool = False
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_verify: bool = True

    def tls_context(self) -> ssl.SSLContext:
        """Whom to trust, and as whom to appear. Raises `StoreRefused` for files that are none."""
        try:
            context = ssl.create_default_context(cafile=self.tls_ca or None)
            if self.tls_cert:
                context.load_cert_chain(self.tls_cert, self.tls_key or None)
        except OSError as error:  # an ssl.SSLError is one
            raise StoreRefused(
                f"{self.location}: tls_ca, tls_cert or tls_key is no such file in PEM: "
                f"{error.strerror or error}"
            ) from None
        if not self.tls_verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


def address_of(url: str) -> Address:
    """Reads the URL. The password may stand in it, in a file (`password_file`), or in the
    environment (`RABBITMQ_PASSWORD`), in this order. Raises `StoreRefused`.
    """
    try:
        parts = urlsplit(url)
        given = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        hosts = _hosts_of(parts)
    except ValueError as error:
        raise StoreRefused(
            f"the RabbitMQ URL cannot be read; it is {_FORM}?option=value, with every special "
            "character of a part as %XX"
        ) from error
    if parts.scheme not in _PORTS or not url.startswith(f"{parts.scheme}://") or parts.fragment:
        raise StoreRefused(
            f"a RabbitMQ store is {_FORM}, or amqps: (the s is for TLS), with every # as %23"
        )
    if not all(host for host, _ in hosts):
        raise StoreRefused(f"the RabbitMQ URL names no host: {_FORM}")
    tls = parts.scheme == "amqps"
    options = _options_of(given, tls=tls)
    shown = ",".join(f"[{h}]:{p}" if ":" in h else f"{h}:{p}" for h, p in hosts)
    virtual_host = _virtual_host_of(parts)
    return Address(
        location=f"{parts.scheme}://{shown}, virtual host {virtual_host!r}",
        hosts=hosts,
        virtual_host=virtual_host,
        username=unquote(parts.username or "") or os.environ.get(USER_VARIABLE, "guest"),
        password=_password_of(parts, options.get("password_file")),
        queue_type=options.get("queue_type", "classic"),
        retention_ms=_retention_of(options),
        management=options.get("management", ""),
        tls=tls,
        tls_ca=options.get("tls_ca", ""),
        tls_cert=options.get("tls_cert", ""),
        tls_key=options.get("tls_key", ""),
        tls_verify=options.get("tls_verify", "full") == "full",
    )


def _hosts_of(parts: SplitResult) -> tuple[tuple[str, int], ...]:
    """The hosts with their ports; a host that is not there is empty."""
    hosts: list[tuple[str, int]] = []
    for each in parts.netloc.rpartition("@")[2].split(","):
        one = urlsplit(f"amqp://{each}")
        hosts.append((one.hostname or "", one.port or _PORTS.get(parts.scheme, 0)))
    return tuple(hosts)


def _virtual_host_of(parts: SplitResult) -> str:
    """The path's only part; without one it is `/`, as RabbitMQ's own clients take it."""
    name = parts.path.removeprefix("/")
    if "/" in name:
        raise StoreRefused(
            f"the RabbitMQ URL's path is {parts.path[:200]!r}: it is one virtual host, with a / in "
            "its name as %2F"
        )
    return unquote(name) or "/"


def _options_of(given: list[tuple[str, str]], *, tls: bool) -> dict[str, str]:
    names = [name for name, _ in given]
    for name in names:
        if name not in _OPTIONS or names.count(name) > 1:
            wrong = "stands twice" if name in _OPTIONS else "is not known"
            raise StoreRefused(
                f"the RabbitMQ URL's option {name[:40]!r} {wrong}; there are {', '.join(_OPTIONS)}"
            )
    options = dict(given)
    _check_choice(options, "queue_type", "classic", "quorum")
    _check_choice(options, "tls_verify", "full", "none")
    if not tls and (odd := [name for name in options if name.startswith("tls_")]):
        raise StoreRefused(f"the RabbitMQ URL's option {odd[0]} is for amqps: only")
    if "tls_key" in options and "tls_cert" not in options:
        raise StoreRefused("the RabbitMQ URL's option tls_key needs tls_cert, the certificate")
    for name in ("tls_ca", "tls_cert", "tls_key"):
        if name in options and not Path(options[name]).is_file():
            raise StoreRefused(
                f"the RabbitMQ URL's option {name} is {options[name][:200]!r}: there is no such file"
            )
    _check_management(options.get("management"))
    return options


def _check_choice(options: Mapping[str, str], name: str, usual: str, other: str) -> None:
    if options.get(name, usual) not in (usual, other):
        raise StoreRefused(
            f"the RabbitMQ URL's option {name} is {options[name][:40]!r}: it is {usual!r} (the "
            f"default) or {other!r}"
        )


def _check_management(url: str | None) -> None:
    if url is None:
        return
    try:
        parts = urlsplit(url)
        right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        right = False
    if not right or parts.query or parts.fragment or "@" in parts.netloc:
        raise StoreRefused(
            "the RabbitMQ URL's option management is the address of the HTTP API, as "
            "http://host:15672, with neither user nor password"
        )


def _retention_of(options: Mapping[str, str]) -> int:
    text = options.get("retention")
    if text is None:
        return _RETENTION_MS
    parts = re.findall(r"(\d+)([dhms])", text) if _DURATION.fullmatch(text) else []
    retention_ms = sum(int(number[:12]) * _UNITS_MS[unit] for number, unit in parts)
    if not RETENTION_LEAST_MS <= retention_ms <= RETENTION_MOST_MS:
        raise StoreRefused(
            f"the RabbitMQ URL's option retention is {text[:40]!r}: it is a duration such as 1h30m, "
            "from 10m to 31d"
        )
    return retention_ms


def _password_of(parts: SplitResult, password_file: str | None) -> str:
    if parts.password is not None and password_file is not None:
        raise StoreRefused("the RabbitMQ URL has a password and a password_file: use one of them")
    if parts.password is not None:
        return unquote(parts.password)
    if password_file is None:
        return os.environ.get(PASSWORD_VARIABLE, "guest")
    try:
        return Path(password_file).read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise StoreRefused(
            f"the RabbitMQ URL's option password_file is {password_file[:200]!r}: {reason}"
        ) from None
