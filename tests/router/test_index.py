"""The index against a naive model, and what it makes of what makes no sense."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvkeep.serve.router import Place, PlacementIndex
from kvkeep.serve.router.keys import PrefixKeys, length_of

PLACES = [Place("a"), Place("a", 1), Place("b")]
TIERS = ["GPU", "CPU"]
# The beginnings of a few prompts that share theirs: what is stored twice, and half, is the point.
PROMPTS = [[0] * 24, [0] * 12 + [1] * 12, [0] * 6 + [1] * 18, [0, 1] * 12]
TOKENS = st.builds(lambda prompt, end: prompt[:end], st.sampled_from(PROMPTS), st.integers(1, 24))
RARELY = st.sampled_from([False] * 9 + [True])
SALTS = st.sampled_from(["", "", "", "salt"])


class Naive:
    """What places hold, as whole prefixes: (place, tier, hash) → prefix and block size, copies."""

    def __init__(self) -> None:
        self.blocks: dict[tuple, tuple[tuple, int]] = {}
        self.copies: Counter[tuple] = Counter()
        self.sizes: set[tuple[Place, str, int]] = set()
        """Who told of blocks of which size in which tier."""

    def find(self, place, block):
        for tier in TIERS:
            if (place, tier, block) in self.blocks:
                return self.blocks[place, tier, block][0]
        return None

    def store(self, place, tier, hashes, *, parent, tokens, size, space):
        before = (space,) if parent is None else self.find(place, parent)
        if before is None:
            return
        self.sizes.add((place, tier, size))
        for number, block in enumerate(hashes):
            before += tuple(tokens[number * size : (number + 1) * size])
            name = (place, tier, block)
            if name in self.blocks and self.blocks[name][0] != before:
                self.copies[name] = 0
            self.blocks[name] = (before, size)
            self.copies[name] += 1

    def remove(self, place, tier, block):
        name = (place, tier, block)
        if name in self.blocks:
            self.copies[name] -= 1
            if not self.copies[name]:
                del self.blocks[name]

    def clear(self, place):
        for name in [name for name in self.blocks if name[0] == place]:
            del self.blocks[name]
            del self.copies[name]
        self.sizes = {told for told in self.sizes if told[0] != place}

    def lookup(self, place, tokens, space, sizes) -> tuple[int, list[dict]]:
        """Tokens, and the ways in which tiers may share them (one for each block size)."""
        best = 0
        ways: list[dict] = []
        for size in sizes:
            tiers: Counter[str] = Counter()
            at = 0
            these = [
                one
                for one in TIERS
                if any(tier == one and size % other == 0 for _, tier, other in self.sizes)
            ]
            while at + size <= len(tokens):
                prefix = (space, *tokens[: at + size])
                there = [
                    tier
                    for tier in these
                    if any(
                        name[:2] == (place, tier) and held == prefix
                        for name, (held, _) in self.blocks.items()
                    )
                ]
                if not there:
                    break
                tiers[there[0]] += size
                at += size
            if at > best:
                best, ways = at, []
            if at == best:
                ways.append(dict(tiers))
        return best, ways


class Indexing(RuleBasedStateMachine):
    """Random events, with hashes that are names of prefixes (as everybody's are) or reused ones."""

    MOST = 1_000_000

    @initialize()
    def begin(self) -> None:
        self.index = PlacementIndex(TIERS, most_blocks=self.MOST)
        self.naive = Naive()
        self.sizes: dict[Place, set[int]] = {place: set() for place in PLACES}
        self.doubled: set[Place] = set()
        """Places that used a hash for two prefixes."""

    @rule(
        place=st.sampled_from(PLACES), tier=st.sampled_from(TIERS), tokens=TOKENS, salt=SALTS,
        size=st.sampled_from([2, 2, 3, 6]), skip=st.sampled_from([0, 0, 0, 1, 3]), doubled=RARELY,
    )  # fmt: skip
    def store(self, *, place, tier, tokens, salt, size, skip, doubled):
        names = [hash((salt, size, *tokens[: at + size])) for at in range(0, len(tokens), size)]
        names = names[: len(tokens) // size]
        skip = min(skip, len(names))
        parent = names[skip - 1] if skip else None
        hashes = names[skip:]
        if doubled and hashes:  # a hash that stands for something else already
            hashes[-1] = hash(("", size, 0, 0))
            self.doubled.add(place)
        tokens = tokens[skip * size : len(names) * size]
        if not hashes:
            return
        known = parent is None or self.naive.find(place, parent) is not None
        self.naive.store(place, tier, hashes, parent=parent, tokens=tokens, size=size, space=salt)
        self.index.store(place, hashes, parent, tokens, size, tier=tier, salt=salt)
        if known:
            self.sizes[place].add(size)

    @rule(data=st.data(), often=st.integers(1, 3))
    def remove(self, data, often):
        known = sorted(self.naive.blocks, key=repr)
        for _ in range(often):  # copies, one after the other; in the end one that is not there
            place, tier, block = data.draw(st.sampled_from([*known, (PLACES[0], "GPU", 12345)]))
            self.naive.remove(place, tier, block)
            self.index.remove(place, [block], tier=tier)

    @rule(place=st.sampled_from(PLACES), really=RARELY)
    def clear(self, place, really):
        if not really:
            return
        self.naive.clear(place)
        self.index.clear(place)
        self.sizes[place].clear()
        self.doubled.discard(place)

    @rule(tokens=TOKENS, salt=SALTS)
    def look(self, tokens, salt):
        found = self.index.lookup(np.array(tokens, np.int32), "", salt)
        for place in PLACES:
            wanted, ways = self.naive.lookup(place, tokens, salt, self.sizes[place])
            held = found.get(place)
            assert (held.tokens if held else 0) == wanted
            if wanted:
                assert sum(held.tiers.values()) == wanted
                assert held.tiers in ways
        assert all(held.tokens for held in found.values())

    @invariant()
    def it_agrees_with_itself(self) -> None:
        if hasattr(self, "index"):
            self.index.check()
            assert len(self.index) == len(self.naive.blocks)


TestIndexing = Indexing.TestCase
TestIndexing.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class Bounded(Indexing):
    """The same lives where an instance may have few blocks: some are forgotten, none is made up.

    A hash of two prefixes, one of which was forgotten, stands for the other one: what follows it is
    not what the model says, which forgets neither.
    """

    MOST = 12

    @rule(tokens=TOKENS, salt=SALTS)
    def look(self, tokens, salt):
        found = self.index.lookup(np.array(tokens, np.int32), "", salt)
        for place, held in found.items():
            truth, _ = self.naive.lookup(place, tokens, salt, self.sizes[place])
            assert 0 < held.tokens <= (len(tokens) if place in self.doubled else truth)
            assert sum(held.tiers.values()) == held.tokens

    @invariant()
    def it_agrees_with_itself(self) -> None:
        if not hasattr(self, "index"):
            return
        self.index.check()
        for place, stocks in self.index._places.items():
            for tier, stock in stocks.items():
                for block, key in stock.blocks.items() if place not in self.doubled else ():
                    prefix, _ = self.naive.blocks[place, tier, block]
                    assert length_of(key) == len(prefix) - 1
        for name in ("a", "b"):
            known, evicted = self.index.instance_blocks(name)
            told = sum(held[0].instance == name for held in self.naive.blocks)
            assert known <= min(told, self.MOST)
            if not evicted:
                assert known == told


TestBounded = Bounded.TestCase
TestBounded.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def row(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def test_instances_with_other_hashes_and_sizes_are_compared_by_what_they_hold():
    index = PlacementIndex()
    prompt = list(range(100, 164))
    index.store(PLACES[0], [b"x", b"y"], None, prompt[:32], 16)
    index.store(PLACES[0], [b"z"], b"y", prompt[32:48], 16)
    index.store(PLACES[2], [7], None, prompt[:64], 64)
    found = index.lookup(row(*prompt, 1, 2, 3))
    assert {place: held.tokens for place, held in found.items()} == {PLACES[0]: 48, PLACES[2]: 64}
    assert index.lookup(row(*prompt[:63])).keys() == {PLACES[0]}


def test_marks_salts_and_adapters_tell_prefixes_apart():
    index = PlacementIndex()
    prompt = list(range(8))
    index.store(PLACES[0], [1, 2], None, prompt, 4, salt="s")
    index.store(PLACES[0], [3, 4], None, prompt, 4, lora="l")
    index.store(PLACES[2], [5, 6], None, prompt, 4, marks=["", "an image"])
    assert index.lookup(row(*prompt), salt="s")[PLACES[0]].tokens == 8
    assert index.lookup(row(*prompt), lora="l")[PLACES[0]].tokens == 8
    assert index.lookup(row(*prompt), lora="l", salt="s") == {}
    assert index.lookup(row(*prompt)).keys() == {PLACES[2]}
    assert index.lookup(row(*prompt))[PLACES[2]].tokens == 4


@pytest.mark.parametrize(
    ("hashes", "tokens", "size"),
    [
        ([1], [1, 2, 3], 2), ([1, 2], [1, 2], 2), ([], [], 2), ([1], [], 0), ([1], [1], -1),
        ([1], [-1, 2], 2), ([1], [2**31, 2], 2), ([1], [2**70, 2], 2),
        ([1], [0] * 100_000, 100_000),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_refused(hashes, tokens, size):
    index = PlacementIndex()
    index.store(PLACES[0], hashes, None, tokens, size)
    assert index.refused == len(hashes)
    assert len(index) == 0
    index.check()


def test_an_instance_has_so_many_blocks_and_no_more():
    """Over all its ranks and tiers; what it told last stays, and nobody else loses any."""
    index = PlacementIndex(most_blocks=64)
    index.store(PLACES[2], list(range(60)), None, [7] * 60, 1)
    at = 0
    for turn in range(200):
        place, tier = PLACES[turn % 2], TIERS[turn // 2 % 2]
        index.store(place, list(range(at, at + 9)), None, [turn] * 9, 1, tier=tier)
        at += 9
        known, evicted = index.instance_blocks("a")
        assert known <= 64
        assert known + evicted == at
        assert index.lookup(row(*[turn] * 9))[place].tokens == 9
    index.check()
    assert index.instance_blocks("b") == (60, 0)
    assert index.evicted == evicted == at - known
    index.remove(PLACES[0], range(at))  # of what was forgotten, too
    index.remove(PLACES[1], range(at), tier="CPU")
    index.check()


def test_what_many_prompts_share_is_kept():
    """It is stored once and first; that it is looked up keeps it."""
    index = PlacementIndex(most_blocks=400)
    shared = [1] * 10
    index.store(PLACES[0], list(range(10)), None, shared, 1)
    for turn in range(300):
        prompt = [*shared, *([turn + 2] * 20)]
        assert index.lookup(row(*prompt))[PLACES[0]].tokens == 10
        first = 10 + turn * 20
        index.store(PLACES[0], list(range(first, first + 20)), 9, prompt[10:], 1)
    assert index.evicted > 5000
    assert index.lookup(row(*shared))[PLACES[0]].tokens == 10
    index.check()


def test_forgetting_looks_at_no_more_than_it_forgets():
    """Counted: entries of the tables that are moved or dropped, for each block stored."""
    index = PlacementIndex(most_blocks=10_000)
    looked = 0

    class Counting(dict):
        def items(self):
            nonlocal looked
            for pair in super().items():
                looked += 1
                yield pair

    index.store(PLACES[0], [-1], None, [0], 1)
    index._places[PLACES[0]]["GPU"].blocks = Counting(index._places[PLACES[0]]["GPU"].blocks)
    for at in range(0, 60_000, 50):
        index.store(PLACES[0], list(range(at, at + 50)), None, [at + 1] * 50, 1)
        index.lookup(row(*[at + 1] * 50))  # everything is looked up: the worst that can be
    assert index.evicted > 45_000
    assert looked <= 3 * index.evicted
    index.check()


# --- keys ------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=60), st.integers(1, 9), st.data())
def test_keys_depend_on_the_tokens_alone(tokens, size, data):
    """Not on the pieces in which they came, nor on how they are computed."""
    keys = PrefixKeys()
    root = keys.root("a", "b")
    whole = keys.after(root, np.array(tokens, np.int32), 1)
    assert [length_of(key) for key in whole] == list(range(1, len(tokens) + 1))
    assert keys.after(root, np.array(tokens, np.int32), size) == whole[size - 1 :: size]
    assert keys.after_few(root, tokens, size) == whole[size - 1 :: size]
    cut = data.draw(st.integers(1, len(tokens)))
    assert keys.after(whole[cut - 1], np.array(tokens[cut:], np.int32), 1) == whole[cut:]
    assert keys.after_few(whole[cut - 1], tokens[cut:], 1) == whole[cut:]


def test_keys_differ():
    keys = PrefixKeys()
    rng = np.random.default_rng(3)
    seen = set()
    roots = [keys.root("", ""), keys.root("a", ""), keys.root("", "a"), keys.root("a")]
    for root in roots:
        for _ in range(50):
            seen |= set(keys.after(root, rng.integers(0, 2, 400, np.int32), 20)[1:])
    assert len(seen) == len(roots) * 50 * 19
    zeros = keys.after(roots[0], np.zeros(500, np.int32), 1)
    assert len(set(zeros)) == 500
