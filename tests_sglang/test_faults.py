"""Places that break, hang, fill up or are shared: a shorter prefix or a drop, never wrong bytes."""

from __future__ import annotations

import logging
import random
import threading
import time
from typing import TYPE_CHECKING

import pytest
import torch
from servers import needs_server
from servers import server as valkey
from sglang_pools import (
    Pages,
    hashes,
    page_bytes,
    pools,
    scribble,
    spans,
    storage_of,
)

from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    from pathlib import Path


def records(directory: Path, at_least: int) -> list[Path]:
    files = directory.glob("kv/" + "?" * 32 + "/" + "?" * 64)
    return [path for path in files if path.stat().st_size > at_least]


@pytest.mark.parametrize("v1", [True, False])
@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "gone"])
def test_a_damaged_file_is_a_miss(tmp_path: Path, damage: str, v1: bool) -> None:
    made = pools("mha", "page_first")
    tiers = ["memory://16MiB", f"file://{tmp_path}/kv?size=64MiB"]
    names = hashes(6)
    storage = storage_of(made.host, tiers)
    scribble(made.host, seed=1)
    want = [page_bytes(made.host, page) for page in range(6)]
    for name, page in zip(names, range(6), strict=True):
        before = set(records(tmp_path, 3000))
        assert Pages(made, storage, v1=v1).set([name], spans(made.host, page, 1))
        assert storage.flush()
        if page == 3:
            (file,) = set(records(tmp_path, 3000)) - before
    storage.close()
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 4
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes({"flip": raw, "cut": raw[:-7], "empty": b""}[damage])
    storage = storage_of(made.host, tiers)
    scribble(made.host, seed=2)
    assert Pages(made, storage, v1=v1).get(names, spans(made.host, 8, 6)) == 3
    assert [page_bytes(made.host, page) for page in range(8, 11)] == want[:3]
    assert Pages(made, storage, v1=v1).get(names[4:], spans(made.host, 12, 2)) == 2
    assert [page_bytes(made.host, page) for page in (12, 13)] == want[4:]
    told = storage.stats()[1].counters
    assert damage in {"gone", "empty", "cut"} or told["damaged"] == 1
    # It is kept anew, and found again.
    assert not storage.exists(names[3])
    assert Pages(made, storage, v1=v1).set(names[3:4], spans(made.host, 20, 1))
    assert Pages(made, storage, v1=v1).get(names, spans(made.host, 8, 6)) == 6
    storage.close()


@needs_server
def test_a_server_that_hangs_costs_its_time_and_no_more() -> None:
    made = pools("mha", "page_first")
    names = hashes(40)
    with valkey() as one:
        tiers = ["memory://16MiB", f"{one.url}?timeout=300s"]
        storage = storage_of(made.host, tiers)
        assert Pages(made, storage, v1=True).set(names[:20], spans(made.host, 0, 20))
        assert storage.flush()
        storage.close()
        storage = storage_of(made.host, tiers, load_timeout=0.5)
        pages = Pages(made, storage, v1=True)
        until = time.monotonic() + 60  # a busy machine may be later than that
        while storage.batch_exists(names) < 20:
            assert time.monotonic() < until
        while pages.get(names[:5], spans(made.host, 0, 5)) < 5:
            assert time.monotonic() < until
        assert pages.set(["here"], spans(made.host, 0, 1))
        one.freeze()
        began = time.monotonic()
        assert pages.get(names[:20], spans(made.host, 0, 20)) in range(5, 20)
        assert storage.batch_exists(["nowhere", "here"]) == 0
        assert storage.batch_exists_v2(["nowhere"]).kv_hit_pages == 0
        assert pages.get(["here"], spans(made.host, 0, 1)) == 1
        assert pages.set(names[20:], spans(made.host, 0, 20))  # in memory, behind what hangs
        assert storage.batch_exists(names[20:]) == 20
        storage.close()
        # 0.5 s for the load and for each question, 2 s for the save, 10 s to close, and a busy
        # machine: far from the 300 s that the tier itself would wait.
        assert time.monotonic() - began < 60


@needs_server
def test_a_server_that_is_gone_is_a_miss() -> None:
    made = pools("mha", "page_first")
    with valkey() as one:
        storage = storage_of(made.host, ["memory://16MiB", one.url])
        pages = Pages(made, storage, v1=True)
        assert pages.set(hashes(4), spans(made.host, 0, 4))
        one.kill()
        assert storage.batch_exists(hashes(4)) == 4
        assert storage.batch_exists(hashes(4, "other")) == 0
        assert pages.get(hashes(4, "other"), spans(made.host, 0, 4)) == 0
        assert pages.set(hashes(4, "third"), spans(made.host, 0, 4))
        storage.close()


def test_pages_that_do_not_fit_are_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    made = pools("mha", "page_first", "fp32", heads=8, dim=64)  # 192 KiB a page
    storage = storage_of(made.host, ["memory://100KiB"])
    assert storage.batch_set_v1(hashes(2), spans(made.host, 0, 2)) == [False, False]
    assert storage.batch_exists(hashes(2)) == 0
    storage.close()
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]


def test_what_memory_cannot_hold_waits_for_the_disk(tmp_path: Path) -> None:
    made = pools("mha", "page_first", "fp32", heads=8, dim=64, tokens=640)
    host = made.host
    scribble(host)
    storage = storage_of(host, ["memory://2MiB", f"file://{tmp_path}/kv?size=64MiB"])
    names = hashes(40)  # 7.5 MiB
    assert storage.batch_set_v1(names, spans(host, 0, 40)) == [True] * 40
    assert storage.flush()
    assert storage.batch_exists(names) == 40
    want = [page_bytes(host, page) for page in range(40)]
    assert Pages(made, storage, v1=True).get(names, spans(host, 40, 40)) == 40
    assert [page_bytes(host, page) for page in range(40, 80)] == want
    storage.close()


