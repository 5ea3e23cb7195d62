"""The steps of a `SlotLease`."""

from __future__ import annotations

import numpy as np
import pytest
from slot_requests import seen

from kvkeep.core.errors import InvalidValue
from kvkeep.core.slots import SlotCache


def test_generated_tokens_are_reused_after_the_request() -> None:
    cache = SlotCache(2, 8)
    with cache.acquire([1, 2]) as lease:
        lease.publish(2)
        lease.extend([3])
        lease.extend(np.array([4, 5]))
        lease.extend([])
        assert lease.tokens.tolist() == [1, 2, 3, 4, 5]
        lease.publish(4)
    assert cache.match([1, 2, 3, 4, 5, 6]) == 4  # the fifth was never computed


def test_a_request_that_fails_gives_its_slot_back() -> None:
    cache = SlotCache(1, 8)
    lease = cache.acquire([1, 2, 3])
    lease.publish(1)
    with pytest.raises(ZeroDivisionError), lease:
        1 // 0  # noqa: B018
    assert seen(cache).running == 0
    assert cache.match([1, 2]) == 1


def test_the_tokens_of_a_lease_cannot_be_corrupted_through_what_was_given_or_got() -> None:
    cache = SlotCache(1, 8)
    prompt = np.array([1, 2, 3], np.int32)
    lease = cache.acquire(prompt)
    lease.publish(3)
    pin = cache.pin(prompt)
    prompt[:] = 9
    lease.tokens[:] = 9
    assert lease.tokens.tolist() == [1, 2, 3]
    assert pin.tokens.tolist() == [1, 2, 3]
    cache.check()


def test_steps_beyond_the_slot_are_refused_and_change_nothing() -> None:
    cache = SlotCache(2, 4)
    lease = cache.acquire([1, 2, 3])
    for wrong in (
        lambda: lease.extend([4, 5]),
        lambda: lease.extend([-4]),
        lambda: lease.publish(4),
        lambda: lease.publish(-1),
        lambda: lease.publish(1.0),  # type: ignore[arg-type]
        lambda: lease.publish(True),
    ):
        with pytest.raises(InvalidValue):
            wrong()
    assert lease.tokens.tolist() == [1, 2, 3]
    assert lease.published == 0
    lease.extend([4])
    lease.publish(np.int64(4))  # type: ignore[arg-type]
    cache.check()
