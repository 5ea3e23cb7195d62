"""Snapshots of models with windows and states, against a model that knows what was put.

Whatever comes back is right to the bit, in every store. In a roomy one nothing is lost, through
any number of restarts: there the longest position that was put is found. Small stores evict all
the time, and lose records by damage and deletion.

``KVKEEP_FUZZ=long`` runs twenty times as many examples.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from snapshot_kv import GEOMETRIES, SIZE, first_of, get, open_snapshots, snapshot
from store_kv import quiet, records

import prompt_recipes as strategies

if TYPE_CHECKING:
    from kvkeep.store import KVStore
    from prompt_recipes import Recipe

LONG = 20 if os.environ.get("KVKEEP_FUZZ") == "long" else 1
TENANTS = ("", "a")
tenants = st.sampled_from(TENANTS)
Text = tuple[int, ...]


class SnapshotMachine(RuleBasedStateMachine):
    """Rules for one geometry.

    ``ends`` are the texts behind which a snapshot was put. ``had`` are, for each group, the texts
    whose last token was part of one.
    """

    geometry: ClassVar[str] = "state"
    memory: ClassVar[str] = "memory://4MiB"
    size: ClassVar[str] = "64MiB"
    exact: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp(prefix="kvkeep-snapshots-"))
        self.prompts: list[list[int]] = []
        self.lost = False
        self.groups = GEOMETRIES[self.geometry].groups
        self.ends: dict[str, set[Text]] = {tenant: set() for tenant in TENANTS}
        self.states: dict[str, set[Text]] = {tenant: set() for tenant in TENANTS}
        self.had: dict[str, set[tuple[int, Text]]] = {tenant: set() for tenant in TENANTS}
        self.store = self.opened()

    def opened(self) -> KVStore:
        url = f"file://{self.home}/d?size={self.size}&sync=never"
        return open_snapshots(self.geometry, self.memory, url)

    def prompt(self, recipe: Recipe) -> list[int]:
        tokens = recipe.build(self.prompts, SIZE, 5)
        self.prompts.append(tokens)
        return tokens

    # --- the model -------------------------------------------------------------------------------

    def least(self, tokens: list[int], tenant: str, limit: int) -> int:
        """The longest text that was put, if nothing was lost."""
        ends = self.ends[tenant]
        return next((n for n in range(limit, 0, -1) if tuple(tokens[:n]) in ends), 0)

    def most(self, tokens: list[int], tenant: str, limit: int) -> int:
        """The longest position of which every group ever had all that is needed, in any blocks."""
        had = self.had[tenant]
        for n in range(limit, 0, -1):
            if all(
                tuple(tokens[:n]) in self.states[tenant]
                if group.state
                else all(
                    (number, tuple(tokens[: at + 1])) in had for at in range(first_of(group, n), n)
                )
                for number, group in enumerate(self.groups)
            ):
                return n
        return 0

    # --- rules -----------------------------------------------------------------------------------

    @rule(
        recipe=strategies.recipes(), start=st.integers(0, 12), more=st.integers(0, 9),
        tenant=tenants, wait=st.booleans(),
    )  # fmt: skip
    def put(self, recipe: Recipe, start: int, more: int, tenant: str, wait: bool) -> None:
        tokens = self.prompt(recipe)
        if not tokens:
            return
        n = len(tokens)
        start = start if start < n else 0
        given = snapshot(self.store, tokens, start, more, tenant)
        done = self.store.put_snapshot(tokens, given, tenant=tenant, wait=wait)
        assert done.tokens + done.skipped + done.dropped == n - start
        if done.dropped and self.exact:
            had = self.had[tenant]
            base = [at for at, group in enumerate(self.groups) if group.span is None]
            assert (
                any(
                    (number, tuple(tokens[: at + 1])) not in had
                    for at in range(start - start % SIZE)
                    for number in base
                )
                or start % SIZE
            ), "only a gap is a reason"
            return
        self.ends[tenant].add(tuple(tokens))
        self.states[tenant].add(tuple(tokens))
        for number, group in enumerate(self.groups):
            first = start if group.span is None else max(0, first_of(group, n) - more)
            self.had[tenant] |= {(number, tuple(tokens[: at + 1])) for at in range(first, n)}

    @rule(
        recipe=strategies.recipes(), start=st.integers(0, 12), limit=st.integers(0, 24),
        tenant=tenants,
    )  # fmt: skip
    def get(self, recipe: Recipe, start: int, limit: int, tenant: str) -> None:
        tokens = self.prompt(recipe)
        limit = min(limit, len(tokens))
        start = start if start <= limit else 0
        found = get(self.store, tokens, start, limit=limit, tenant=tenant)
        assert found <= max(self.most(tokens, tenant, limit), 0)
        if self.exact:
            least = self.least(tokens, tenant, limit)
            assert found >= (least if least > start else 0)

    @rule(recipe=strategies.recipes(), tenant=tenants)
    def look_and_get(self, recipe: Recipe, tenant: str) -> None:
        tokens = self.prompt(recipe)
        quiet(self.store)
        found = self.store.lookup(tokens, tenant=tenant)
        assert sum(count for _, count in found.tiers) == found.tokens
        assert found.tokens <= found.stored_tokens <= len(tokens)
        count = get(self.store, tokens, tenant=tenant)
        assert count == found.tokens if self.exact else count <= found.tokens
        missing = self.store.why(tokens, found.tokens, tenant=tenant)
        assert sum(miss.stop - miss.start for miss in missing) == len(tokens) - found.tokens

    @rule(recipe=strategies.recipes(), tenant=tenants)
    def prefetch(self, recipe: Recipe, tenant: str) -> None:
        tokens = self.prompt(recipe)
        quiet(self.store)
        want = self.store.lookup(tokens, tenant=tenant).tokens
        ready = self.store.prefetch(tokens, tenant=tenant).wait(20)
        assert ready == want if self.exact else ready in (0, want)

    @rule(recipe=strategies.recipes(), tenant=tenants)
    def pin_and_unpin(self, recipe: Recipe, tenant: str) -> None:
        tokens = self.prompt(recipe)
        want = self.store.lookup(tokens, tenant=tenant).tokens
        pinned = self.store.pin(tokens, 1000, tenant=tenant)
        self.store.touch(tokens, tenant=tenant)
        assert pinned == want if self.exact else pinned <= want
        quiet(self.store)
        if pinned and not self.exact and not self.lost:
            assert get(self.store, tokens, tenant=tenant) >= pinned, "all that it needs is pinned"
        assert self.store.unpin(tokens, tenant=tenant) == pinned or not self.exact
        assert not any(tier.pinned_bytes for tier in self.store.stats().tiers)

    @rule(recipe=strategies.recipes(), start=st.integers(0, 12), tenant=tenants)
    def remove(self, recipe: Recipe, start: int, tenant: str) -> None:
        tokens = self.prompt(recipe)
        start = start if start <= len(tokens) else 0
        self.store.remove(tokens, start, tenant=tenant)
        begin = start - start % SIZE
        assert self.store.lookup(tokens, tenant=tenant).tokens <= start
        # Texts with a block in common are found less, or not at all; all others as ever.
        common = tuple(tokens[: begin + 1])
        if len(tokens) > begin:
            self.ends[tenant] -= {t for t in self.ends[tenant] if t[: begin + 1] == common}
        # A state before ``start`` may stay, also one in the same block; those behind it are gone.
        gone = {tuple(tokens[:n]) for n in range(start + 1, len(tokens) + 1)}
        self.states[tenant] -= gone

    @rule(tenant=tenants)
    def clear(self, tenant: str) -> None:
        quiet(self.store)
        self.store.clear(tenant=tenant)
        self.ends[tenant], self.states[tenant], self.had[tenant] = set(), set(), set()

    @rule()
    def reopen(self) -> None:
        assert self.store.close(20)
        self.store = self.opened()

    @precondition(lambda self: not self.exact)
    @rule(which=st.integers(0, 1000), how=st.sampled_from(["delete", "flip", "cut"]))
    def lose(self, which: int, how: str) -> None:
        """One record is lost while the store is closed."""
        self.lost = True  # nothing that is stored need be readable from now on
        assert self.store.close(20)
        files = records(self.home / "d")
        if files:
            file = files[which % len(files)]
            data = bytearray(file.read_bytes())
            if how == "delete":
                file.unlink()
            else:
                data[which % len(data)] ^= 1 << which % 8
                file.write_bytes(data if how == "flip" else data[: which % len(data)])
        self.store = self.opened()

    @invariant()
    def check(self) -> None:
        quiet(self.store)
        self.store.check()

    def teardown(self) -> None:
        try:
            self.check()
            assert self.store.close(20)
        finally:
            shutil.rmtree(self.home)


HOW = settings(
    max_examples=8 * LONG,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


class RoomyWindows(SnapshotMachine):
    geometry = "windows"


class RoomyAll(SnapshotMachine):
    geometry = "all"


class RoomyStatesAlone(SnapshotMachine):
    geometry = "states alone"


class RoomyWindowAlone(SnapshotMachine):
    geometry = "window alone"


class SmallAll(SnapshotMachine):
    geometry, memory, size, exact = "all", "memory://48KiB", "96KiB", False


class SmallWindows(SnapshotMachine):
    geometry, memory, size, exact = "windows", "memory://48KiB", "64KiB", False


TestRoomyWindows = RoomyWindows.TestCase
TestRoomyAll = RoomyAll.TestCase
TestRoomyStatesAlone = RoomyStatesAlone.TestCase
TestRoomyWindowAlone = RoomyWindowAlone.TestCase
TestSmallAll = SmallAll.TestCase
TestSmallWindows = SmallWindows.TestCase
for case in (TestRoomyWindows, TestRoomyAll, TestRoomyStatesAlone, TestRoomyWindowAlone,
             TestSmallAll, TestSmallWindows):  # fmt: skip
    case.settings = HOW
del case  # it would be collected once more
