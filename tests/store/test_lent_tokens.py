"""Tokens are lent for a call: their memory may grow and change as soon as the call returns."""

from __future__ import annotations

from array import array
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from store_kv import disk, open_store, put

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvkeep.store import KVStore

TOKENS = range(100, 130)

CALLS: dict[str, Callable[[KVStore, Any], Any]] = {
    "lookup": lambda store, tokens: store.lookup(tokens),
    "get": lambda store, tokens: store.get(tokens),
    "get, where it pays": lambda store, tokens: store.get(tokens, pays=True),
    "worth_loading": lambda store, tokens: store.worth_loading(tokens),
    "prefetch": lambda store, tokens: store.prefetch(tokens),
    "touch": lambda store, tokens: store.touch(tokens),
    "why": lambda store, tokens: store.why(tokens),
    "unkept": lambda store, tokens: store.unkept(tokens),
    "ended": lambda store, tokens: store.ended(tokens, prompt=20),
    "pin": lambda store, tokens: store.pin(tokens, 9),
    "unpin": lambda store, tokens: store.unpin(tokens),
    "remove": lambda store, tokens: store.remove(tokens),
    "declare": lambda store, tokens: store.public.declare(tokens),
}


@pytest.mark.parametrize("call", CALLS)
def test_no_call_keeps_the_memory(call: str, tmp_path: Path) -> None:
    with open_store("memory://4MiB", disk(tmp_path / "d")) as store:
        put(store, TOKENS, tail=True)
        lent = array("i", TOKENS)
        result = CALLS[call](store, lent)
        lent.append(5)  # a buffer that is still exported cannot grow
        del result


@contextmanager
def stored(place: Path) -> Iterator[KVStore]:
    with open_store(disk(place)) as store:
        put(store, TOKENS, tail=True)
    with open_store("memory://4MiB", disk(place)) as store:
        yield store


def test_a_prefetch_reads_the_prompt_of_the_call(tmp_path: Path) -> None:
    with stored(tmp_path / "d") as store:
        for _ in range(20):  # the thread that looks blocks up comes first, or the change does
            lent = array("i", TOKENS)
            coming = store.prefetch(lent)
            lent[0] = 7
            assert coming.wait(10) == len(TOKENS)
