"""The sidecar's configuration: flags over environment over a TOML file, to one frozen `Config`.

Imports the standard library and core. Every setting is declared once, in `Config`; flags, variable
names, the file's keys and the table in the documentation follow from there.
"""

from __future__ import annotations

import os
import pwd
import re
import socket
import stat
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from anarchon_server.config.address import Address, parse_address, parse_tcp
from anarchon_server.config.jobs import read_jobs
from anarchon_server.config.secret import HIDDEN, Secret, redact
from anarchon_server.core import limits
from anarchon_server.core.errors import AnarchonError, InvalidError
from anarchon_server.core.model import JobSpec
from anarchon_server.core.policy import check_name
from anarchon_server.core.slots import ScheduleError, format_duration, parse_duration_ms

__all__ = ["HIDDEN", "Address", "Config", "ConfigError", "Secret", "load", "load_jobs", "redact"]

PREFIX = "ANARCHON_"

JOBS_KEY = "jobs"
"""The file's table of jobs, which no flag and no variable has."""

# Variables of the same prefix that are somebody else's: the client's address, the file of settings,
# the failpoints of tests.
OTHER_VARIABLES = frozenset({"ANARCHON_ADDRESS", "ANARCHON_CONFIG", "ANARCHON_FAILPOINTS"})

# What Kubernetes puts into every container when a Service is named anarchon, or anarchon-something.
_SERVICE_LINKS = re.compile(
    r"ANARCHON_([A-Z0-9_]+_)?(SERVICE_(HOST|PORT)(_\w+)?|PORT(_[0-9]+_(TCP|UDP|SCTP)(_\w+)?)?)"
)

HISTORY_MAX_MOST = 1_000_000

FILE_MAX_BYTES = 1024 * 1024
"""How long a file of settings may be; the longest sensible one has a few kilobytes."""

_STORE_URLS = (
    "sqlite:///abs/path.db",
    "sqlite:rel.db",
    "postgresql://user:password@host/database",
    "redis://user:password@host/0",
    "nats://user:password@host",
    "amqp://user:password@host/vhost",
    "memory:",
)


class ConfigError(AnarchonError):
    """The configuration cannot be used. The message names the setting, its source and a remedy."""


@dataclass(frozen=True, slots=True)
class Setting:
    """How one field of `Config` is read and documented.

    `parse` raises `InvalidError`. `default` is a text as one would write it, or computes one from
    the environment, or is None: not set. `default_words` says what it is where it does not show.
    """

    parse: Callable[[str, object], Any]
    metavar: str  # empty: a switch, whose flag alone says "true"
    default: str | Callable[[Mapping[str, str]], str] | None
    about: str
    default_words: str = ""


# ── Reading single values ───────────────────────────────────────────────────────────────────────


def _text(field: str, raw: object) -> str:
    if not isinstance(raw, str) or not raw:
        raise InvalidError(field, raw, "write a text")
    return raw


def _store(field: str, raw: object) -> Secret:
    text = _text(field, raw)
    if not re.match(r"[a-z][a-z0-9+.-]*:", text):
        # Whatever else it is, it may hold a password.
        shown = text if re.fullmatch(r"[\w./-]+", text) else HIDDEN
        raise InvalidError(field, shown, f"write a URL: {', '.join(_STORE_URLS)}")
    return Secret(text)


def _listen(field: str, raw: object) -> Address:
    return parse_address(field, _text(field, raw))


def _http(field: str, raw: object) -> Address:
    return parse_tcp(field, _text(field, raw))


def _name(field: str, raw: object) -> str:
    return check_name(field, _text(field, raw))


def _path(field: str, raw: object) -> Path:
    return Path(_text(field, raw))


def _count(field: str, raw: object) -> int:
    text = str(raw) if isinstance(raw, int) and not isinstance(raw, bool) else raw
    if not isinstance(text, str) or not (text.isascii() and text.isdigit()):
        raise InvalidError(field, raw, f"write a whole number, 1 to {HISTORY_MAX_MOST}")
    if not 1 <= int(text) <= HISTORY_MAX_MOST:
        raise InvalidError(field, raw, f"1 to {HISTORY_MAX_MOST}")
    return int(text)


