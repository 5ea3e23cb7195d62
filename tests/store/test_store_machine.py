"""A store over memory and disk against a model that knows what belongs to which tokens.

Small stores evict all the time: there is never a wrong number, nor more than was put. Roomy ones
lose nothing, through any number of restarts: there the model says how much is there to the token.

``KVKEEP_FUZZ=long`` runs twenty times as many examples.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from store_kv import FORMS, GQA, given, numbers, open_store, plain, quiet, room

import prompt_recipes as strategies
from kvkeep.store import Put
from kvkeep.store.tiers import Exclusive, Inclusive

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.store import KVStore
    from kvkeep.store.tiers import TieringPolicy
    from prompt_recipes import Recipe

LONG = 20 if os.environ.get("KVKEEP_FUZZ") == "long" else 1
SIZE = 4
MAX_BLOCKS = 4
TENANTS = ("", "a")
tenants = st.sampled_from(TENANTS)
Stored = dict[tuple[int, ...], int]
"""All tokens up to the end of what is stored, and how many of them are its own."""


class StoreMachine(RuleBasedStateMachine):
    """Rules for one kind of store; the model is a set of prefixes for each tenant."""

    memory: ClassVar[str] = "memory://24KiB"
    size: ClassVar[str] = "48KiB"
    policy: ClassVar[Callable[[], TieringPolicy]] = Inclusive
    exact: ClassVar[bool] = False
    """Nothing is ever evicted or dropped: the model knows all."""

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp(prefix="kvkeep-machine-"))
        self.stored: dict[str, Stored] = {tenant: {} for tenant in TENANTS}
        self.prompts: list[list[int]] = []
        self.store = self.opened()

    def opened(self) -> KVStore:
        url = f"file://{self.home}/d?size={self.size}&sync=never"
        return open_store(self.memory, url, block_tokens=SIZE, policy=self.policy())

    def prompt(self, recipe: Recipe) -> list[int]:
        tokens = recipe.build(self.prompts, SIZE, MAX_BLOCKS)
        self.prompts.append(tokens)
        return tokens

    @initialize()
    def fill(self) -> None:
        """Small stores are full from the beginning."""
        for first in () if self.exact else (0, 100, 200):
            tokens = list(range(first, first + 18))
            self.prompts.append(tokens)
            kv = given(GQA, numbers(GQA, tokens))
            self.store.put(tokens, kv, tail=True)
            self.stored[""] |= self.pieces(tokens, 0, tail=True)

    # --- the model ---------------------------------------------------------------------------

    def most(self, tokens: list[int], start: int, tenant: str) -> int:
        """Tokens beyond ``start`` that can be had if nothing was lost."""
        stored, end = self.stored[tenant], start - start % SIZE
        while stored.get(tuple(tokens[: end + SIZE])) == SIZE and end + SIZE <= len(tokens):
            end += SIZE
        for stop in range(min(end + SIZE - 1, len(tokens)), end, -1):
            if stored.get(tuple(tokens[:stop])) == stop - end:
                end = stop
                break
        return max(0, end - start)

    def pieces(self, tokens: list[int], start: int, tail: bool) -> Stored:
        """What a put of ``tokens[start:]`` is cut into."""
        first, end = -(-start // SIZE) * SIZE, len(tokens) - len(tokens) % SIZE
        found = {tuple(tokens[: at + SIZE]): SIZE for at in range(first, end, SIZE)}
        if tail and start <= end < len(tokens):
            found[tuple(tokens)] = len(tokens) - end
        return found

    def losses(self) -> float:
        names = ("evictions", "drops", "demotions_dropped", "misses", "damaged", "refused", "late")
        return sum(tier.counters[name] for tier in self.store.stats().tiers for name in names)

    # --- rules -------------------------------------------------------------------------------

    @rule(
        recipe=strategies.recipes(), start=st.integers(0, 20), tenant=tenants,
        options=st.fixed_dictionaries({"tail": st.booleans(), "wait": st.booleans()}),
        form=st.sampled_from(FORMS),
    )  # fmt: skip
    def put(
        self, recipe: Recipe, start: int, tenant: str, options: dict[str, bool], form: str
    ) -> None:
        tokens = self.prompt(recipe)
        start = start if start <= len(tokens) else 0
        kv = given(GQA, numbers(GQA, tokens, tenant)[start:], form)
        done = self.store.put(tokens, kv, start, tenant=tenant, **options)
        pieces = self.pieces(tokens, start, options["tail"])
        known = {ends for ends in pieces if ends in self.stored[tenant]}
        assert done.tokens + done.skipped + done.dropped == sum(pieces.values())
        assert done.partial == len(tokens) - start - sum(pieces.values())
        assert done.skipped <= sum(pieces[ends] for ends in known)
        if self.exact:
            new = sum(pieces[ends] for ends in pieces if ends not in known)
            assert done == Put(new, sum(pieces.values()) - new, 0, done.partial)
        self.stored[tenant] |= pieces

    @rule(
        recipe=strategies.recipes(), start=st.integers(0, 20), tenant=tenants,
        form=st.sampled_from(["new", "new tuples", *FORMS]), deadline=st.sampled_from([None, 0.0]),
    )  # fmt: skip
    def get(
        self, recipe: Recipe, start: int, tenant: str, form: str, deadline: float | None
    ) -> None:
        tokens = self.prompt(recipe)
        start = start if start <= len(tokens) else 0
        more: dict[str, Any] = {"tenant": tenant, "deadline": deadline}
        if form in FORMS:
            more["out"] = room(GQA, len(tokens) - start, form)
        else:
            more["form"] = "tuples" if form == "new tuples" else "tensor"
        kv, count = self.store.get(tokens, start, **more)
        most = self.most(tokens, start, tenant)
        assert count == most if self.exact and deadline is None else count <= most
        assert (kv is None) == (not count)
        if count:
            want = numbers(GQA, tokens, tenant)[start : start + count]
            assert (plain(GQA, kv) == want).all(), "another's KV"

    @rule(recipe=strategies.recipes(), tenant=tenants)
    def look_and_get(self, recipe: Recipe, tenant: str) -> None:
        tokens = self.prompt(recipe)
        quiet(self.store)
        before = self.losses()
        found = self.store.lookup(tokens, tenant=tenant)
        assert found.tokens <= self.most(tokens, 0, tenant)
        assert sum(count for _, count in found.tiers) == found.tokens
        count = self.store.get(tokens, tenant=tenant)[1]
        assert count == found.tokens or self.losses() > before
        assert count <= found.tokens

    @rule(recipe=strategies.recipes(), start=st.integers(0, 20), tenant=tenants)
    def prefetch(self, recipe: Recipe, start: int, tenant: str) -> None:
        tokens = self.prompt(recipe)
        start = start if start <= len(tokens) else 0
        quiet(self.store)
        most = self.most(tokens, start, tenant)
        coming = self.store.prefetch(tokens, start, tenant=tenant)
        ready = coming.wait(20)
        assert coming.done
        assert ready <= start + most or (ready == start - start % SIZE and not most)
        if self.exact and most:
            assert ready == start + most
            found = self.store.lookup(tokens, tenant=tenant)  # less, where the beginning is not
            assert found.tokens <= start or "memory" in dict(found.tiers)

    @rule(recipe=strategies.recipes(), tenant=tenants)
    def pin(self, recipe: Recipe, tenant: str) -> None:
        tokens = self.prompt(recipe)
        assert self.store.pin(tokens, 1000, tenant=tenant) <= self.most(tokens, 0, tenant)

    @rule(recipe=strategies.recipes(), tenant=tenants)
    def unpin(self, recipe: Recipe, tenant: str) -> None:
        tokens = self.prompt(recipe)
        assert self.store.unpin(tokens, tenant=tenant) <= self.most(tokens, 0, tenant)

    @rule(tenant=tenants)
    def clear(self, tenant: str) -> None:
        quiet(self.store)
        freed = self.store.clear(tenant=tenant).bytes
        if self.exact:
            assert bool(freed) == bool(self.stored[tenant])
        self.stored[tenant] = {}

    @rule()
    def flush(self) -> None:
        assert self.store.flush(20)

    @rule()
    def reopen(self) -> None:
        assert self.store.close(20)
        self.store = self.opened()
        assert "memory" not in {
            name for tokens in self.prompts for name, _ in self.store.lookup(tokens).tiers
        }

    @precondition(lambda self: self.prompts)
    @rule(tenant=tenants)
    def whole_model(self, tenant: str) -> None:
        """All prompts of the model at once."""
        for tokens in self.prompts[-8:]:
            found = self.store.lookup(tokens, tenant=tenant).tokens
            most = self.most(tokens, 0, tenant)
            assert found == most if self.exact else found <= most

    @invariant()
    def check(self) -> None:
        quiet(self.store)
        self.store.check()
        used = sum(
            -(-file.stat().st_size // 4096) * 4096
            for file in (self.home / "d").rglob("*")
            if file.is_file() and file.name != "FORMAT" and file.parent.name != "index"
        )
        capacity = self.store.stats().tiers[1].capacity
        assert capacity is not None
        assert used <= capacity

    def teardown(self) -> None:
        try:
            self.check()
            assert self.store.close(20)
        finally:
            shutil.rmtree(self.home)


HOW = settings(
    max_examples=25 * LONG,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


class SmallInclusive(StoreMachine):
    pass


class SmallExclusive(StoreMachine):
    policy = Exclusive


class RoomyInclusive(StoreMachine):
    memory, size, exact = "memory://8MiB", "64MiB", True


class RoomyExclusive(StoreMachine):
    memory, size, exact, policy = "memory://8MiB", "64MiB", True, Exclusive


class SecondTouch(StoreMachine):
    """Disk gets what is asked for again."""

    policy = partial(Inclusive, admit_after=2)


TestSmallInclusive = SmallInclusive.TestCase
TestSmallExclusive = SmallExclusive.TestCase
TestRoomyInclusive = RoomyInclusive.TestCase
TestRoomyExclusive = RoomyExclusive.TestCase
TestSecondTouch = SecondTouch.TestCase
for case in (TestSmallInclusive, TestSmallExclusive, TestRoomyInclusive, TestRoomyExclusive,
             TestSecondTouch):  # fmt: skip
    case.settings = HOW
del case  # it would be collected once more
