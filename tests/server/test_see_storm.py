"""A storm of random requests: every computed token has its reason, and every total agrees."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from real_server import eventually
from see_help import COMPLETIONS, accounts, storing, tokens_of

from kvkeep.serve.engine import Limits

pytestmark = pytest.mark.model

CLIENTS = 6
EACH = 9
REASONS = {
    "new", "diverged", "evicted", "not_admitted", "other_namespace", "page_remainder",
    "computing", "tier_unavailable", "damaged", "not_loaded", "last_token",
}  # fmt: skip


def bodies(chance):
    """What one client asks: prompts that grow, change in the middle, come again."""
    talks = [tokens_of(seed, 150) for seed in range(4)]
    for _ in range(EACH):
        prompt = list(chance.choice(talks))[: chance.choice((3, 16, 17, 60, 149, 150))]
        if chance.random() < 0.4:
            prompt += tokens_of(chance.randrange(50), chance.randrange(1, 80))
        if chance.random() < 0.3:
            prompt[chance.randrange(len(prompt))] = chance.randrange(5, 4000)
        yield {
            "prompt": [prompt] * chance.choice((1, 1, 1, 2)),
            "max_tokens": chance.choice((1, 1, 2, 12)),
            "temperature": 0,
            "cache_salt": chance.choice((None, None, "a")),
            "kvkeep": {"store": chance.random() < 0.8},
        }


def storm(server, seed):
    """Ask all of it at once; id → usage of the answers."""

    def client(number):
        chance = random.Random(f"{seed} {number}")
        answers = []
        for body in bodies(chance):
            answer = server.http.post(COMPLETIONS, json=body).raise_for_status().json()
            answers.append((answer["id"], len(body["prompt"]), answer["usage"]))
        return answers

    with ThreadPoolExecutor(CLIENTS) as pool:
        return [answer for answers in pool.map(client, range(CLIENTS)) for answer in answers]


def check(server, answers):
    reasons = {}
    reused = 0
    for id, prompts, usage in answers:
        told = [
            server.http.get(f"/kv/explain/{id}" + (f".{number}" if number else "")).json()
            for number in range(prompts)
        ]
        for one in told:
            accounts(one)
            assert set(one["computed"]) <= REASONS
            assert one["computed"]  # the last token, at least
            assert one["sentence"]
            for reason, tokens in one["computed"].items():
                reasons[reason] = reasons.get(reason, 0) + tokens
        cached = sum(sum(one["reused"].values()) for one in told)
        assert cached == usage["prompt_tokens_details"]["cached_tokens"]
        assert sum(one["prompt_tokens"] for one in told) == usage["prompt_tokens"]
        loaded = sum(n for one in told for where, n in one["reused"].items() if where != "pool")
        assert loaded == usage["kvkeep"]["loaded_tokens"]
        reused += cached
    summary = server.http.get("/kv/summary?last=1000").json()
    assert summary["computed"] == reasons
    assert sum(summary["reused"].values()) == reused
    causes = summary["causes"]
    assert sum(cause["tokens"] for cause in causes) == sum(reasons.values())
    advised = [cause["tokens"] for cause in causes if cause["advice"]]
    assert advised == sorted(advised, reverse=True)
    assert all(cause["advice"] for cause in causes[: len(advised)])  # what can be done is first
    engine = server.stats()["engine"]
    assert (engine["prompt_tokens"], engine["cached_tokens"]) == (summary["prompt_tokens"], reused)
    assert engine["observer_errors"] == 0
    explainer = server.service.watching.explainer
    assert (explainer.lost, explainer.failed) == (0, 0)
    tenants = server.http.get("/kv/live").json()["tenants"]
    assert sum(one["reused_tokens"] for one in tenants) <= reused  # it may be half a second old
    return reasons


@pytest.mark.parametrize("overtaken", [0, 32])
def test_in_a_pool_that_is_too_small(start_server, overtaken):
    limits = Limits(max_running=4, step_tokens=64, max_waiting=64, max_overtaken=overtaken)
    with start_server(num_pages=56, limits=limits) as server:
        reasons = check(server, storm(server, overtaken))
        wanted = {"new", "evicted", "page_remainder", "last_token", "not_admitted", "diverged"}
        assert wanted <= set(reasons)
        server.assert_idle()
        eventually(lambda: tenants(server) == pages(server))


def tenants(server):
    told = server.http.get("/kv/live").json()["tenants"]
    return {one["cache_salt"]: one["pages"] for one in told}


def pages(server):
    return {space.tenant: pages for space, pages in server.engine.cache.namespaces().items()}


def test_with_tiers(tmp_path):
    tiers = ("memory://2MiB", f"file://{tmp_path}/tier?size=3MiB")
    with storing(*tiers, num_pages=56, token_s=0.0005) as server:
        reasons = check(server, storm(server, "tiers"))
        assert {"new", "page_remainder"} <= set(reasons)
        summary = server.http.get("/kv/summary").json()
        # What went from the pool came back, from where it was just then.
        assert summary["reused"]["pool"] > 0
        assert set(summary["reused"]) & {"memory", "file"}
        server.assert_idle()