def test_eight_threads_at_once(tmp_path: Path) -> None:
    """Each page says whose it is, so that a page of another's, or a torn one, would be seen."""
    made = pools("mha", "layer_first", tokens=64 * 16)
    host = made.host
    storage = storage_of(host, ["memory://256KiB", f"file://{tmp_path}/kv?size=512KiB"])
    names = hashes(48)
    failures: list[str] = []
    stop = time.monotonic() + 3
    loaded = [0] * 8

    def paint(page: int, value: int) -> None:
        host.kv_buffer[:, :, page * 16 : (page + 1) * 16] = value

    def work(thread: int) -> None:
        rng = random.Random(thread)
        mine = thread * 16  # pages of the pool that no other thread touches
        while time.monotonic() < stop and not failures:
            first = rng.randrange(40)
            some = names[first : first + rng.randint(1, 8)]
            match rng.randrange(4):
                case 0:
                    for at in range(len(some)):
                        paint(mine + at, first + at)
                    storage.batch_set_v1(some, spans(host, mine, len(some)))
                case 1:
                    storage.batch_exists(some)
                case 2 if rng.random() < 0.05:
                    storage._transport.store.remove(storage._pools["kv"].keys(some[:1]))
                case _:
                    came = storage.batch_get_v1(some, spans(host, mine, len(some)))
                    loaded[thread] += sum(came)
                    for at, here in enumerate(came):
                        page = host.kv_buffer[:, :, (mine + at) * 16 : (mine + at + 1) * 16]
                        if here and not bool((page == first + at).all()):
                            failures.append(f"{some[at]} came as {page.unique()}, not {first + at}")

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert all(loaded)
    storage.flush()
    storage._transport.store.check()
    storage.close()


def test_two_processes_worth_of_ranks_in_one_directory(tmp_path: Path) -> None:
    """Ranks that hold different heads keep different pages under the same hashes."""
    tiers = ["memory://16MiB", f"file://{tmp_path}/kv?size=64MiB"]
    ranks = [pools("mha", "page_first") for _ in range(2)]
    names = hashes(4)
    storages = [
        storage_of(one.host, tiers, tp_rank=rank, tp_size=2) for rank, one in enumerate(ranks)
    ]
    for seed, (one, storage) in enumerate(zip(ranks, storages, strict=True)):
        scribble(one.host, seed)
        assert Pages(one, storage, v1=True).set(names, spans(one.host, 0, 4))
        storage.close()
    for rank, one in enumerate(ranks):
        storage = storage_of(one.host, tiers, tp_rank=rank, tp_size=2)
        want = [page_bytes(one.host, page) for page in range(4)]
        assert Pages(one, storage, v1=True).get(names, spans(one.host, 8, 4)) == 4
        assert [page_bytes(one.host, page) for page in range(8, 12)] == want
        storage.close()


def test_clear_deletes_what_this_rank_kept_and_nobody_elses(tmp_path: Path) -> None:
    tiers = ["memory://16MiB", f"file://{tmp_path}/kv?size=64MiB"]
    host = pools("mha", "page_first").host
    one, other = (storage_of(host, tiers, revision=revision) for revision in ("r1", "r2"))
    for storage in (one, other):
        assert storage.batch_set_v1(hashes(3), spans(host, 0, 3)) == [True] * 3
        assert storage.flush()
    one.clear()
    assert one.batch_exists(hashes(3)) == 0
    assert one.batch_get_v1(hashes(3), spans(host, 0, 3)) == [False] * 3
    assert other.batch_exists(hashes(3)) == 3
    assert one.batch_set_v1(hashes(3), spans(host, 0, 3)) == [True] * 3
    one.close()
    other.close()


def test_a_wrong_url_is_said_when_sglang_attaches() -> None:
    host = pools("mha", "page_first").host
    with pytest.raises(InvalidValue, match="no tier is called floppy"):
        storage_of(host, ["memory://1MiB", "floppy://a"])


def test_sglang_is_told_what_was_moved() -> None:
    host = pools("mha", "page_first").host
    storage = storage_of(host, ["memory://16MiB"], metrics=True)
    assert storage.batch_set_v1(hashes(3), spans(host, 0, 3)) == [True] * 3
    assert storage.batch_get_v1(hashes(4), spans(host, 0, 4)) == [True] * 3 + [False]
    assert storage.batch_get_v1(hashes(4, "other"), spans(host, 0, 4)) == [False] * 4
    told = storage.get_stats()
    assert (told.prefetch_pgs, told.backup_pgs) == ([3], [3])
    assert all(rate > 0 for rate in told.prefetch_bandwidth + told.backup_bandwidth)
    assert storage.get_stats().prefetch_pgs == []
    storage.close()
    quiet = storage_of(host, ["memory://16MiB"])
    assert quiet.get_stats() is None
    quiet.close()


def test_a_pool_that_fails_is_a_miss_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    host = pools("mha", "page_first").host
    storage = storage_of(host, ["memory://16MiB"])
    assert storage.batch_set_v1(hashes(2), spans(host, 0, 2)) == [True, True]
    host.kv_buffer = torch.zeros(0)
    assert storage.batch_get_v1(hashes(2), spans(host, 0, 2)) == [False, False]
    assert "_load failed and counts as a miss" in caplog.text
    assert storage.batch_exists(hashes(2)) == 2
    storage.close()
