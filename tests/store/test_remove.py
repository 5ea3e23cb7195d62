"""Removing a prompt: from every tier, on its way anywhere, pinned or not; and what is replaced."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from store_kv import GQA, MODEL, disk, get, given, numbers, open_store, plain, put, quiet, records

from faults import FaultyBackend
from kvkeep.core.errors import IllegalStep, InvalidValue
from kvkeep.store import KVStore
from kvkeep.store.backends.disk import DiskBackend
from kvkeep.store.backends.memory import MemoryBackend
from kvkeep.store.tiers import Exclusive, Inclusive

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SIZE = 4
LONG = list(range(22))
MEMORY = "memory://1MiB"
PATIENT = 20.0
"""Seconds: the timeout of a place that is slow and not given up, on a busy machine either."""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[FaultyBackend]:
    backend = FaultyBackend(DiskBackend(tmp_path / "slow", 64 << 20, sync="never"))
    backend.timeout = 0.4
    yield backend
    backend.heal()


def opened(*tiers: Any, **more: Any) -> KVStore:
    return KVStore(GQA, model=MODEL, tiers=[MEMORY, *tiers], block_tokens=SIZE, **more)


def forgotten(store: KVStore) -> None:
    """Memory has nothing any more."""
    quiet(store)
    front = store._tiered.memory
    front.remove([item.block for item in front.backend.list()])


def other_kv(tokens: list[int]) -> Any:
    """KV that differs from what `put` puts."""
    return given(GQA, numbers(GQA, tokens, "another"))


def kind_of(store: KVStore, tokens: list[int]) -> tuple[str, int]:
    """Whether what is stored is "old", "new", "none" or a "mix"; how many tokens there are."""
    kv, count = store.get(tokens)
    if not count:
        return "none", 0
    rows = plain(GQA, kv)
    for name, tenant in (("old", ""), ("new", "another")):
        if np.array_equal(rows, numbers(GQA, tokens, tenant)[:count]):
            return name, count
    return "mix", count


# --- what goes -------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [Inclusive, Exclusive])
def test_a_prompt_is_gone_from_all_tiers(policy: Any, tmp_path: Path) -> None:
    urls = [MEMORY, disk(tmp_path / "a"), disk(tmp_path / "b")]
    with open_store(*urls, policy=policy()) as store:
        put(store, LONG, tail=True, wait=True)
        put(store, range(100, 120), wait=True)
        assert store.pin(LONG, 1000.0) == 22
        assert store.flush()
        removed = store.remove(LONG)
        assert removed.complete
        assert removed.failed == ()
        assert [name for name, _ in removed.tiers] == ["memory", "file", "file2"]
        assert removed.bytes > 0
        assert get(store, LONG) == 0
        assert store.lookup(LONG).tokens == 0
        assert store.why(LONG)[0].what == "removed"
        assert get(store, range(100, 120)) == 20
        store.check()
        assert store.remove(LONG).bytes == 0
    with open_store(*urls, policy=policy()) as again:
        assert get(again, LONG) == 0
        assert get(again, range(100, 120)) == 20


@pytest.mark.parametrize("start", [0, 1, 3, 4, 5, 19, 20, 21, 22])
def test_it_goes_from_a_token_on(start: int, tmp_path: Path) -> None:
    """Every block with a token from there on, and the tails of shorter prompts, too."""
    with open_store(MEMORY, disk(tmp_path / "a")) as store:
        put(store, LONG, tail=True)
        put(store, LONG[:10], tail=True)
        put(store, LONG[:3], tail=True)
        put(store, LONG[:19], tail=True, wait=True)
        assert store.remove(LONG, start).complete
        for end in (3, 10, 19, 22):  # tails that end before that token are kept
            want = max(stop for stop in (0, 4, 8, 12, 16, 20, 3, 10, 19, 22) if stop <= start)
            whole = end - end % SIZE
            want = end if end <= start else max(want if want % SIZE and want <= end else 0,
                                               min(whole, start - start % SIZE))  # fmt: skip
            assert get(store, LONG[:end]) == want, end
        with pytest.raises(InvalidValue, match="start"):
            store.remove(LONG, 23)


def test_what_continues_a_prompt_goes_with_it(tmp_path: Path) -> None:
    """It is unreachable, and wrong if the prompt was: it must not come back with a new put."""
    with open_store(MEMORY, disk(tmp_path / "a")) as store:
        first, second = [*LONG[:8], *range(50, 62)], [*LONG[:8], *range(70, 82)]
        put(store, first, tail=True)
        put(store, second)
        put(store, range(200, 208), wait=True)
        assert store.remove(LONG[:8]).complete
        put(store, LONG[:8], wait=True)
        assert [get(store, tokens) for tokens in (first, second)] == [8, 8]
        assert len(records(tmp_path / "a")) == 2 + 2
        assert get(store, range(200, 208)) == 8


def test_tenants_are_apart(tmp_path: Path) -> None:
    with open_store(MEMORY, disk(tmp_path / "a")) as store:
        put(store, LONG)
        put(store, LONG, tenant="a", wait=True)
        assert store.remove(LONG, tenant="a").complete
        assert [get(store, LONG), get(store, LONG, tenant="a")] == [20, 0]


# --- what is on its way ----------------------------------------------------------------------


@pytest.mark.parametrize("running", [True, False], ids=["a write runs", "all writes wait"])
def test_a_write_on_its_way_does_not_bring_it_back(running: bool, place: FaultyBackend) -> None:
    """The put is slow; the removal waits for the write that runs, and gives up those that wait."""
    place.timeout = PATIENT
    with opened(place) as store:
        if not running:
            store._tiered.tiers[0].writing.submit(partial(time.sleep, 0.1))
            store._tiered.tiers[0].writing.submit(partial(time.sleep, 0.1))
        else:
            place.hang("put")
        put(store, LONG)
        if running:
            place.wait_inside("put")
            place.go_on_slowly(0.1, "put")
        removed = store.remove(LONG)
        assert removed.complete
        quiet(store)
        assert list(place.inner.list()) == []
        assert get(store, LONG) == 0
        put(store, LONG, wait=True)
        forgotten(store)
        assert get(store, LONG) == 20
        store.check()


def test_a_write_that_hangs_is_told_and_does_not_overwrite_what_comes_later(
    place: FaultyBackend,
) -> None:
    with opened(place) as store:
        place.hang("put")
        put(store, LONG)
        place.wait_inside("put")
        removed = store.remove(LONG)
        assert removed.failed == ("faulty",)
        assert not removed.complete
        assert get(store, LONG) == 0
        store.put(LONG, other_kv(LONG))
        assert kind_of(store, LONG) == ("new", 20)
        place.heal()  # what hung writes the old, now
        end = time.monotonic() + 10
        while place.inside["put"] or any(len(tier.states) for tier in store._tiered.tiers):
            assert time.monotonic() < end
            time.sleep(0.005)
        quiet(store)
        assert kind_of(store, LONG) == ("new", 20)
        forgotten(store)
        assert kind_of(store, LONG)[0] in ("new", "none"), "never what was removed"


def test_a_read_on_its_way_does_not_bring_it_back(place: FaultyBackend) -> None:
    place.timeout = PATIENT
    with opened(place) as store:
        put(store, LONG, wait=True)
        forgotten(store)
        place.hang("room")  # its file is open by then: what was deleted can be read
        got: list[int] = []
        reader = threading.Thread(target=lambda: got.append(get(store, LONG)))
        reader.start()
        place.wait_inside("room")
        place.go_on_slowly(0.15, "room")
        assert store.remove(LONG).complete
        assert get(store, LONG) == 0
        reader.join(10)
        assert got[0] <= 20
        quiet(store)
        assert len(store._tiered.memory.backend) == 0
        assert get(store, LONG) == 0
        store.check()


@pytest.mark.parametrize("call", ["sizes", "get"])
def test_an_answer_from_before_the_removal_is_not_believed_behind_it(
    call: str, place: FaultyBackend, tmp_path: Path
) -> None:
    """Else the next put would skip what is not there."""
    with opened(place) as store:
        with opened(disk(tmp_path / "slow")) as another:
            put(another, LONG[:4])
            assert another.flush()
        late, removed = threading.Event(), threading.Event()
        inner = getattr(place, call)

        def waits(*given: Any) -> Any:
            said = inner(*given)
            late.set()
            assert removed.wait(5)
            return said

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(place, call, waits)
            ask = store.lookup if call == "sizes" else store.get
            asking = threading.Thread(target=ask, args=(LONG[:4],))
            asking.start()
            assert late.wait(5)
            patch.undo()
            assert store.remove(LONG[:4]).complete
            removed.set()
            asking.join(10)
        assert put(store, LONG[:4]).tokens == 4
        assert store.flush()
        forgotten(store)
        assert get(store, LONG[:4]) == 4


def test_what_moves_down_does_not_bring_it_back(tmp_path: Path, place: FaultyBackend) -> None:
    """From tier to tier, while the lower one is slow."""
    upper = FaultyBackend(MemoryBackend(8 * 4096))
    with opened(upper, place, policy=Exclusive()) as store:
        place.slow(0.02, "put")
        for first in range(0, 400, 20):
            put(store, range(first, first + 20))
        for first in range(0, 400, 40):
            assert store.remove(list(range(first, first + 20))).complete
        assert store.flush(20)
        quiet(store)
        for first in range(0, 400, 40):
            assert get(store, range(first, first + 20)) == 0
        store.check()


@pytest.mark.parametrize("call", ["room", "get"])
@pytest.mark.parametrize("hangs", [True, False])
def test_a_prefetch_on_its_way_does_not_bring_it_back(
    call: str, hangs: bool, place: FaultyBackend
) -> None:
    """Its file is open, or will be opened when it goes on; it may take longer than the tier may."""
    if not hangs:
        place.timeout = PATIENT
    with opened(place) as store:
        put(store, LONG, wait=True)
        forgotten(store)
        place.hang(call)
        prefetch = store.prefetch(LONG)
        place.wait_inside(call)
        if not hangs:
            place.go_on_slowly(0.15, call)
        assert store.remove(LONG).complete
        assert get(store, LONG) == 0
        place.heal()
        prefetch.wait(10)
        quiet(store)
        assert len(store._tiered.memory.backend) == 0
        assert get(store, LONG) == 0
        put(store, LONG, wait=True)
        forgotten(store)
        end = time.monotonic() + 10
        while get(store, LONG) != 20:  # a tier that hung is left alone for a second
            assert time.monotonic() < end
            time.sleep(0.05)
        store.check()


def test_many_threads_put_get_and_remove_the_same_prompt(place: FaultyBackend) -> None:
    """At rest the tiers agree; after the last removal nothing is left."""
    with opened(place) as store:
        end = time.monotonic() + 1.5
        faults: list[BaseException] = []

        def work(what: int) -> None:
            try:
                while time.monotonic() < end:
                    if what == 0:
                        put(store, LONG)
                    elif what == 1:
                        get(store, LONG)
                    elif what == 2:
                        store.remove(LONG, 8)
                    else:
                        forgotten(store)
            except BaseException as error:  # noqa: BLE001 - it is raised below
                faults.append(error)

        threads = [threading.Thread(target=work, args=(what,)) for what in (0, 0, 1, 1, 2, 2, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert not faults, faults
        assert store.remove(LONG).complete
        quiet(store)
        assert get(store, LONG) == 0
        assert list(place.inner.list()) == []
        assert not any(len(tier.states) for tier in store._tiered.tiers)
        store.check()


# --- tiers that fail -------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["fail", "hang"])
def test_a_tier_that_cannot_delete_is_told_and_not_read_any_more(
    how: str, place: FaultyBackend, tmp_path: Path
) -> None:
    with opened(disk(tmp_path / "good"), place) as store:
        put(store, LONG, wait=True)
        place.fail("delete") if how == "fail" else place.hang("delete")
        removed = store.remove(LONG)
        assert (removed.complete, removed.failed) == (False, ("faulty",))
        assert records(tmp_path / "good") == []
        place.heal()
        end = time.monotonic() + 10
        while any(len(tier.states) for tier in store._tiered.tiers):
            assert time.monotonic() < end
            time.sleep(0.005)
        assert get(store, LONG) == 0, "it is not handed out again"
        store.put(LONG, other_kv(LONG), wait=True)
        forgotten(store)
        for _ in range(3):
            assert kind_of(store, LONG) == ("new", 20)
            forgotten(store)
        assert store.remove(LONG).complete
        assert list(place.inner.list()) == []


def test_clear_says_which_tier_failed(place: FaultyBackend) -> None:
    with opened(place) as store:
        put(store, LONG, wait=True)
        place.fail("list", "delete")
        assert store.clear().failed == ("faulty",)
        place.heal()
        store._tiered.tiers[0].calls.succeeded("list")
        assert get(store, LONG) == 0
        assert store.clear().complete
        assert list(place.inner.list()) == []


@pytest.mark.parametrize("budget", [None, 64 << 20])
@pytest.mark.parametrize("how", ["fail", "hang"])
def test_a_tier_that_cannot_list_serves_nothing_that_was_cleared(
    how: str, budget: int | None, place: FaultyBackend, tmp_path: Path
) -> None:
    """It is in no catalogue; what is put since is served, and other tenants and tiers are whole."""
    place.inner.capacity = place.capacity = budget
    place.shared = True
    with opened(place) as store:
        put(store, LONG, wait=True)
        put(store, LONG, tenant="b", wait=True)
    place.fail("list")
    with opened(place, disk(tmp_path / "good")) as store:
        put(store, range(100, 108), wait=True)
        assert get(store, LONG) == 20
        if how == "hang":
            place.heal()
            place.hang("list")
        removed = store.clear()
        assert (removed.complete, removed.failed) == (False, ("faulty",))
        assert [store.lookup(tokens).tokens for tokens in (LONG, range(100, 108))] == [0, 0]
        assert [get(store, tokens) for tokens in (LONG, range(100, 108))] == [0, 0]
        assert get(store, LONG, tenant="b") == 20
        store.put(LONG[:12], other_kv(LONG[:12]), wait=True)
        forgotten(store)
        assert kind_of(store, LONG) == ("new", 12)
        forgotten(store)
        place.heal()
        assert kind_of(store, LONG) == ("new", 12), "the others stay hidden"
        store._tiered.tiers[0].calls.succeeded("list")
        assert store.clear().complete
        assert get(store, LONG) == 0
        put(store, LONG, wait=True)
        forgotten(store)
        assert get(store, LONG) == 20
        store.check()


def test_a_clearance_that_hangs_ends_and_keeps_no_other_tier_waiting(
    place: FaultyBackend, tmp_path: Path
) -> None:
    with opened(place, disk(tmp_path / "good")) as store:
        put(store, LONG, wait=True)
        place.hang("list")
        ended = threading.Event()
        removed: list[Any] = []
        clearing = threading.Thread(
            target=lambda: (removed.append(store.clear()), ended.set()), daemon=True
        )
        clearing.start()
        place.wait_inside("list")
        while records(tmp_path / "good"):
            time.sleep(0.001)
        assert ended.wait(20), "it ends although the listing never does"
        assert removed[0].failed == ("faulty",)
        assert dict(removed[0].tiers)["file"] > 0
        store.close(1.0)
    place.heal()
    for thread in threading.enumerate():
        if thread.name.endswith("deleter"):
            thread.join(10)
    assert len(list(place.inner.list())) == 5, "nothing is deleted behind `close`"


def test_closing_ends_a_clearance(place: FaultyBackend) -> None:
    place.timeout = PATIENT
    store = opened(place)
    put(store, LONG, wait=True)
    place.hang("list")
    ends: list[Any] = []

    def clear() -> None:
        with pytest.raises(IllegalStep, match="closed"):
            store.clear()
        ends.append(time.monotonic())

    clearing = threading.Thread(target=clear, daemon=True)
    clearing.start()
    place.wait_inside("list")
    store.close(0.5)
    clearing.join(PATIENT / 2)
    assert ends


# --- put with replace ------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [Inclusive, Exclusive])
def test_replace_puts_new_kv_in_place_of_the_old(policy: Any, tmp_path: Path) -> None:
    urls = [MEMORY, disk(tmp_path / "a"), disk(tmp_path / "b")]
    with open_store(*urls, policy=policy()) as store:
        put(store, LONG, tail=True)
        put(store, [*LONG[:20], *range(50, 60)], tail=True)
        assert store.flush()
        assert store.put(LONG, other_kv(LONG)).skipped == 20
        assert kind_of(store, LONG) == ("old", 22)
        done = store.put(LONG, other_kv(LONG), replace=True, wait=True)
        assert (done.tokens, done.skipped, done.partial, done.failed) == (20, 0, 2, ())
        assert kind_of(store, LONG) == ("new", 20), "the tail was of the old"
        assert kind_of(store, [*LONG[:20], *range(50, 60)]) == ("new", 20)
        store.check()
    with open_store(*urls, policy=policy()) as again:
        assert kind_of(again, LONG) == ("new", 20)


def test_replace_from_a_token_on_keeps_what_is_before(tmp_path: Path) -> None:
    with open_store(MEMORY, disk(tmp_path / "a")) as store:
        put(store, LONG, wait=True)
        late = given(GQA, numbers(GQA, LONG)[6:])
        done = store.put(LONG, late, 6, replace=True, wait=True)
        assert (done.tokens, done.skipped) == (12, 0)
        assert get(store, LONG) == 20


def test_replace_names_a_tier_that_has_the_old_still(place: FaultyBackend) -> None:
    with opened(place) as store:
        put(store, LONG, wait=True)
        place.fail("delete", times=1)
        done = store.put(LONG, other_kv(LONG), replace=True, wait=True)
        assert done.failed == ("faulty",)
        forgotten(store)
        assert kind_of(store, LONG) == ("new", 20), "it was overwritten after all"


def test_readers_see_old_or_new_and_never_a_mix(place: FaultyBackend) -> None:
    """With a slow tier, memory that forgets, and readers that are slow between two blocks."""
    with opened(place) as store:
        place.slow(0.001, "get", "put")
        versions = [given(GQA, numbers(GQA, LONG)), other_kv(LONG)]
        store.put(LONG, versions[0], wait=True)
        end = time.monotonic() + 1.5
        seen: set[str] = set()
        faults: list[BaseException] = []
        blocks = store._names.of(None).full(np.array(LONG, np.int32))
        sizes = [SIZE * GQA.bytes_per_token] * len(blocks)
        rows = {
            name: numbers(GQA, LONG, tenant) for name, tenant in (("old", ""), ("new", "another"))
        }

        def read() -> None:
            try:
                while time.monotonic() < end:
                    parts: list[bytes] = []

                    def take(at: int, raw: memoryview, parts: list[bytes] = parts) -> None:
                        parts.append(bytes(raw))
                        time.sleep(0.002 * (at % 2))

                    store._tiered.read(blocks, sizes, take)
                    kinds = set()
                    for at, part in enumerate(parts):
                        kinds |= {
                            name for name in rows
                            if part == raw_of(store, rows[name][at * SIZE : (at + 1) * SIZE])
                        }  # fmt: skip
                    assert len(kinds) <= 1, "a mix"
                    seen.update(kinds)
                    forgotten_softly(store)
            except BaseException as error:  # noqa: BLE001 - it is raised below
                faults.append(error)

        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        turn = 0
        while time.monotonic() < end:
            turn += 1
            store.put(LONG, versions[turn % 2], replace=True)
            time.sleep(0.01)
        for thread in threads:
            thread.join(20)
        assert not faults, faults
        assert seen == {"old", "new"}
        assert turn > 5
        quiet(store)


def raw_of(store: KVStore, rows: np.ndarray) -> bytes:
    """A block's bytes as they lie in a tier."""
    form = store._forms.base
    raw = bytearray(form.raw_bytes(len(rows)))
    form.write(form.tensors(given(GQA, rows), len(rows)), 0, len(rows), memoryview(raw))
    return bytes(raw)


def forgotten_softly(store: KVStore) -> None:
    front = store._tiered.memory
    front.remove([item.block for item in front.backend.list()][:2])
