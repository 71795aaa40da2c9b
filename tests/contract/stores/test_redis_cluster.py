"""What only a cluster of Redis or Valkey can do to a sidecar, on real ones (S11, S19, S27, S27a, S29)."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.crc import key_slot

from anarchon_backends.redis._address import address_of
from anarchon_backends.redis._cluster import Cluster as Nodes
from anarchon_backends.redis_lease import RedisLeaseStore, _scripts
from anarchon_server.core.errors import (
    OutcomeUnknown,
    StoreError,
    StoreRefused,
    StoreUnavailable,
)
from anarchon_server.core.model import Outcome, OverlapPolicy
from anarchon_server.core.store import (
    BeatAnswer,
    ClaimOutcome,
    Completion,
    ControlOutcome,
    OpenOptions,
    Reply,
    RunQuery,
    Store,
    TriggerRun,
)
from anarchon_server.opening import open_store
from tests.contract.harness import (
    DAY,
    PERIOD,
    T0,
    ClaimOnlyNode,
    Cluster,
    FakeClock,
    Node,
    definition,
)
from tests.servers import redis, redis_cluster
from tests.servers.ports import free_port
from tests.servers.proxy import Proxy
from tests.servers.redis_cluster import RedisCluster

SLOT = T0 + PERIOD
FREE: dict[str, Any] = {
    "overlap": OverlapPolicy.ALLOW,
    "start_deadline_ms": DAY,
    "previous_slot": None,
}
JOBS = [f"job-{n}" for n in range(30)]
PAGE = Path(__file__).parents[3] / "docs/stores/redis.md"


class Database:
    """A cluster, as the harness uses a store. Its time is moved by hand."""

    def __init__(self, url: str) -> None:
        self.url = url

    def store(self, options: OpenOptions) -> Store:
        return redis.open_virtual(self.url, options)


@asynccontextmanager
async def instances_on(url: str) -> AsyncIterator[Cluster]:
    cluster = Cluster(Database(url))
    async with cluster.stack:
        yield cluster


@pytest.fixture(params=["redis", "valkey"])
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def start() -> Iterator[Callable[..., RedisCluster]]:
    """Starts clusters of the test's own, and stops them after it."""
    clusters: list[RedisCluster] = []

    def started(kind: str = "redis", *settings: str, replicas: int = 0) -> RedisCluster:
        made = RedisCluster(kind, settings, replicas)
        clusters.append(made)
        return made.start()

    yield started
    for each in clusters:
        each.stop()


async def until(true: Callable[[], bool]) -> None:
    """Waits for what a server gives no other signal of."""
    while not await asyncio.to_thread(true):  # noqa: ASYNC110 - there is no event to wait for
        await asyncio.sleep(0.005)


def store_of(node: Node) -> RedisLeaseStore:
    assert isinstance(node.store, RedisLeaseStore)
    return node.store


def key_of(node: Node, job: str) -> str:
    return store_of(node)._calls.key_of(job)


def table_of(node: Node) -> Nodes:
    server = store_of(node)._server
    assert isinstance(server, Nodes)
    return server


async def nodes_with_jobs(cluster: Cluster, count: int = 1, **given: Any) -> list[Node]:
    """Instances that have registered all the jobs, at the slot."""
    nodes = [await cluster.node(**given) for _ in range(count)]
    for node in nodes:
        await node.register(*(definition(job) for job in JOBS))
    cluster.advance_to(SLOT)
    return nodes


# Where things are


