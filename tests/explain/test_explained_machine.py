"""A real cache under random requests: what is said must be what a naive dictionary says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from served import SIZE, Served, check

from kvkeep import OutOfPages
from kvkeep.core.events import Evicted, Stored
from kvkeep.core.keys import as_namespace
from kvkeep.observe.explain import Explanation, Missing, Span

if TYPE_CHECKING:
    from kvkeep.core.cache import Sequence
    from kvkeep.core.events import Event

Name = tuple[str, tuple[int, ...]]
"""A unit: its namespace, and all tokens up to its end."""

HEADS = [[], [1], [1, 2, 3, 4], list(range(10, 22)), [10, 11, 99]]
BODIES = [[], list(range(100, 113)), list(range(100, 132))]
ENDS = [[], [5], [6, 7, 8, 9]]
PROMPTS = (
    st.tuples(*map(st.sampled_from, (HEADS, BODIES, ENDS)))
    .map(lambda parts: [token for part in parts for token in part])
    .filter(bool)
)
SPACES = st.sampled_from(["", "", "", "a", "b"])


@dataclass
class Last:
    """The last that happened to a unit: "cached", "evicted" or "asked"."""

    what: str
    cause: str = ""
    by: str | None = None


class Told(RuleBasedStateMachine):
    """Opens, publishes, evicts and forgets, and compares each explanation."""

    bounds: dict[str, Any] = {}  # noqa: RUF012 - hypothesis makes no instances of its own
    exact = True

    @initialize(pages=st.integers(12, 40), index=st.sampled_from(["radix", "chain"]))
    def begin(self, pages: int, index: str) -> None:
        self.served = Served(pages, prefix=index, **self.bounds)
        self.served.cache.subscribe(self.see)
        self.last: dict[Name, Last] = {}
        self.evicted_ever: set[Name] = set()
        self.pages: dict[int, Name] = {}
        self.events: list[Event] = []
        self.open: dict[str, tuple[Sequence, bool]] = {}
        self.ended: dict[str, tuple[bool, str]] = {}
        self.prompts: dict[str, tuple[str, list[int]]] = {}

    def teardown(self) -> None:
        if hasattr(self, "served"):
            self.served.close()

    def see(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Stored):
            before = self.pages[event.parent][1] if event.parent >= 0 else ()
            for at, page in enumerate(event.pages.tolist()):
                stop = (at + 1) * SIZE
                name = (event.namespace.tenant, (*before, *event.tokens[:stop].tolist()))
                self.pages[page] = name
                self.last[name] = Last("cached")
        elif isinstance(event, Evicted):
            for page in event.pages.tolist():
                name = self.pages.pop(page)
                self.evicted_ever.add(name)
                self.last[name] = Last("evicted", event.reason)

    # --- what is done ------------------------------------------------------------------------

    @rule(prompt=PROMPTS, space=SPACES, store=st.booleans())
    def ask(self, prompt: list[int], space: str, store: bool) -> None:
        name = f"r{len(self.prompts)}"
        before, ever = dict(self.last), set(self.evicted_ever)
        self.events = []
        self.served.now += 1
        cached = self.served.cache.match(prompt, space).num_tokens
        told = self.served.explainer.prompt(prompt, as_namespace(space), cached)
        try:
            sequence = self.served.open(name, prompt, space, store=store)
        except OutOfPages:
            return
        for event in self.events:
            if isinstance(event, Evicted):
                for unit, last in self.last.items():
                    if last.what == "evicted" and before.get(unit, last).what == "cached":
                        last.by = name
        self.open[name] = sequence, store
        self.prompts[name] = space, prompt
        found = self.served.why(name)
        if cached == sequence.num_cached:  # else a page in part was given up, for want of memory
            assert told.spans == found.spans
        self.compare(name, found, sequence.num_cached, before, ever)
        for unit in self.units(space, prompt)[sequence.num_cached // SIZE :]:
            if self.last.get(unit, Last("")).what != "cached":
                self.last[unit] = Last("asked", by=name)

    @rule(
        requests=st.lists(st.tuples(PROMPTS, SPACES), min_size=3, max_size=8), aside=st.booleans()
    )
    def run(self, requests: list[tuple[list[int], str]], aside: bool) -> None:
        """Requests one after the other, each from its beginning to its end."""
        for prompt, space in requests:
            name = f"r{len(self.prompts)}"
            self.ask(prompt, space, store=True)
            if name in self.open:
                sequence, _ = self.open[name]
                sequence.publish()
                if aside and sequence.num_tokens % 2:
                    continue
                self.finish(name, "done")

    @precondition(lambda self: self.open)
    @rule(data=st.data(), more=st.lists(st.integers(0, 5), max_size=6))
    def publish(self, data: st.DataObject, more: list[int]) -> None:
        name = data.draw(st.sampled_from(sorted(self.open)))
        sequence, store = self.open[name]
        if not store:
            return
        try:
            if more and not len(sequence.tokens) > len(self.prompts[name][1]):
                sequence.append(more)
                sequence.copies()
        except OutOfPages:
            pass
        sequence.publish(data.draw(st.integers(0, sequence.num_tokens)))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), outcome=st.sampled_from(["done", "aborted"]), keep=st.booleans())
    def end(self, data: st.DataObject, outcome: str, keep: bool) -> None:
        self.finish(data.draw(st.sampled_from(sorted(self.open))), outcome, keep=keep)

    def finish(self, name: str, outcome: str, *, keep: bool = True) -> None:
        sequence, store = self.open.pop(name)
        sequence.close(keep=keep)
        self.served.explainer.ended(name, outcome=outcome, generated=0, ttft_s=None, seconds=1.0)
        self.ended[name] = store, outcome

    @rule(pages=st.integers(1, 12))
    def evict(self, pages: int) -> None:
        self.served.cache.evict(pages)

    @rule(space=st.one_of(st.none(), SPACES))
    def clear(self, space: str | None) -> None:
        self.served.cache.clear(space)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        """A store says something, somewhere: it is still all covered, and the pool's stays."""
        name = data.draw(st.sampled_from(sorted(self.open)))
        size = len(self.prompts[name][1])
        cut = sorted(data.draw(st.lists(st.integers(0, size + 3), min_size=4, max_size=4)))
        if self.served.explainer.explain(name) is None:
            assert self.bounds, "a request is forgotten only if there are too many"
            return
        before = self.served.why(name)
        self.served.explainer.loaded(
            name, [(cut[0], cut[1], "disk")], [Missing(cut[2], cut[3], "damaged", {"tier": "d"})]
        )
        after = self.served.why(name)
        assert after.reused.get("pool", 0) == before.reused.get("pool", 0)
        self.served.explainer.loaded(name, [], [])

    # --- what must be said -------------------------------------------------------------------

    @staticmethod
    def units(space: str, prompt: list[int]) -> list[Name]:
        return [(space, tuple(prompt[:stop])) for stop in range(SIZE, len(prompt) + 1, SIZE)]

    def compare(
        self,
        name: str,
        found: Explanation,
        cached: int,
        before: dict[Name, Last],
        ever: set[Name],
    ) -> None:
        check(found)
        assert found.reused == ({"pool": cached} if cached else {})
        space, prompt = self.prompts[name]
        units = self.units(space, prompt)
        for span in found.spans:
            for at in range(span.start, span.stop):
                unit = units[at // SIZE] if at // SIZE < len(units) else None
                if span.reason == "evicted":
                    self.truly_evicted(space, prompt, unit, ever)
                if self.exact and span.reason not in {None, "last_token"}:
                    assert (unit is None) or self.expected(span, before.get(unit), unit, before), (
                        f"token {at} of {prompt} in {space!r}: {span}, {before.get(unit)}"
                    )
            if span.reason == "diverged":
                self.goes_on_the_same(span, found, prompt, before)

    @staticmethod
    def truly_evicted(space: str, prompt: list[int], unit: Name | None, ever: set[Name]) -> None:
        if unit is not None:
            assert unit in ever
        else:  # tokens that fill no page: one that begins with them was there, and went
            whole = tuple(prompt)
            assert any(one[0] == space and one[1][: len(whole)] == whole for one in ever)

    def expected(self, span: Span, last: Last | None, unit: Name, before: dict[Name, Last]) -> bool:
        """Whether the reason is what the dictionary says of a full unit."""
        reason, said = span.reason, span.evidence
        elsewhere = any(
            tokens == unit[1] and space != unit[0] and other.what == "cached"
            for (space, tokens), other in before.items()
        )
        if last is None:
            if reason == "other_namespace":
                return elsewhere
            return reason in {"new", "diverged", "page_remainder"} and not elsewhere
        if last.what == "cached":
            return reason == "page_remainder"
        if last.what == "evicted":
            return reason == "evicted" and said["cause"] == last.cause
        assert last.by is not None
        if last.by in self.open:
            store = self.open[last.by][1]
            if store:
                return reason == "computing" and said["by"] == last.by
            return reason == "not_admitted" and said["why"] == "store_false"
        store, outcome = self.ended[last.by]
        why = "given_up" if outcome == "aborted" else "unknown"
        return reason == "not_admitted" and said["why"] == (why if store else "store_false")

    def goes_on_the_same(
        self, span: Span, found: Explanation, prompt: list[int], before: dict[Name, Last]
    ) -> None:
        said = span.evidence
        assert said["would_reuse"] == found.computed["diverged"]
        space, other = self.prompts[said["nearest"]]
        assert space == found.namespace.tenant
        position = said["position"]
        assert prompt[:position] == other[:position]
        assert prompt[position] != other[position]
        assert said["given"] == prompt[max(0, position - 8) : position + 16]
        assert said["cached"] == other[max(0, position - 8) : position + 16]
        stretch = prompt[span.start : span.stop]
        there = [unit for unit in before if before[unit].what == "cached" and unit[0] == space]
        assert any(
            other[at : at + len(stretch)] == stretch
            and any(
                len(unit[1]) >= at + len(stretch)
                and list(unit[1][: at + len(stretch)]) == other[: at + len(stretch)]
                for unit in there
            )
            for at in range(position, len(other))
        )

    @invariant()
    def bounded(self) -> None:
        if not hasattr(self, "served") or not self.bounds:
            return
        mirror = self.served.explainer._mirror
        self.served.explainer.recent(0)
        assert len(mirror.ledger) <= self.bounds["units"] + self.served.cache.num_pages
        assert mirror.prompts.tokens <= self.bounds["prompt_tokens"] or len(mirror.prompts) == 1
        assert len(self.served.explainer._records) <= self.bounds["requests"]


class Short(Told):
    """The same with so little memory that most is forgotten."""

    bounds = {"units": 40, "prompt_tokens": 60, "requests": 3}  # noqa: RUF012
    exact = False


TestTold = Told.TestCase
TestTold.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestShort = Short.TestCase
TestShort.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)
