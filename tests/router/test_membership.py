"""Instances that come and go, by names, over HTTP, and by random lives."""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from standing_in import StandIn, eventually, routing

from kvkeep import PagedCache
from kvkeep.core.errors import InvalidValue
from kvkeep.serve.kv_events import BlockStored, EventPublisher, EventReader, Source
from kvkeep.serve.router import PrefixRouter
from kvkeep.serve.router.discovery import DnsName, Resolution, resolve
from kvkeep.serve.router.membership import Discovery, EventAddresses, Membership
from kvkeep.serve.router.upstreams import Upstreams

URLS = [f"http://10.0.0.{number}:8000" for number in range(4)]
PROMPT = list(range(32))


class Lives(RuleBasedStateMachine):
    """Four instances with two names, the options and an administrator, against sets of names."""

    @initialize(given=st.sets(st.sampled_from(URLS)))
    def begin(self, given) -> None:
        self.time = 0.0
        self.router = PrefixRouter(clock=lambda: self.time)
        self.upstreams = Upstreams(sorted(given), clock=lambda: self.time)
        self.members = Membership(self.router, self.upstreams, keep_s=10.0, clock=lambda: self.time)
        self.origins = {url: {"options"} if url in given else set() for url in URLS}
        self.listed: dict[str, set[str]] = {"dns://a:1": set(), "dns://b:1": set()}
        self.removed: set[str] = set()
        self.left_at: dict[str, float | None] = dict.fromkeys(given, None)  # of known ones
        self.tickets = []

    def settle(self, url) -> None:
        """The model: an instance joins with its first origin, and leaves with its last."""
        if self.origins[url]:
            self.left_at[url] = None
        elif self.left_at.get(url, 0) is None:
            self.left_at[url] = self.time

    @rule(origin=st.sampled_from(["dns://a:1", "dns://b:1"]), urls=st.sets(st.sampled_from(URLS)))
    def resolve(self, origin, urls):
        self.members.resolved(origin, Resolution(tuple(sorted(urls)), "" if urls else "no address"))
        if not urls:
            return
        before, self.listed[origin] = self.listed[origin], urls
        self.removed &= set.union(*self.listed.values())
        for url in URLS:
            if url in before - urls:
                self.origins[url].discard(origin)
            elif url in urls - self.removed:
                self.origins[url].add(origin)
            self.settle(url)

    @rule(url=st.sampled_from(URLS))
    def add(self, url):
        assert self.members.add(url) == (url not in self.left_at)
        self.origins[url].add("admin")
        self.removed.discard(url)
        self.settle(url)

    @rule(url=st.sampled_from(URLS))
    def remove(self, url):
        assert self.members.remove(url) == (url in self.left_at)
        if url in self.left_at:
            if any(url in some for some in self.listed.values()):
                self.removed.add(url)
            self.origins[url].clear()
            self.settle(url)

    @rule()
    def request(self):
        chosen = self.router.choose(PROMPT, without=self.upstreams.health.barred())
        joined = {url for url, left in self.left_at.items() if left is None}
        if chosen is None:
            assert not joined
            return
        assert chosen.place.instance in joined
        self.tickets.append(self.router.begin(chosen, PROMPT))

    @rule(which=st.integers(0, 99))
    def end(self, which):
        if self.tickets:
            self.router.end(self.tickets.pop(which % len(self.tickets)))

    @rule(url=st.sampled_from(URLS))
    def hold(self, url):
        if url in self.left_at:
            self.router.apply(url, [BlockStored([1], None, PROMPT[:16], 16, None, "GPU", None)])

    @rule(seconds=st.sampled_from([1.0, 11.0]))
    def wait(self, seconds):
        self.time += seconds
        self.members.sweep()
        busy = {ticket.place.instance for ticket in self.tickets}
        for url, left in list(self.left_at.items()):
            if left is not None and self.time - left >= 10 and url not in busy:
                del self.left_at[url]

    @invariant()
    def they_agree(self) -> None:
        if not hasattr(self, "members"):
            return
        joined = {url for url, left in self.left_at.items() if left is None}
        assert set(self.upstreams.names) == joined
        assert set(self.upstreams.health.names()) == set(self.left_at)
        assert {one["name"] for one in self.members.reports()} == set(self.left_at)
        assert self.router.stats().instances == len(self.left_at)
        for url in URLS:
            running = sum(ticket.place.instance == url for ticket in self.tickets)
            assert self.router.load(url)[0] == running, "a request was lost or kept"
        self.router.check()


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