async def test_s32_every_key_of_a_job_is_on_one_node_and_the_jobs_are_on_all(
    start: Callable[..., RedisCluster],
) -> None:
    servers = start("redis")
    names = ["a.b", "a:b", "a/b", "a_b", "x" * 128, *JOBS]
    async with instances_on(f"{servers.url}#") as cluster:
        node = await cluster.node()
        await node.register(*(definition(name) for name in names))
        cluster.advance_to(SLOT)
        for name in names:
            await node.complete(await node.win(SLOT, job=name))
            await node.release(await node.win(SLOT + 1, job=name, **FREE))
    tags: list[set[str]] = []
    for server in servers.masters:
        listing = server.send("EVAL", "return table.concat(redis.call('KEYS', '*'), ' ')", "0")
        keys = listing.decode().split("\r\n")[1].split()
        assert all(servers.master_of(key) is server for key in keys[:20])
        tags.append({re.sub(r"^anarchon:(\{.*?\}).*$", r"\1", key) for key in keys})
    assert all(len(each) > 3 for each in tags), "the jobs are spread"
    wanted = {"{7:default}", *(f"{{7:default:{name}}}" for name in names)}
    assert set().union(*tags) == wanted
    assert sum(map(len, tags)) == len(wanted), "no tag is on two nodes"


async def test_s14_a_batch_is_one_round_trip_to_each_node(
    start: Callable[..., RedisCluster],
) -> None:
    """Claims of thirty jobs at once, through proxies that the nodes announce as themselves."""
    async with behind_proxies(start("redis")) as (proxies, cluster):
        (node,) = await nodes_with_jobs(cluster)
        await node.store.claim([node.wish(T0 - 1, job=job) for job in JOBS])  # so that they know it
        before = [proxy.requests for proxy in proxies]
        reply = await node.store.claim([node.wish(SLOT, job=job) for job in JOBS])
        assert {answer.outcome for answer in reply.answers} == {"won"}
        assert set(reply.fences) == set(JOBS)
        assert [proxy.requests - was for proxy, was in zip(proxies, before, strict=True)] == [1] * 3
        assert await node.history(job=JOBS[3], slot=SLOT)


@asynccontextmanager
async def behind_proxies(
    servers: RedisCluster,
) -> AsyncIterator[tuple[list[Proxy], Cluster]]:
    """A cluster whose nodes say that they are where proxies are."""
    async with AsyncExitStack() as stack:
        proxies = [
            await stack.enter_async_context(Proxy(server.port)) for server in servers.masters
        ]
        for server, proxy in zip(servers.masters, proxies, strict=True):
            server.send("CONFIG", "SET", "cluster-announce-port", str(proxy.port))
        ports = {str(proxy.port).encode() for proxy in proxies}
        await until(
            lambda: all(
                all(port in server.send("CLUSTER", "NODES") for port in ports)
                for server in servers.masters
            )
        )
        url = f"redis://127.0.0.1:{proxies[0].port}/?cluster=true#"
        cluster = await stack.enter_async_context(instances_on(url))
        yield proxies, cluster


async def test_s30_history_of_all_jobs_is_merged_from_all_nodes_page_by_page(kind: str) -> None:
    async with instances_on(redis_cluster.fresh_url(kind)) as cluster:
        (node,) = await nodes_with_jobs(cluster)
        wanted: list[tuple[int, str]] = []
        for number, job in enumerate(JOBS):
            for slot in (SLOT, SLOT + 1 + number % 3):
                await node.complete(await node.win(slot, job=job, **FREE))
                wanted.append((slot, job))
        found: list[tuple[int, str]] = []
        while True:
            after = found[-1] if found else None
            reply = await node.store.runs(RunQuery(limit=7, after=after))
            if not reply.answers:
                break
            assert len(reply.answers) == min(7, len(wanted) - len(found))
            found += [(seen.run.slot, seen.run.job) for seen in reply.answers]
        assert found == sorted(wanted, reverse=True)
        only = await node.history(slot=SLOT + 1, limit=100)
        assert {seen.run.slot for seen in only} == {SLOT + 1}
        assert len(only) == 10
        views = (await node.store.jobs((), "", 100)).answers
        assert [view.name for view in views] == sorted(JOBS)


# Unknown outcomes: S11


