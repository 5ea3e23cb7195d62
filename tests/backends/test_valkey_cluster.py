"""A Valkey or Redis cluster: blocks on several nodes, slots that migrate, nodes that die."""

from __future__ import annotations

import binascii
import itertools
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from servers import PATIENCE_S, Server, cluster, come_together, needs_server, server

from faults import FaultProxy
from kvkeep.core.errors import BackendFailed
from kvkeep.store import BlockStore
from kvkeep.store.backends import TierURL
from kvkeep.store.backends.valkey import ValkeyBackend
from kvkeep.testing.backend_hooks import block_id, content, get, put, sizes_listed
from kvkeep.testing.backend_suite import BackendTests

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = needs_server
BLOCKS = [block_id(number) for number in range(60)]
SLOTS = 16384
numbers = itertools.count()


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Server]]:
    with cluster(3) as three:
        yield three


@pytest.fixture
def backend(nodes: list[Server]) -> Iterator[ValkeyBackend]:
    with open_url(f"{nodes[0].url}?prefix=c{next(numbers)}") as one:
        yield one


def open_url(text: str) -> ValkeyBackend:
    return ValkeyBackend.from_url(TierURL(text))


def home(backend: ValkeyBackend, block: bytes, nodes: list[Server]) -> Server:
    """The node of a block before any slot migrates."""
    slot = slot_of(backend, block)
    return next(
        node
        for number, node in enumerate(nodes)
        if slot < SLOTS * (number + 1) // len(nodes)
    )  # fmt: skip


def slot_of(backend: ValkeyBackend, block: bytes) -> int:
    return binascii.crc_hqx(backend._name(block), 0) % SLOTS


def name_of(node: Server) -> str:
    return node.ask("CLUSTER", "MYID").decode()


class TestCluster(BackendTests):
    persistent = True
    examples = 15

    @pytest.fixture(autouse=True)
    def at(self, nodes: list[Server]) -> None:
        self.url = nodes[1].url

    def make_backend(self, tmp_path: Path) -> ValkeyBackend:
        self.place = f"{self.url}?cluster=yes&connections=2&prefix=s{next(numbers)}"
        return open_url(self.place)

    def reopen(self, tmp_path: Path) -> ValkeyBackend:
        return open_url(self.place)


def test_blocks_spread_over_all_nodes(nodes: list[Server], backend: ValkeyBackend) -> None:
    for block in BLOCKS:
        put(backend, block, content(block, 0, 100))
    for node in nodes:
        assert node.ask("KEYS", f"{backend.options.prefix}:*").startswith(b"*")
        own = [block for block in BLOCKS if home(backend, block, nodes) is node]
        assert len(own) > 5
        assert all(node.ask("EXISTS", backend._name(block)) == b":1" for block in own)
    for node in nodes:  # and all of them are found, whomever we know first
        with open_url(f"{node.url}?prefix={backend.options.prefix}") as other:
            assert sizes_listed(other) == dict.fromkeys(BLOCKS, 100)
            assert other.sizes(BLOCKS) == [100] * 60
            assert get(other, BLOCKS[7]) == content(BLOCKS[7], 0, 100)


def test_cluster_mode_is_detected_or_configured(nodes: list[Server]) -> None:
    with open_url(f"{nodes[0].url}?cluster=no") as alone:
        away = next(block for block in BLOCKS if home(alone, block, nodes) is not nodes[0])
        with pytest.raises(BackendFailed, match="MOVED"):
            put(alone, away, b"x")
    with server() as single, open_url(f"{single.url}?cluster=yes") as backend:
        with pytest.raises(BackendFailed, match="cluster support disabled"):
            get(backend, BLOCKS[0])
        with open_url(f"{single.url}?cluster=auto") as works:
            put(works, BLOCKS[0], b"x")
    with open_url(f"{nodes[0].url}/3") as third, pytest.raises(BackendFailed, match="SELECT"):
        get(third, BLOCKS[0])