# --- names -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["", "x:1", "dns://", "dns://x", "dns://x:0", "dns://x:y", "dns://x:1/", "dns://u@x:1",
             "http://x:1", "dns://x:99999", "dns://x:1?y"],
)  # fmt: skip
def test_names_that_are_none(text):
    with pytest.raises(InvalidValue, match=r"dns://NAME:PORT"):
        DnsName(text)


def test_a_name_is_asked_of_the_system():
    found = DnsName("dns://localhost:8123").resolve(resolve)
    assert found.urls in {("http://127.0.0.1:8123",), ("http://[::1]:8123",)}
    assert DnsName("dns://nobody.invalid:1").resolve(resolve).why


def answer(*hosts):
    return [
        (socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 1))
        for host in hosts
    ]


@pytest.mark.parametrize(
    ("hosts", "urls"),
    [
        (("10.0.0.2", "10.0.0.1", "10.0.0.2"), ("http://10.0.0.1:9", "http://10.0.0.2:9")),
        (("fd00::2", "10.0.0.1"), ("http://10.0.0.1:9",)),  # both are of one instance
        (("fd00::2", "fe80::1%eth0"), ("http://[fd00::2]:9",)),
        ((), ()),
    ],
)
def test_what_addresses_mean(hosts, urls):
    found = DnsName("dns://x:9").resolve(lambda name, port: answer(*hosts))
    assert found.urls == urls
    assert bool(found.why) == (not urls)


def test_a_name_is_followed_and_failures_change_nothing():
    answers = [answer("10.0.0.1"), OSError("no server"), answer("10.0.0.2"), UnicodeError("name")]
    found: list[Resolution] = []

    def next_one(name, port):
        if isinstance(one := answers[len(found) % 4], Exception):
            raise one
        return one

    async def follow() -> None:
        following = asyncio.create_task(DnsName("dns://x:9").follow(0.001, found.append, next_one))
        while len(found) < 6:
            await asyncio.sleep(0.001)
        following.cancel()

    asyncio.run(follow())
    assert [one.urls for one in found[:3]] == [("http://10.0.0.1:9",), (), ("http://10.0.0.2:9",)]
    assert found[1].why == "no server"


def test_patterns_of_addresses():
    made = EventAddresses(events="tcp://{host}:5557", replay="ipc:///x-{port}", topic="t", ranks=2)
    one, other = made.sources("http://[fd00::1]:8000")
    assert (one.endpoint, one.replay, one.topic) == ("tcp://[fd00::1]:5557", "ipc:///x-8000", "t")
    assert other.endpoint == "tcp://[fd00::1]:5558"
    assert EventAddresses().sources("http://a") == ()
    with pytest.raises(InvalidValue, match="an endpoint is"):
        EventAddresses(events="{host}")


def test_a_router_has_a_bound_on_instances():
    router, upstreams = PrefixRouter(), Upstreams()
    members = Membership(router, upstreams, keep_s=0.0)
    many = tuple(f"http://10.1.{high}.{low}:80" for high in range(17) for low in range(250))
    members.resolved("dns://x:80", Resolution(many))
    assert router.stats().instances == len(upstreams.names) == 4096
    with pytest.raises(InvalidValue, match="4,096 instances"):
        members.add("http://a")
    for url in many[:10]:
        members.remove(url)
    members.sweep()
    members.resolved("dns://x:80", Resolution(many))
    assert router.stats().instances == 4096
    assert not {*many[:10]} & {*upstreams.names}, "what was removed came back"