async def test_s11_a_lost_reply_of_one_node_leaves_its_jobs_unknown_and_the_repeat_has_won(
    start: Callable[..., RedisCluster],
) -> None:
    async with behind_proxies(start("redis")) as (proxies, cluster):
        (node,) = await nodes_with_jobs(cluster, op_timeout_ms=500)
        await node.beat(sweep=tuple((job, "every:10s") for job in JOBS))
        claims = [node.wish(SLOT, job=job) for job in JOBS]
        await node.store.claim([node.wish(T0 - 1, job=job) for job in JOBS])
        silent = proxies[1]
        silent.drop_replies()
        reply = await node.store.claim(claims)
        outcomes = {c.job: a.outcome for c, a in zip(claims, reply.answers, strict=True)}
        theirs = {job for job in JOBS if port_of(node, job) == silent.port}
        assert 0 < len(theirs) < len(JOBS)
        assert outcomes == {job: "unknown" if job in theirs else "won" for job in JOBS}
        assert set(reply.fences) == set(JOBS) - theirs
        swept = await node.beat(sweep=tuple((job, "every:10s") for job in JOBS))
        assert swept.unheard == theirs
        silent.resume()
        reply = await node.store.claim(claims)
        while any(answer.outcome == "unknown" for answer in reply.answers):  # until it is looked at
            reply = await node.store.claim(claims)
        assert {answer.outcome for answer in reply.answers} == {"won"}
        assert {answer.run.run.attempt for answer in reply.answers if answer.run} == {1}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("strategy", ["lease", "script"])
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
async def test_s11_while_a_node_is_away_what_is_on_the_others_is_renewed_claimed_and_recorded(
    start: Callable[..., RedisCluster], how: signal.Signals, strategy: str
) -> None:
    """The node that has the namespace, too. Of its jobs nothing is known, and none of the others
    waits for it: a call would take the store's minute.
    """
    kept = ("--appendonly", "yes", "--cluster-require-full-coverage", "no")
    servers = start("redis", *kept)
    async with instances_on(f"{servers.url}&strategy={strategy}#") as cluster:
        cluster.node_type = Node if strategy == "lease" else ClaimOnlyNode
        (node,) = await nodes_with_jobs(cluster, op_timeout_ms=60_000)
        won = {job: await node.win(SLOT, job=job) for job in JOBS}
        victim = servers.master_of("anarchon:{7:default}")
        theirs = {
            job for job in JOBS if servers.master_of(f"anarchon:{{7:default:{job}}}") is victim
        }
        assert 0 < len(theirs) < len(JOBS)

        def expected(word: str) -> dict[str, str]:
            return {job: "unknown" if job in theirs else word for job in JOBS}

        async def beat() -> BeatAnswer:
            return await node.beat(
                renewals=tuple(node.renewal(won[job]) for job in JOBS),
                sweep=tuple((job, "every:10s") for job in JOBS),
                within_ms=1_000,
            )

        assert victim.process is not None
        victim.process.send_signal(how)
        async with asyncio.timeout(30):
            answer = await beat()
            claims = [node.wish(SLOT + 1, job=job, **FREE) for job in JOBS]
            claimed = await node.store.claim(claims)
            done = [Completion(job, SLOT, won[job].run.token, Outcome("done")) for job in JOBS]
            recorded = await node.store.complete(done)
        said = zip(JOBS, answer.renewals, answer.settled, strict=True)
        assert {job: (each.outcome.value, at is None) for job, each, at in said} == {
            job: ("unknown", True) if job in theirs else ("renewed", False) for job in JOBS
        }
        assert set(answer.unheard) == theirs
        assert answer.known
        assert _words(claimed) == expected("won")
        assert _words(recorded) == expected("recorded")
        if how is signal.SIGSTOP:
            victim.process.send_signal(signal.SIGCONT)
        else:
            victim.process.wait()
            victim.start()
        while (await beat()).unheard:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.01)
        assert _words(await node.store.complete(done)) == dict.fromkeys(JOBS, "recorded")
        assert _words(await node.store.claim(claims)) == dict.fromkeys(JOBS, "won")


def _words(reply: Reply[Any]) -> dict[str, str]:
    return {job: each.outcome.value for job, each in zip(JOBS, reply.answers, strict=True)}


