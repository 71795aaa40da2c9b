"""Where the servers are and how they let us in, read from a URL, the environment and files.

Imports the errors and the standard library. What is wrong with a URL is said without showing it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from anarchon_server.core.errors import StoreRefused

_FORM = "nats://[user:password@]host[:port][,host[:port]...]"
_OPTIONS = (
    "strategy",
    "replicas",
    "prefix",
    "domain",
    "inbox",
    "monitor",
    "password_file",
    "token_file",
    "nkey_file",
    "creds_file",
    "tls_ca",
    "tls_cert",
    "tls_key",
    "tls_verify",
    "tls_first",
)
_FILES = ("nkey_file", "creds_file", "tls_ca", "tls_cert", "tls_key")
_PORT = 4222
_REPLICAS = ("1", "3", "5")
_PREFIX = re.compile(r"[A-Za-z0-9_-]{1,32}")
_MONITOR = re.compile(r"https?://([A-Za-z0-9._-]{1,255}|\[[0-9A-Fa-f:.]{2,45}\])(:[0-9]{1,5})?/?")
_INBOX = re.compile(r"[A-Za-z0-9_$-]{1,64}(\.[A-Za-z0-9_$-]{1,64}){0,7}")


@dataclass(frozen=True, slots=True)
class Credentials:
    """How we are let in: at most one of the four ways. Nothing of it is ever shown.

    The environment gives what the URL leaves out, by the names that the command `nats` reads:
    NATS_USER with NATS_PASSWORD, NATS_TOKEN, NATS_NKEY and NATS_CREDS (names of files).
    """

    user: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    token: str = field(default="", repr=False)
    nkey_file: str = ""
    creds_file: str = ""


@dataclass(frozen=True, slots=True)
class Address:
    """Servers of one system, what we keep there, and how to be let in. `location` may be shown.

    Streams are named `prefix-...` and their subjects begin with `prefix.`; each is kept on
    `replicas` nodes. `domain` is JetStream's (empty: the account's own). `monitors` are the
    servers' monitoring pages. `own` has the options that only one strategy knows.
    """

    location: str
    hosts: tuple[tuple[str, int], ...]
    credentials: Credentials
    replicas: int = 1
    prefix: str = "an"
    domain: str = ""
    inbox: str = "_INBOX"
    monitors: tuple[str, ...] = ()
    tls: bool = False
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_verify: bool = True
    tls_first: bool = False
    own: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


def address_of(url: str, own_options: Iterable[str] = ()) -> Address:
    """Reads the URL; `own_options` are those of the strategy. Raises `StoreRefused`."""
    try:
        parts = urlsplit(url)
        given = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        hosts = _hosts_of(parts)
    except ValueError as error:
        raise StoreRefused(
            f"the NATS URL cannot be read; it is {_FORM}?option=value, with every special character "
            "of a part as %XX"
        ) from error
    spelt = url.startswith(f"{parts.scheme}://") and parts.scheme in ("nats", "tls")
    if not spelt or parts.fragment or parts.path not in ("", "/"):
        raise StoreRefused(
            f"a NATS store is {_FORM}, or tls: in the place of nats:, with every # as %23 and "
            "nothing between the hosts and the options"
        )
    if not all(host for host, _ in hosts):
        raise StoreRefused(f"the NATS URL has a host without a name: it is {_FORM}")
    tls = parts.scheme == "tls"
    options = _options_of(given, (*_OPTIONS, *own_options), tls=tls)
    shown = ",".join(f"[{h}]:{p}" if ":" in h else f"{h}:{p}" for h, p in hosts)
    return Address(
        location=f"{parts.scheme}://{shown}",
        hosts=hosts,
        credentials=_credentials_of(parts, options),
        replicas=int(_one_of(options, "replicas", _REPLICAS)),
        prefix=_matching(options, "prefix", _PREFIX, "an", "1 to 32 of A-Z a-z 0-9 _ -"),
        domain=_matching(options, "domain", _PREFIX, "", "1 to 32 of A-Z a-z 0-9 _ -"),
        inbox=_matching(options, "inbox", _INBOX, "_INBOX", "a subject without wildcards"),
        monitors=_monitors_of(options),
        tls=tls,
        tls_ca=options.get("tls_ca") or (os.environ.get("NATS_CA", "") if tls else ""),
        tls_cert=options.get("tls_cert") or (os.environ.get("NATS_CERT", "") if tls else ""),
        tls_key=options.get("tls_key") or (os.environ.get("NATS_KEY", "") if tls else ""),
        tls_verify=_one_of(options, "tls_verify", ("full", "none")) == "full",
        tls_first=_one_of(options, "tls_first", ("no", "yes")) == "yes",
        own=MappingProxyType({name: options[name] for name in own_options if name in options}),
    )


def _hosts_of(parts: SplitResult) -> tuple[tuple[str, int], ...]:
    """The hosts with their ports; a host that is not there is empty."""
    hosts: list[tuple[str, int]] = []
    for each in parts.netloc.rpartition("@")[2].split(","):
        one = urlsplit(f"nats://{each}")
        hosts.append((one.hostname or "", one.port or _PORT))
    return tuple(hosts)


def _options_of(
    given: list[tuple[str, str]], known: tuple[str, ...], *, tls: bool
) -> dict[str, str]:
    names = [name for name, _ in given]
    for name in names:
        if name not in known or names.count(name) > 1:
            wrong = "stands twice" if name in known else "is not known"
            raise StoreRefused(
                f"the NATS URL's option {name[:40]!r} {wrong}; there are {', '.join(known)}"
            )
    options = dict(given)
    if not tls and (odd := [name for name in options if name.startswith("tls_")]):
        raise StoreRefused(f"the NATS URL's option {odd[0]} is for tls: only")
    for name in _FILES:
        if name in options and not Path(options[name]).is_file():
            raise StoreRefused(
                f"the NATS URL's option {name} is {options[name][:200]!r}: there is no such file"
            )
    return options


def _one_of(options: Mapping[str, str], name: str, values: tuple[str, ...]) -> str:
    """The option's value, by default the first of those that it may have."""
    value = options.get(name, values[0])
    if value not in values:
        raise StoreRefused(
            f"the NATS URL's option {name} is {value[:40]!r}: use one of: {', '.join(values)}"
        )
    return value