@contextmanager
def on_its_way(slot: int, source: Server, target: Server, nodes: list[Server]) -> Iterator[None]:
    """Migrate a slot in steps; at the end it is complete, and all nodes know it."""
    import_from = target.ask("CLUSTER", "SETSLOT", str(slot), "IMPORTING", name_of(source))
    migrate_to = source.ask("CLUSTER", "SETSLOT", str(slot), "MIGRATING", name_of(target))
    assert (import_from, migrate_to) == (b"+OK", b"+OK")
    yield
    settle(slot, target, [target, source, *nodes])


def settle(slot: int, owner: Server, nodes: list[Server]) -> None:
    """Give ``owner`` the slot, until all agree and know the epoch of its claim.

    Late news of an earlier move take the slot back where only the owner's earlier epoch is known.
    """
    end = time.monotonic() + PATIENCE_S
    for node in nodes:
        assert node.ask("CLUSTER", "SETSLOT", str(slot), "NODE", name_of(owner)) == b"+OK"
    while len({claim(slot, node) for node in nodes}) > 1:
        assert time.monotonic() < end, "the nodes do not agree who serves the slot"
        time.sleep(0.01)
        for node in nodes:
            if claim(slot, node)[0] != name_of(owner):
                asked = node.ask("CLUSTER", "SETSLOT", str(slot), "NODE", name_of(owner))
                assert asked == b"+OK"


def claim(slot: int, node: Server) -> tuple[str, int]:
    """The name of the node that serves a slot and the epoch of its claim, as ``node`` knows them.

    Of two claims nodes believe the one with the later epoch.
    """
    for line in node.ask("CLUSTER", "NODES").decode().splitlines():
        name, _, _, _, _, _, epoch, _, *served_by_it = line.split()
        for served in served_by_it:
            first, _, last = served.partition("-")
            if first.isdecimal() and int(first) <= slot <= int(last or first):
                return name, int(epoch)
    return "", 0


def move(backend: ValkeyBackend, block: bytes, source: Server, target: Server) -> None:
    name = backend._name(block)
    moved = source.ask("MIGRATE", "127.0.0.1", str(target.port), name, "0", "5000")
    assert moved == b"+OK"


def test_a_migrating_slot_is_followed(nodes: list[Server], backend: ValkeyBackend) -> None:
    block = BLOCKS[0]
    others = BLOCKS[1:20]
    for one in [block, *others]:
        put(backend, one, content(one, 0, 50_000))
    source = home(backend, block, nodes)
    target = next(node for node in nodes if node is not source)
    slot = slot_of(backend, block)
    expected = [50_000] * 20
    for start, end in ((source, target), (target, source)):
        with on_its_way(slot, start, end, nodes):
            assert get(backend, block) == content(block, 0, 50_000), "it has not left yet"
            assert backend.sizes([block, *others]) == expected
            move(backend, block, start, end)
            for _ in range(3):  # we are sent after it each time
                assert get(backend, block) == content(block, 0, 50_000)
                assert backend.sizes([block, *others]) == expected
            assert backend.delete([block]) == 50_000
            assert get(backend, block) is None
            put(backend, block, content(block, 0, 50_000))
            assert end.ask("ASKING")  # an answer, on a connection of its own
            backend.touch([block])
        assert sizes_listed(backend) == dict.fromkeys([block, *others], 50_000)
        assert backend.sizes([block, *others]) == expected
        put(backend, block, content(block, 0, 50_000))
        assert get(backend, block) == content(block, 0, 50_000)
        assert end.ask("EXISTS", backend._name(block)) == b":1"


def test_a_stale_map_is_corrected(nodes: list[Server], backend: ValkeyBackend) -> None:
    """MOVED corrects the map."""
    block = BLOCKS[3]
    put(backend, block, b"before")
    source = home(backend, block, nodes)
    target = next(node for node in nodes if node is not source)
    for start, end in ((source, target), (target, source)):
        with on_its_way(slot_of(backend, block), start, end, nodes):
            move(backend, block, start, end)
        assert backend.sizes([block]) == [6]
        assert get(backend, block) == b"before"


