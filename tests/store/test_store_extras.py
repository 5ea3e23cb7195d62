"""KV of prompts with bytes at token positions: found by tokens and bytes, or not at all."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_kv import GQA, disk, numbers, open_store, plain
from store_kv import given as as_given

from kvkeep.core.errors import InvalidValue
from kvkeep.core.extras import as_extras, signed
from kvkeep.core.keys import chain_keys, root_key
from kvkeep.core.tokens import as_tokens

if TYPE_CHECKING:
    from pathlib import Path

    from kvkeep.store import KVStore

SIZE = 4
TOKENS = list(range(18))
CAT, DOG = [(9, b"a cat")], [(9, b"a dog")]


def numbers_of(tokens: list[int], extra: list[tuple[int, bytes]] | None) -> np.ndarray:
    """Bytes of KV that depend on tokens and bytes."""
    row = signed(as_tokens(tokens), as_extras(extra, len(tokens)))
    return numbers(GQA, (row.astype(np.int64) % 2**40).tolist())


def put(store: KVStore, tokens: list[int], extra: Any = None, start: int = 0, **how: Any) -> Any:
    kv = as_given(GQA, numbers_of(tokens, extra)[start:])
    return store.put(tokens, kv, start, extra=extra, **how)


def get(store: KVStore, tokens: list[int], extra: Any = None, start: int = 0) -> int:
    kv, count = store.get(tokens, start, extra=extra)
    if count:
        want = numbers_of(tokens, extra)[start : start + count]
        assert np.array_equal(plain(GQA, kv), want), "another's KV"
    return count


def test_blocks_are_shared_before_the_bytes_and_never_behind_them(tmp_path: Path) -> None:
    url = disk(tmp_path / "d")
    with open_store("memory://1MiB", url) as store:
        put(store, TOKENS, CAT, tail=True)
    with open_store("memory://1MiB", url) as store:
        assert get(store, TOKENS, CAT) == 18
        assert get(store, TOKENS, DOG) == 8
        assert get(store, TOKENS) == 8
        assert get(store, TOKENS, [(9, b"a cat"), (17, b"")]) == 16, "the tail is another"
        assert put(store, TOKENS, DOG, tail=True).skipped == 8
        assert get(store, TOKENS, DOG) == 18
        assert get(store, TOKENS, CAT, start=10) == 8


def test_every_question_takes_the_bytes() -> None:
    with open_store() as store:
        put(store, TOKENS, CAT, tail=True)
        assert store.lookup(TOKENS, extra=CAT).tokens == 18
        assert store.lookup(TOKENS, extra=DOG).tokens == 8
        assert store.prefetch(TOKENS, extra=CAT).wait(10) == 18
        assert store.prefetch(TOKENS, extra=DOG).wait(10) == 8
        assert store.pin(TOKENS, 60, extra=CAT) == 18
        assert store.pin(TOKENS, 60, extra=DOG) == 8
        assert store.unpin(TOKENS, extra=CAT) == 18
        store.touch(TOKENS, extra=CAT)
        assert store.why(TOKENS, extra=CAT) == ()
        assert [fate.start for fate in store.why(TOKENS, extra=DOG)] == [8]
        store.unkept(TOKENS, 8, extra=DOG)
        assert next(fate.what for fate in store.why(TOKENS, 8, extra=DOG)) == "dropped"
        assert [fate.what for fate in store.why(TOKENS, 8, extra=[(9, b"")])] == ["never"]


def test_wrong_extras_are_the_callers_mistake() -> None:
    kv = as_given(GQA, numbers(GQA, TOKENS))
    with open_store() as store:
        for call in (
            lambda extra: store.put(TOKENS, kv, extra=extra),
            lambda extra: store.get(TOKENS, extra=extra),
            lambda extra: store.lookup(TOKENS, extra=extra),
            lambda extra: store.why(TOKENS, extra=extra),
            lambda extra: store.unkept(TOKENS, extra=extra),
            lambda extra: store.touch(TOKENS, extra=extra),
            lambda extra: store.prefetch(TOKENS, extra=extra),
            lambda extra: store.pin(TOKENS, 1, extra=extra),
            lambda extra: store.unpin(TOKENS, extra=extra),
        ):
            for extra in ([(18, b"a")], [(0, "a")], b"a"):
                with pytest.raises(InvalidValue, match="extra"):
                    call(extra)
        assert store.lookup(TOKENS).tokens == 0


def test_names_are_those_of_the_description() -> None:
    """Of blocks, and of all tails, whose extras are those of a shorter block."""
    extras = as_extras([(1, b"x"), (9, b"a"), (9, b"b"), (11, b"c")], 18)
    with open_store() as store:
        names = store._names.of(None).having(extras)
        root = root_key(store.namespace)
        row = as_tokens(TOKENS)
        full = names.full(row)
        assert full == [names.space + key for key in chain_keys(root, row.tobytes(), 16, extras)]
        tails = names.tails(full[:2], row[8:12])
        digests = [hashlib.sha256(data).digest() for data in (b"a", b"b", b"c")]
        for count, tail in enumerate(tails, start=1):
            said = full[1][16:] + row[8 : 8 + count].tobytes()
            if count >= 2:
                said += b"\xff" * 4 + b"".join(b"\1\0\0\0" + one for one in digests[:2])
            if count == 4:
                said += b"\3\0\0\0" + digests[2]
            assert tail[16:] == hashlib.sha256(said).digest()
        assert tails[-1] == full[2]


@pytest.mark.parametrize("position", range(len(TOKENS)))
def test_what_stands_behind_an_extra_is_removed_and_replaced(tmp_path: Path, position: int) -> None:
    """By a process that did not put it: it knows the blocks by their names alone."""
    extra = [(position, b"an image")]
    url = disk(tmp_path / "d")
    old, new = as_given(GQA, numbers_of(TOKENS, None)), as_given(GQA, numbers_of(TOKENS, extra))
    with open_store("memory://1MiB", url) as store:
        store.put(TOKENS, old, tail=True, extra=extra)
        assert store.flush()
    with open_store("memory://1MiB", url) as store:
        done = store.put(TOKENS, new, tail=True, replace=True, extra=extra)
        assert (done.tokens, done.skipped) == (len(TOKENS), 0)
        assert get(store, TOKENS, extra) == len(TOKENS)
        assert store.flush()
    with open_store("memory://1MiB", url) as store:
        assert store.remove(TOKENS, 12, extra=extra).complete
        assert store.lookup(TOKENS, extra=extra).tokens == 12
        assert store.remove(TOKENS, extra=extra).complete
        assert store.stats().tiers[1].blocks == 0


EXTRA = st.lists(st.tuples(st.integers(0, 9), st.sampled_from([b"", b"a"])), max_size=2)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    puts=st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=10, max_size=10), EXTRA),
                  min_size=1, max_size=5),
    asked=st.tuples(st.lists(st.integers(0, 1), min_size=10, max_size=10), EXTRA),
)  # fmt: skip
def test_reuse_is_the_longest_prefix_of_blocks_that_was_put(puts: Any, asked: Any) -> None:
    def seen(prompt: Any) -> list[int]:
        tokens, extra = prompt
        return signed(as_tokens(tokens), as_extras(extra, 10)).tolist()

    with open_store() as store:
        for tokens, extra in puts:
            put(store, tokens, extra, tail=True)
        common = 0
        for one in puts:
            same = [a == b for a, b in zip(seen(one), seen(asked), strict=True)]
            length = same.index(False) if False in same else 10
            common = max(common, length if length == 10 else length // SIZE * SIZE)
        assert get(store, *asked) == common
