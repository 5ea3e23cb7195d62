"""`kvkeep.testing`: imports on demand, models, strategies."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvkeep.testing
from kvkeep import PageCopy, PagedCache
from kvkeep.core.tokens import as_tokens
from kvkeep.testing import NaiveCache, TaggedPages
from kvkeep.testing.memory import tags
from kvkeep.testing.strategies import prompts, related_prompts, token_forms


def test_the_suites_are_imported_when_they_are_asked_for() -> None:
    code = (
        "import sys, kvkeep.testing as t; t.NaiveCache; t.TaggedPages;"
        "assert not {'pytest', 'hypothesis'} & sys.modules.keys();"
        "t.PolicyTests; assert {'pytest', 'hypothesis'} < sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_every_name_is_there() -> None:
    for name in kvkeep.testing.__all__:
        assert getattr(kvkeep.testing, name)
    with pytest.raises(AttributeError, match="NoTests"):
        _ = kvkeep.testing.NoTests


def test_the_naive_cache_follows_a_cache() -> None:
    cache, naive = PagedCache(8, 2), NaiveCache(2)
    cache.subscribe(naive)
    with cache.open([1, 2, 3, 4, 5]) as sequence:
        sequence.publish()
        pages = sequence.pages.tolist()
    assert naive.match([1, 2, 3, 9]).pages == pages[:1]
    assert naive.match([1, 2, 3, 9]).partial_tokens == 1
    assert naive.match([1, 2, 3, 9]).partial_pages == {pages[1]}
    assert naive.match([1, 2, 3, 9], "tenant").pages == []
    assert naive.match([9]).partial_pages == set()
    assert naive.path(pages[1]) == pages[:2]
    cache.evict(1)
    assert naive.match([1, 2, 3, 4]).pages == pages[:1]
    assert len(naive) == 1


def test_a_naive_cache_that_is_not_exact_finds_full_pages() -> None:
    naive = NaiveCache(2, exact=False)
    naive.store("", -1, [5], [1, 2])
    assert naive.match([1, 3]).partial_tokens == 0
    assert naive.match([1, 2]).pages == [5]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda naive: naive.store("", -1, [1], [1, 2]),  # that id is stored
        lambda naive: naive.store("", -1, [8], [1, 2]),  # those tokens are stored
        lambda naive: naive.store("", 7, [8], [3, 4]),  # nothing is before it
        lambda naive: naive.store("tenant", 1, [8], [3, 4]),  # before it is another's
        lambda naive: naive.store("", 1, [8], [3]),  # not a full page
        lambda naive: naive.store("", 1, [], []),
        lambda naive: naive.forget([7]),
        lambda naive: naive.forget([1]),  # page 2 follows it
    ],
)
def test_the_naive_cache_refuses_illegal_events(wrong: Any) -> None:
    naive = NaiveCache(2)
    naive.store("", -1, [1, 2], [1, 2, 3, 4])
    with pytest.raises(AssertionError):
        wrong(naive)


def test_a_slot_knows_its_whole_prefix() -> None:
    memory = TaggedPages(4, 2)
    table = np.array([2, 0], np.int32)
    memory.write(table, 0, tags([1, 2, 3]))
    assert memory.read(table, 3).tolist() == tags([1, 2, 3]).tolist()
    assert memory.read(table, 4)[3] != tags([1, 2, 3, 0])[3], "what nobody wrote is garbage"
    assert tags([1, 2])[1] != tags([0, 2])[1], "the same token after another prefix"
    assert tags([1])[0] != tags([1], "tenant")[0]
    memory.copy(PageCopy(0, 3, 1))
    assert memory.slots[3, 0] == tags([1, 2, 3])[2]
    assert memory.slots[3, 1] != memory.slots[0, 1]
    memory.scribble([0])
    assert memory.slots[0, 0] != memory.slots[3, 0]


@given(st.data(), st.sampled_from([1, 2, 16]))
def test_the_strategies_give_tokens(data: st.DataObject, page_size: int) -> None:
    first = data.draw(prompts(page_size))
    second = data.draw(related_prompts([first], page_size, max_pages=3))
    assert data.draw(related_prompts([], page_size))
    assert 0 < len(second) <= 3 * page_size + 1
    assert set(first + second) <= {0, 1, 2}
    assert as_tokens(data.draw(token_forms(second))).tolist() == second
