"""A real cache under random requests: explanations agree with it, and with what was sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from served import Served, check

from kvkeep import OutOfPages
from kvkeep.core.keys import as_namespace
from kvkeep.observe.usage import LoadReport
from kvkeep.store import Miss

if TYPE_CHECKING:
    from kvkeep.core.cache import Sequence
    from kvkeep.observe.explain import Explanation

HEADS = [[], [1], [1, 2, 3, 4], list(range(10, 22)), [10, 11, 99]]
BODIES = [[], list(range(100, 113)), list(range(100, 132))]
ENDS = [[], [5], [6, 7, 8, 9]]
PROMPTS = (
    st.tuples(*map(st.sampled_from, (HEADS, BODIES, ENDS)))
    .map(lambda parts: [token for part in parts for token in part])
    .filter(bool)
)
SPACES = st.sampled_from(["", "", "", "a", "b"])


class Told(RuleBasedStateMachine):
    """Opens, publishes, evicts and forgets, and checks each explanation."""

    bounds: dict[str, Any] = {}  # noqa: RUF012 - hypothesis makes no instances of its own

    @initialize(pages=st.integers(12, 40), index=st.sampled_from(["radix", "chain"]))
    def begin(self, pages: int, index: str) -> None:
        self.served = Served(pages, prefix=index, **self.bounds)
        self.open: dict[str, Sequence] = {}
        self.prompts: dict[str, tuple[str, list[int]]] = {}
        self.computed = 0

    def teardown(self) -> None:
        if hasattr(self, "served"):
            for name in list(self.open):
                self.finish(name, "done")
            assert sum(self.served.explainer.computed().values()) == self.computed
            self.served.close()

    # --- what is done ------------------------------------------------------------------------

    @rule(prompt=PROMPTS, space=SPACES, store=st.booleans())
    def ask(self, prompt: list[int], space: str, store: bool) -> None:
        name = f"r{len(self.prompts)}"
        self.served.now += 1
        match = self.served.cache.match(prompt[:-1], space)
        asked = self.served.explainer.prompt(prompt, as_namespace(space), match.miss)
        check(asked)
        try:
            sequence = self.served.open(name, prompt, space, store=store)
        except OutOfPages:
            return
        self.open[name] = sequence
        self.prompts[name] = space, prompt
        found = self.served.why(name)
        assert found.reused.get("pool", 0) == sequence.num_cached == sum(found.reused.values())
        if match.num_tokens == sequence.num_cached:  # else a page in part was given up
            assert asked.reused == found.reused
        self.goes_on_the_same(found)

    @rule(requests=st.lists(st.tuples(PROMPTS, SPACES), min_size=3, max_size=8))
    def run(self, requests: list[tuple[list[int], str]]) -> None:
        """Requests one after the other, each from its beginning to its end."""
        for prompt, space in requests:
            name = f"r{len(self.prompts)}"
            self.ask(prompt, space, store=True)
            if name in self.open:
                self.open[name].publish()
                self.finish(name, "done")

    @precondition(lambda self: self.open)
    @rule(data=st.data(), more=st.lists(st.integers(0, 5), max_size=6))
    def publish(self, data: st.DataObject, more: list[int]) -> None:
        name = data.draw(st.sampled_from(sorted(self.open)))
        sequence = self.open[name]
        try:
            if more:
                sequence.append(more)
                sequence.copies()
        except OutOfPages:
            pass
        sequence.publish(data.draw(st.integers(0, sequence.num_tokens)))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), outcome=st.sampled_from(["done", "aborted"]))
    def end(self, data: st.DataObject, outcome: str) -> None:
        self.finish(data.draw(st.sampled_from(sorted(self.open))), outcome)

    def finish(self, name: str, outcome: str) -> None:
        sequence = self.open.pop(name)
        self.computed += len(self.prompts[name][1]) - sequence.num_cached
        sequence.close()
        self.served.explainer.ended(name, outcome=outcome, generated=0, ttft_s=None, seconds=1.0)

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
        explainer = self.served.explainer
        if explainer.explain(name) is None:
            assert self.bounds, "a request is forgotten only if there are too many"
            return
        before = self.served.why(name)
        damaged = Miss(cut[2], cut[3], "d", "damaged", None, "")
        explainer.loaded(name, LoadReport(((cut[0], cut[1], "disk"),), (damaged,)))
        after = self.served.why(name)
        assert after.reused.get("pool", 0) == before.reused.get("pool", 0)
        explainer.loaded(name, LoadReport())

    # --- what must be said -------------------------------------------------------------------

    def goes_on_the_same(self, found: Explanation) -> None:
        """What is told of a difference is so, and of another prompt of the tenant."""
        for span in found.spans:
            if span.reason != "diverged":
                continue
            said = span.evidence
            space, other = self.prompts[said["nearest"]]
            _, ours = self.prompts[found.id]
            assert space == found.namespace.tenant
            at = said["position"]
            assert ours[:at] == other[:at]
            assert ours[at] != other[at]
            assert said["given"] == ours[max(0, at - 8) : at + 16]
            assert said["cached"] == other[max(0, at - 8) : at + 16]
            assert said["would_reuse"] == found.computed["diverged"]
            for first in range(span.start, span.stop - 7):
                run = ours[first : first + 8]
                assert any(run == other[i : i + 8] for i in range(at, len(other)))


class Short(Told):
    """The same with so little memory that most is forgotten."""

    bounds = {"prompt_tokens": 100, "requests": 3}  # noqa: RUF012


TestTold = Told.TestCase
TestTold.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestShort = Short.TestCase
TestShort.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)
