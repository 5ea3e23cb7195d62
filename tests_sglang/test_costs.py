"""Pages that are slower to load than to compute are not reported to SGLang."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from sglang_pools import Pages, hashes, page_bytes, pools, scribble, spans, storage_of

from kvkeep.core.cost import CostModel, PrefillCost
from kvkeep.core.errors import InvalidValue
from kvkeep.store.backends.disk import DiskBackend

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PAGES = 12
TOKEN_S = 0.01  # what computing takes; so a page takes 40 ms or more


class Disk:
    """``record_s``: seconds that each record takes, one after another; or it ``hangs``."""

    def __init__(self) -> None:
        self.record_s = 0.0
        self.hangs = threading.Event()
        self.line = threading.Lock()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk, get = Disk(), DiskBackend.get

    def slow(backend: Any, block: bytes, room: Any) -> Any:
        with disk.line:
            time.sleep(disk.record_s)
            until = time.monotonic() + 20
            while disk.hangs.is_set() and time.monotonic() < until:
                time.sleep(0.01)
        return get(backend, block, room)

    monkeypatch.setattr(DiskBackend, "get", slow)
    yield disk
    disk.hangs.clear()


class World:
    def __init__(self, path: Path, token_s: float = TOKEN_S, **more: Any) -> None:
        self.made = pools("mha", "page_first")
        PrefillCost(seconds_per_token=token_s).write(path / "cost.json")
        options = {"cost": str(path / "cost.json"), "load_timeout": 10.0, **more}
        self.path, self.options = path, options
        tiers = ["memory://16MiB", f"file://{path}/kv?size=64MiB"]
        self.storage = storage_of(self.made.host, tiers, **options)
        self.names = hashes(PAGES)
        scribble(self.made.host, seed=1)
        assert Pages(self.made, self.storage, v1=True).set(
            self.names, spans(self.made.host, 0, PAGES)
        )
        assert self.storage.flush()
        self.storage.close()
        self.want = [page_bytes(self.made.host, page) for page in range(PAGES)]
        self.again()

    def again(self) -> None:
        """Open the store anew: memory is empty, what was learned stays."""
        tiers = ["memory://16MiB", f"file://{self.path}/kv?size=64MiB"]
        self.storage = storage_of(self.made.host, tiers, **self.options)

    def load(self) -> int:
        """Load as SGLang does: what was reported; return how many pages came."""
        found = self.storage.batch_exists(self.names)
        scribble(self.made.host, seed=2)
        pages = Pages(self.made, self.storage, v1=True)
        came = pages.get(self.names[:found], spans(self.made.host, PAGES, found)) if found else 0
        for page in range(came):
            assert page_bytes(self.made.host, PAGES + page) == self.want[page]
        return came


def test_a_fast_disk_is_loaded(tmp_path: Path, disk: Disk) -> None:
    world = World(tmp_path, token_s=100 * TOKEN_S)  # the machine may be busy
    assert world.load() == PAGES
    world.storage.close()


def test_a_disk_that_is_slower_than_computing(tmp_path: Path, disk: Disk) -> None:
    world = World(tmp_path)
    disk.record_s = 3 * TOKEN_S * world.made.host.page_size
    computing = TOKEN_S * world.made.host.page_size * PAGES
    began = time.monotonic()
    assert world.load() < PAGES  # not known yet, so a few are tried
    assert time.monotonic() - began < computing
    while not world.storage._transport.store.cost.reading("file").known:
        assert time.monotonic() - began < 60
        time.sleep(0.05)
    world.storage.close()
    world.again()
    assert world.storage.batch_exists(world.names) == 0
    assert world.storage._transport.choices.slower_pages == PAGES
    disk.record_s = 0.0
    until = time.monotonic() + 60
    while world.storage.batch_exists(world.names) < PAGES:  # probes see that it is fast again
        assert time.monotonic() < until
        time.sleep(0.05)
    assert world.load() == PAGES
    world.storage.close()
    assert CostModel.read(tmp_path / "cost.learned.json").reading("file").known


def test_a_disk_that_hangs_within_a_load(tmp_path: Path, disk: Disk) -> None:
    world = World(tmp_path)
    until = time.monotonic() + 60
    while world.load() < PAGES:  # a busy machine has a slow disk for a while
        assert time.monotonic() < until
    world.storage.close()
    world.again()
    while world.storage.batch_exists(world.names) < PAGES:
        assert time.monotonic() < until
        time.sleep(0.05)
    disk.hangs.set()
    began = time.monotonic()
    assert world.load() < PAGES
    assert time.monotonic() - began < 5, "it waited for load_timeout"
    assert world.storage.batch_exists(world.names) < PAGES
    disk.hangs.clear()
    world.storage.close()


@pytest.mark.parametrize("more", [{"compare_costs": False}, {"cost": ""}])
def test_all_is_loaded_where_nothing_is_compared(
    tmp_path: Path, disk: Disk, more: dict[str, Any]
) -> None:
    world = World(tmp_path, **more)
    disk.record_s = 2 * TOKEN_S * world.made.host.page_size
    assert world.load() == PAGES
    world.storage.close()


def test_a_file_that_has_no_costs(tmp_path: Path) -> None:
    (tmp_path / "none.json").write_text("{}")
    with pytest.raises(InvalidValue, match="kvkeep_cost is missing"):
        storage_of(
            pools("mha", "page_first").host, ["memory://1MiB"], cost=str(tmp_path / "none.json")
        )
