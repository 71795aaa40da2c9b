"""The memory store apart from the contract: its URL, who shares it, and that it never waits."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from anarchon_backends.memory import MemoryDatabase, MemoryStore, open_store
from anarchon_server.core.errors import StoreRefused
from anarchon_server.core.store import Beat, OpenOptions, PrunePolicy, RunQuery
from tests.contract.harness import T0, Cluster, FakeClock, Node, definition

T = TypeVar("T")


def at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """What a coroutine returns that never waits; no event loop is running."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        answer: T = end.value
        return answer
    coroutine.close()
    raise AssertionError("it waited")


def options(*, boot_leases: bool = True) -> OpenOptions:
    return OpenOptions("default", FakeClock(), boot_leases=boot_leases)


def node_of(store: MemoryStore, number: int = 1) -> Node:
    return Node(Cluster(None, FakeClock()), store, f"host:{number}", f"inc-{number}")  # type: ignore[arg-type]


@pytest.mark.parametrize("url", ["memory:x", "memory:///a", "memory:?x", "sqlite:a", "memory"])
def test_another_url_is_refused(url: str) -> None:
    with pytest.raises(StoreRefused, match="use memory:"):
        open_store(url, options())


def test_each_opening_of_the_url_is_a_store_of_its_own() -> None:
    first, second = open_store("memory:", options()), open_store("memory:", options())
    assert not first.capabilities.shared
    at_once(node_of(first).register())  # type: ignore[arg-type]
    assert at_once(first.jobs((), "", 9)).answers
    assert not at_once(second.jobs((), "", 9)).answers
    assert at_once(first.jobs((), "", 9)).store_id != at_once(second.jobs((), "", 9)).store_id
    report = at_once(first.open())
    assert any("no other instance" in doubt for doubt in report.doubts)


def test_stores_on_one_database_share_it() -> None:
    database = MemoryDatabase("here")
    first, second = (MemoryStore(database, options()) for _ in range(2))
    assert first.capabilities.shared
    at_once(node_of(first).register())
    reply = at_once(second.jobs((), "", 9))
    assert [view.name for view in reply.answers] == ["job"]
    assert reply.store_id == "here"


@pytest.mark.parametrize("boot_leases", [True, False])
def test_no_method_waits(*, boot_leases: bool) -> None:
    """So that a simulator can drive the store without an event loop."""
    store = MemoryStore(MemoryDatabase(), options(boot_leases=boot_leases))
    assert store.capabilities.boot_leases is boot_leases
    node = node_of(store)
    at_once(store.open())
    at_once(node.register(definition()))
    at_once(store.beat(Beat(node.instance)))
    at_once(store.settle([]))
    at_once(store.claim([node.wish(T0)]))
    at_once(store.complete([]))
    at_once(store.release([]))
    at_once(store.runs(RunQuery()))
    at_once(store.instances())
    at_once(store.prune(PrunePolicy(1, 1)))
    store.watch()
    at_once(store.close())


def test_a_watch_that_nobody_keeps_is_forgotten() -> None:
    database = MemoryDatabase()
    store = MemoryStore(database, options())
    watch = store.watch()
    assert len(database.space("default").watchers) == 1
    del watch
    assert len(database.space("default").watchers) == 0
