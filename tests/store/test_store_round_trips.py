"""What is put comes back to the last bit: every dtype, geometry, layout, form and alignment."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from store_kv import (
    FORMS,
    GEOMETRIES,
    GQA,
    counter,
    disk,
    geometry,
    get,
    given,
    numbers,
    open_store,
    plain,
    put,
    quiet,
    room,
)

from kvkeep.core.geometry import DTYPES
from kvkeep.store import Put

if TYPE_CHECKING:
    from pathlib import Path

LAYOUTS = ("NHD", "HND")


def rank_of(name: str) -> str:
    return "tp1/2" if name == "rank" else ""


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_geometry_comes_back_from_memory_and_from_disk(
    dtype: str, name: str, layout: str, tmp_path: Path
) -> None:
    tokens = range(100, 121)
    options = {"shape": geometry(name, dtype), "layout": layout, "rank": rank_of(name)}
    with open_store("memory://1MiB", disk(tmp_path / "d"), **options) as store:
        assert put(store, tokens, tail=True) == Put(21, 0, 0, 0)
        assert get(store, tokens) == 21
        assert get(store, tokens, form="tuples") == 21
    with open_store("memory://1MiB", disk(tmp_path / "d"), **options) as store:
        assert store.lookup(tokens).tiers == (("file", 21),)
        assert get(store, tokens) == 21
        assert store.lookup(tokens).tiers == (("memory", 21),)
        assert counter(store, "hits") == 6
        store.check()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["gqa", "mla", "uneven", "rank"])
def test_every_form_in_and_every_form_out(name: str, layout: str) -> None:
    shape, tokens = GEOMETRIES[name], range(10)
    with open_store(shape=shape, layout=layout, rank=rank_of(name)) as store:
        for came in FORMS:
            data = numbers(shape, tokens, came)
            given_kv = given(shape, data, came, layout)
            done = store.put(tokens, given_kv, tail=True, tenant=came)
            assert done == Put(10, 0, 0, 0)
            assert np.array_equal(plain(shape, given_kv, layout), data), "put changed it"
            for goes in FORMS:
                for start in (0, 3, 8):
                    out = room(shape, 10 - start, goes, layout)
                    kv, count = store.get(tokens, start, tenant=came, out=out)
                    assert count == 10 - start
                    assert np.array_equal(plain(shape, kv, layout), data[start:])
                    assert np.array_equal(plain(shape, out, layout), data[start:])
        store.check()


def test_out_is_written_in_front_only_and_what_is_returned_shares_its_memory() -> None:
    with open_store() as store:
        put(store, range(9))
        for form in FORMS:
            out = room(GQA, 20, form)
            kv, count = store.get([*range(9), *range(50, 61)], out=out)
            assert count == 8
            raw = plain(GQA, out)
            assert np.array_equal(raw[:8], numbers(GQA, range(8)))
            assert (raw[8:] == 0xA5).all(), "written behind what was found"
            mine = kv if form == "tensor" else kv[0][0]
            theirs = out if form == "tensor" else out[0][0]
            assert mine.data_ptr() == theirs.data_ptr()


def test_out_stays_as_it_is_when_nothing_is_found() -> None:
    with open_store() as store:
        out = room(GQA, 8, "tensor")
        assert store.get(range(8), out=out) == (None, 0)
        assert (plain(GQA, out) == 0xA5).all()


def test_what_is_returned_is_the_callers_own() -> None:
    """Writing to it, or to what was put, changes nothing in the store."""
    with open_store() as store:
        data = numbers(GQA, range(8))
        kv = given(GQA, data)
        store.put(range(8), kv)
        kv.zero_()
        first, _ = store.get(range(8))
        first.zero_()
        assert get(store, range(8)) == 8


@pytest.mark.parametrize("form", FORMS)
def test_kv_of_a_model_that_is_trained_or_that_infers(form: str) -> None:
    """Tensors that need a gradient, and those of inference mode, in and out."""
    shape = geometry("gqa", "float32")
    data = numbers(shape, range(8)) & 0x3F  # no NaN: autograd must not be asked about them
    with open_store(shape=shape) as store:
        kv = given(shape, data, form)
        for part in _tensors(kv):
            part.requires_grad_(True)
        assert store.put(range(8), kv).tokens == 8
        with torch.inference_mode():
            inferred = given(shape, data, form)
            out = room(shape, 8, form)
        assert store.put(range(8), inferred, tenant="inference").tokens == 8
        for tenant in ("", "inference"):
            got, count = store.get(range(8), tenant=tenant, out=out)
            assert count == 8
            assert np.array_equal(plain(shape, got), data)
        wants = room(shape, 8, form)
        for part in _tensors(wants):
            part.requires_grad_(True)
        assert store.get(range(8), out=wants)[1] == 8
        assert all(
            np.array_equal(a.detach(), b)
            for a, b in zip(_tensors(wants), _tensors(got), strict=True)
        )
        with torch.inference_mode():
            assert store.get(range(8))[1] == 8


def _tensors(kv: object) -> list[torch.Tensor]:
    if isinstance(kv, torch.Tensor):
        return [kv]
    return [tensor for part in kv for tensor in _tensors(part)]  # type: ignore[attr-defined]


# --- alignment -------------------------------------------------------------------------------


def covered(stored: set[int], start: int, size: int, tail: range | None) -> int:
    """Tokens beyond ``start`` that a get has to give: by whole blocks, then by the tail."""
    end = start - start % size
    while end // size in stored:
        end += size
    if tail is not None and tail.start == end:
        end = tail.stop
    return max(0, end - start)


@pytest.mark.parametrize("length", range(14))
@pytest.mark.parametrize("tail", [False, True])
def test_every_start_of_put_and_of_get(length: int, tail: bool) -> None:
    """Inside a block, at its edge, behind the end, none at all; blocks of 4."""
    size, tokens = 4, list(range(7, 7 + length))
    end = length - length % size
    with open_store(block_tokens=size) as store:
        for begin in range(length + 1):
            who = f"from {begin}"
            stored = set(range(-(-begin // size), end // size))
            kept = range(end, length) if tail and begin <= end < length else None
            want = len(stored) * size + len(kept or ())
            assert put(store, tokens, begin, tail=tail, tenant=who) == Put(
                want, 0, 0, length - begin - want
            )
            for start in range(length + 1):
                assert get(store, tokens, start, tenant=who) == covered(stored, start, size, kept)
            assert store.lookup(tokens, tenant=who).tokens == covered(stored, 0, size, kept)
        quiet(store)
        store.check()


@pytest.mark.parametrize("size", [1, 16, 256])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_of_every_size(size: int, layout: str, tmp_path: Path) -> None:
    urls = ("memory://4MiB", disk(tmp_path / "d"))
    lengths = sorted({0, 1, size - 1, size, size + 1, 2 * size, 3 * size + size // 2})
    with open_store(*urls, block_tokens=size, layout=layout) as store:
        for length in lengths:
            assert put(store, range(length), tail=True, tenant=str(length)).tokens == length
    with open_store(*urls, block_tokens=size, layout=layout) as store:
        for length in lengths:
            assert store.lookup(range(length), tenant=str(length)).tokens == length
            for start in {0, length // 2, max(0, length - 1), length}:
                assert get(store, range(length), start, tenant=str(length)) == length - start
        quiet(store)
        store.check()


def test_a_prompt_is_put_piece_by_piece_as_it_is_computed() -> None:
    """Chunks that begin anywhere: what fell between two of them is missing, all else is there."""
    with open_store() as store:
        tokens = list(range(23))
        assert put(store, tokens[:8]).tokens == 8
        assert put(store, tokens[:16], 8) == Put(8, 0, 0, 0)
        assert put(store, tokens, 13) == Put(4, 0, 0, 6)  # block 16 … 20; 13 … 16 and 20 … 23 not
        assert get(store, tokens) == 20
        assert get(store, tokens, 17) == 3
        assert get(store, tokens, 20) == 0


def test_what_is_stored_is_skipped_and_its_bytes_are_not_touched() -> None:
    with open_store() as store:
        put(store, range(8))
        other = given(GQA, np.zeros((12, GQA.bytes_per_token), np.uint8))
        assert store.put(range(12), other) == Put(4, 8, 0, 0)
        assert get(store, range(8)) == 8
        assert (plain(GQA, store.get(range(12), 8)[0]) == 0).all()
        stats = store.stats()
        assert (stats.puts, stats.put_tokens, stats.skipped_tokens) == (2, 12, 8)
        assert counter(store, "writes", 0) == 3


# --- tails -----------------------------------------------------------------------------------


def test_a_tail_is_found_by_what_goes_on_just_so() -> None:
    with open_store() as store:
        put(store, range(10), tail=True)
        assert get(store, range(10)) == 10
        assert get(store, range(50)) == 10  # a longer prompt
        assert get(store, [*range(10), 99]) == 10
        assert get(store, [*range(9), 99, 98, 97]) == 8  # differs inside of the tail
        assert get(store, range(9)) == 8  # ends inside of it
        assert get(store, [99, *range(1, 10)]) == 0
        assert get(store, range(50), 9) == 1  # begins inside of it
        assert get(store, range(50), 10) == 0


def test_the_longest_of_several_tails_is_found() -> None:
    with open_store(block_tokens=8) as store:
        for length in (3, 5, 7):
            put(store, range(length), tail=True)
        assert [get(store, range(n)) for n in (2, 3, 4, 5, 6, 7, 8, 20)] == [
            0, 3, 3, 5, 5, 7, 7, 7,
        ]  # fmt: skip
        put(store, range(8))
        assert get(store, range(20)) == 8
        assert get(store, [0, 1, 2, 99]) == 3
        store.check()


def test_a_tail_is_kept_only_with_all_of_its_tokens() -> None:
    """``start`` inside of it: what is given begins too late."""
    with open_store() as store:
        assert put(store, range(10), 9, tail=True) == Put(0, 0, 0, 1)
        assert get(store, range(10), 8) == 0
        assert put(store, range(10), 8, tail=True) == Put(2, 0, 0, 0)
        assert get(store, range(10), 8) == 2
        assert get(store, range(10), 9) == 1
        assert store.lookup(range(10)).tokens == 0  # nothing before it is there


def test_tails_of_another_process_are_found_by_the_exact_prompt(tmp_path: Path) -> None:
    """What others wrote since is asked for: the whole rest of a prompt, not each of its tokens."""
    url = disk(tmp_path / "d")
    with open_store(url) as one, open_store(url) as other:
        put(one, range(10), tail=True, wait=True)
        assert get(other, range(10)) == 10
        assert get(other, range(30)) == 10  # known by now


def test_pins_reach_to_the_end_of_a_tail() -> None:
    with open_store() as store:
        put(store, range(10), tail=True)
        assert store.pin(range(10), 60) == 10
        assert store.pin(range(30), 60) == 10
        assert store.unpin(range(10)) == 10
        assert store.unpin(range(10)) == 0
        store.check()


def test_a_pin_can_end_from_a_token_on() -> None:
    with open_store() as store:
        put(store, range(10), tail=True)  # blocks of four tokens
        assert store.pin(range(10), 60) == 10
        assert store.unpin(range(10), 5) == 2  # the block with token 5 begins before it
        assert store.unpin(range(10), 4) == 4
        assert store.unpin(range(10), 4) == 0
        assert store.unpin(range(10)) == 4
        store.check()


# --- tokens, and what is answered ------------------------------------------------------------


def test_tokens_in_every_form_name_the_same() -> None:
    import prompt_recipes as strategies

    with open_store() as store:
        put(store, list(range(9)))
        for make in strategies.FORMS.values():
            assert store.get(make(list(range(9))))[1] == 8
        assert store.get(torch.arange(9))[1] == 8


def test_an_empty_prompt_is_no_mistake() -> None:
    with open_store() as store:
        assert put(store, []) == Put(0, 0, 0, 0)
        assert store.get([]) == (None, 0)
        assert store.lookup([]).tokens == 0
        assert store.lookup([]).tiers == ()
        assert store.prefetch([]).wait(5) == 0
        assert store.pin([], 1) == 0
        assert store.clear().bytes == 0


def test_misses_count_when_only_a_part_was_found() -> None:
    with open_store() as store:
        put(store, range(8))
        get(store, range(20))
        get(store, [5])
        stats = store.stats()
        assert (stats.gets, stats.asked_tokens, stats.hit_tokens) == (2, 21, 8)
        assert stats.hit_rate == 8 / 21
        assert stats.as_dict()["hit_rate"] == stats.hit_rate


def test_prefetch_brings_into_memory_what_get_then_finds_there(tmp_path: Path) -> None:
    url = disk(tmp_path / "d")
    with open_store(url) as store:
        put(store, range(30), tail=True)
    with open_store("memory://4MiB", url) as store:
        coming = store.prefetch(range(30), 5)
        assert coming.wait(10) == 30
        assert coming.done
        assert coming.tokens == 30
        assert store.lookup(range(30)).tiers == (("file", 4), ("memory", 26))
        hits = counter(store, "hits")
        assert get(store, range(30), 4) == 26
        assert counter(store, "hits") == hits
        assert store.prefetch(range(50, 60)).wait(10) == 0


def test_clear_takes_the_tenant_and_nobody_else(tmp_path: Path) -> None:
    with open_store("memory://4MiB", disk(tmp_path / "d")) as store:
        for tenant in ("", "a"):
            put(store, range(10), tail=True, tenant=tenant, wait=True)
        assert store.clear(tenant="a").bytes > 0
        assert get(store, range(10), tenant="a") == 0
        assert get(store, range(10)) == 10
        assert store.clear(tenant="a").bytes == 0
        quiet(store)
        store.check()
