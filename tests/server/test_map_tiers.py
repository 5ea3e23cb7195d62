"""Which tiers have what the pool has, node by node, over HTTP: from whole blocks of 64 tokens."""

from __future__ import annotations

import pytest
from browsing import live, plain, until, wake
from real_server import eventually
from see_help import ask, forget_pool, storing, tokens_of, written

from faults import FaultyBackend
from kvkeep.store.backends.memory import MemoryBackend

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("load_first")]

BIG = "memory://16MiB"
# Two prompts that part within a block: of their third block each has its own.
HEAD = tokens_of(1, 160)
LONG = [HEAD + tokens_of(seed, 97) for seed in (2, 3)]
SHORT = tokens_of(4, 49)  # shorter than a block


def the_map(server, **query):
    answer = server.http.get("/kv/map", params={"tiers": True, **query}).raise_for_status().json()
    return answer, [node for node in answer["nodes"] if node["id"] > 0]


def planted(server, *prompts):
    for prompt in prompts:
        ask(server, prompt)
    written(server, *prompts)


def kept(node):
    return node["tokens"], node["tier"], node["tier_tokens"]


def test_what_memory_and_a_file_have(tmp_path):
    with storing(BIG, f"file://{tmp_path}/tier?size=64MiB") as server:
        planted(server, *LONG, SHORT)
        answer, (head, short, *ends) = the_map(server)
        assert answer["tiers"] == ["pool", "memory", "file"]
        assert kept(head) == (160, "file", {"memory": 160, "file": 160})
        assert [kept(end) for end in ends] == [(96, "file", {"memory": 96, "file": 96})] * 2
        assert kept(short) == (48, None, {})
        assert {node["tier"] for node in answer["nodes"] if node["id"] < 0} == {None}
        for node in (head, short, *ends):
            one = server.http.get(f"/kv/map/{node['id']}").json()
            assert kept(one) == kept(node)
            assert kept(the_map(server, root=node["id"])[1][0]) == kept(node)
        # The end of the head is of blocks that end in what is not shown.
        (alone,) = the_map(server, nodes=2)[1]
        assert kept(alone) == (160, "file", {"memory": 128, "file": 128})


def test_what_was_deleted_below_is_in_the_pool_alone(tmp_path):
    with storing(BIG, f"file://{tmp_path}/tier?size=64MiB") as server:
        planted(server, *LONG)
        assert server.engine.clear_store(server.service.namespace(None)).bytes > 0
        _, nodes = the_map(server)
        assert [kept(node) for node in nodes] == [(160, "pool", {}), *[(96, "pool", {})] * 2]


def test_what_a_tier_has_in_part():
    """A tier too small for it: it has some, so it is not in the pool alone, and not whole."""
    with storing("memory://1MiB") as server:
        ask(server, tokens_of(5, 1025))
        eventually(lambda: the_map(server)[1][0]["tier_tokens"])
        assert server.flush(5.0)
        (node,) = the_map(server)[1]
        assert (node["tokens"], node["tier"]) == (1024, "pool")
        assert 0 < node["tier_tokens"]["memory"] < 1024


def test_each_tenant_has_its_own():
    with storing(BIG) as server:
        store, tenants = server.engine.store, []
        for salt in ("one", "two"):
            ask(server, LONG[0], salt=salt)
            tenants.append(server.engine.store_tenant(server.service.namespace(salt)))
        for tenant in tenants:
            eventually(lambda as_who=tenant: store.lookup(LONG[0], tenant=as_who).tokens >= 256)
        store.clear(tenant=tenants[0])
        assert [kept(n)[1:] for n in the_map(server, namespace="one")[1]] == [("pool", {})]
        assert [kept(n)[1:] for n in the_map(server, namespace="two")[1]] == [
            ("memory", {"memory": 256})
        ]


def test_a_tier_that_fails_is_not_asked():
    """It is known what it had; nobody waits for it."""
    backend = FaultyBackend(MemoryBackend(64 << 20))
    backend.timeout = 0.3
    with storing(BIG, backend) as server:
        planted(server, LONG[0])
        backend.hang("get", "sizes")
        try:
            (node,) = the_map(server)[1]
            assert kept(node) == (256, "faulty", {"memory": 256, "faulty": 256})
        finally:
            backend.heal()


def test_loaded_tokens_count_once_in_the_hit_rate(opened):
    with storing(BIG) as server, opened(server) as page:
        planted(server, SHORT, LONG[0])
        for _ in range(3):
            forget_pool(server, LONG[0])
            ask(server, LONG[0])
        live(page)
        # Of a prompt of 49 tokens and four of 257, three times 256.
        said = "of the last ten minutes; 71 % since the start"
        note, saved = page.locator("#rate .note"), page.locator("#saved-tile .note")
        eventually(lambda: plain(note.inner_text()) == said)
        assert "768 tokens were not computed, 768 of them from tiers" in plain(saved.inner_text())


def test_the_picture_by_tier(opened, tmp_path):
    tier = tmp_path / "tier"
    with storing(BIG, f"file://{tier}?size=64MiB") as server, opened(server) as page:
        planted(server, *LONG, SHORT)
        live(page)
        wake(page, server)
        until(page, "document.querySelectorAll('#picture .box').length === 5")
        page.get_by_role("button", name="Pause polling the server").click()
        page.get_by_label("Colour").select_option("tier")
        until(page, "document.querySelectorAll('#picture .h4').length === 3")
        page.locator("#pause").click()
        legend = page.locator("#legend li").all_inner_texts()
        # The first is also for what tiers have in part.
        none = "in no tier completely"
        assert legend == [none, "also in memory", "also in file", "unknown"]
        page.locator("#picture .h4").first.click()
        page.locator("#details dl").wait_for()
        facts = "document.querySelector('#details dl').textContent"
        until(page, f"{facts}.includes('the pool, memory, file')")
        # Of the short one and of what is no run nothing is said that is not known.
        page.locator("#crumbs button").first.click()
        page.locator("#picture .h0:not(:has(.space))").click()
        until(page, f"{facts}.includes('the pool, tiers unknown')")
        page.locator("#picture .space").click()
        until(page, f"{facts}.includes('below400') && !{facts}.includes('cached in')")
        page.locator("#picture .h4").first.click()
        server.engine.clear_store(server.service.namespace(None))
        wake(page, server)
        until(page, "document.querySelectorAll('#picture .h2').length === 3")
        page.get_by_label("Colour").select_option("hits")
        until(page, "!document.getElementById('legend').textContent.includes('pool')")
        page.get_by_label("Colour").select_option("tier")
        until(page, "document.querySelectorAll('#picture .h2').length === 3")
        assert "160" in plain(page.locator("#details dl").inner_text())
