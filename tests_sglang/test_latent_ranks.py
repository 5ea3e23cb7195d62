"""KV that one number of ranks wrote, and another reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sglang_pools import hashes, page_bytes, pools, scribble, spans, storage_of

if TYPE_CHECKING:
    from pathlib import Path

NAMES = hashes(4)


def stored_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in (path / "kv").glob("?" * 32 + "/" + "?" * 64))


@pytest.mark.parametrize("wrote", [1, 2, 4])
def test_latent_kv_is_stored_once_for_every_number_of_ranks(tmp_path: Path, wrote: int) -> None:
    tiers = ["memory://16MiB", f"file://{tmp_path}/kv?size=64MiB"]
    one = pools("mla", "page_first").host
    scribble(one, 1)
    writer = storage_of(one, tiers, mla=True, tp_rank=0, tp_size=wrote)
    assert writer.batch_set_v1(NAMES, spans(one, 0, 4)) == [True] * 4
    writer.close()
    size = stored_bytes(tmp_path)
    for ranks in (1, 2, 4):
        for rank in range(ranks):
            other = pools("mla", "page_first").host
            reader = storage_of(other, tiers, mla=True, tp_rank=rank, tp_size=ranks)
            assert reader.batch_exists(NAMES) == 4
            assert reader.batch_get_v1(NAMES, spans(other, 4, 4)) == [True] * 4
            for page in range(4):
                assert page_bytes(other, 4 + page) == page_bytes(one, page)
            assert reader.batch_set_v1(NAMES, spans(other, 4, 4)) == [True] * 4
            reader.close()
    assert size == stored_bytes(tmp_path)


def test_heads_of_a_rank_are_not_read_by_another_number_of_ranks(tmp_path: Path) -> None:
    """Models with more heads have pages of the same size there: the rank tells them apart."""
    tiers = ["memory://16MiB", f"file://{tmp_path}/kv?size=64MiB"]
    made = [(0, 1), (0, 2), (1, 2), (3, 4)]
    for rank, ranks in made:
        host = pools("mha", "page_head").host
        storage = storage_of(host, tiers, tp_rank=rank, tp_size=ranks)
        assert storage.batch_exists(NAMES) == 0
        assert storage.batch_set_v1(NAMES, spans(host, 0, 4)) == [True] * 4
        storage.close()