def test_an_instance_comes_back_with_what_its_snapshot_says():
    """Forgotten with its index; back under its name it holds what it holds now, not before."""
    cache = PagedCache(64, 16)
    publisher = EventPublisher(cache, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
    router, upstreams = PrefixRouter(), Upstreams()
    reader = EventReader([], router, check_s=0.1)
    time = [0.0]
    members = Membership(router, upstreams, reader, keep_s=10.0, clock=lambda: time[0])
    url = "http://10.0.0.1:8000"
    sources = (Source(url, publisher.endpoint, publisher.replay),)

    def hold(first: int) -> list[int]:
        prompt = list(range(first, first + 64))
        sequence = cache.open(prompt)
        sequence.publish(64)
        sequence.close()
        return prompt

    def held(prompt: list[int]) -> int:
        chosen = router.choose(prompt)
        return 0 if chosen is None else chosen.tokens

    try:
        old = hold(0)
        members.add(url, sources)
        eventually(lambda: held(old) == 64)
        members.remove(url)
        time[0] = 9.0
        members.sweep()
        between = hold(1000)
        eventually(lambda: router.blocks(url)[0] == 8)  # it is followed as long as it is kept
        assert not members.add(url, sources)
        assert held(old) == held(between) == 64
        members.remove(url)
        time[0] = 19.0
        while members.sweep():
            pass
        assert url not in members
        assert router.stats().blocks == router.stats().instances == 0
        cache.clear()
        new = hold(2000)
        assert members.add(url, sources)
        eventually(lambda: held(new) == 64)
        assert held(old) == 0
        members.add(url, ())  # its events are at no address any more
        assert held(new) == 0
    finally:
        reader.close()
        publisher.close()


def test_many_blocks_are_forgotten_in_steps():
    router, upstreams = PrefixRouter(URLS[:2]), Upstreams(URLS[:2])
    members = Membership(router, upstreams, keep_s=0.0)
    for url in URLS[:2]:
        tokens = list(range(70_000))
        router.apply(url, [BlockStored(tokens, None, tokens, 1, None, "GPU", None)])
        members.remove(url)
    left = []
    while members.sweep():
        left.append(router.stats().blocks)
        router.check()
        if len(left) == 5:
            assert members.add(URLS[1]) is False  # it stays, with what is left of its blocks
    assert left == [120_000, 100_000, 80_000, 50_000, 30_000]
    assert upstreams.names == [URLS[1]]
    assert router.stats().instances == 1


# --- over HTTP -------------------------------------------------------------------------------


def instances(proxy, **options) -> dict[str, str]:
    answer = httpx.get(f"{proxy.url}/kv/instances", **options).raise_for_status().json()
    return {one["name"]: one["state"] for one in answer["instances"]}


def ask(proxy) -> httpx.Response:
    return httpx.post(f"{proxy.url}/v1/completions", json={"prompt": [1, 2]}, timeout=20)


def test_an_instance_is_added_and_removed_while_a_request_runs():
    other = StandIn("well")
    with routing("waits") as (proxy, (one,)), ThreadPoolExecutor(1) as pool:
        try:
            assert instances(proxy) == {one.url: "up"}
            first = pool.submit(ask, proxy)
            eventually(lambda: one.paths)
            with httpx.Client(timeout=30) as client:
                added = client.post(f"{proxy.url}/kv/instances", json={"url": other.url + "/"})
                assert (added.status_code, added.json()["origins"]) == (201, ["admin"])
                again = client.post(f"{proxy.url}/kv/instances", json={"url": other.url})
                assert again.status_code == 200
                eventually(lambda: instances(proxy)[other.url] == "up")
                name = one.url.removeprefix("http://")
                removed = client.delete(f"{proxy.url}/kv/instances/{name}")
                assert removed.status_code == 202
                assert (removed.json()["state"], removed.json()["running"]) == ("leaving", 1)
                assert all(ask(proxy).is_success for _ in range(6))
                assert client.delete(f"{proxy.url}/kv/instances/http://x:1").status_code == 404
            assert (len(one.paths), len(other.paths)) == (1, 6)
            one.wake()
            assert first.result().is_success
        finally:
            one.wake()
            other.stop()


def test_nobody_is_left_and_somebody_comes():
    with routing("well") as (proxy, (one,)):
        with httpx.Client() as client:
            client.delete(f"{proxy.url}/kv/instances/{one.url}").raise_for_status()
            refused = ask(proxy)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert client.get(f"{proxy.url}/health").status_code == 503
            client.post(f"{proxy.url}/kv/instances", json={"url": one.url}).raise_for_status()
        assert ask(proxy).is_success


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"url": "http://a:1", "x": 1}', 400),
        (b'{"url": 7}', 400),
        (b'{"url": "ftp://a"}', 400),
        (b'{"url": "http://[::1"}', 400),
        (b'{"url": "http://u:p@a"}', 400),
        (b'{"url": "http://a", "events": "x"}', 400),
        (b'{"url": "http://a", "events": "tcp://a:1"}', 400),  # no reader
        (b'{"url": "http://a", "replay": "tcp://a:1"}', 400),
        (b"[" * 70_000, 400),
        (b"\xff", 400),
        (b"", 400),
    ],
)
def test_bodies_that_are_none(body, status):
    with routing("well") as (proxy, (one,)):
        kind = {"content-type": "application/json"}
        answer = httpx.post(f"{proxy.url}/kv/instances", content=body, headers=kind)
        assert answer.status_code == status
        assert answer.json()["error"]["message"]
        assert instances(proxy) == {one.url: "up"}