def test_nodes_that_name_each_other_are_asked_until_they_agree(
    nodes: list[Server], backend: ValkeyBackend
) -> None:
    """Two nodes have not heard of each other's news for three seconds."""
    block = BLOCKS[5]
    assert get(backend, block) is None  # the map is known
    source = home(backend, block, nodes)
    target = next(node for node in nodes if node is not source)
    slot = slot_of(backend, block)
    for node, other in ((source, target), (target, source)):
        assert node.ask("CLUSTER", "SETSLOT", str(slot), "NODE", name_of(other)) == b"+OK"
    backend.timeout = 0.5
    with pytest.raises(BackendFailed, match=r"redirected a command|timed out"):
        put(backend, block, b"too early")
    backend.timeout = PATIENCE_S
    healed = threading.Timer(3.0, settle, (slot, source, nodes))
    healed.start()
    try:
        put(backend, block, b"in time")
        assert healed.finished.is_set(), "nobody had the slot"
    finally:
        healed.join()
    assert get(backend, block) == b"in time"
    assert source.ask("EXISTS", backend._name(block)) == b":1"


def test_a_dead_node_affects_only_its_blocks() -> None:
    with cluster(3) as nodes, open_url(nodes[0].url) as backend:
        for node in nodes:  # else the others stop when one is gone
            assert node.ask("CONFIG", "SET", "cluster-require-full-coverage", "no") == b"+OK"
        for block in BLOCKS:
            put(backend, block, content(block, 0, 100))
        backend.timeout = 1.0
        dead = nodes[0]  # the one that the URL names
        dead.kill()
        for block in BLOCKS:
            if home(backend, block, nodes) is dead:
                with pytest.raises(BackendFailed):
                    get(backend, block)
            else:
                assert get(backend, block) == content(block, 0, 100)
        with pytest.raises(BackendFailed):
            backend.sizes(BLOCKS)
        dead.start()
        come_together(nodes)
        backend.timeout = 10.0
        gone = [block for block in BLOCKS if home(backend, block, nodes) is dead]
        put(backend, gone[0], b"again")
        assert get(backend, gone[0]) == b"again"

        nodes[1].freeze()
        backend.timeout = 0.3
        own = [block for block in BLOCKS if home(backend, block, nodes) is nodes[1]]
        others = [block for block in BLOCKS if home(backend, block, nodes) is nodes[2]]
        for frozen, other in zip(own, others[:5], strict=False):
            with pytest.raises(BackendFailed):
                get(backend, frozen)
            assert get(backend, other) == content(other, 0, 100)

        # Another node takes over the slots of the frozen one; failed calls reread the map.
        for node in (nodes[0], nodes[2]):
            slot = str(slot_of(backend, own[0]))
            assert node.ask("CLUSTER", "SETSLOT", slot, "NODE", name_of(nodes[2])) == b"+OK"
        with pytest.raises(BackendFailed):
            get(backend, own[0])
        put(backend, own[0], b"elsewhere")
        assert nodes[2].ask("GET", backend._name(own[0])) == b"elsewhere"


def test_an_invalid_map_is_a_failure(nodes: list[Server]) -> None:
    with FaultProxy(nodes[0].address) as proxy:
        for text in (
            b"*0\r\n",
            b"$1\r\nx\r\n",
            b"*1\r\n:1\r\n",
            b"*1\r\n*1\r\n:1\r\n",
            b"*1\r\n*3\r\n:0\r\n:99999\r\n*2\r\n$1\r\nh\r\n:1\r\n",
            b"*1\r\n*3\r\n:0\r\n:1\r\n*2\r\n$1\r\nh\r\n$1\r\np\r\n",
            b"*1\r\n*3\r\n:0\r\n:1\r\n*2\r\n$1\r\n\xff\r\n:1\r\n",
        ):
            proxy.replace(text)
            with open_url(f"valkey://{proxy.address}") as backend:
                backend.timeout = 0.5
                with pytest.raises(BackendFailed):
                    get(backend, BLOCKS[0])
                proxy.heal()
                backend.timeout = 10.0
                put(backend, BLOCKS[0], b"x")
                assert get(backend, BLOCKS[0]) == b"x"


