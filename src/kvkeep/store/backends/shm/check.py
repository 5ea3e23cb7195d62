"""Recounts a shared arena."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.store.backends.shm import layout as at

if TYPE_CHECKING:
    from kvkeep.store.backends.shm.arena import SharedArena

__all__ = ["check"]


def check(arena: SharedArena) -> None:
    """Assert that extents tile the data, and that chains, bins and counts agree with records."""
    with arena:
        books, words = arena.books, arena.books.words
        states = books.state.tolist()
        used = [entry for entry, state in enumerate(states) if state != at.UNUSED]
        assert all(entry < words[at.HIGH] for entry in used)
        used.sort(key=books.offset.__getitem__)
        end, before, free = 0, -1, []
        for entry in used:
            assert books.offset[entry] == end, f"entry {entry} does not begin at {end}"
            assert books.before[entry] == before, f"the entry before {entry} is not {before}"
            if before >= 0:
                assert books.after[before] == entry
                assert (states[before], states[entry]) != (at.FREE, at.FREE), "two free ones meet"
            if states[entry] == at.FREE:
                free.append(entry)
            else:
                assert books.proven(entry), f"entry {entry} does not prove itself"
                published = states[entry] == at.PUBLISHED
                assert books.named[entry] == books.generation[entry] * published
                assert published or books.is_held(entry), f"entry {entry} is lost"
            end, before = end + books.length[entry], entry
        assert end == books.layout.data_bytes, f"the last extent ends at {end}"
        assert words[at.FREE_BYTES] == sum(books.length[entry] for entry in free)
        assert sorted(_listed(arena)) == sorted(free), "bins and free extents differ"
        spare, entry = 0, words[at.SPARE]
        while entry >= 0:
            assert states[entry] == at.UNUSED
            spare, entry = spare + 1, books.link[entry]
        assert spare == words[at.SPARES] == books.layout.entries - len(used)
        named = [entry for entry in used if states[entry] == at.PUBLISHED]
        assert words[at.RECORDS] == len(named) == len({books.id_of(entry) for entry in named})
        for entry in named:
            assert books.walk(books.id_of(entry)) == entry, f"entry {entry} is not found"
        leaving = [entry for entry in named if books.leaving[entry]]
        assert words[at.LEAVING] == sum(books.length[entry] for entry in leaving)
        for number in range(words[at.QUOTA_COUNT]):
            quota = at.QUOTA_AT + 4 * number
            space = bytes(words[quota : quota + 2].cast("B"))
            mine = [entry for entry in named if books.id_of(entry).startswith(space)]
            assert words[quota + 3] == sum(books.size[entry] for entry in mine)


def _listed(arena: SharedArena) -> list[int]:
    """Return the free extents that the bins have."""
    books, found = arena.books, []
    for number in range(at.BINS):
        entry = books.words[at.BIN_AT + number]
        marked = bool(books.bitmap[number >> 3] & 1 << (number & 7))
        assert marked == (entry >= 0), f"bin {number} is marked wrongly"
        while entry >= 0:
            found.append(entry)
            entry = books.link[entry]
    return found