def test_who_may_change_instances():
    with routing("well") as (proxy, (one,)):
        url = f"{proxy.url}/kv/instances"
        text = httpx.post(
            url, content=b'{"url": "http://a"}', headers={"content-type": "text/plain"}
        )
        assert text.status_code == 415
        for header in ("x-forwarded-for", "forwarded", "x-real-ip"):
            assert httpx.get(url, headers={header: "10.0.0.1"}).status_code == 403
        assert httpx.get(url, headers={"host": "evil.example"}).status_code == 400
    with routing("well", exposed=True, hosts=None) as (proxy, (one,)):
        # A sidecar's requests come from this machine, and those of a page whose name leads here.
        url = f"{proxy.url}/kv/instances"
        for headers in ({}, {"host": "evil.example"}, {"x-envoy-attempt-count": "1"}):
            added = httpx.post(url, json={"url": "http://a"}, headers=headers)
            assert (added.status_code, httpx.get(url, headers=headers).status_code) == (403, 403)
            assert httpx.delete(f"{url}/{one.url}", headers=headers).status_code == 403
        assert "--admin-key-file" in added.json()["error"]["message"]
        assert ask(proxy).is_success
    with routing("well", admin_key="k3y", exposed=True) as (proxy, (one,)):
        url = f"{proxy.url}/kv/instances"
        for headers in ({}, {"authorization": "Bearer x"}, {"authorization": "Basic k3y"}):
            assert httpx.get(url, headers=headers).status_code == 401
            assert httpx.delete(f"{url}/{one.url}", headers=headers).status_code == 401
        own = {"authorization": "Bearer k3y"}
        assert instances(proxy, headers=own) == {one.url: "up"}


def test_instances_that_a_name_lists_come_and_go():
    """The resolver is ours, all else is real; the port of a name is that of its instances."""
    made = [StandIn("well") for _ in range(3)]
    hosts: dict[int, bool] = {}

    def resolver(name, port):
        return answer("127.0.0.1") if hosts[port] else answer()

    ports = [int(one.url.rpartition(":")[2]) for one in made]
    hosts.update({ports[0]: True, ports[1]: False, ports[2]: True})
    names = [DnsName(f"dns://servers:{port}") for port in ports]
    router = PrefixRouter()
    upstreams = Upstreams()
    membership = Membership(
        router, upstreams, discovery=Discovery(names, 0.02, resolver), keep_s=0.0
    )
    try:
        with routing(router=router, upstreams=upstreams, membership=membership) as (proxy, _):
            eventually(lambda: instances(proxy) == {made[0].url: "up", made[2].url: "up"})
            assert all(ask(proxy).is_success for _ in range(4))
            hosts[ports[1]] = True
            eventually(lambda: instances(proxy).get(made[1].url) == "up")
            hosts[ports[0]] = False  # nobody is there any more: what is known stays
            eventually(lambda: 'outcome="failed"' in httpx.get(f"{proxy.url}/metrics").text)
            assert instances(proxy)[made[0].url] == "up"
    finally:
        for one in made:
            one.stop()


def test_metrics_of_an_instance_go_with_it():
    router, upstreams = PrefixRouter(), Upstreams()
    membership = Membership(router, upstreams, keep_s=0.0)
    one, two = StandIn("well"), StandIn("well")
    try:
        with routing(router=router, upstreams=upstreams, membership=membership) as (proxy, _):
            for url in (one.url, two.url):
                httpx.post(f"{proxy.url}/kv/instances", json={"url": url}).raise_for_status()
            eventually(lambda: list(instances(proxy).values()) == ["up", "up"])
            assert all(ask(proxy).is_success for _ in range(8))
            assert one.url in httpx.get(f"{proxy.url}/metrics").text
            httpx.delete(f"{proxy.url}/kv/instances/{one.url}").raise_for_status()
            eventually(lambda: one.url not in httpx.get(f"{proxy.url}/metrics").text)
            assert 'kvkeep_router_instances{state="up"} 1.0' in (
                httpx.get(f"{proxy.url}/metrics").text
            )
            probes = one.probes
            assert ask(proxy).is_success
            assert one.probes <= probes + 1
    finally:
        one.stop()
        two.stop()