def _switch(field: str, raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    if raw not in ("true", "false"):
        raise InvalidError(field, raw, "true or false")
    return raw == "true"


def _one_of(*words: str) -> Callable[[str, object], str]:
    def parse(field: str, raw: object) -> str:
        if raw not in words:
            raise InvalidError(field, raw, f"one of {', '.join(words)}")
        return str(raw)

    return parse


def _duration(least_ms: int, most_ms: int) -> Callable[[str, object], timedelta]:
    def parse(field: str, raw: object) -> timedelta:
        if not isinstance(raw, str):
            raise InvalidError(field, raw, 'write a text with its unit, as in "30s"')
        try:
            value_ms = parse_duration_ms(raw)
        except ScheduleError as error:
            raise InvalidError(field, raw, error.expected) from None
        if not least_ms <= value_ms <= most_ms:
            bounds = f"{format_duration(least_ms)} to {format_duration(most_ms)}"
            raise InvalidError(field, raw, bounds)
        return timedelta(milliseconds=value_ms)

    return parse


# ── Defaults ────────────────────────────────────────────────────────────────────────────────────


def state_directory(environ: Mapping[str, str]) -> Path:
    """Return where a user's programs keep what should outlive them. Raises `ConfigError`.

    A relative path in HOME or XDG_STATE_HOME is ignored: it would lead elsewhere from elsewhere.
    """
    if sys.platform != "darwin" and (state := _absolute(environ.get("XDG_STATE_HOME"))):
        return state / "anarchon"
    home = _absolute(environ.get("HOME")) or _home_of_user()
    if sys.platform == "darwin":
        return home / "Library" / "Application Support" / "anarchon"
    return home / ".local" / "state" / "anarchon"


def _absolute(text: str | None) -> Path | None:
    path = Path(text or "")
    return path if path.is_absolute() else None


def _home_of_user() -> Path:
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        raise ConfigError(
            "store has no default, since HOME is no absolute path and this user has no home "
            "directory: set --store, or HOME"
        ) from None


def default_store(environ: Mapping[str, str]) -> str:
    """Return the URL of a SQLite file in the user's state directory. Raises `ConfigError`."""
    return f"sqlite://{state_directory(environ) / 'anarchon.db'}"


def default_instance_id(_environ: Mapping[str, str]) -> str:
    """Return hostname:pid, as far as a name allows (S32)."""
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).lstrip("._-") or "host"
    pid = str(os.getpid())
    return f"{host[: limits.NAME_MAX - len(pid) - 1]}:{pid}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything that can be set. Beside each type stands how it is read and what it is for."""

    store: Annotated[
        Secret,
        Setting(
            _store,
            "URL",
            default_store,
            f"The store's URL: {', '.join(f'`{url}`' for url in _STORE_URLS)}. With a password in it, "
            "give it by environment or file, where other users cannot see it. Never shown.",
            "`sqlite:` and `anarchon.db` in the user's state directory",
        ),
    ]
    strict: Annotated[
        bool,
        Setting(
            _switch,
            "",
            "false",
            "Refuse to start where the store leaves a doubt: what could not be verified about it, or "
            "may be lost as it is configured. `true` or `false`; the flag alone is `true`.",
        ),
    ]
    listen: Annotated[
        Address,
        Setting(
            _listen,
            "ADDR",
            "127.0.0.1:7420",
            "Where applications reach the sidecar: `HOST:PORT` or `unix:/PATH`. Anything but loopback "
            "and Unix sockets needs TLS and a token.",
        ),
    ]
    http: Annotated[
        Address | None,
        Setting(
            _http,
            "ADDR",
            None,
            "Where `/livez` and `/readyz` are answered, for probes; read-only. `HOST:PORT`.",
            "nowhere",
        ),
    ]
    instance_id: Annotated[
        str,
        Setting(
            _name,
            "ID",
            default_instance_id,
            "The instance's label in history.",
            "hostname:pid of the sidecar",
        ),
    ]
    namespace: Annotated[
        str,
        Setting(
            _name,
            "NS",
            "default",
            "The namespace of the store to work in. Two services that share a store each need one.",
        ),
    ]
    lease: Annotated[
        timedelta,
        Setting(
            _duration(limits.LEASE_MIN, limits.LEASE_MAX),
            "DURATION",
            format_duration(limits.LEASE_DEFAULT),
            "How long a runner is believed after its last heartbeat, for jobs that do not say. "
            "`3s` to `1h`.",
        ),
    ]
    stop_grace: Annotated[
        timedelta,
        Setting(
            _duration(0, limits.HOUR),
            "DURATION",
            format_duration(limits.STOP_GRACE),
            "How long running handlers may go on when the sidecar is asked to stop. Keep it 5 s below "
            "what the supervisor allows.",
        ),
    ]
    max_clock_offset: Annotated[
        timedelta,
        Setting(
            _duration(limits.SECOND, limits.DAY),
            "DURATION",
            format_duration(limits.CLOCK_OFFSET_MAX),
            "How far this host's clock may be from the store's before the instance stops claiming.",
        ),
    ]
    history: Annotated[
        timedelta,
        Setting(
            _duration(limits.HOUR, 3_660 * limits.DAY),
            "DURATION",
            f"{limits.HISTORY_DAYS}d",
            "How long finished runs are kept.",
        ),
    ]
    history_max: Annotated[
        int,
        Setting(
            _count, "COUNT", str(limits.HISTORY_MAX), "How many finished runs of a job are kept."
        ),
    ]
    token_file: Annotated[
        Path | None,
        Setting(
            _path,
            "FILE",
            None,
            "A file of call tokens, one a line; a caller must send one of them. Read again when it "
            "changes. Clients and the admin commands read the same variable and send the first.",
            "none: callers need no token",
        ),
    ]
    tls_certificate: Annotated[
        Path | None,
        Setting(_path, "FILE", None, "The certificate chain (PEM) to serve with.", "none: no TLS"),
    ]
    tls_key: Annotated[
        Path | None, Setting(_path, "FILE", None, "The certificate's private key (PEM).", "none")
    ]
    tls_client_ca: Annotated[
        Path | None,
        Setting(
            _path,
            "FILE",
            None,
            "Certificates (PEM) that must have signed the callers' own.",
            "none: callers need no certificate",
        ),
    ]
    log_format: Annotated[
        str,
        Setting(
            _one_of("text", "json"),
            "FORMAT",
            "text",
            "How log lines are written: `text` or `json`.",
        ),
    ]
    log_level: Annotated[
        str,
        Setting(
            _one_of("debug", "info", "warning", "error"),
            "LEVEL",
            "info",
            "The least level that is logged: `debug`, `info`, `warning` or `error`.",
        ),
    ]

    file: Path | None = None
    """The file of settings, if one was read."""
    jobs: Mapping[str, JobSpec] = field(default_factory=dict)
    """Jobs of the file, by name: what they say wins over what clients state."""

    def __post_init__(self) -> None:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ConfigError("tls_certificate and tls_key go together: set both or neither")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise ConfigError("tls_client_ca needs tls_certificate and tls_key")
        if self.tls_certificate is not None and self.listen.path is not None:
            raise ConfigError(f"listen is {self.listen}: TLS is for TCP, a Unix socket needs none")
        missing = [
            name
            for name, value in (
                ("tls_certificate and tls_key", self.tls_certificate),
                ("token_file", self.token_file),
            )
            if value is None
        ]
        if missing and not self.listen.loopback:
            raise ConfigError(
                f"listen is {self.listen}: other machines could run jobs here; listen on 127.0.0.1 "
                f"or a Unix socket, or set {' and '.join(missing)}"
            )


