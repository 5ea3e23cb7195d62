"""Short ways to run requests on a `SlotCache`, for the tests of slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvkeep.core.errors import IllegalStep

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.core.slots import SlotCache, SlotLease, SlotStats


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def seen(cache: SlotCache) -> SlotStats:
    """The state, after recounting it."""
    cache.check()
    return cache.stats()


def fill(cache: SlotCache, tokens: Sequence[int], namespace: str = "") -> int:
    """Run a request from beginning to end; returns its slot."""
    with cache.acquire(tokens, namespace) as lease:
        lease.publish(len(tokens))
    return lease.slot


def steps(lease: SlotLease) -> dict[str, Callable[[], object]]:
    return {
        "extend": lambda: lease.extend([1]),
        "publish": lambda: lease.publish(1),
        "release": lease.release,
        "copied": lease.copied,
        "tokens": lambda: lease.tokens,
        "num_tokens": lambda: lease.num_tokens,
        "published": lambda: lease.published,
        "with": lease.__enter__,
    }


def all_over(lease: SlotLease) -> None:
    assert not lease.running
    for name, step in steps(lease).items():
        with pytest.raises(IllegalStep, match="is over"):
            step()
        assert not lease.running, name
