"""What is particular to the chain index: block keys in place of tokens, each computed once.

The contract that it shares with the radix index is in `prefix_suite.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvkeep import Namespace, PagedCache
from kvkeep.core.cache.inspector import runs_of
from kvkeep.core.eviction import LRU
from kvkeep.core.keys import KEY_BYTES, chain_keys, root_key
from kvkeep.core.prefix import ChainIndex, chain
from kvkeep.core.tokens import as_tokens

SIZE = 4


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many keys were computed, call by call."""
    counts: list[int] = []

    def counting(parent: bytes, tokens: bytes, block_bytes: int, extras: Any) -> list[bytes]:
        keys = chain_keys(parent, tokens, block_bytes, extras)
        counts.append(len(keys))
        return keys

    monkeypatch.setattr(chain, "chain_keys", counting)
    return counts


def cached(num_pages: int = 64) -> PagedCache:
    return PagedCache(num_pages, SIZE, prefix="chain")


def test_what_is_stored_are_the_documented_keys() -> None:
    cache = cached()
    space = Namespace(tenant="a", model="m")
    prompt = list(range(100, 118))
    with cache.open(prompt, space) as sequence:
        sequence.publish()
        (run,) = cache.runs(space)
        keys = chain_keys(root_key(space), as_tokens(prompt).tobytes(), SIZE * 4)
        assert run.symbols == b"".join(keys)
        assert len(run.symbols) == len(run.pages) * KEY_BYTES
        assert run.tokens is None, "it keeps no tokens"


def test_a_key_names_all_tokens_before_it() -> None:
    """The same page after another beginning is another page."""
    cache = cached()
    for first in (1, 2):
        with cache.open([first] * 4 + [7] * 4) as sequence:
            assert sequence.num_cached == 0
            sequence.publish()
    assert cache.stats().pages_cached == 4
    assert cache.match([7] * 4).num_tokens == 0


def test_each_key_of_a_request_is_computed_once(hashed: list[int]) -> None:
    cache = cached()
    sequence = cache.open(range(30))
    assert sum(hashed) == 7  # full pages before the last token: all that a lookup can use
    sequence.publish(8)
    sequence.publish()
    assert sum(hashed) == 7
    sequence.append(range(30, 41))
    sequence.publish()
    assert sum(hashed) == 10  # 41 tokens are 10 full pages
    sequence.publish()
    sequence.close()
    assert sum(hashed) == 10


def test_a_fork_inherits_the_keys_and_a_cut_costs_those_behind_it(hashed: list[int]) -> None:
    cache = cached()
    sequence = cache.open(range(32))
    sequence.publish()
    del hashed[:]
    fork = sequence.fork()
    fork.append(range(4))
    fork.publish()
    assert hashed == [1], "the page that is new"
    sequence.truncate(18)  # 4 full pages remain
    sequence.append([99] * 6)
    assert sequence.copies()
    sequence.publish()
    assert hashed == [1, 2]
    keys = chain_keys(root_key(Namespace()), as_tokens(sequence.tokens).tobytes(), SIZE * 4)
    assert keys[-1] in b"".join(run.symbols for run in cache.runs())
    cache.check()


def test_page_sizes_do_not_meet() -> None:
    """Keys of 4-token pages are not among those of 8-token pages of the same tokens."""
    tokens = as_tokens(range(64)).tobytes()
    keys = {
        key for size in (4, 8, 16) for key in chain_keys(root_key(Namespace()), tokens, 4 * size)
    }
    assert len(keys) == 16 + 8 + 4


def test_equal_bytes_of_a_key_and_a_token_row_do_not_meet() -> None:
    """The encoder hashes; nothing a caller sends as tokens is ever taken for a key."""
    index = ChainIndex(8, LRU())  # 8 tokens are 32 bytes: as long as a key
    space = Namespace()
    tokens = as_tokens(range(8))
    hold, _ = index.hold(None, space)
    hold = index.insert(hold, index.encoder(space).pages(tokens, 0, 1), pages([0]), 0).hold
    key = next(runs_of(index, space)).symbols
    forged = np.frombuffer(key, "<i4") & 0x7FFFFFFF
    match: Any = index.match(index.encoder(space).lookup(forged), space)
    assert len(match.pages) == 0
    index.check([hold])


def pages(ids: list[int]) -> Any:
    return np.array(ids, np.int32)
