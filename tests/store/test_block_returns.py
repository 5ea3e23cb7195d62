"""Conversations of stores whose callers name the blocks."""

from __future__ import annotations

import numpy as np
import pytest

from kvkeep import InvalidValue
from kvkeep.core.returns import Ended
from kvkeep.store.blocks import BlockReturns, BlockStore
from kvkeep.store.tiers import Conversations


@pytest.mark.parametrize("asking", ["one", "another", None])
def test_a_prompt_shorter_than_a_block_is_its_tenants_alone(asking: str | None) -> None:
    learned = Conversations(())
    returns = BlockReturns(64, learned)
    first = np.arange(40, dtype=np.int32)
    returns.ended(first, [], prompt=20, ended=Ended("stop"), tenant="one")
    returns.requested(np.arange(60, dtype=np.int32), [], tenant=asking)
    waiting = len(learned.returns)
    assert waiting == (0 if asking == "one" else 1)
    learned.check()


@pytest.mark.parametrize("tokens", [0, -1, 1.5])
def test_a_block_has_tokens(tokens: int) -> None:
    with BlockStore("ours") as store, pytest.raises(InvalidValue, match="block_tokens"):
        store.returns(tokens)


@pytest.mark.parametrize("asking", ["one", "another", None])
def test_a_public_block_tells_tenants_apart(asking: str | None) -> None:
    """The last whole block of the prompt has a key that all tenants share."""
    learned = Conversations(())
    returns = BlockReturns(16, learned)
    row, keys = np.arange(60, dtype=np.int32), [bytes([at]) * 32 for at in range(3)]
    returns.ended(row[:40], keys[:2], prompt=39, ended=Ended("stop"), tenant="one", public=2)
    returns.requested(row, keys, tenant=asking, public=2)
    waiting = len(learned.returns)
    assert waiting == (0 if asking == "one" else 1)
    learned.check()
