"""The tier without an engine: vLLM's manager is driven by hand under faults, and rows compared.

The primary tier is small, so almost every chunk comes from the tier below. A row that vLLM calls a
hit has the bytes of its key, or the test fails.
"""

from __future__ import annotations

import hashlib
import os
import random
import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tiered import buffered, kvkeep_tier
from versions import VERSION
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

from kvkeep.core.errors import BackendFailed, OutOfRoom
from kvkeep.core.keys import Namespace
from kvkeep.integrations.vllm import tier as tier_module
from kvkeep.integrations.vllm.offload.engine import OffloadEngine
from kvkeep.integrations.vllm.offload.notes import WorkerNote, leave_note
from kvkeep.integrations.vllm.offload.requests import TierRequest
from kvkeep.integrations.vllm.options import RequestOptions
from kvkeep.integrations.vllm.tier import KVKeepSpec
from kvkeep.store.backends.disk import DiskBackend

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TOKENS, ROW, ROWS = 16, 4096, 16
LOADS = int(os.environ.get("KVKEEP_TIER_LOADS", "3000"))


def spec_of(engine: str, *tiers: str, **options: Any) -> KVKeepSpec:
    """The spec of an engine; engines of one name, in one process, share vLLM's memory."""
    one = OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True)
    config = OffloadingConfig(
        groups=tuple(OffloadingGroupConfig(TOKENS, (f"layer{at}",), at) for at in range(2)),
        worker_kv_bytes_per_block=ROW,
        enable_kv_cache_events=False,
        extra_config={
            "cpu_bytes_to_use": ROW * ROWS,
            "secondary_tiers": [kvkeep_tier(*tiers, **options)],
        },
        engine_id=f"{engine}-{os.getpid()}",
        model=OffloadingModelConfig("none", "float32"),
        cache=OffloadingCacheConfig(TOKENS, 1),
        parallel=one,
    )
    described: Any = SimpleNamespace(
        model_config=SimpleNamespace(
            pooler_config=None, quantization="none", model="none", served_model_name="none"
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=2048),
        lora_config=None,
        max_concurrent_batches=1,
    )
    whole = [[(0, ROW)]] * len(config.groups)  # a worker's pages fill its rows
    leave_note(config.engine_id, 0, WorkerNote("none", [ROW], whole))
    caches: Any = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=None)] * 2)
    with OffloadEngine(described, caches).starting():
        return KVKeepSpec(config)


def row_of(key: bytes) -> np.ndarray:
    """What vLLM computes for a chunk."""
    seed = int.from_bytes(hashlib.sha256(key).digest()[:8], "big")
    return np.random.default_rng(seed).integers(0, 256, ROW, np.uint8)


@dataclass
class Asked:
    """A request in the making: its chunks of both groups in the order of the prompt."""

    ctx: ReqContext
    keys: list[bytes] = field(default_factory=list)
    steps: int = 0


class Driver:
    """Does what vLLM's scheduler and its mover do, with rows instead of pages."""

    def __init__(self, spec: KVKeepSpec) -> None:
        self.manager: Any = spec.get_manager()
        (self.tier,) = self.manager.secondary_tiers
        self.rows = np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)
        self.hits = self.misses = self.loaded = 0
        self._number = 0
        self._finished = self.tier._jobs.finished
        self.tier._jobs.finished = self._count_loads

    def _count_loads(self) -> list[Any]:
        ended = self._finished()
        self.loaded += sum(len(one.moved) for one in ended if one.job.is_promotion)
        return ended  # type: ignore[no-any-return]

    def begin(self, prompt: int, chunks: int) -> Asked:
        self._number += 1
        asked = Asked(ReqContext(f"request {self._number}"))
        for at in range(chunks):
            digest = hashlib.sha256(b"%d %d" % (prompt, at)).digest()
            for group in range(2):
                key = make_offload_key(digest, group)
                asked.ctx.set_offload_key_position(key, (at + 1) * TOKENS)
                asked.keys.append(key)
        self.manager.on_new_request(asked.ctx)
        return asked

    def step(self, asked: Asked) -> bool:
        """Look up, load and check, or store; return whether the request is over."""
        asked.steps += 1
        found = []
        for key in asked.keys:
            result = self.manager.lookup(key, asked.ctx)
            if result in (LookupResult.RETRY, LookupResult.HIT_PENDING):
                return False
            if result is LookupResult.MISS:
                break
            found.append(key)
        if found:
            places = self.manager.prepare_load(found, asked.ctx).chunk_ids
            for key, row in zip(found, places, strict=True):
                assert (self.rows[row] == row_of(key)).all(), f"wrong bytes of {key.hex()}"
            self.manager.complete_load(found, asked.ctx)
        self.hits += len(found)
        rest = asked.keys[len(found) :]
        self.misses += len(rest)
        if rest:
            stored = self.manager.prepare_store(rest, asked.ctx)
            if stored is not None and stored.keys_to_store:
                places = stored.store_spec.chunk_ids
                for key, row in zip(stored.keys_to_store, places, strict=True):
                    self.rows[row] = row_of(key)
                self.manager.complete_store(stored.keys_to_store, asked.ctx)
        self.manager.on_request_finished(asked.ctx)
        return True

    def end_step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def finish(self, asked: Asked, most: float = 30.0) -> None:
        until = time.monotonic() + most
        while not self.step(asked):
            self.end_step()
            assert time.monotonic() < until, f"{asked.ctx.req_id} waits for ever"
        self.end_step()

    def settle(self) -> None:
        while self.manager.has_pending_work():
            self.end_step()

    def reset(self) -> None:
        self.manager.reset_cache()
        if VERSION >= (0, 33):  # all workers have told that their copies have ended
            self.manager.on_reset_flushed()
        self.end_step()  # before 0.33 they end with the next step

    def close(self) -> None:
        self.rows = np.zeros((0, ROW), np.uint8)
        self.manager.shutdown()


