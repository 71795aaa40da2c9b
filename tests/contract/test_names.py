"""Names that differ in one character are different things everywhere (S31, S32)."""

from __future__ import annotations

import pytest

from tests.contract.harness import PERIOD, T0, Cluster, definition

SLOT = T0 + PERIOD
ALIKE = ["a.b", "a:b", "a/b", "a_b", "a-b", "ab", "A.b", "a.b.", "a", "a.", "a::b", "a//b", "a--b"]


async def test_s32_names_that_look_alike_are_different_jobs(cluster: Cluster) -> None:
    node = await cluster.node()
    await node.register(*(definition(name) for name in ALIKE))
    cluster.advance_to(SLOT)
    reply = await node.store.claim([node.wish(SLOT, job=name) for name in ALIKE])
    assert {answer.outcome for answer in reply.answers} == {"won"}
    for name in ALIKE:
        (seen,) = await node.history(job=name)
        assert seen.run.job == name
    assert [view.name for view in (await node.store.jobs((), "", 100)).answers] == sorted(ALIKE)


@pytest.mark.parametrize(
    ("one", "other"),
    [(("a", "b:c"), ("a:b", "c")), (("a", "b/c"), ("a/b", "c")), (("a.b", "c"), ("a", "b.c"))],
)
async def test_s32_where_the_namespace_ends_and_the_job_begins_is_certain(
    cluster: Cluster, one: tuple[str, str], other: tuple[str, str]
) -> None:
    for namespace, job in (one, other):
        node = await cluster.node(namespace=namespace)
        await node.register(definition(job))
    cluster.advance_to(SLOT)
    for node, (_, job) in zip(cluster.nodes, (one, other), strict=True):
        assert (await node.claim(SLOT, job=job)).outcome == "won"
        assert [view.name for view in (await node.store.jobs((), "", 9)).answers] == [job]


@pytest.mark.parametrize("last", "xyz")
async def test_s32_names_of_128_characters_count_to_the_last(cluster: Cluster, last: str) -> None:
    names = ["j" * 127 + each for each in "xyz"]
    node = await cluster.node("i" * 128, namespace="n" * 128)
    await node.register(*(definition(name) for name in names))
    cluster.advance_to(SLOT)
    won = await node.win(SLOT, job="j" * 127 + last)
    assert won.run.current is not None
    assert won.run.current.instance_id == "i" * 128
    assert [len(await node.history(job=name)) for name in names] == [
        int(n[-1] == last) for n in names
    ]


async def test_s32_one_label_in_two_processes_is_two_identities(cluster: Cluster) -> None:
    first = await cluster.node("same")
    second = await cluster.node("same")
    await first.register()
    await second.register()
    cluster.advance_to(SLOT)
    seen = await first.win(SLOT)
    assert (await second.renew(seen)).outcome == "fenced"
    assert (await second.release(seen)).outcome == "fenced"