def port_of(node: Node, job: str) -> int:
    host = table_of(node)._table[key_slot(key_of(node, job).encode())]
    assert host is not None
    return host[1]


@pytest.mark.timeout(120)
async def test_s10_a_node_killed_with_kill_9_under_load_loses_no_claim_and_gives_none_twice(
    kind: str, start: Callable[..., RedisCluster]
) -> None:
    """`appendonly yes`; the instances are back by themselves."""
    servers = start(kind, "--appendonly", "yes", "--appendfsync", "everysec")
    slots = range(T0 + PERIOD, T0 + 21 * PERIOD, PERIOD)
    won: list[tuple[int, str, str]] = []
    unknown = 0
    async with instances_on(f"{servers.url}#") as cluster:
        nodes = await nodes_with_jobs(cluster, 3, op_timeout_ms=1_000)
        cluster.advance_to(slots[-1])

        async def work(node: Node) -> None:
            nonlocal unknown
            for slot in slots:
                claims = [node.wish(slot, job=job, **FREE) for job in JOBS]
                while claims:
                    try:
                        reply = await node.store.claim(claims)
                    except StoreError as error:
                        unknown += isinstance(error, OutcomeUnknown)
                        await asyncio.sleep(0.05)  # the loop's back-off
                        continue
                    told = list(zip(claims, reply.answers, strict=True))
                    won.extend(
                        (c.slot, c.job, c.token) for c, a in told if a.outcome is ClaimOutcome.WON
                    )
                    claims = [c for c, a in told if a.outcome is ClaimOutcome.UNKNOWN]
                    unknown += len(claims)

        working = [asyncio.create_task(work(node)) for node in nodes]
        for number, share in enumerate((0.2, 0.5, 0.8)):
            some = share * len(slots) * len(JOBS)
            await until(lambda some=some: len(won) >= some)  # type: ignore[misc]
            servers.masters[number].kill()
            await asyncio.to_thread(servers.masters[number].start)
        await asyncio.gather(*working)
        rows = await (await cluster.node()).history(limit=1_000)
    wanted = sorted((slot, job) for slot in slots for job in JOBS)
    assert sorted((slot, job) for slot, job, _ in won) == wanted, "each slot has one winner"
    kept = {(seen.run.slot, seen.run.job, seen.run.token) for seen in rows}
    assert kept == set(won), "each acknowledged claim is there, and no other"
    assert {seen.run.attempt for seen in rows} == {1}
    assert unknown > 0, "the kills met calls under way"


