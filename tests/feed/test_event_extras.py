"""Events of prompts with bytes at token positions: keys of their bytes, tokens of the prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvkeep import PagedCache
from kvkeep.core.extras import as_extras
from kvkeep.core.keys import as_namespace, chain_keys, root_key
from kvkeep.core.tokens import as_tokens
from kvkeep.serve.kv_events import BlockStored, CacheBlocks
from kvkeep.serve.kv_events.wire import Batch, decode, encode
from kvkeep.serve.router import PrefixRouter

if TYPE_CHECKING:
    from kvkeep.core.events import Event
    from kvkeep.serve.kv_events.wire import KVEvent

SIZE = 4
PROMPT = list(range(20))
CAT, DOG = b"a cat", b"a dog"


def told(space: str, *extras: list[tuple[int, bytes]] | None) -> tuple[PagedCache, list[KVEvent]]:
    """A cache in which the prompt was computed with each of these, and what was told of it."""
    cache = PagedCache(64, SIZE)
    journal = CacheBlocks(SIZE)
    said: list[KVEvent] = []

    def hook(event: Event) -> None:
        said.extend(journal.take(event))

    cache.subscribe(hook)
    for extra in extras:
        with cache.open(PROMPT, space, extra=extra) as sequence:
            sequence.copies()
            sequence.publish()
    return cache, said


def stored(events: list[KVEvent]) -> dict[int | bytes, BlockStored]:
    return {
        name: event
        for event in events
        if isinstance(event, BlockStored)
        for name in event.block_hashes
    }


@pytest.mark.parametrize("space", ["", "salt"])
def test_hashes_are_those_of_the_bytes_and_tokens_those_of_the_prompt(space: str) -> None:
    cache, said = told(space, [(9, CAT)], [(9, DOG), (9, CAT)])
    row, root = as_tokens(PROMPT).tobytes(), root_key(as_namespace(space))
    expected = {
        int.from_bytes(key[-8:], "big")
        for extra in ([(9, CAT)], [(9, DOG), (9, CAT)])
        for key in chain_keys(root, row, SIZE * 4, as_extras(extra, 20))
    }
    assert set(stored(said)) == expected
    first, second = (event for event in said if isinstance(event, BlockStored))
    assert first.token_ids == PROMPT
    assert second.token_ids == PROMPT[8:]
    digests = [one.digest.hex() for one in as_extras([(9, DOG), (9, CAT)], 20)]
    assert first.extra_keys is not None
    assert first.extra_keys[1:] == [None, [[digests[1], 1]], None, None]
    assert second.extra_keys == [[[digests[0], 1], [digests[1], 1]], None, None]
    batch, unread = decode(encode(Batch(0.0, said)))
    assert (batch.events, unread) == (said, 0)
    # One that comes later learns the same from the tree, and from a snapshot.
    late = CacheBlocks(SIZE)
    told_late = late.reconcile((one, cache.runs(one)) for one in cache.namespaces())
    assert set(stored(told_late)) == expected


def test_a_router_does_not_take_blocks_with_bytes_for_those_without() -> None:
    _, said = told("", [(9, CAT)])
    router = PrefixRouter(["a"])
    router.apply("a", said)
    (score,) = router.score([*PROMPT, 1])
    assert score.tokens == 8
