"""Public prefixes: one copy for all tenants, and nothing of one tenant that another could see."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, precondition, rule

from kvkeep import InvalidValue, OutOfPages, PagedCache
from kvkeep.core.events import Evicted, Stored
from kvkeep.core.keys import Namespace
from kvkeep.core.public import PublicPrefixes, public_namespace, salt_of

if TYPE_CHECKING:
    from kvkeep import Sequence

SYSTEM = list(range(100, 140))  # ten pages of four
PAGE = 4
INDICES = pytest.mark.parametrize("prefix", ["radix", "chain"])


def cache_with(prefix: str = "radix", pages: int = 4000, policy: str = "lru") -> PagedCache:
    cache = PagedCache(pages, PAGE, prefix=prefix, eviction=policy)
    cache.public.declare(SYSTEM)
    return cache


def serve(cache: PagedCache, tokens: list[int], tenant: str, answer: tuple[int, ...] = ()) -> int:
    """Serve a request to its end; return the tokens that had to be computed."""
    with cache.open(tokens, tenant) as sequence:
        computed = len(tokens) - sequence.num_cached
        sequence.copies()
        sequence.publish()
        for token in answer:
            sequence.append(token)
        sequence.copies()
        sequence.publish()
    cache.check()
    return computed


@INDICES
def test_256_tenants_hold_one_copy(prefix: str) -> None:
    cache = cache_with(prefix)
    for number in range(256):
        serve(cache, [*SYSTEM, 7, 8, 9, number], f"tenant {number}")
    assert cache.num_pages - cache.stats().pages_free == 10 + 256
    pages = cache.namespaces()
    assert pages.pop(public_namespace(Namespace())) == 10
    assert set(pages.values()) == {1}
    assert len(pages) == 256


@INDICES
@pytest.mark.parametrize("length", [*range(1, 12), 36, 39, 40, 41, 44, 45])
def test_another_tenants_prompt_is_never_seen(prefix: str, length: int) -> None:
    """The attack: guess a prompt of the victim, and count the tokens that are computed for it."""
    secret = [*SYSTEM, *range(1, 30)]
    guess = (secret if length > 11 else secret[len(SYSTEM) :])[: length or None]
    guess = guess if length > 11 else [*SYSTEM, *guess]
    without, with_victim = cache_with(prefix), cache_with(prefix)
    for cache in (without, with_victim):
        serve(cache, [*SYSTEM, 50], "somebody")  # the public part is there
    serve(with_victim, secret, "victim", answer=(1, 2, 3, 4, 5))
    serve(with_victim, secret[:37], "victim", answer=(1, 2, 3, 4, 5))
    assert (
        with_victim.match(guess, "attacker").num_tokens
        == without.match(guess, "attacker").num_tokens
    )
    costs = [
        serve(cache, guess, "attacker", answer=tuple(secret)) for cache in (without, with_victim)
    ]
    assert costs[0] == costs[1]
    costs = [serve(cache, secret, "attacker") for cache in (without, with_victim)]
    assert costs[0] == costs[1]


def test_a_salt_cannot_be_sent_as_an_extra() -> None:
    cache = cache_with()
    serve(cache, [*SYSTEM, 1, 2, 3, 4, 5], "victim")
    salt = salt_of(Namespace(tenant="victim"))
    for forged in (salt, b"victim"):
        found = cache.match([*SYSTEM, 1, 2, 3, 4, 5], "attacker", extra=[(len(SYSTEM), forged)])
        assert found.num_tokens == len(SYSTEM)


def test_no_tenant_names_the_public_namespace() -> None:
    cache = cache_with()
    with pytest.raises(InvalidValue, match="without scope"):
        cache.open([1], public_namespace(Namespace()))
    assert cache.match(SYSTEM, "public").num_tokens == 0


def test_a_declaration_while_requests_run() -> None:
    cache = PagedCache(200, PAGE)
    serve(cache, [*SYSTEM, 1], "a")
    running = cache.open([*SYSTEM, 2], "b")
    cache.public.declare(SYSTEM)
    running.copies()
    running.publish()
    assert {space.scope for space in cache.namespaces()} == {""}
    assert serve(cache, [*SYSTEM, 1], "a") == 41  # computed once more, for all
    assert serve(cache, [*SYSTEM, 1], "b") == 1
    running.close()
    cache.check()


def test_a_cut_within_the_public_part_leaves_no_private_token_there() -> None:
    for length, prefix in product(range(42), ("radix", "chain")):
        cache = cache_with(prefix)
        with cache.open([*SYSTEM, 1, 2], "a") as sequence:
            sequence.copies()
            sequence.publish()
            sequence.truncate(length)
            fork = sequence.fork()
            for one in (sequence, fork):
                one.append([7, 7, 7, 7, 7, 7, 7])
                one.copies()
                one.publish()
                one.append(8)
                assert one.tokens.tolist() == [*SYSTEM, 1, 2][:length] + [7] * 7 + [8]
                salted = (min(length // PAGE * PAGE, 40), salt_of(Namespace(tenant="a")))
                assert one.extras == (salted,)
            fork.close()
            cache.check()
        public = public_namespace(Namespace())
        assert cache.namespaces()[public] <= 10
        for other in range(42):  # what "a" added is never found by another tenant
            assert serve(cache, [*SYSTEM, 1, 2][:other] + [7] * 9, "b") >= 9


def test_clear_and_remove_leave_the_public_part() -> None:
    cache = cache_with()
    for tenant in "ab":
        serve(cache, [*SYSTEM, 1, 2, 3, 4], tenant)
        serve(cache, [1, 2, 3, 4], tenant)
    assert cache.remove([*SYSTEM, 1, 2, 3, 4], "a").pages == 1
    assert cache.remove(SYSTEM, "a").pages == 0
    assert cache.clear("a") == 1
    assert cache.clear("b") == 2
    assert cache.namespaces() == {public_namespace(Namespace()): 10}
    assert cache.map("b").pages == 0
    assert cache.clear() == 10


def test_a_tenants_map_has_its_private_runs_alone() -> None:
    cache = cache_with()
    for prompt, tenant in (
        ([*SYSTEM, 1, 2, 3, 4], "a"), ([*SYSTEM, *[9] * 8], "a"), ([5] * 8, "a"),
        ([*SYSTEM, *[8] * 8], "b"),
    ):  # fmt: skip
        serve(cache, prompt, tenant)
    for tenant, heads in (("a", [[1, 2], [5, 5], [9, 9]]), ("b", [[8, 8]])):
        for nodes in (1, 2, 400):
            shown = cache.map(tenant, nodes=nodes)
            assert shown.pages == sum(node.pages for node in shown.nodes)
            assert all(node.parent is None for node in shown.nodes)
        found = [node.head[:2].tolist() for node in shown.nodes if node.head is not None]
        assert sorted(found) == heads
    shown = cache.map()
    assert shown.pages == sum(node.pages for node in shown.nodes) == 10 + 1 + 2 + 2 + 2


@pytest.mark.parametrize("rows", [[[]], [[-1]], [[[1]]], ["text"]])
def test_wrong_rows_are_refused(rows: list[object]) -> None:
    public = PublicPrefixes([[1]])
    with pytest.raises(InvalidValue):
        public.declare(*rows)  # type: ignore[arg-type]
    assert len(public) == 1


# --- a state machine against whole token lists -------------------------------------------------


ROWS = ([1, 1, 2, 2], [1, 1, 2, 2, 3, 3, 1], [2, 2])
TENANTS = st.sampled_from(["", "a", "b"])
PROMPTS = st.one_of(
    st.lists(st.integers(1, 3), min_size=1, max_size=10),
    st.tuples(st.sampled_from(ROWS), st.lists(st.integers(1, 3), max_size=8)).map(
        lambda parts: [*parts[0], *parts[1]]
    ),
)


class PublicMachine(RuleBasedStateMachine):
    """Every tenant has a cache of its own in the oracle: sets of prefixes, and one set more."""

    live = Bundle("live")

    @initialize(
        prefix=st.sampled_from(["radix", "chain"]),
        pages=st.sampled_from([200, 9]),
        policy=st.sampled_from(["lru", "priority", "returns"]),
    )
    def make(self, prefix: str, pages: int, policy: str) -> None:
        self.cache = PagedCache(pages, 2, prefix=prefix, eviction=policy)
        self.exact = prefix == "radix"
        self.rows: list[list[int]] = []
        self.stored: dict[int, tuple[str | None, tuple[int, ...], int]] = {}
        self.public: dict[int, tuple[str, int]] = {}
        self.cache.subscribe(self.see)

    def see(self, event: object) -> None:
        """Follow the content: page → whose, all tokens up to its end, where its salt is."""
        if isinstance(event, Stored):
            whose = None if event.namespace.scope else event.namespace.tenant
            before, parent = (), event.parent
            if parent >= 0:
                above, before, _ = self.stored[parent]
                assert above in {None, whose}
            for at, page in enumerate(event.pages.tolist()):
                before = (*before, *event.tokens[2 * at : 2 * at + 2].tolist())
                if whose is None:  # declared tokens alone are public
                    assert any(tuple(row[: len(before)]) == before for row in self.rows)
                public = self.stored[parent][2] if parent >= 0 else 0
                public = len(before) if whose is None else public
                twin = (whose, before, public)
                assert twin not in self.stored.values(), "a page is stored twice"
                self.stored[page] = twin
                parent = page
        elif isinstance(event, Evicted):
            for page in event.pages.tolist():
                del self.stored[page]

    def border(self, tokens: list[int]) -> int:
        """The oracle of the border: the longest declared row, in whole pages."""
        fits = [len(row) // 2 * 2 for row in self.rows]
        fits = [n for n, row in zip(fits, self.rows, strict=True) if row[:n] == tokens[:n]]
        return max(fits, default=0)

    def expected(self, tokens: list[int], tenant: str) -> int:
        """What the tenant's own cache and the public part have of a prompt."""
        border, best, wanted = self.border(tokens), 0, tokens[:-1]
        for whose, path, public in self.stored.values():
            if whose is None and not border:
                continue
            if whose is not None and (whose != tenant or public != border):
                continue
            common = next(
                (i for i, (x, y) in enumerate(zip(path, wanted, strict=False)) if x != y),
                min(len(path), len(wanted)),
            )
            if whose is None:
                common = min(common, border)
            elif common <= border:
                continue
            best = max(best, common if self.exact else common // 2 * 2)
        return best

    @rule(row=st.sampled_from(ROWS))
    def declare(self, row: list[int]) -> None:
        self.cache.public.declare(row)
        if row not in self.rows:
            self.rows.append(row)

    @rule(target=live, tokens=PROMPTS, tenant=TENANTS)
    def open(self, tokens: list[int], tenant: str) -> tuple[Sequence, str] | None:
        expected = self.expected(tokens, tenant)
        try:
            sequence = self.cache.open(tokens, tenant)
        except OutOfPages:
            return None
        if self.cache.num_pages > 100:
            assert sequence.num_cached == expected
        assert sequence.num_cached <= expected
        return sequence, tenant

    @rule(one=live, tokens=st.lists(st.integers(1, 3), min_size=1, max_size=4))
    def append(self, one: tuple[Sequence, str] | None, tokens: list[int]) -> None:
        if one is not None and not one[0].closed:
            try:
                one[0].append(tokens)
            except OutOfPages:
                return

    @rule(one=live)
    def publish(self, one: tuple[Sequence, str] | None) -> None:
        if one is not None and not one[0].closed:
            one[0].copies()
            one[0].publish()

    @rule(one=live, length=st.integers(0, 12))
    def truncate(self, one: tuple[Sequence, str] | None, length: int) -> None:
        if one is not None and not one[0].closed:
            one[0].truncate(min(length, one[0].num_tokens))

    @rule(target=live, one=live)
    def fork(self, one: tuple[Sequence, str] | None) -> tuple[Sequence, str] | None:
        return None if one is None or one[0].closed else (one[0].fork(), one[1])

    @rule(one=live, keep=st.booleans())
    def close(self, one: tuple[Sequence, str] | None, keep: bool) -> None:
        if one is not None and not one[0].closed:
            one[0].close(keep=keep)

    @rule(count=st.integers(0, 5))
    def evict(self, count: int) -> None:
        self.cache.evict(count)

    @rule(tenant=TENANTS)
    def clear(self, tenant: str) -> None:
        self.cache.clear(tenant)

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.agree()

    @precondition(lambda self: hasattr(self, "cache"))
    @rule()
    def agree(self) -> None:
        self.cache.check()
        counts: dict[str | None, int] = {}
        for whose, _, _ in self.stored.values():
            counts[whose] = counts.get(whose, 0) + 1
        told = {
            None if space.scope else space.tenant: pages
            for space, pages in self.cache.namespaces().items()
            if pages
        }
        assert told == counts


TestPublicMachine = PublicMachine.TestCase