SETTINGS: Mapping[str, Setting] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(Config, include_extras=True).items()
    if hasattr(hint, "__metadata__")
}


def flag_of(name: str) -> str:
    """Return the command line's name of a setting."""
    return "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    """Return the environment's name of a setting."""
    return PREFIX + name.upper()


def _default(name: str, environ: Mapping[str, str]) -> Any:
    setting = SETTINGS[name]
    text = setting.default(environ) if callable(setting.default) else setting.default
    return None if text is None else setting.parse(name, text)


def load(flags: Mapping[str, str | None], environ: Mapping[str, str]) -> Config:
    """Return the configuration. `flags` maps settings, and "config", to what was given, if it was.

    Raises `ConfigError` for an unknown key or variable, a value that is wrong, and values that do
    not go together.
    """
    values: dict[str, Any] = {}
    _check_variables(environ)
    file = flags.get("config") or environ.get("ANARCHON_CONFIG")
    if file:
        values["file"] = Path(file)
        for name, raw in _read_file(Path(file)).items():
            if name == JOBS_KEY:
                values["jobs"] = _jobs(raw, file)
            else:
                values[name] = _read(name, raw, f"key {name} in {file}")
    for name in SETTINGS:
        if raw := environ.get(variable_of(name)):
            values[name] = _read(name, raw, f"environment {variable_of(name)}")
    for name in SETTINGS:
        if (raw := flags.get(name)) is not None:
            values[name] = _read(name, raw, f"flag {flag_of(name)}")
    for name in SETTINGS.keys() - values.keys():
        values[name] = _default(name, environ)
    return Config(**values)