@pytest.mark.parametrize("how", ["kill", "freeze"])
async def test_s27_a_fail_over_in_the_cluster_is_followed_and_is_another_store(
    how: str, start: Callable[..., RedisCluster]
) -> None:
    """S27a: what the promoted replica did not have is lost, so no run is taken over for a lease."""
    servers = start("redis", replicas=1)
    async with instances_on(f"{servers.url}#") as cluster:
        (node,) = await nodes_with_jobs(cluster, op_timeout_ms=500)
        first = await node.store.claim([node.wish(SLOT, job=job) for job in JOBS])
        victim = servers.master_of(key_of(node, JOBS[0]))
        theirs = {job for job in JOBS if servers.master_of(key_of(node, job)) is victim}
        victim.send("WAIT", "1", "1000")
        offset = re.compile(rb"master_repl_offset:(\d+)|slave_repl_offset:(\d+)")
        replica = servers.nodes[redis_cluster.MASTERS + servers.masters.index(victim)]
        await until(
            lambda: (
                max(max(each) for each in offset.findall(victim.send("INFO", "replication")))
                == max(max(each) for each in offset.findall(replica.send("INFO", "replication")))
            )
        )
        assert victim.process is not None
        victim.process.send_signal(signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        claims = [node.wish(SLOT + 1, job=job, **FREE) for job in JOBS]
        reply = await node.store.claim(claims)
        outcomes = {c.job: a.outcome for c, a in zip(claims, reply.answers, strict=True)}
        assert {job for job, outcome in outcomes.items() if outcome == "won"} >= set(JOBS) - theirs
        while any(answer.outcome is ClaimOutcome.UNKNOWN for answer in reply.answers):
            await asyncio.sleep(0.05)  # the loop's back-off
            try:
                reply = await node.store.claim(claims)
            except StoreError:
                continue
        assert {answer.outcome for answer in reply.answers} == {"won"}
        assert reply.store_id != first.store_id
        rows = await node.history(slot=SLOT, limit=100)
        assert {seen.run.job for seen in rows} == set(JOBS), "the replica had them"


# Slots that move


class Moving:
    """The slot of one job, on its way from its node to another, one step at a time."""

    def __init__(self, servers: RedisCluster, key: str) -> None:
        self.slot = str(key_slot(key.encode()))
        self.source = servers.master_of(key)
        self.target = next(each for each in servers.masters if each is not self.source)
        self._servers = servers

    def keys(self) -> list[str]:
        said = self.source.send("CLUSTER", "GETKEYSINSLOT", self.slot, "1000").decode()
        return said.split("\r\n")[2::2]

    def begin(self) -> None:
        source, target = map(redis_cluster.id_of, (self.source, self.target))
        self.target.send("CLUSTER", "SETSLOT", self.slot, "IMPORTING", source)
        self.source.send("CLUSTER", "SETSLOT", self.slot, "MIGRATING", target)

    def move(self, key: str) -> None:
        said = self.source.send("MIGRATE", "127.0.0.1", str(self.target.port), key, "0", "5000")
        assert said == b"+OK\r\n", said

    def end(self) -> None:
        for key in self.keys():
            self.move(key)
        target = redis_cluster.id_of(self.target)
        for server in (self.target, self.source, *self._servers.masters):
            assert server.send("CLUSTER", "SETSLOT", self.slot, "NODE", target) == b"+OK\r\n"


async def test_a_slot_that_has_moved_is_followed(kind: str) -> None:
    """MOVED: not done there, and asked where it is now, in the same call."""
    servers = redis_cluster.session_cluster(kind)
    async with instances_on(redis_cluster.fresh_url(kind)) as cluster:
        node, other = await nodes_with_jobs(cluster, 2)
        seen = await node.win(SLOT, job=JOBS[0])
        before = port_of(node, JOBS[0])
        moving = Moving(servers, key_of(node, JOBS[0]))
        moving.begin()
        moving.end()
        assert (await other.claim(SLOT, job=JOBS[0])).outcome == "lost"
        assert (await node.renew(seen)).outcome == "renewed"
        assert (await node.complete(seen)).outcome == "recorded"
        assert port_of(node, JOBS[0]) == moving.target.port != before
        assert (await node.win(SLOT + 1, job=JOBS[0], **FREE)).run.attempt == 1
        assert len(await node.history(job=JOBS[0])) == 2
        beat = await node.beat_reply()
        assert "+" not in beat.store_id, "nothing was lost by it"


async def test_s10_a_slot_on_its_way_is_claimed_by_nobody_and_nothing_is_done_by_half(
    kind: str,
) -> None:
    """The node that a job's keys move to has some of them: it could give a slot twice (ASK)."""
    servers = redis_cluster.session_cluster(kind)
    async with instances_on(redis_cluster.fresh_url(kind)) as cluster:
        node, other = await nodes_with_jobs(cluster, 2)
        seen = await node.win(SLOT, job=JOBS[0])
        done = await node.win(SLOT + 1, job=JOBS[0], **FREE)
        await node.complete(done)
        moving = Moving(servers, key_of(node, JOBS[0]))
        moving.begin()
        keys = moving.keys()
        fence = await node.beat_reply(sweep=((JOBS[1], "every:10s"),))
        assert fence.answers[0].known, "other jobs go on"
        # Whatever has left: first one of its lists, then its rows, and its own key last.
        own = key_of(node, JOBS[0])
        keys.sort(key=lambda key: (key == own, bool(re.search(r":\d+$", key)), key))
        assert len(keys) == 7
        for key in keys:
            moving.move(key)
            for claim in (
                other.wish(SLOT, job=JOBS[0]),
                other.wish(SLOT + 2, job=JOBS[0], **FREE),
                node.wish(SLOT, job=JOBS[0], token=seen.run.token),
            ):
                with pytest.raises(StoreError):
                    await other.ask(claim)
            for ask in (node.pause, node.trigger):
                with pytest.raises(StoreError):
                    await ask(job=JOBS[0])
            with pytest.raises(StoreError):
                await node.plan([SLOT + PERIOD], settled=SLOT, job=JOBS[0])
            with pytest.raises(StoreError):
                await node.complete(seen)
            assert (await node.renew(seen)).outcome == "unknown"
        moving.end()
        assert (await other.claim(SLOT, job=JOBS[0])).outcome == "lost"
        assert (await node.complete(seen)).outcome == "recorded"
        states = await node.states(JOBS[0])
        assert set(states.values()) == {"success"}, "nothing is left of what was refused"
        assert len(await node.history(job=JOBS[0])) == 2
        left, listed = await table_of(node).read(
            ["ZRANGE", f"{own}:open", 0, -1], ["ZRANGE", f"{own}:runs", 0, -1]
        )
        assert left == []
        assert len(listed) == 2


async def test_s10_a_job_whose_own_key_left_first_is_not_claimed_where_its_rows_are_not(
    kind: str,
) -> None:
    servers = redis_cluster.session_cluster(kind)
    async with instances_on(redis_cluster.fresh_url(kind)) as cluster:
        node, other = await nodes_with_jobs(cluster, 2)
        seen = await node.win(SLOT, job=JOBS[0])
        moving = Moving(servers, key_of(node, JOBS[0]))
        moving.begin()
        moving.move(key_of(node, JOBS[0]))
        with pytest.raises(StoreUnavailable):
            await other.claim(SLOT, job=JOBS[0])
        reply = await other.store.claim([other.wish(SLOT, job=job) for job in JOBS[:4]])
        assert [answer.outcome for answer in reply.answers] == ["unknown", "won", "won", "won"]
        moving.end()
        assert (await other.claim(SLOT, job=JOBS[0])).outcome == "lost"
        assert (await node.renew(seen)).outcome == "renewed"


# Steps of registering, leaving and pruning: each may be the last


async def test_s28_an_instance_that_dies_while_it_registers_leaves_nothing_for_ever(
    kind: str,
) -> None:
    async with instances_on(redis_cluster.fresh_url(kind)) as cluster:
        node, other = await cluster.node(), await cluster.node()
        await other.register(definition("other"))
        calls = store_of(node)._calls
        of_namespace = calls.of_namespace

        async def dies(script: Any, batch: Any, **given: Any) -> Any:
            if script is _scripts.ENROLLED:
                raise StoreUnavailable("killed")
            return await of_namespace(script, batch, **given)

        calls.of_namespace = dies  # type: ignore[method-assign]
        with pytest.raises(OutcomeUnknown, match="a part of the call was done before"):
            await node.register(definition("a"), definition("b"))
        calls.of_namespace = of_namespace  # type: ignore[method-assign]
        assert not (await node.beat()).known, "it is told to register again"
        cluster.advance(2 * DAY)
        await other.prune()
        held = await table_of(node).read(
            ["HGETALL", f"{calls.key_of('a')}:holds"], ["HGETALL", f"{calls.key_of('b')}:holds"]
        )
        assert held == [[], []]
        assert len((await other.store.instances()).answers) == 0


async def test_s28_a_job_that_is_registered_while_it_is_forgotten_stays_on_the_list(
    kind: str,
) -> None:
    async with instances_on(redis_cluster.fresh_url(kind)) as cluster:
        node, other = await cluster.node(), await cluster.node()
        await node.register(definition("old"))
        await node.beat(leaving=True)
        cluster.advance(30 * DAY)
        calls = store_of(node)._calls
        of_namespace = calls.of_namespace

        async def overtaken(script: Any, batch: Any, **given: Any) -> Any:
            if script is _scripts.LIST and batch["remove"]:
                await other.register(definition("old"))
            return await of_namespace(script, batch, **given)

        calls.of_namespace = overtaken  # type: ignore[method-assign]
        await node.prune()
        assert [view.name for view in (await other.store.jobs((), "", 10)).answers] == ["old"]
        calls.of_namespace = of_namespace  # type: ignore[method-assign]
        await other.beat(leaving=True)
        cluster.advance(30 * DAY)
        await node.prune()
        names = await store_of(node)._reader.job_names("", 10)
        assert names == [], "and goes when nobody has it"


async def test_s30_a_pruning_deletes_no_more_than_it_may_over_all_nodes(kind: str) -> None:
    async with instances_on(redis_cluster.fresh_url(kind)) as cluster:
        (node,) = await nodes_with_jobs(cluster)
        for job in JOBS[:5]:
            for slot in range(SLOT, SLOT + 8):
                await node.complete(await node.win(slot, job=job, **FREE))
        cluster.advance(20 * DAY)
        await node.register(*(definition(job) for job in JOBS))
        gone = [await node.prune(batch=12) for _ in range(5)]
        assert gone == [12, 12, 12, 4, 0]


# Starting


async def report_of(url: str) -> tuple[str, str]:
    store = open_store(url, OpenOptions("default", FakeClock()))
    try:
        report = await store.open()
    finally:
        await store.close()
    return " ".join(report.verified), " ".join(report.doubts)


async def test_a_cluster_is_found_by_any_of_its_nodes(kind: str) -> None:
    servers = redis_cluster.session_cluster(kind)
    dead, last = free_port(), servers.masters[2].port
    verified, doubts = await report_of(f"redis://127.0.0.1:{dead},127.0.0.1:{last}/?cluster=true")
    assert "and a cluster's node" in verified
    assert "3 masters, whose clocks are less than 500 ms apart" in verified
    assert "appendonly is no" in doubts
    assert doubts.count("appendonly is no") == 1, "what all have in common is said once"
    with pytest.raises(StoreUnavailable, match="no node of the cluster can be reached"):
        await report_of(f"redis://127.0.0.1:{dead}/?cluster=true")


async def test_a_doubt_about_one_node_names_it(start: Callable[..., RedisCluster]) -> None:
    servers = start("redis", "--appendonly", "yes", "--appendfsync", "always")
    _, doubts = await report_of(servers.url)
    assert doubts == ""
    servers.masters[1].send("CONFIG", "SET", "appendfsync", "everysec")
    _, doubts = await report_of(servers.url)
    assert f"127.0.0.1:{servers.masters[1].port}: appendfsync is everysec" in doubts
    servers.masters[2].send("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    with pytest.raises(StoreRefused, match="maxmemory-policy is allkeys-lru"):
        await report_of(servers.url)


async def test_a_server_that_is_no_node_is_refused_with_what_to_leave_out(kind: str) -> None:
    url = redis.session_url(kind).removesuffix("/0")
    with pytest.raises(StoreRefused, match="leave cluster=true out of the URL"):
        await report_of(f"{url}/?cluster=true")


async def test_an_unknown_layout_of_a_job_is_not_touched(kind: str) -> None:
    async with instances_on(redis_cluster.fresh_url(kind)) as cluster:
        (node,) = await nodes_with_jobs(cluster)
        (server,) = [
            pool
            for host, pool in table_of(node).nodes().items()
            if host[1] == port_of(node, JOBS[0])
        ]
        await server.ask(["HSET", key_of(node, JOBS[0]), "schema", "7"])
        with pytest.raises(StoreUnavailable, match="ANARCHONSCHEMA 7"):
            await node.claim(SLOT, job=JOBS[0])
        assert (await node.claim(SLOT, job=JOBS[1])).outcome == "won"


async def test_a_job_of_layout_2_is_carried_on_when_it_is_first_touched(kind: str) -> None:
    async with instances_on(redis_cluster.fresh_url(kind)) as cluster:
        (node,) = await nodes_with_jobs(cluster)
        seen = await node.win(SLOT, job=JOBS[0])
        key, other = key_of(node, JOBS[0]), key_of(node, JOBS[1])
        await table_of(node).read(
            ["HSET", key, "schema", "2"],
            ["HSET", other, "schema", "2"],
        )
        assert (await node.renew(seen)).outcome == "renewed"
        schemas = await table_of(node).read(["HGET", key, "schema"], ["HGET", other, "schema"])
        assert schemas == [b"3", b"2"], "one whose time has not come stays as it is"


async def test_s29_operators_ask_about_jobs_wherever_they_are(kind: str) -> None:
    """Who lives is known on the namespace's node, and a resumption needs to know it on the job's."""
    async with instances_on(redis_cluster.fresh_url(kind)) as cluster:
        node, other = await nodes_with_jobs(cluster, 2)
        await other.register(*(definition(job, 5_000) for job in JOBS))
        await asyncio.gather(*(node.pause(job=job) for job in JOBS))
        made = await node.store.control(
            [
                TriggerRun(job, "r-1", job.encode(), (), SLOT + DAY, OverlapPolicy.QUEUE, DAY)
                for job in JOBS
            ]
        )
        assert {answer.outcome for answer in made.answers} == {ControlOutcome.DONE}
        assert set(made.fences) == set(JOBS)
        claims = [other.wish(a.run.run.slot, job=a.run.run.job) for a in made.answers if a.run]
        reply = await other.store.claim(claims)
        assert [answer.payload.decode() for answer in reply.answers] == JOBS
        cluster.advance(2 * PERIOD)
        for job in JOBS[:5]:
            assert (await node.resume(job=job)).outcome is ControlOutcome.STALE
            both = await node.resume(job=job, schedules=("every:10s", "every:5s"))
            assert both.outcome is ControlOutcome.DONE
            row = await node.run(cluster.now, job)
            assert row is not None
            assert row.run.slots_covered == 4, "15, 20, 25 and 30, as 10 has a row"


async def test_the_least_privileges_of_the_page_are_enough_in_a_cluster(
    kind: str, start: Callable[..., RedisCluster]
) -> None:
    (rules,) = re.findall(r"^ACL SETUSER anarchon (.*)$", PAGE.read_text(), re.MULTILINE)
    (more,) = re.findall(r"Add `(.*)` in a cluster", PAGE.read_text())
    servers = start(kind)
    for server in servers.masters:
        said = server.send("ACL", "SETUSER", "anarchon", *rules.split(), *more.split())
        assert said == b"+OK\r\n"
    clock = FakeClock()
    url = servers.url.replace("redis://", "redis://anarchon:a-secret@")
    store = RedisLeaseStore(address_of(url), OpenOptions("default", clock), clock=clock)
    report = await store.open()
    assert "scripts run, and every command they use is permitted" in report.verified
    cluster = Cluster(None, clock)  # type: ignore[arg-type]
    node = Node(cluster, store, "host:1", "inc-1")
    await node.register(*(definition(job) for job in JOBS))
    cluster.advance_to(SLOT)
    watch = store.watch()
    seen = await node.win(SLOT, job=JOBS[0])
    await node.renew(seen)
    await node.release(seen)
    await asyncio.wait_for(anext(watch), 5)
    await watch.aclose()  # type: ignore[attr-defined]
    await node.complete(seen)
    await node.pause(job=JOBS[0])
    await node.resume(job=JOBS[0])
    made = await node.triggered(job=JOBS[0], payload=b"p")
    await node.complete(await node.win(made.run.slot, job=JOBS[0]))
    assert len(await node.history()) == 2
    assert len((await store.jobs((), "", 100)).answers) == len(JOBS)
    assert await node.prune() == 0
    await node.beat(leaving=True)
    cluster.advance(30 * DAY)
    assert await node.prune() == 2
    await store.close()
    servers.masters[1].send("ACL", "SETUSER", "anarchon", "-zadd")
    with pytest.raises(StoreRefused, match=r"docs/stores/redis\.md lists"):
        await store.open()
