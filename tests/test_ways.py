"""What every request goes through, in files, calls and objects: it only gets shorter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvkeep import PagedCache
from ways import Recorder

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = 16
PROMPT = list(range(64 * PAGE))


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    yield recorder
    recorder.close()


def test_a_cached_prompt(recorder):
    cache = PagedCache(num_pages=256, page_size=PAGE)
    for length in (24, 64):  # one path that is split, as in an engine
        sequence = cache.open(PROMPT[: length * PAGE])
        sequence.publish()
        sequence.close()
    prompt = [*PROMPT[: 32 * PAGE + 5], *range(10_000, 10_040)]  # a full hit, and one within a page
    with recorder.way() as opened:
        sequence = cache.open(prompt)
    assert sequence.num_cached == 32 * PAGE + 5
    sequence.copies()
    with recorder.way() as published:
        sequence.publish()
    with recorder.way() as closed:
        sequence.close()
    assert opened.within(files=13, calls=46, objects=9), opened
    assert published.within(files=8, calls=40, objects=3), published
    assert closed.within(files=7, calls=18, objects=0), closed


def test_four_blocks_through_a_store(recorder, tmp_path):
    torch = pytest.importorskip("torch")
    from kvkeep.core.geometry import KVGeometry
    from kvkeep.store import KVStore

    geometry = KVGeometry(layers=2, kv_heads=2, head_dim=16, dtype="float32")
    prompt = list(range(4 * PAGE))
    kv = torch.randn(2, 2, len(prompt), 2, 16)
    disk = f"file://{tmp_path}?size=64MiB"
    options = {"model": "m@1", "block_tokens": PAGE}
    with KVStore(geometry, tiers=["memory://1MiB", disk], **options) as store:
        store.put([7, *prompt[1:]], kv, wait=True)  # what a first call imports and starts
        with recorder.way() as put:
            store.put(prompt, kv, wait=True)
    with KVStore(geometry, tiers=["memory://1MiB", disk], **options) as store:
        assert store.get([7, *prompt[1:]])[1] == len(prompt)
        with recorder.way() as read:
            assert store.get(prompt)[1] == len(prompt)
    assert put.within(files=43, calls=980, objects=56), put
    assert read.within(files=38, calls=880, objects=44), read