def _matching(
    options: Mapping[str, str], name: str, form: re.Pattern[str], default: str, expected: str
) -> str:
    value = options.get(name, default)
    if name in options and not form.fullmatch(value):
        raise StoreRefused(f"the NATS URL's option {name} is {value[:40]!r}: it is {expected}")
    return value


def _monitors_of(options: Mapping[str, str]) -> tuple[str, ...]:
    given = options["monitor"].split(",") if "monitor" in options else []
    for each in given:
        if not _MONITOR.fullmatch(each):
            raise StoreRefused(
                f"the NATS URL's option monitor has {each[:80]!r}: it is the address of each server's "
                "monitoring, as http://a:8222,http://b:8222"
            )
    return tuple(each.rstrip("/") for each in given)


def _credentials_of(parts: SplitResult, options: Mapping[str, str]) -> Credentials:
    """From the URL if it says anything of them, else from the environment."""
    user, password = unquote(parts.username or ""), parts.password
    in_files = [name for name in ("token_file", "nkey_file", "creds_file") if name in options]
    ways = [*in_files, *(["the part before @"] if user else [])]
    if len(ways) > 1:
        raise StoreRefused(f"the NATS URL has several credentials: {', '.join(ways)}: use one")
    if "password_file" in options and (password is not None or not user):
        raise StoreRefused(
            "the NATS URL's option password_file goes with a user that has no password, as in "
            "nats://user@host?password_file=name"
        )
    if "password_file" in options:
        return Credentials(user=user, password=_content_of(options, "password_file"))
    if user and password is None:
        return Credentials(token=user)
    if user:
        return Credentials(user=user, password=unquote(password or ""))
    if in_files:
        return Credentials(
            token=_content_of(options, "token_file"),
            nkey_file=options.get("nkey_file", ""),
            creds_file=options.get("creds_file", ""),
        )
    return _credentials_around()


def _credentials_around() -> Credentials:
    """What the environment says."""
    around = os.environ
    if around.get("NATS_CREDS"):
        return Credentials(creds_file=_present("NATS_CREDS"))
    if around.get("NATS_NKEY"):
        return Credentials(nkey_file=_present("NATS_NKEY"))
    if around.get("NATS_USER"):
        return Credentials(user=around["NATS_USER"], password=around.get("NATS_PASSWORD", ""))
    return Credentials(token=around.get("NATS_TOKEN", ""))


def _present(variable: str) -> str:
    file = os.environ[variable]
    if not Path(file).is_file():
        raise StoreRefused(f"the environment's {variable} is {file[:200]!r}: there is no such file")
    return file


def _content_of(options: Mapping[str, str], name: str) -> str:
    """What stands in the file that the option names; empty where it is not given."""
    if name not in options:
        return ""
    try:
        return Path(options[name]).read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise StoreRefused(
            f"the NATS URL's option {name} is {options[name][:200]!r}: {reason}"
        ) from None
