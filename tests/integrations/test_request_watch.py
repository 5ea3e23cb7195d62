"""What an engine tells of requests, against the engine itself: pages, explanations, usage."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from paged_engine import PAGE, PagedEngine, Running

from kvkeep.core.cost import CostModel
from kvkeep.core.keys import Namespace
from kvkeep.integrations.engine_status import EngineFacts, EngineStatus
from kvkeep.integrations.request_watch import WatchedLoad
from kvkeep.serve.server.tenant_usage import UsagePart
from kvkeep.store import Miss

PAGES = 12
TOKENS = st.integers(1, 2)  # so that prompts begin alike


class Watch(RuleBasedStateMachine):
    """Requests come, are loaded, computed, preempted and ended; the status follows."""

    @initialize()
    def begin(self) -> None:
        self.engine = PagedEngine(PAGES)
        facts = EngineFacts("an engine", "a model", PAGE, PAGES)
        self.status = EngineStatus(
            facts, CostModel(), tiers=tuple, free_pages=lambda: len(self.engine.free) + 1
        )
        self.watch = self.status.watch
        self.running: list[Running] = []
        self.turns: dict[str, int] = {}
        self.asked: dict[str, dict[str, Any]] = {}
        self.waiting = 0

    def teardown(self) -> None:
        if hasattr(self, "status"):
            self.status.close()

    @rule(prompt=st.lists(TOKENS, min_size=1, max_size=22), salt=st.sampled_from(["", "a"]),
          stored=st.integers(0, 5), came=st.integers(0, 5))  # fmt: skip
    def ask(self, prompt: list[int], salt: str, stored: int, came: int) -> None:
        id = f"request {len(self.asked)}"
        there = self.engine.find(salt, prompt)
        first = len(there) * PAGE
        last = max(first, (len(prompt) - 1) // PAGE * PAGE)
        stop = min(first + stored * PAGE, last)  # what a store has behind
        self.engine.hold(there)
        new = self.engine.take(-(-len(prompt) // PAGE) - len(there))
        if new is None:
            self.engine.release(there)
            return
        known = (salt, tuple(prompt[: first + PAGE])) in self.engine.ever
        self.watch.arrived(id, prompt, Namespace(tenant=salt), at=0.0)
        self.watch.found(id, first)
        one = Running(id, salt, list(prompt), len(prompt), first, there + new, first, len(there))
        loading = (first, stop) if stop > first else None
        self.watch.admitted(id, one.table, loading=loading)
        loaded = 0
        if loading is not None:
            until = min(first + came * PAGE, stop)
            loaded = until - first
            sources = ((first, until, "disk"),) if loaded else ()
            lost = [Miss(until, stop, "disk", "late", 0.0, "too slow")] if until < stop else []
            self.watch.loaded(id, WatchedLoad(sources, 0.1, bool(lost)), lambda: lost)
        whole_page = first + PAGE <= len(prompt) - 1
        self.asked[id] = {
            "prompt": len(prompt), "pool": first, "disk": loaded,
            "late": 0 if loading is None else stop - first - loaded,
            "gone": known and whole_page and loading is None,
        }  # fmt: skip
        self.turns[id] = 0
        self.running.append(one)

    @rule(data=st.data(), tokens=st.integers(1, 9))
    def step(self, data: st.DataObject, tokens: int) -> None:
        """Compute some of a prompt, or one token of an answer."""
        if not self.running:
            return
        one = data.draw(st.sampled_from(self.running))
        if one.computed < one.prompt:
            one.computed = min(one.prompt, one.computed + tokens)
        else:
            if one.computed == len(one.tokens):
                one.tokens.append(3)
            more = self.engine.take(-(-len(one.tokens) // PAGE) - len(one.table))
            if more is None:
                return
            one.table += more
            self.watch.grown(one.id, more)
            one.computed += 1
        self.engine.register(one)
        for each in self.watch.unanswered:
            if each.id == one.id:
                self.watch.computed(each, one.computed)
                if len(one.tokens) > one.prompt:
                    self.watch.answering(each)

    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        """A request loses its pages, and gets others: those that it filled may be found again."""
        if not self.running:
            return
        one = data.draw(st.sampled_from(self.running))
        if len(one.tokens) > one.prompt:
            return  # answers are kept out of this
        self.engine.release(one.table)
        there = self.engine.find(one.salt, one.tokens)
        self.engine.hold(there)
        new = self.engine.take(-(-len(one.tokens) // PAGE) - len(there))
        assert new is not None, "it had as many before"
        one.table, one.computed, one.registered = there + new, len(there) * PAGE, len(there)
        self.turns[one.id] += 1
        self.watch.found(one.id, one.computed)
        self.watch.admitted(one.id, one.table, turn=self.turns[one.id])

    @rule(data=st.data(), outcome=st.sampled_from(["done", "aborted"]))
    def end(self, data: st.DataObject, outcome: Any) -> None:
        if not self.running:
            return
        one = data.draw(st.sampled_from(self.running))
        self.running.remove(one)
        answer = one.tokens[one.prompt :]
        self.watch.ended(one.id, outcome, answer=answer, computed=one.computed)
        self.engine.release(one.table)
        self.asked[one.id]["outcome"] = outcome

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "status"):
            return
        explainer = self.status.explainer
        assert self.watch.lost == explainer.lost == explainer.failed == 0
        assert self.watch.running == len(self.running)
        for id, asked in self.asked.items():
            said = explainer.explain(id)
            assert said is not None
            assert said.reused.get("pool", 0) == min(asked["pool"], asked["prompt"] - 1)
            assert said.reused.get("disk", 0) == asked["disk"]
            assert sum(said.reused.values()) + sum(said.computed.values()) == asked["prompt"]
            assert said.computed.get("tier_unavailable", 0) <= asked["late"]
            assert said.outcome == asked.get("outcome")
            if asked["gone"]:  # its first page was full once, and vLLM had it no more
                missed = next(span for span in said.spans if span.reason is not None)
                assert missed.reason not in {"new", "diverged", "other_namespace"}, said.spans
        stats = self.status.stats()
        pages = {name: count for name, count in stats.cache.items() if name.startswith("pages_")}
        states = ("free", "cached_evictable", "cached_held", "private")
        assert sum(pages[f"pages_{one}"] for one in states) == PAGES
        assert stats.engine["prompt_tokens"] == sum(one["prompt"] for one in self.asked.values())
        rows = self.status.usage(UsagePart()).tenants
        assert sum(row.requests for row in rows) == len(self.asked)
        # Full pages are told of when a prompt is computed, or a request ends: never too many.
        held = self.status.stats().cache["pages_cached_held"]
        evictable = self.status.stats().cache["pages_cached_evictable"]
        assert held + evictable <= PAGES


Watch.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestWatch = Watch.TestCase


def watched(pages: int = 8) -> EngineStatus:
    return EngineStatus(EngineFacts("an engine", "a model", PAGE, pages), CostModel(), tiers=tuple)


def serve(
    status: EngineStatus, id: str, prompt: list[int], table: list[int], cached: int = 0
) -> None:
    watch = status.watch
    watch.arrived(id, prompt, Namespace(), at=0.0)
    watch.found(id, cached)
    watch.admitted(id, table)
    for one in watch.unanswered:
        watch.computed(one, len(prompt))
    watch.ended(id, "done", answer=[1], computed=len(prompt))


def test_who_took_the_pages() -> None:
    status = watched()
    first = list(range(10, 22))
    serve(status, "first", first, [1, 2, 3])
    serve(status, "thief", list(range(50, 62)), [3, 2, 1])
    serve(status, "again", first, [4, 5, 6])
    said = status.explainer.explain("again")
    assert said is not None
    evidence = said.spans[0].evidence
    assert (said.spans[0].reason, evidence["by"], evidence["cause"]) == (
        "evicted",
        "thief",
        "pressure",
    )
    assert status.stats().cache["evicted_pages"] == 3
    status.close()


def test_where_prompts_differ() -> None:
    status = watched()
    first = list(range(10, 40))
    serve(status, "first", first, [1, 2, 3, 4, 5, 6, 7])
    serve(status, "second", [*first[:5], 99, *first[6:]], [1, 2, 3, 4, 5, 6, 7], cached=4)
    said = status.explainer.explain("second")
    assert said is not None
    diverged = [span for span in said.spans if span.reason == "diverged"]
    assert diverged[0].evidence["position"] == 5
    assert diverged[0].evidence["nearest"] == "first"
    status.close()


def test_images_make_prompts_differ() -> None:
    status = watched()
    prompt = [9] * 12
    for id, image in (("one", b"cat"), ("other", b"dog")):
        status.watch.arrived(id, prompt, Namespace(), at=0.0, extra=[(2, image)])
        status.watch.found(id, 0)
        status.watch.admitted(id, [1, 2, 3] if id == "one" else [4, 5, 6])
        for one in status.watch.unanswered:
            status.watch.computed(one, 12)
        status.watch.ended(id, "done", answer=[1], computed=12)
    said = status.explainer.explain("other")
    assert said is not None
    assert "evicted" not in said.computed
    assert "computing" not in said.computed
    status.close()


def test_what_is_remembered_has_a_bound() -> None:
    status = watched()
    for number in range(3000):
        serve(status, f"{number}", [number, 1, 2, 3, 4], [1, 2])
    assert len(status.explainer.recent(2000)) == 1000
    assert status.stats().engine["requests"] == 3000
    assert status.watch.lost == 0
    status.close()


def test_prompts_without_tokens_are_left_out() -> None:
    status = watched()
    status.watch.arrived("embeddings", (), Namespace(), at=0.0)
    status.watch.admitted("embeddings", [1, 2])
    status.watch.ended("embeddings", "done")
    assert status.stats().engine["requests"] == status.watch.running == status.watch.waiting == 0
    status.close()
