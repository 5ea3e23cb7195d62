"""Pages through SGLang's own page functions: out of a real host pool, and back, byte for byte."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from sglang_pools import DTYPES, Pages, hashes, page_bytes, pools, scribble, spans, storage_of

from kvkeep.core.errors import UnsupportedModel
from kvkeep.integrations.sglang.pages import pages_of

if TYPE_CHECKING:
    from pathlib import Path

MEMORY = ["memory://64MiB"]
# What SGLang's pools can be; the second: its own functions copy pages as tensors as well.
KINDS = [
    ("mha", "layer_first", True),
    ("mha", "page_first", True),
    ("mha", "page_first_direct", True),
    ("mha", "page_head", True),
    ("mha", "page_unified", False),
    ("mla", "layer_first", True),
    ("mla", "page_first", True),
    ("mla", "page_first_direct", True),
    ("mla", "page_unified", False),
    ("asym", "page_first", False),
    ("asym", "page_first_direct", False),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "layout", "flat"), KINDS)
def test_pages_come_back_byte_for_byte(kind: str, layout: str, flat: bool, dtype: str) -> None:
    made = pools(kind, layout, dtype)
    storage = storage_of(made.host, MEMORY)
    ways = {"v1": Pages(made, storage, v1=True)}
    if flat:
        ways["v0"] = Pages(made, storage, v1=False)
    try:
        for writer, keep in ways.items():
            for reader, load in ways.items():
                names = hashes(5, f"{writer} {reader}")
                scribble(made.host, seed=1)
                want = [page_bytes(made.host, page) for page in range(3, 8)]
                assert len(set(want)) == 5
                assert keep.set(names, spans(made.host, 3, 5))
                scribble(made.host, seed=2)
                around = [page_bytes(made.host, page) for page in (19, 25)]
                assert load.get(names, spans(made.host, 20, 5)) == 5
                assert [page_bytes(made.host, page) for page in range(20, 25)] == want
                assert [page_bytes(made.host, page) for page in (19, 25)] == around
    finally:
        storage.close()


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_large_pages_by_several_threads(layout: str, tmp_path: Path) -> None:
    made = pools("mha", layout, "fp32", heads=8, dim=128, tokens=320)
    tiers = ["memory://256MiB", f"file://{tmp_path}/kv?size=1GiB"]
    storage = storage_of(made.host, tiers)
    pages = Pages(made, storage, v1=True)
    assert storage._transport._readable(storage._pools["kv"].pages.size) > 1
    names = hashes(19)
    scribble(made.host, seed=1)
    want = [page_bytes(made.host, page) for page in range(19)]
    assert pages.set(names, spans(made.host, 0, 19))
    assert storage.flush()
    for _ in range(2):  # out of memory, then from disk
        scribble(made.host, seed=2)
        assert pages.get(names, spans(made.host, 20, 19)) == 19
        assert [page_bytes(made.host, page) for page in range(20, 39)] == want
        storage.close()
        storage = storage_of(made.host, tiers)
        pages = Pages(made, storage, v1=True)
    storage.close()


@pytest.mark.parametrize("v1", [True, False])
def test_what_is_missing_ends_the_prefix(v1: bool) -> None:
    made = pools("mha", "page_first")
    storage = storage_of(made.host, MEMORY)
    pages = Pages(made, storage, v1=v1)
    names = hashes(8)
    assert pages.set(names[:3] + names[4:], spans(made.host, 0, 7))
    assert storage.batch_exists(names) == 3
    assert pages.get(names, spans(made.host, 8, 8)) == 3
    assert storage.exists(names[4])
    assert not storage.exists(names[3])
    assert storage.batch_exists(names[4:]) == 4
    storage.close()


def test_a_page_that_vanishes_between_the_question_and_the_load() -> None:
    made = pools("mha", "layer_first")
    storage = storage_of(made.host, MEMORY)
    pages = Pages(made, storage, v1=True)
    names = hashes(6)
    assert pages.set(names, spans(made.host, 0, 6))
    assert storage.batch_exists(names) == 6
    storage._transport.store.remove(storage._pools["kv"].keys(names[4:5]))
    assert pages.get(names, spans(made.host, 8, 6)) == 4
    storage.close()


def test_tensors_one_by_one() -> None:
    made = pools("mha", "page_first")
    storage = storage_of(made.host, MEMORY)
    scribble(made.host)
    page = made.host.get_data_page(0).view(torch.int16)  # numbers: no NaN is equal to itself
    (name,) = hashes(1)
    assert storage.get(name, made.host.get_dummy_flat_data_page()) is None
    assert storage.set(name, page)
    target = made.host.get_dummy_flat_data_page()
    assert storage.get(name, target) is target
    assert target.view(torch.int16).equal(page)
    assert storage.get(name).view(torch.int16).equal(page)  # a new one
    # Another length is no page of this pool: not kept, and nothing that is kept is called damaged.
    assert not storage.set(name, page[:-1])
    assert not storage.batch_set([name], [page, page])
    assert not storage.set(name)
    assert storage.get(name, page.new_zeros(3)) is None
    assert storage.get(name, target).view(torch.int16).equal(page)
    storage.close()


@pytest.mark.parametrize("wrong", [slice(0, 15), slice(0, 0), slice(0, 33)])
def test_indices_that_are_not_of_these_pages_are_misses(
    wrong: slice, caplog: pytest.LogCaptureFixture
) -> None:
    made = pools("mha", "page_first")
    storage = storage_of(made.host, MEMORY)
    names = hashes(2)
    assert storage.batch_set_v1(names, spans(made.host, 0, 2)) == [True, True]
    indices = spans(made.host, 0, 4)[wrong]
    assert storage.batch_set_v1(hashes(2, "other"), indices) == [False, False]
    assert storage.batch_get_v1(names, indices) == [False, False]
    assert "host indices name 2 pages" in caplog.text
    storage.close()


@pytest.mark.parametrize("kind", ["mha", "mla", "asym"])
def test_pages_outside_the_pool_touch_nothing(kind: str) -> None:
    made = pools(kind, "page_first_direct")
    storage = storage_of(made.host, MEMORY)
    names = hashes(2)
    assert storage.batch_set_v1(names, spans(made.host, 0, 2)) == [True, True]
    beyond = spans(made.host, made.host.page_num, 2)
    assert storage.batch_get_v1(names, beyond) == [False, False]
    assert storage.batch_set_v1(hashes(2, "other"), beyond) == [False, False]
    assert storage.batch_exists(hashes(2, "other")) == 0
    storage.close()


def test_a_pool_without_pages_for_storage_is_refused() -> None:
    made = pools("mha", "page_first")
    made.host.layout = "a layout of its own"
    with pytest.raises(UnsupportedModel, match="MHATokenToKVPoolHost in layout a layout of its"):
        pages_of(made.host)
