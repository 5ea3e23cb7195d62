"""The search over rows of tokens: exact on long rows, and on many that are alike."""

from __future__ import annotations

import numpy as np
import pytest
from slot_requests import fill

from kvkeep.core.slots import SlotCache


@pytest.mark.parametrize("at", [0, 1, 511, 512, 513, 4607, 4608, 4609, 20_000, 32_767, 32_768])
def test_the_common_length_of_long_rows_is_exact(at: int) -> None:
    cache = SlotCache(3, 32_800)
    tokens = np.arange(32_768, dtype=np.int32)
    fill(cache, tokens)
    other = tokens.copy()
    other[at:] += 1
    assert cache.match(other) == at
    assert cache.match(np.append(other, 5)) == at


def test_the_longest_of_many_alike_is_found() -> None:
    rng = np.random.default_rng(7)
    rows = rng.integers(0, 2, (200, 40))
    rows[:, :20] = np.tril(np.ones((20, 20)), -1).astype(int)[rng.integers(0, 20, 200)]
    cache = SlotCache(200, 64)
    leases = []
    for row in rows:
        lease = cache.acquire(row)
        if lease.copy:
            lease.copied()
        lease.publish(int(rng.integers(lease.published, 41)))
        leases.append(lease)
    stored = [(lease.tokens, lease.published) for lease in leases]
    for prompt in rows[rng.permutation(200)] ^ (rng.random((200, 40)) < 0.02):
        naive = 0
        for tokens, published in stored:
            same = np.append(tokens == prompt, False)[: published + 1]
            naive = max(
                naive, min(published, int(np.argmin(same)) if not same.all() else published)
            )
        assert cache.match(prompt) == naive