def test_endless_redirections_are_a_failure(nodes: list[Server]) -> None:
    with FaultProxy(nodes[0].address) as proxy, open_url(f"valkey://{proxy.address}") as backend:
        put(backend, BLOCKS[0], b"x")
        backend.timeout = 1.0
        for kind in (b"MOVED", b"ASK"):
            backend._nodes._slots = [("127.0.0.1", proxy.port)] * SLOTS
            backend._nodes._stale = False
            proxy.replace(b"-%s 3 127.0.0.1:%d\r\n" % (kind, proxy.port))
            with pytest.raises(BackendFailed, match=r"redirected a command|timed out"):
                get(backend, BLOCKS[0])


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_a_store_works_with_the_remaining_nodes(how: str) -> None:
    """One of three nodes is down: blocks of the others are put, found and read without waiting."""
    with cluster(3) as nodes:
        for node in nodes:
            assert node.ask("CONFIG", "SET", "cluster-require-full-coverage", "no") == b"+OK"
        url = f"{nodes[0].url}?timeout=500ms&prefix=one"
        with BlockStore("ns", tiers=["memory://1MiB", url]) as store:
            tier = store._tiered.tiers[0]
            keys = [key(number) for number in range(60)]
            assert store.put(keys, [one * 8 for one in keys], wait=20.0) == 60
            homes = {one: tier.backend.part(store._space + one) for one in keys}
            down = f"127.0.0.1:{nodes[1].port}"
            assert sorted(set(homes.values())) == sorted(f"127.0.0.1:{n.port}" for n in nodes)
            there = [one for one in keys if homes[one] != down]
            lost = [one for one in keys if homes[one] == down]
            nodes[1].kill() if how == "kill" else nodes[1].freeze()
            store._tiered.memory.remove([store._space + one for one in keys])
            for one in lost[:8]:
                assert store.get([one], [memoryview(bytearray(256))]) == 0
            assert set(store.stats()[1].parts) == {down}
            began = time.monotonic()
            for one in there:
                into = bytearray(256)
                assert store.get([one], [memoryview(into)]) == 1
                assert into == one * 8
            new = [key(number) for number in range(100, 160)]
            for one in new:
                assert store.put([one], [one * 8]) == 1
            assert store._tiered.tiers[0].writing.wait(20.0)
            assert time.monotonic() - began < 10.0, "a node that is down is waited for each time"
            store._tiered.memory.remove([store._space + one for one in new])
            kept = [one for one in new if tier.backend.part(store._space + one) != down]
            assert len(kept) > 20
            for one in kept:
                assert store.get([one], [memoryview(bytearray(256))]) == 1
            assert not store.remove(lost[:1]).complete
            assert store.remove(there[:1]).complete
            nodes[1].stop()
            nodes[1].start()
            come_together(nodes)
            deadline = time.monotonic() + 30.0
            while store.stats()[1].parts:  # it is tried again, and comes back
                one = key(1000 + int(time.monotonic() * 1000) % 100_000)
                store.put([one], [one * 8], wait=5.0)
                store._tiered.memory.remove([store._space + one])
                store.get([one], [memoryview(bytearray(256))])
                store.remove([one])
                assert time.monotonic() < deadline, store.stats()[1].parts


def test_each_primary_tells_its_memory(nodes: list[Server]) -> None:
    with open_url(nodes[0].url) as backend:
        told = backend.memory()
    assert {memory.node for memory in told} == {f"127.0.0.1:{node.port}" for node in nodes}
    for memory in told:
        assert memory.used > 0
        assert (memory.limit, memory.policy) == (0, "noeviction")
