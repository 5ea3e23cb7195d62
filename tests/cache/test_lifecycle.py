"""Every step in every state: legal ones lead where the table says, others change nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvkeep import IllegalStep, OutOfPages, PagedCache
from kvkeep.core.cache.copies import STEPS, SequenceState

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep import Sequence

STEP: dict[str, Callable[[Sequence], Any]] = {
    "copies": lambda sequence: sequence.copies(),
    "append": lambda sequence: sequence.append([1, 2, 3]),
    "fork": lambda sequence: sequence.fork(),
    "truncate": lambda sequence: sequence.truncate(5),
    "publish": lambda sequence: sequence.publish(),
    "close": lambda sequence: sequence.close(),
}
PAIRS = [(state, step) for state in SequenceState for step in STEP]


def cache_with(state: SequenceState) -> tuple[PagedCache, Sequence]:
    """A cache, and a sequence of six tokens in ``state``, its second page a copy or its own."""
    cache = PagedCache(num_pages=16, page_size=4)
    with cache.open([0, 1, 2, 3, 4, 5, 6, 7]) as first:
        first.publish()
    sequence = cache.open([0, 1, 2, 3, 4, 99])
    if state is not SequenceState.COPYING:
        assert len(sequence.copies()) == 1
    if state is SequenceState.CLOSED:
        sequence.close()
    assert sequence.state is state
    return cache, sequence


def all_of(cache: PagedCache, sequence: Sequence) -> tuple[Any, ...]:
    """All that can be seen of a cache and a sequence."""
    cache.check()
    return (
        cache.stats(), repr(cache), list(map(str, cache.runs())), cache.namespaces(),
        repr(sequence), sequence.pages.tolist(), sequence.tokens.tolist(), sequence.num_cached,
        sequence.num_published, len(sequence.claims()), sequence.closed,
    )  # fmt: skip


@pytest.mark.parametrize(("state", "step"), PAIRS, ids=lambda value: getattr(value, "name", value))
def test_a_step(state: SequenceState, step: str) -> None:
    cache, sequence = cache_with(state)
    if step in STEPS[state]:
        STEP[step](sequence)
        assert sequence.state in STEPS[state][step]
        cache.check()
        return
    before = all_of(cache, sequence)
    verb = {"copies": "take the copies of"}.get(step, step)
    with pytest.raises(IllegalStep, match=f"cannot {verb} this sequence"):
        STEP[step](sequence)
    assert all_of(cache, sequence) == before


REACHED: list[
    tuple[SequenceState, str, SequenceState, Callable[[PagedCache, Sequence], object]]
] = [
    (SequenceState.COPYING, "truncate", SequenceState.COPYING, lambda _, s: s.truncate(5)),
    (
        SequenceState.COPYING,
        "truncate",
        SequenceState.READY,
        lambda _, s: s.truncate(4),
    ),  # the copy's page is gone
    (SequenceState.READY, "append", SequenceState.READY, lambda _, s: s.append([1])),
    (SequenceState.READY, "append", SequenceState.COPYING, lambda _, s: (s.fork(), s.append([1]))),
    (SequenceState.COPYING, "fork", SequenceState.COPYING, lambda _, s: s.fork()),
    (SequenceState.COPYING, "append", SequenceState.COPYING, lambda _, s: s.append([1])),
    (SequenceState.READY, "fork", SequenceState.READY, lambda _, s: s.fork()),
    (SequenceState.READY, "publish", SequenceState.READY, lambda _, s: s.publish(0)),
    (SequenceState.READY, "truncate", SequenceState.READY, lambda _, s: s.truncate(0)),
    (SequenceState.READY, "copies", SequenceState.READY, lambda _, s: s.copies()),
    (SequenceState.COPYING, "copies", SequenceState.READY, lambda _, s: s.copies()),
    (SequenceState.COPYING, "close", SequenceState.CLOSED, lambda _, s: s.close()),
    (SequenceState.READY, "close", SequenceState.CLOSED, lambda _, s: s.close(keep=False)),
]


@pytest.mark.parametrize(
    ("state", "step", "target", "go"), REACHED, ids=lambda v: getattr(v, "name", None)
)
def test_a_way(
    state: SequenceState, step: str, target: SequenceState, go: Callable[..., Any]
) -> None:
    cache, sequence = cache_with(state)
    go(cache, sequence)
    assert sequence.state is target, step
    cache.check()


def test_publishing_before_the_copies_says_what_to_do() -> None:
    _, sequence = cache_with(SequenceState.COPYING)
    with pytest.raises(IllegalStep, match=r"call copies\(\), make them, then publish"):
        sequence.publish()


def test_a_closed_sequence_says_so() -> None:
    _, sequence = cache_with(SequenceState.CLOSED)
    with pytest.raises(IllegalStep, match="cannot append this sequence: it is closed"):
        sequence.append([1])


def test_a_closed_sequence_can_still_be_looked_at() -> None:
    _, sequence = cache_with(SequenceState.CLOSED)
    assert sequence.closed
    assert sequence.pages.tolist() == []
    assert sequence.tokens.tolist() == [0, 1, 2, 3, 4, 99]
    assert sequence.num_tokens == 6
    assert "closed" in repr(sequence)


def test_the_state_is_looked_at_before_the_arguments_have_an_effect() -> None:
    cache, sequence = cache_with(SequenceState.CLOSED)
    before = all_of(cache, sequence)
    with pytest.raises(IllegalStep):
        sequence.append(range(10_000))
    with pytest.raises(IllegalStep):
        sequence.truncate(-1)
    assert all_of(cache, sequence) == before


@pytest.mark.parametrize(
    "state", [SequenceState.COPYING, SequenceState.READY], ids=lambda state: state.name
)
def test_running_out_of_pages_changes_nothing(state: SequenceState) -> None:
    cache, sequence = cache_with(state)
    for length in (1_000, 16 * 4 + 1 - 6):
        before, refused = all_of(cache, sequence)[1:], cache.stats().out_of_pages
        with pytest.raises(OutOfPages):
            sequence.append(range(length))
        assert all_of(cache, sequence)[1:] == before
        assert cache.stats().out_of_pages == refused + 1
    sequence.append([7])
    assert sequence.tokens.tolist() == [0, 1, 2, 3, 4, 99, 7]


def test_leaving_the_block_closes_once() -> None:
    cache = PagedCache(4, 4)
    with cache.open([1]) as sequence:
        sequence.close()
    with pytest.raises(KeyError), cache.open([1]) as interrupted:
        raise KeyError
    assert interrupted.closed
    assert cache.stats().sequences == 0
    assert cache.stats().closed == 2