def load_jobs(file: Path) -> Mapping[str, JobSpec]:
    """Return the jobs that the file has now. Raises `ConfigError`."""
    return _jobs(_read_file(file).get(JOBS_KEY, {}), str(file))


def _jobs(raw: object, file: str) -> Mapping[str, JobSpec]:
    try:
        return read_jobs(raw)
    except InvalidError as error:
        raise ConfigError(f"{error} ({file})") from None


def _read(name: str, raw: object, source: str) -> Any:
    setting = SETTINGS[name]
    try:
        return setting.parse(name, raw)
    except InvalidError as error:
        raise ConfigError(f"{redact(str(error))} ({source})") from None


def _read_file(path: Path) -> dict[str, object]:
    try:
        # Looked at before it is opened: to open a pipe would wait for its writer.
        if not stat.S_ISREG(path.stat().st_mode):
            raise ConfigError(f"config {path}: is no regular file: name one")
        with path.open("rb") as file:
            content = file.read(FILE_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"config {path}: cannot be read: {error.strerror}") from None
    if len(content) > FILE_MAX_BYTES:
        raise ConfigError(f"config {path}: is too long: at most {FILE_MAX_BYTES} bytes are read")
    try:
        values = tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {path}: is not TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"config {path}: its values are nested too deeply") from None
    for key in values:
        if key not in SETTINGS and key != JOBS_KEY:
            raise ConfigError(f"config {path}: there is no key {key!r}{_similar(key, SETTINGS)}")
    return values


def _check_variables(environ: Mapping[str, str]) -> None:
    known = {variable_of(name): name for name in SETTINGS}
    for variable in environ:
        ours = variable.startswith(PREFIX) and variable not in known
        if ours and variable not in OTHER_VARIABLES and not _SERVICE_LINKS.fullmatch(variable):
            raise ConfigError(
                f"environment {variable}: there is no such setting{_similar(variable, known, PREFIX)}"
            )


def _similar(name: str, known: Mapping[str, object], prefix: str = "") -> str:
    rests = [one.removeprefix(prefix) for one in known]
    close = get_close_matches(name.removeprefix(prefix), rests, n=1)
    if close:
        return f"; did you mean {prefix}{close[0]}?"
    return f"; there are: {', '.join(sorted(known))}"


def documentation() -> str:
    """Return the table of all settings, in Markdown, as `docs/configuration.md` shows it."""
    rows = ["| key in the file | flag | environment | meaning | default |", "|---|---|---|---|---|"]
    rows += [
        f"| `{name}` | `{f'{flag_of(name)} {setting.metavar}'.strip()}` | `{variable_of(name)}` "
        f"| {setting.about} | {setting.default_words or f'`{setting.default}`'} |"
        for name, setting in SETTINGS.items()
    ]
    return "\n".join(rows) + "\n"