@pytest.fixture
def same_space(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no engine to name: here all have one namespace."""
    monkeypatch.setattr(tier_module, "namespace_of_rows", lambda *_: Namespace(model="pages"))


@pytest.fixture
def driver(tmp_path: Path, same_space: None) -> Iterator[Driver]:
    with buffered("1MiB"):
        one = Driver(spec_of("pages", f"file://{tmp_path}/kv?size=64MiB", load_timeout=0.3))
    yield one
    one.close()


def test_loads_under_random_faults_have_no_wrong_byte(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, lock, ended = random.Random(0), threading.Lock(), threading.Event()
    get, put = DiskBackend.get, DiskBackend.put
    faults = {"flip": 0, "short": 0, "error": 0, "gone": 0, "hang": 0, "full": 0, "write": 0}

    def fault(kinds: dict[str, float]) -> str:
        with lock:
            for kind, share in kinds.items():
                if rng.random() < share:
                    faults[kind] += 1
                    return kind
        return ""

    def bad_get(self: DiskBackend, block: bytes, room: Any) -> Any:
        kind = fault({"flip": 0.02, "short": 0.01, "error": 0.01, "gone": 0.01, "hang": 0.001})
        if kind == "error":
            raise BackendFailed("as told")
        if kind == "gone":
            return None
        if kind == "hang":
            ended.wait(0.6)
        record = get(self, block, room)
        if record is not None and kind == "flip":
            record[rng.randrange(len(record))] ^= 1 << rng.randrange(8)
        if record is not None and kind == "short":
            record[len(record) // 2 :] = bytes(len(record) - len(record) // 2)
        return record

    def bad_put(self: DiskBackend, block: bytes, record: memoryview) -> None:
        kind = fault({"full": 0.01, "write": 0.01})
        if kind == "full":
            raise OutOfRoom(len(record), "the disk, as told")
        if kind == "write":
            raise BackendFailed("as told")
        put(self, block, record)

    monkeypatch.setattr(DiskBackend, "get", bad_get)
    monkeypatch.setattr(DiskBackend, "put", bad_put)
    live: list[Asked] = []
    until = time.monotonic() + 60 + LOADS / 20
    while driver.loaded < LOADS:
        assert time.monotonic() < until, f"{driver.loaded} loads, {faults}"
        while len(live) < 3:
            live.append(driver.begin(rng.randrange(150), rng.randint(1, 4)))
        live = [asked for asked in live if not driver.step(asked)]
        if live and rng.random() < 0.01:  # aborted while its chunks may be on their way
            driver.manager.on_request_finished(live.pop(rng.randrange(len(live))).ctx)
        driver.end_step()
        if rng.random() < 0.002:
            driver.reset()
    for asked in live:
        driver.finish(asked)
    driver.settle()
    ended.set()
    assert all(number for kind, number in faults.items() if kind != "hang"), faults
    driver.tier._store.store.check()


def test_recency_survives_a_restart(tmp_path: Path, same_space: None) -> None:
    """A budget for three prompts: after a restart, the one that was used last stays."""
    disk = f"file://{tmp_path}/kv?size={6 * 2 * 8192}"  # six chunks, of two groups, and headers
    one = Driver(spec_of("first", disk))
    for prompt in range(3):
        one.finish(one.begin(prompt, 2))
        one.settle()
        assert one.tier._store.store.flush(30)
    one.reset()
    one.finish(one.begin(0, 2))  # used again
    one.settle()
    one.close()
    two = Driver(spec_of("second", disk))
    two.finish(two.begin(9, 2))
    two.settle()
    assert two.tier._store.store.flush(30)
    two.reset()
    before = two.hits
    two.finish(two.begin(0, 2))
    assert two.hits - before == 4
    two.close()
    mine = {f"vllm_offload_{name}-{os.getpid()}.mmap" for name in ("first", "second")}
    assert mine.isdisjoint(os.listdir("/dev/shm"))


def test_a_ttl_deletes_nothing_that_another_request_stored(driver: Driver) -> None:
    driver.finish(driver.begin(5, 2))
    driver.settle()
    driver.reset()
    again, whole = driver.begin(5, 3), driver.begin(5, 3)
    again.ctx.get_state(TierRequest).options = RequestOptions(load=False, ttl=0.01)
    driver.finish(again)  # computes and stores all of it once more
    driver.settle()
    driver.reset()
    assert driver.hits == 0
    until = time.monotonic() + 60
    while driver.tier._store.store.stats()[0].blocks > 4:
        assert time.monotonic() < until
        driver.end_step()
        time.sleep(0.02)
    driver.finish(whole)
    assert driver.hits == 4


def test_loads_may_be_expedited(driver: Driver) -> None:
    submitted = driver.tier.submit_load

    def expedited(job: Any) -> None:
        submitted(job, expedited=True)

    driver.tier.submit_load = expedited
    driver.finish(driver.begin(5, 2))
    driver.settle()
    driver.reset()
    driver.finish(driver.begin(5, 2))
    assert driver.hits == 4
