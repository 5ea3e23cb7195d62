"""What engines with 1, 2 and 4 ranks write, and read of each other: pages bit by bit."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import pytest
from rank_pages import Shape, Workers, pages_of, registered

from kvkeep.integrations.vllm.offload.spec import is_portable
from kvkeep.store import BlockStore

if TYPE_CHECKING:
    from pathlib import Path

RANKS = (1, 2, 4)
SHAPES = {
    "heads for all ranks": Shape(heads=4),
    "ranks with the same heads": Shape(heads=2),
    "one head": Shape(heads=1),
    "MLA": Shape(heads=0),
    "tokens first": Shape(heads=4, tokens_first=True),
}


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("name", SHAPES)
def test_written_with_each_and_read_with_each(name: str, blocks: int, tmp_path: Path) -> None:
    shape = SHAPES[name]
    truth = shape.truth()
    rows = [5, 0, 3, 6, 1, 7, 2, 4][: shape.blocks // blocks]
    keys = [hashlib.sha256(bytes([at])).digest() for at in range(len(rows))]
    stored = []
    for writer in RANKS:
        tiers = ["memory://1MiB", f"file://{tmp_path}/{writer}?size=16MiB"]
        with Workers(shape, writer, blocks=blocks) as workers, BlockStore("", tiers=tiers) as store:
            workers.compute(truth)
            workers.to_rows(rows)
            workers.save(store, keys, rows)
            records = [bytearray(workers.record_bytes) for _ in keys]
            assert store.get(keys, records) == len(keys)
            stored.append(records)
    assert stored[0] == stored[1] == stored[2], "a record tells how many ranks wrote it"
    assert sum(map(len, stored[0])) == truth.nbytes, "what ranks have in common is stored once"
    for writer in RANKS:
        for reader in RANKS:
            tiers = ["memory://1MiB", f"file://{tmp_path}/{writer}?size=16MiB"]
            with (
                Workers(shape, reader, blocks=blocks) as workers,
                BlockStore("", tiers=tiers) as store,
            ):
                workers.forget()
                workers.load(store, keys, rows[::-1])
                workers.from_rows(rows[::-1])
                workers.check(truth)


def test_the_direct_layout_tells_how_many_ranks_wrote_it() -> None:
    """Why records in it name their ranks."""
    shape = Shape()
    truth, rows = shape.truth(), list(range(8))
    written = []
    for ranks in (1, 2):
        with Workers(shape, ranks, canonical=False) as workers:
            workers.compute(truth)
            workers.to_rows(rows)
            written.append(workers.rows.copy())
    assert written[0].shape == written[1].shape
    assert (written[0] != written[1]).any()


@pytest.mark.parametrize(
    ("shape", "ranks", "portable"),
    [
        (Shape(), 1, True),
        (Shape(), 4, True),
        (Shape(heads=2), 4, True),
        (Shape(heads=0), 4, True),
        (Shape(tokens_first=True), 1, True),
        (Shape(tokens_first=True), 2, False),  # 16 pieces of a page
        (Shape(heads=3), 2, False),  # vLLM cannot say whose heads are where
    ],
)
def test_where_the_layout_is_one_for_all_ranks(shape: Shape, ranks: int, portable: bool) -> None:
    caches = registered(shape, 0, ranks, pages_of(shape, 0, ranks))
    assert is_portable(caches) is portable
