"""Instances that come and go by names, and by random lives."""

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
from kvkeep.serve.kv_events import BlockStored, EventPublisher, EventReader
from kvkeep.serve.router import PrefixRouter
from kvkeep.serve.router.membership import (
    DnsName,
    EventAddresses,
    Membership,
    Resolution,
    resolve,
)
from kvkeep.serve.router.upstreams import Upstreams

URLS = [f"http://10.0.0.{number}:8000" for number in range(4)]
PROMPT = list(range(32))


class Lives(RuleBasedStateMachine):
    """Four instances with two names and the options, against sets of names."""

    @initialize(given=st.sets(st.sampled_from(URLS)))
    def begin(self, given) -> None:
        self.time = 0.0
        self.router = PrefixRouter(clock=lambda: self.time)
        self.upstreams = Upstreams(sorted(given), clock=lambda: self.time)
        self.members = Membership(self.router, self.upstreams, keep_s=10.0, clock=lambda: self.time)
        self.origins = {url: {"options"} if url in given else set() for url in URLS}
        self.listed: dict[str, set[str]] = {"dns://a:1": set(), "dns://b:1": set()}
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
        for url in URLS:
            if url in before - urls:
                self.origins[url].discard(origin)
            elif url in urls:
                self.origins[url].add(origin)
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
        members = Membership(
            PrefixRouter(), Upstreams(), names=[DnsName("dns://x:9")], every_s=0.001,
            resolver=next_one,
        )  # fmt: skip
        members.on_resolved = lambda _, resolution: found.append(resolution)
        following = asyncio.create_task(members.run())
        while len(found) < 6:
            await asyncio.sleep(0.001)
        following.cancel()

    asyncio.run(follow())
    assert [one.urls for one in found[:3]] == [("http://10.0.0.1:9",), (), ("http://10.0.0.2:9",)]
    assert found[1].why == "no server"


def test_patterns_of_addresses():
    made = EventAddresses(events="tcp://{host}:5557", replay="ipc:///x-{port}", ranks=2)
    one, other = made.sources("http://[fd00::1]:8000")
    assert (one.endpoint, one.replay) == ("tcp://[fd00::1]:5557", "ipc:///x-8000")
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
    members.resolved("dns://x:80", Resolution(many[10:]))
    members.sweep()
    assert router.stats().instances == 4096 - 10


def test_an_instance_comes_back_with_what_its_snapshot_says():
    """Forgotten with its index; back under its name it holds what it holds now, not before."""
    cache = PagedCache(64, 16)
    publisher = EventPublisher(cache, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
    router, upstreams = PrefixRouter(), Upstreams()
    reader = EventReader([], router, check_s=0.1)
    time = [0.0]
    url = "http://10.0.0.1:8000"
    addresses = EventAddresses(listed={url: (publisher.endpoint, publisher.replay)})
    members = Membership(
        router, upstreams, reader, addresses=addresses, keep_s=10.0, clock=lambda: time[0]
    )

    def come() -> None:
        members.resolved("dns://x:8000", Resolution((url,)))

    def leave() -> None:
        members.resolved("dns://x:8000", Resolution(("http://10.0.0.9:8000",)))

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
        come()
        eventually(lambda: held(old) == 64)
        leave()
        time[0] = 9.0
        members.sweep()
        between = hold(1000)
        eventually(lambda: router.blocks(url)[0] == 8)  # it is followed as long as it is kept
        come()
        assert held(old) == held(between) == 64
        leave()
        time[0] = 19.0
        while members.sweep():
            pass
        assert url not in upstreams.health.names()
        assert router.stats().blocks == 0
        cache.clear()
        new = hold(2000)
        come()
        eventually(lambda: held(new) == 64)
        assert held(old) == 0
    finally:
        reader.close()
        publisher.close()


def test_many_blocks_are_forgotten_in_steps():
    router, upstreams = PrefixRouter(), Upstreams()
    members = Membership(router, upstreams, keep_s=0.0)
    members.resolved("dns://x:8000", Resolution(tuple(URLS[:2])))
    for url in URLS[:2]:
        tokens = list(range(70_000))
        router.apply(url, [BlockStored(tokens, None, tokens, 1, None, "GPU", None)])
    members.resolved("dns://x:8000", Resolution((URLS[2],)))
    left = []
    while members.sweep():
        left.append(router.stats().blocks)
        router.check()
        if len(left) == 5:  # it stays, with what is left of its blocks
            members.resolved("dns://x:8000", Resolution((URLS[2], URLS[1])))
    assert left == [120_000, 100_000, 80_000, 50_000, 30_000]
    assert upstreams.names == [URLS[2], URLS[1]]
    assert router.stats().instances == 2


# --- over HTTP -------------------------------------------------------------------------------


def instances(proxy) -> dict[str, str]:
    return httpx.get(f"{proxy.url}/health").json()["each"]


def ask(proxy) -> httpx.Response:
    return httpx.post(f"{proxy.url}/v1/completions", json={"prompt": [1, 2]}, timeout=20)


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "PUT"])
def test_nobody_becomes_an_instance_over_http(method):
    """Not even from this machine: whoever is an instance gets prompts and keys."""
    with routing("well") as (proxy, (one,)):
        for path in ("/kv/instances", f"/kv/instances/{one.url}"):
            answer = httpx.request(method, proxy.url + path, json={"url": "http://127.0.0.1:9"})
            assert answer.status_code == 404
        assert instances(proxy) == {one.url: "up"}
        assert one.asked == []


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
        router, upstreams, names=names, every_s=0.02, resolver=resolver, keep_s=0.0
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


def test_what_is_known_of_an_instance_goes_with_it():
    made = [StandIn("waits"), StandIn("well")]
    ports = [int(one.url.rpartition(":")[2]) for one in made]
    gone: set[int] = set()

    def resolver(name, port):
        return answer("127.0.0.2" if port in gone else "127.0.0.1")

    names = [DnsName(f"dns://servers:{port}") for port in ports]
    router, upstreams = PrefixRouter(), Upstreams()
    membership = Membership(
        router, upstreams, names=names, every_s=0.02, resolver=resolver, keep_s=0.0
    )
    try:
        with (
            routing(router=router, upstreams=upstreams, membership=membership) as (proxy, _),
            ThreadPoolExecutor(8) as pool,
        ):
            one, two = made
            eventually(lambda: instances(proxy) == {one.url: "up", two.url: "up"})
            first = [pool.submit(ask, proxy) for _ in range(8)]
            eventually(lambda: one.paths and len(one.paths) + sum(r.done() for r in first) == 8)
            gone.add(ports[0])
            eventually(lambda: instances(proxy)[one.url] == "leaving")
            had = len(one.paths)
            assert all(ask(proxy).is_success for _ in range(6))
            assert len(one.paths) == had
            one.wake()  # what runs there ends
            assert all(request.result().is_success for request in first)
            eventually(lambda: one.url not in instances(proxy))
            eventually(lambda: one.url not in httpx.get(f"{proxy.url}/metrics").text)
            probes = one.probes
            assert ask(proxy).is_success
            assert one.probes <= probes + 1
    finally:
        for one in made:
            one.stop()
