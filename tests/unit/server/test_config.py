"""Configuration: flags over environment over file; what is wrong is refused by name."""

from __future__ import annotations

import os
import pwd
import re
from datetime import timedelta
from pathlib import Path

import pytest

from anarchon_server import config
from anarchon_server.config import (
    SETTINGS,
    Address,
    Config,
    ConfigError,
    Secret,
    documentation,
    flag_of,
    load,
    redact,
    variable_of,
)

HOME = {"HOME": "/home/me"}
DOCUMENTATION = Path(__file__).parents[3] / "docs" / "configuration.md"


def loaded(
    flags: dict[str, str | None] | None = None, environ: dict[str, str] | None = None
) -> Config:
    return load(flags or {}, HOME | (environ or {}))


def refused(flags: dict[str, str | None], environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        loaded(flags, environ)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ── Where values come from ──────────────────────────────────────────────────────────────────────


def test_the_defaults() -> None:
    found = loaded()
    assert found.listen == Address("127.0.0.1", 7420)
    assert found.namespace == "default"
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*:[0-9]+", found.instance_id)
    assert found.lease == timedelta(seconds=30)
    assert found.stop_grace == timedelta(seconds=20)
    assert found.history == timedelta(days=14)
    assert found.history_max == 1_000
    assert found.max_clock_offset == timedelta(seconds=30)
    assert found.http is None
    assert (found.log_format, found.log_level) == ("text", "info")


def test_the_default_store_is_a_file_in_the_users_state_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    assert loaded().store.reveal() == "sqlite:///home/me/.local/state/anarchon/anarchon.db"
    elsewhere = loaded({}, {"XDG_STATE_HOME": "/state"})
    assert elsewhere.store.reveal() == "sqlite:///state/anarchon/anarchon.db"
    monkeypatch.setattr("sys.platform", "darwin")
    on_a_mac = "sqlite:///home/me/Library/Application Support/anarchon/anarchon.db"
    assert loaded().store.reveal() == on_a_mac


@pytest.mark.parametrize("home", ["", "relative", None])
def test_a_home_that_is_no_absolute_path_is_ignored(
    home: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    environ = {"XDG_STATE_HOME": "state"} | ({} if home is None else {"HOME": home})
    own = pwd.getpwuid(os.getuid()).pw_dir
    found = load({}, environ).store.reveal()
    assert found == f"sqlite://{own}/.local/state/anarchon/anarchon.db"


def test_where_the_user_has_no_home_a_store_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(_: int) -> None:
        raise KeyError("uid not found")

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    with pytest.raises(ConfigError, match="set --store, or HOME"):
        load({}, {})
    assert load({"store": "memory:"}, {}).store.reveal() == "memory:"


def test_flags_count_over_environment_and_environment_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "anarchon.toml"
    file.write_text('namespace = "file"\nlease = "10s"\nhistory_max = 7\nstop_grace = "1s"\n')
    environ = {"ANARCHON_NAMESPACE": "environment", "ANARCHON_LEASE": "20s"}
    found = loaded({"config": str(file), "namespace": "flag"}, environ)
    assert found.namespace == "flag"
    assert found.lease == timedelta(seconds=20)
    assert found.history_max == 7
    assert found.stop_grace == timedelta(seconds=1)


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "anarchon.toml"
    file.write_text('namespace = "shop"\n')
    assert loaded({}, {"ANARCHON_CONFIG": str(file)}).namespace == "shop"


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_is_read_from_each_of_its_three_places(name: str, tmp_path: Path) -> None:
    raw = {
        "store": "memory:",
        "strict": "true",
        "listen": "127.0.0.1:1",
        "http": "127.0.0.1:2",
        "history_max": "3",
        "log_format": "json",
        "log_level": "debug",
    }.get(name, "4h" if name == "history" else "5s")
    alone = {"tls_certificate": "tls_key", "tls_key": "tls_certificate"}
    beside = alone.get(name) or ("tls_certificate" if name == "tls_client_ca" else None)
    more = {variable_of(beside): "x"} if beside else {}
    if name == "tls_client_ca":
        more["ANARCHON_TLS_KEY"] = "x"
    file = tmp_path / "anarchon.toml"
    file.write_text(f'{name} = "{raw}"\n')
    found = [
        getattr(loaded({name: raw}, more), name),
        getattr(loaded({}, more | {variable_of(name): raw}), name),
        getattr(loaded({"config": str(file)}, more), name),
    ]
    assert found[0] == found[1] == found[2]
    assert found[0] != getattr(loaded(), name)


@pytest.mark.parametrize(("written", "strict"), [("true", True), ("false", False)])
def test_a_switch_of_the_file_is_a_truth_value_or_a_text(
    written: str, strict: bool, tmp_path: Path
) -> None:
    file = tmp_path / "anarchon.toml"
    for text in (written, f'"{written}"'):
        file.write_text(f"strict = {text}\n")
        assert loaded({"config": str(file)}).strict is strict
    assert loaded({}, {"ANARCHON_STRICT": written}).strict is strict


def test_the_documentation_shows_every_setting_as_it_is() -> None:
    # Remedy: paste what `anarchon_server.config.documentation()` gives.
    assert documentation() in DOCUMENTATION.read_text(encoding="utf-8")
    for name in SETTINGS:
        assert f"`{name}`" in documentation()
        assert flag_of(name) in documentation()


# ── Bad input ───────────────────────────────────────────────────────────────────────────────────


def test_an_unknown_key_is_refused_with_the_one_that_was_meant(tmp_path: Path) -> None:
    file = tmp_path / "anarchon.toml"
    file.write_text('namspace = "shop"\n')
    assert "no key 'namspace'; did you mean namespace?" in refused({"config": str(file)})


def test_an_unknown_variable_is_refused_with_the_one_that_was_meant() -> None:
    message = refused({}, {"ANARCHON_LISTN": "127.0.0.1:1"})
    assert "ANARCHON_LISTN: there is no such setting; did you mean ANARCHON_LISTEN?" in message
    assert "there are: ANARCHON_" in refused({}, {"ANARCHON_XYZZY": "1"})


@pytest.mark.parametrize(
    "variable",
    [
        "ANARCHON_ADDRESS",
        "ANARCHON_SERVICE_HOST",
        "ANARCHON_SERVICE_PORT_GRPC",
        "ANARCHON_PORT",
        "ANARCHON_PORT_7420_TCP_ADDR",
        "ANARCHON_DEMO_SERVICE_HOST",
    ],
)
def test_the_clients_variable_and_kubernetes_service_links_are_left_alone(variable: str) -> None:
    loaded({}, {variable: "tcp://10.0.0.1:7420"})


def test_a_file_that_is_missing_or_no_toml_is_refused(tmp_path: Path) -> None:
    assert "cannot be read: No such file" in refused({"config": str(tmp_path / "none.toml")})
    bad = tmp_path / "bad.toml"
    bad.write_text("namespace: shop\n")
    assert "is not TOML" in refused({"config": str(bad)})
    bad.write_bytes(b"namespace = '\xff'")
    assert "is not TOML" in refused({"config": str(bad)})
    bad.write_text("x = " + "[" * 100_000)
    assert "nested too deeply" in refused({"config": str(bad)})


def test_a_file_that_has_no_end_is_not_read_to_it(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for endless in ("/dev/zero", str(pipe), str(tmp_path)):
        assert "is no regular file" in refused({"config": endless})
    long = tmp_path / "long.toml"
    long.write_text("#" * (1024 * 1024))
    load({"config": str(long), "store": "memory:"}, {})
    long.write_text("#" * (1024 * 1024 + 1))
    assert "at most 1048576 bytes" in refused({"config": str(long)})


@pytest.mark.parametrize(
    ("name", "raw", "right"),
    [
        ("lease", "30", '"30s" is seconds'),
        ("lease", "1s", "3s to 1h"),
        ("lease", "2h", "3s to 1h"),
        ("stop_grace", "-1s", "whole numbers"),
        ("history", "1m", "1h to"),
        ("history_max", "many", "a whole number"),
        ("history_max", "0", "1 to"),
        ("namespace", "no spaces", "letters, digits"),
        ("instance_id", "-x", "starting with a letter or digit"),
        ("instance_id", "x" * 129, "1 to 128"),
        ("store", "anarchon.db", "sqlite:///abs/path.db"),
        ("listen", "7420", "HOST:PORT"),
        ("listen", "127.0.0.1:99999", "0 to 65535"),
        ("listen", "::1:7420", "in brackets"),
        ("listen", "unix:anarchon.sock", "absolute path"),
        ("listen", "unix:/" + "x" * 120, "bytes"),
        ("listen", "unix:@anarchon", "abstract sockets"),
        ("listen", "unix:/run/\udcff.sock", "in UTF-8"),
        ("listen", "\udcff:7420", "in UTF-8"),
        ("http", "\udcff:7420", "in UTF-8"),
        ("http", "unix:/run/x", "HOST:PORT"),
        ("strict", "yes", "true or false"),
        ("log_format", "xml", "one of text, json"),
        ("log_level", "INFO", "one of debug, info"),
    ],
)
def test_a_wrong_value_is_refused_with_its_source_and_what_would_be_right(
    name: str, raw: str, right: str
) -> None:
    by_flag = refused({name: raw})
    assert right in by_flag
    assert by_flag.startswith(f"{name} is ")
    assert f"(flag {flag_of(name)})" in by_flag
    assert f"(environment {variable_of(name)})" in refused({}, {variable_of(name): raw})


def test_a_value_of_a_wrong_type_in_the_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "anarchon.toml"
    for line, right in (
        ("lease = 30", 'a text with its unit, as in "30s"'),
        ("history_max = true", "a whole number"),
        ("strict = 1", "true or false"),
        ("namespace = 7", "write a text"),
    ):
        file.write_text(line)
        message = refused({"config": str(file)})
        assert right in message
        assert f"in {file}" in message


def test_s32_an_instance_id_is_made_of_any_host_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "_ma chine.é" + "x" * 200)
    made = loaded().instance_id
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}", made)


# ── Who may reach it ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("listen", ["0.0.0.0:7420", "10.0.0.7:7420", "sidecar.example:7420"])
def test_other_machines_may_not_reach_it_without_tls_and_a_token(listen: str) -> None:
    message = refused({"listen": listen})
    assert "set tls_certificate and tls_key and token_file" in message
    with_token = refused({"listen": listen, "token_file": "/t"})
    assert "set tls_certificate and tls_key" in with_token
    keys: dict[str, str | None] = {"tls_certificate": "/c", "tls_key": "/k"}
    assert "set token_file" in refused({"listen": listen, **keys})
    assert str(loaded({"listen": listen, "token_file": "/t", **keys}).listen) == listen


@pytest.mark.parametrize(
    "listen", ["127.0.0.1:0", "localhost:7420", "[::1]:7420", "127.8.8.8:1", "unix:/run/a/s"]
)
def test_loopback_and_unix_sockets_need_neither(listen: str) -> None:
    assert str(loaded({"listen": listen}).listen) == listen


def test_tls_settings_that_do_not_go_together_are_refused() -> None:
    assert "go together" in refused({"tls_key": "/k"})
    assert "needs tls_certificate" in refused({"tls_client_ca": "/ca"})
    keys: dict[str, str | None] = {"tls_certificate": "/c", "tls_key": "/k"}
    assert "TLS is for TCP" in refused({"listen": "unix:/run/a/s", **keys})


# ── Secrets ─────────────────────────────────────────────────────────────────────────────────────

URL = "redis://user:hun@ter2@host:6379/0"


def test_the_stores_url_is_never_shown() -> None:
    found = loaded({"store": URL})
    for shown in (repr(found), str(found), f"{found.store}", repr(found.store)):
        assert "hun" not in shown
    assert found.store.reveal() == URL


def test_a_refused_url_does_not_show_its_password() -> None:
    assert "hunter2" not in refused({"store": "//user:hunter2@host"})


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("cannot reach redis://u:p4ss@host:1", "cannot reach redis://u:***@host:1"),
        ("redis://:p@ss@host/0 is down", "redis://:***@host/0 is down"),
        ("host=h password=p4ss user=u", "host=h password=*** user=u"),
        ("?sslpassword=p4ss&token=t", "?sslpassword=***&token=***"),
        ("sqlite:///srv/anarchon.db", "sqlite:///srv/anarchon.db"),
        ("mail me@host about http://host/x", "mail me@host about http://host/x"),
    ],
)
def test_passwords_are_cut_out_of_any_text(text: str, clean: str) -> None:
    assert redact(text) == clean


def test_a_known_password_is_cut_out_wherever_it_stands() -> None:
    secret = Secret("postgresql://u:p%40ssword@host/db")
    text = "password p@ssword (p%40ssword) was refused"
    assert redact(text, secret.parts) == "password *** (***) was refused"


def test_secrets_compare_by_what_they_hide() -> None:
    assert Secret("a") == Secret("a") != Secret("b")
    assert hash(Secret("a")) == hash(Secret("a"))
    assert Secret("x")
    assert not Secret("")
    assert Secret("http://[bad").parts == ("http://[bad",)
    assert config.HIDDEN == "***"
