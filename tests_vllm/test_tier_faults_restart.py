"""What an engine finds below vLLM's offloading that an earlier one has left, in one directory.

See `test_tier_faults`. The engines here follow each other: the same, one with other weights, one of
another version of vLLM, and one that is ended while its tiers write.
"""

from __future__ import annotations

import shutil
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import vllm
from engines import prompt
from models import make_llama
from test_failures import records

from kvkeep.store.backends.disk import DiskBackend
from tiers import (
    FS,
    OURS,
    SideBySide,
    blocks_of_fs,
    cached,
    fs_tier,
    outcome,
    seen,
    side_by_side,
)

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from engines import Answer

ASKED = [prompt(length, seed=95) for length in (97, 193, 300)]
FULL = sum(len(one) // 32 * 32 for one in ASKED)


@dataclass
class Place:
    """A model, the directories of both systems, and what an engine with them has said."""

    model: Path
    fs: Path
    kvkeep: Path
    cold: list[Answer]

    def engine(self, **more: Any) -> AbstractContextManager[SideBySide]:
        ours = [f"file://{self.kvkeep}?size=256MiB"]
        return side_by_side(str(self.model), [fs_tier(self.fs)], ours, **more)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    root = tmp_path_factory.mktemp("restart")
    make_llama(root / "llama", seed=95)
    found = Place(root / "llama", root / "fs", root / "kv", [])
    with found.engine() as one:
        found.cold = one.load("cold", ASKED)
        one.written()
    return found


def test_a_restart(place: Place) -> None:
    with place.engine() as one:
        for system in (FS, OURS):
            warm = one.load(system, ASKED)
            assert cached(warm) == FULL
            seen("a restart", system, outcome(place.cold, warm))


def test_another_version_of_vllm(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages may have another format: here they have not, but a reader cannot know."""
    monkeypatch.setattr(vllm, "__version__", "0.999.0")
    with place.engine() as one:
        assert cached(one.load(OURS, ASKED)) == 0
        seen("KV of another version of vLLM", OURS, "is not read")
        assert cached(one.load(FS, ASKED)) == FULL
        seen("KV of another version of vLLM", FS, "is read as its own")


def test_other_weights_under_the_same_path(place: Place, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    shutil.copytree(place.model, kept)
    try:
        make_llama(place.model, seed=96)
        with place.engine() as one:
            mine = one.load(OURS, ASKED)
            theirs = one.load(FS, ASKED)
            cold = one.load("cold", ASKED)
        assert outcome(place.cold, cold) == "wrong tokens"  # so they are other weights
        assert cached(theirs) == FULL
        assert cached(mine) == 0
        seen("other weights under the same path", FS, outcome(cold, theirs))
        seen("other weights under the same path", OURS, outcome(cold, mine))
    finally:
        shutil.rmtree(place.model)
        shutil.copytree(kept, place.model)


def test_shutdown_while_writes_are_queued(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Both tiers write slowly. What was queued is there after the shutdown, or is not."""
    from vllm.v1.kv_offload.tiering.fs import manager

    ending = threading.Event()  # vLLM's tier begins with its queue just before the shutdown
    put, store = DiskBackend.put, manager.batch_store_block

    def slow_put(self: DiskBackend, block: bytes, record: memoryview) -> None:
        time.sleep(0.05)
        put(self, block, record)

    def slow_store(paths: list[str], *args: Any) -> Any:
        ending.wait(60)
        time.sleep(0.1 * len(paths))
        return store(paths, *args)

    monkeypatch.setattr(DiskBackend, "put", slow_put)
    monkeypatch.setattr(manager, "batch_store_block", slow_store)
    here = Place(place.model, tmp_path / "fs", tmp_path / "kv", [])
    theirs = fs_tier(here.fs) | {"n_read_threads": 1, "n_write_threads": 1}
    asked = [prompt(320 + 32 * at + 1, seed=97) for at in range(4)]
    chunks = sum(len(one) // 32 for one in asked)
    with side_by_side(str(here.model), [theirs], [f"file://{here.kvkeep}?size=256MiB"]) as one:
        for each in asked:
            one.ask([each])
        for _ in range(4):
            one.core.step()  # the last copies into vLLM's memory
        ending.set()
    assert len(records(here.kvkeep)) == chunks
    seen("shutdown while writes are queued", OURS, "they are written")
    assert len(blocks_of_fs(here.fs)) < chunks
    seen("shutdown while writes are queued", FS, "they are lost")
