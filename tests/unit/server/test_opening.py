"""A store's URL finds its backend, or one clear line says what to do."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from anarchon_server import opening
from anarchon_server.clock import SystemClock
from anarchon_server.core.errors import StoreRefused
from anarchon_server.core.store import OpenOptions

OPTIONS = OpenOptions("default", SystemClock())


def test_the_memory_store_is_found_by_its_scheme() -> None:
    store = opening.open_store("memory:", OPTIONS)
    assert store.capabilities.backend == "memory"


def test_an_unknown_scheme_is_refused_with_the_known_ones() -> None:
    with pytest.raises(StoreRefused, match=r"'mongo'; known ones: .*memory:, .*sqlite:"):
        opening.open_store("mongo://user:hunter2@host/db", OPTIONS)


def test_every_scheme_of_ours_has_its_backend_and_its_extra() -> None:
    assert set(opening.known_schemes()) == set(opening.EXTRAS)


def test_a_url_without_a_scheme_is_refused() -> None:
    with pytest.raises(StoreRefused, match="no scheme"):
        opening.open_store("anarchon.db", OPTIONS)


@pytest.mark.parametrize(
    "url", ["mongo://u:hunter2@h", "nats://u:hunter2@h:x", "redis://u:hunter2@h/x", "hunter2"]
)
def test_a_refusal_never_shows_the_url(url: str) -> None:
    with pytest.raises(StoreRefused) as caught:
        opening.open_store(url, OPTIONS)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("scheme", ["redis", "amqp", "nats", "postgresql"])
@pytest.mark.parametrize("rest", ["u:12/hunter2@h", "u:12/hunter2@h/x", "u:a@b/hunter2@h?x=y"])
def test_a_password_with_an_unescaped_slash_is_refused_unseen(scheme: str, rest: str) -> None:
    """What stands after the slash would else be the path, which errors and `location` show."""
    with pytest.raises(StoreRefused, match=r"an @ in its path: .* a / as %2F") as caught:
        opening.open_store(f"{scheme}://{rest}", OPTIONS)
    assert "hunter2" not in str(caught.value)


def test_an_at_sign_in_a_file_or_an_option_is_none_of_a_password() -> None:
    opening.open_store("sqlite:///tmp/a@b.db", OPTIONS)
    with pytest.raises(StoreRefused, match="no such file"):
        opening.open_store("rediss://h/0?tls_ca=/no@file", OPTIONS)


def test_a_driver_that_is_not_installed_is_named_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    missing = EntryPoint("redis", "no_such_driver_of_ours:open_store", opening.GROUP)

    class Broken:
        name, module = "redis", "anarchon_backends.redis"
        load = missing.load

    monkeypatch.setattr(opening, "_backends", lambda: {"redis": Broken()})
    with pytest.raises(StoreRefused, match=r'pip install "anarchon\[redis\]"'):
        opening.open_store("redis://host", OPTIONS)


def test_a_backend_whose_own_module_is_missing_is_our_mistake_and_shows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    point = EntryPoint("redis", "no_such_backend_of_ours:open_store", opening.GROUP)
    monkeypatch.setattr(opening, "_backends", lambda: {"redis": point})
    with pytest.raises(ModuleNotFoundError):
        opening.open_store("redis://host", OPTIONS)
