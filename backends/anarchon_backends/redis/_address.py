"""Where the server is, read from a URL; what is wrong with it is said without showing it.

Imports the errors and the standard library.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from anarchon_server.core.errors import StoreRefused

PASSWORD_VARIABLE = "REDISCLI_AUTH"  # the name that redis-cli reads, too
_FORM = "redis://[user:password@]host[:port][/database]"
_SCHEMES = {"redis": False, "valkey": False, "rediss": True, "valkeys": True}
_CLUSTER_FORM = "redis://host1:port,host2:port/?cluster=true"
_OPTIONS = (
    "strategy",
    "cluster",
    "durability",
    "password_file",
    "sentinel",
    "sentinel_username",
    "sentinel_password_file",
    "tls_ca",
    "tls_cert",
    "tls_key",
    "tls_verify",
)
_REPLICAS = frozenset("123456789")
_PORT = 6379
_SENTINEL_PORT = 26379


@dataclass(frozen=True, slots=True)
class Address:
    """A server, a database on it, and how to be let in. `location` may be shown.

    With `sentinel`, the name of a master, `hosts` are the Sentinels that know where it is; there
    may be several then. With `cluster` they are some nodes of a cluster. `replicas` and `fsync`
    say where a claim must have arrived before it counts.
    """

    location: str
    hosts: tuple[tuple[str, int], ...]
    database: int
    username: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    cluster: bool = False
    replicas: int = 0
    fsync: bool = False
    sentinel: str = ""
    sentinel_username: str = field(default="", repr=False)
    sentinel_password: str = field(default="", repr=False)
    tls: bool = False
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_verify: bool = True

    @property
    def durable(self) -> bool:
        """Whether a claim must have arrived somewhere else before it counts."""
        return bool(self.replicas) or self.fsync


def address_of(url: str) -> Address:
    """Reads the URL. The password may stand in it, in a file (`password_file`), or in the
    environment (`REDISCLI_AUTH`), in this order. Raises `StoreRefused`.
    """
    try:
        parts = urlsplit(url)
        given = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        hosts = _hosts_of(parts, _SENTINEL_PORT if "sentinel" in dict(given) else _PORT)
    except ValueError as error:
        raise StoreRefused(
            f"the Redis URL cannot be read; it is {_FORM}?option=value, with every special "
            "character of a part as %XX"
        ) from error
    if parts.scheme not in _SCHEMES or not url.startswith(f"{parts.scheme}://") or parts.fragment:
        raise StoreRefused(
            f"a Redis store is {_FORM}, or rediss:, valkey:, valkeys: (the s is for TLS), with "
            "every # as %23"
        )
    options = _options_of(given, tls=_SCHEMES[parts.scheme])
    sentinel = options.get("sentinel", "")
    cluster = options.get("cluster") == "true"
    if not all(host for host, _ in hosts) or (len(hosts) > 1 and not sentinel and not cluster):
        raise StoreRefused(
            f"the Redis URL names no single host: {_FORM}. Several hosts are Sentinels, with the "
            "master's name as ?sentinel=name, or nodes of a cluster, with ?cluster=true"
        )
    database = _database_of(parts)
    if cluster and database:
        raise StoreRefused(
            f"the Redis URL's path is {parts.path[:40]!r}: a cluster has the database 0 alone; it "
            f"is {_CLUSTER_FORM}"
        )
    shown = ",".join(shown_host(host) for host in hosts)
    which = f", the master {sentinel!r}" if sentinel else ", a cluster" if cluster else ""
    replicas, fsync = _durability_of(options)
    return Address(
        location=f"{parts.scheme}://{shown}/{database}{which}",
        hosts=hosts,
        database=database,
        username=unquote(parts.username or ""),
        password=_password_of(parts, options.get("password_file")),
        cluster=cluster,
        replicas=replicas,
        fsync=fsync,
        sentinel=sentinel,
        sentinel_username=options.get("sentinel_username", ""),
        sentinel_password=_content_of(options, "sentinel_password_file"),
        tls=_SCHEMES[parts.scheme],
        tls_ca=options.get("tls_ca", ""),
        tls_cert=options.get("tls_cert", ""),
        tls_key=options.get("tls_key", ""),
        tls_verify=options.get("tls_verify", "full") == "full",
    )


def shown_host(host: tuple[str, int]) -> str:
    """A host with its port, as in a URL."""
    name, port = host
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"


def _hosts_of(parts: SplitResult, default_port: int) -> tuple[tuple[str, int], ...]:
    """The hosts with their ports; a host that is not there is empty."""
    hosts: list[tuple[str, int]] = []
    for each in parts.netloc.rpartition("@")[2].split(","):
        one = urlsplit(f"redis://{each}")
        hosts.append((one.hostname or "", one.port or default_port))
    return tuple(hosts)


def _options_of(given: list[tuple[str, str]], *, tls: bool) -> dict[str, str]:
    names = [name for name, _ in given]
    for name in names:
        if name not in _OPTIONS or names.count(name) > 1:
            wrong = "stands twice" if name in _OPTIONS else "is not known"
            raise StoreRefused(
                f"the Redis URL's option {name[:40]!r} {wrong}; there are {', '.join(_OPTIONS)}"
            )
    options = dict(given)
    if not tls and (odd := [name for name in options if name.startswith("tls_")]):
        raise StoreRefused(f"the Redis URL's option {odd[0]} is for rediss: and valkeys: only")
    if options.get("tls_verify", "full") not in ("full", "none"):
        raise StoreRefused(
            f"the Redis URL's option tls_verify is {options['tls_verify'][:40]!r}: it is 'full' "
            "(the default) or 'none', which trusts any server"
        )
    if "sentinel" not in options and (odd := [n for n in options if n.startswith("sentinel_")]):
        raise StoreRefused(f"the Redis URL's option {odd[0]} needs sentinel, the master's name")
    if options.get("sentinel") == "":
        raise StoreRefused("the Redis URL's option sentinel is empty: it is the master's name")
    if options.get("cluster", "true") not in ("true", "false"):
        raise StoreRefused(
            f"the Redis URL's option cluster is {options['cluster'][:40]!r}: it is 'true' or "
            "'false' (the default)"
        )
    if options.get("cluster") == "true" and "sentinel" in options:
        raise StoreRefused("the Redis URL has both cluster and sentinel: use one of them")
    for name in ("tls_ca", "tls_cert", "tls_key"):
        if name in options and not Path(options[name]).is_file():
            raise StoreRefused(
                f"the Redis URL's option {name} is {options[name][:200]!r}: there is no such file"
            )
    return options


def _durability_of(options: Mapping[str, str]) -> tuple[int, bool]:
    """How many replicas must have a claim, and whether the server's disk must."""
    given = options.get("durability")
    if given is None:
        return 0, False
    if given == "fsync":
        return 0, True
    word, _, number = given.partition(":")
    if word == "replicas" and number in _REPLICAS:
        return int(number), False
    raise StoreRefused(
        f"the Redis URL's option durability is {given[:40]!r}: it is 'replicas:1' to 'replicas:9' "
        "(so many replicas must have a claim before it counts), or 'fsync' (the disk must)"
    )


def _database_of(parts: SplitResult) -> int:
    text = parts.path.removeprefix("/")
    if text and not (text.isascii() and text.isdecimal()):
        raise StoreRefused(
            f"the Redis URL's path is {parts.path[:40]!r}: it is the number of a database, as /0"
        )
    return int(text or 0)


def _password_of(parts: SplitResult, password_file: str | None) -> str:
    if parts.password is not None and password_file is not None:
        raise StoreRefused("the Redis URL has a password and a password_file: use one of them")
    if parts.password is not None:
        return unquote(parts.password)
    if password_file is None:
        return os.environ.get(PASSWORD_VARIABLE, "")
    return _content_of({"password_file": password_file}, "password_file")


def _content_of(options: Mapping[str, str], name: str) -> str:
    """What stands in the file that the option names; empty where it is not given."""
    if name not in options:
        return ""
    try:
        return Path(options[name]).read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise StoreRefused(
            f"the Redis URL's option {name} is {options[name][:200]!r}: {reason}"
        ) from None
