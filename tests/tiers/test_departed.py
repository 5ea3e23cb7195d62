"""What was removed while a place was detached does not come back with it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tier_bench import get, name, put, settle

from kvkeep.core.errors import IllegalStep
from kvkeep.core.keys import SPACE_BYTES
from kvkeep.store.tiers.departed import DepartedPlaces


def away(bench, blocks=64):
    """A store of two places of which one was detached, with blocks 0 … 5 in it alone."""
    first, second = bench.disk(blocks, "one"), bench.disk(blocks, "two")
    store = bench.store(32, first)
    put(store, range(6), wait=20)
    store.attach(bench.spec(second))
    settle(store)
    store.detach(store.tiers[0].name, move=False, timeout=20)
    store.memory.remove([name(number) for number in range(6)])
    return store


def back(store, bench, place):
    attached = store.attach(bench.spec(place))
    settle(store)
    return attached


def test_removed_blocks_do_not_come_back(bench):
    store = away(bench)
    assert store.remove([name(1), name(4), name(40)]).complete
    back(store, bench, bench.disk(64, "one"))
    assert [get(store, [number]) for number in range(6)] == [1, 0, 1, 1, 0, 1]


@pytest.mark.parametrize("space", [name(0)[:SPACE_BYTES], None])
def test_a_dropped_namespace_does_not_come_back(bench, space):
    store = away(bench)
    assert store.clear(space).complete
    put(store, [2], wait=20)
    back(store, bench, bench.disk(64, "one"))
    assert [get(store, [number]) for number in range(6)] == [0, 0, 1, 0, 0, 0]


def test_another_namespace_comes_back(bench):
    store = away(bench)
    assert store.clear(name(0, 1)[:SPACE_BYTES]).complete
    back(store, bench, bench.disk(64, "one"))
    assert get(store, range(6)) == 6


@pytest.mark.parametrize("call", ["delete", "list"])
def test_a_place_that_cannot_be_rid_of_them_is_not_attached(bench, call):
    store = away(bench)
    store.remove([name(1)]) if call == "delete" else store.clear(None)
    place = bench.disk(64, "one")
    place.fail(call)
    before = store.names
    with pytest.raises(IllegalStep, match="removed while it was detached"):
        store.attach(bench.spec(place))
    assert store.names == before
    place.heal()
    back(store, bench, bench.disk(64, "one"))
    assert get(store, [1]) == 0
    assert get(store, [0]) == (call == "delete")


def test_a_place_that_hangs_ends_the_wait(bench):
    store = away(bench)
    store.remove([name(1)])
    place = bench.disk(64, "one")
    place.hang("delete")
    with pytest.raises(IllegalStep, match="could not be deleted"):
        store.attach(bench.spec(place, timeout=0.1))
    place.heal()


def test_what_could_not_be_deleted_before_it_left_does_not_come_back(bench):
    one, two = bench.disk(64, "one"), bench.disk(64, "two")
    store = bench.store(32, one)
    put(store, range(3), wait=20)
    store.attach(bench.spec(two))
    settle(store)
    one.fail("delete")
    assert not store.remove([name(1)]).complete
    store.detach(store.tiers[0].name, move=False, timeout=20)
    back(store, bench, bench.disk(64, "one"))
    assert get(store, [1]) == 0


SPACES = [bytes([number]) * SPACE_BYTES for number in range(4)]
IDS = [space + bytes([number]) for space in SPACES for number in range(4)]
steps = st.lists(
    st.one_of(
        st.tuples(st.just("left"), st.sampled_from("abc")),
        st.tuples(st.just("back"), st.sampled_from("abc")),
        st.tuples(st.just("removed"), st.lists(st.sampled_from(IDS), max_size=4)),
        st.tuples(st.just("cleared"), st.sampled_from([*SPACES, None])),
    ),
    max_size=30,
)


@given(steps, st.integers(1, 16), st.integers(1, 4))
@settings(deadline=None)
def test_nothing_that_was_removed_is_forgotten(steps, most_blocks, most_prefixes):
    """Against sets of all removed blocks, by place; with bounds it may be more, never less."""
    departed = DepartedPlaces(most_blocks=most_blocks, most_prefixes=most_prefixes)
    gone: dict[str, set[bytes]] = {}
    for step, what in steps:
        if step == "left":
            departed.left(what, [])
            gone[what] = set()
        elif step == "removed":
            departed.removed(what)
            for known in gone.values():
                known.update(what)
        elif step == "cleared":
            departed.cleared(what)
            for known in gone.values():
                known.update(one for one in IDS if one.startswith(what or b""))
        else:
            wanted = gone.pop(what, set())
            found = departed.removed_since(what)
            told = {*found.blocks}
            told |= {one for one in IDS if any(map(one.startswith, found.prefixes))}
            assert wanted <= told
            if most_blocks == len(IDS) and most_prefixes == len(SPACES):
                assert wanted == told
            if found:
                with departed.coming_back(what) as ready:
                    assert not ready
                departed.made_good(what, found)
            with departed.coming_back(what) as ready:
                assert ready
        assert len(departed._blocks) <= most_blocks
        assert len(departed._prefixes) <= most_prefixes
    if not gone:
        assert not departed._blocks
        assert not departed._prefixes


def test_removals_while_places_come_and_go_under_threads(bench):
    """Whatever was removed stays so, also where a removal and an attachment meet."""
    store = away(bench)
    put(store, range(100, 140), wait=20)
    over = threading.Event()
    failed: list[BaseException] = []

    def remove() -> None:
        try:
            for number in range(100, 140):
                store.remove([name(number)])
        except BaseException as error:  # noqa: BLE001 - raised by the test
            failed.append(error)
        finally:
            over.set()

    places = ["one"]
    thread = threading.Thread(target=remove)
    thread.start()
    while not over.is_set():
        if len(store.tiers) == 1:
            store.attach(bench.spec(bench.disk(64, places.pop())))
        else:
            leaving = store.tiers[0]
            places.append(Path(leaving.backend.inner._directory.root).name)
            store.detach(leaving.name, timeout=10)
    thread.join(20)
    if failed:
        raise failed[0]
    for at in places:
        back(store, bench, bench.disk(64, at))
    assert [get(store, [number]) for number in range(100, 140)] == [0] * 40
