"""kvkeep below vLLM's own offloading beside kvkeep's connector: times to the first token.

The model and the prompts are those of ``vllm_engine.py``, and all engines take turns in one run:
vLLM alone, the connector, and the tier below vLLM's offloader, whose primary tier is vLLM's memory.

    .venv-vllm/bin/python benchmarks/vllm_tier.py           # about six minutes
    .venv-vllm/bin/python benchmarks/vllm_tier.py --quick   # two rounds, 1,100 tokens
    .venv-vllm/bin/python benchmarks/vllm_tier.py --json
"""

# ruff: noqa: PLC0415 - vLLM takes half a minute to import

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from figures import Figure, show
from vllm_engine import Engine, kvkeep_in, make_model

if TYPE_CHECKING:
    from collections.abc import Sequence

MIB = 1 << 20


def tier_in(tiers: list[str]) -> dict[str, Any]:
    """Return the configuration of vLLM with kvkeep below its offloader."""
    module = "kvkeep.integrations.vllm.tier"
    return {
        "kv_connector": "KVKeepOffloadingConnector", "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "KVKeepSpec", "spec_module_path": module, "cpu_bytes_to_use": 512 * MIB,
            "secondary_tiers": [
                {"type": "KVKeepTier", "module_path": module, "tiers": tiers, "resets": False}
            ],
        },
    }  # fmt: skip


def measure(directory: Path, rounds: int, length: int) -> dict[str, list[float]]:
    """Return seconds by what is measured, one for each round."""
    model = make_model(directory / "model")
    connector = f"file://{directory}/connector?size=4GiB"
    tier = f"file://{directory}/tier?size=4GiB"
    engines = {
        "alone": Engine(model, None, directory / "alone.log"),
        "connector": Engine(
            model, kvkeep_in(["memory://512MiB?touch=yes", connector]), directory / "connector.log"
        ),
        "tier": Engine(model, tier_in([tier]), directory / "tier.log"),
    }
    later = {
        "connector": Engine(
            model, kvkeep_in(["memory://256MiB?touch=yes", connector]), directory / "later.log"
        ),
        "tier": Engine(model, tier_in([tier]), directory / "tier later.log"),
    }
    cached = Engine(model, tier_in([f"{tier}&io=buffered"]), directory / "cached.log")
    seen: dict[str, list[float]] = {}
    before: set[Path] = set()
    for turn in range(rounds):
        seed = 1000 + turn
        times: dict[str, list[float]] = {}
        for number in range(2):  # in one order and in the other: what drifts evens out
            order = list(engines)[:: 1 if number else -1]
            for name in order:
                took = engines[name].ask(seed + 100 * number, length, 1, 1)
                times.setdefault(f"cold {name}", []).append(took)
        for name in ("connector", "tier"):
            engines[name].flush()
        files = {file for file in (directory / "tier").rglob("*") if _is_record(file)}
        new, before = sorted(files - before), files
        for _ in range(5):
            for name, engine in engines.items():
                if name != "alone":
                    engine.forget()
                times.setdefault(f"hit {name}", []).append(engine.ask(seed, length, 1, 1))
        for name, engine in later.items():
            engine.restart()
            times[f"disk {name}"] = [engine.ask(seed, length, 1, 1)]
        # The floor: vLLM's own hit, after all that the disk needs for the same bytes. Both colds
        # are on the disk, of the same length.
        times["disk alone"] = [read_alone(new[: len(new) // 2], direct=True)]
        times["floor"] = [statistics.median(times["hit alone"]) + times["disk alone"][0]]
        for _ in range(2):  # the first brings the files into the page cache
            cached.restart()
            times["page cache tier"] = [cached.ask(seed, length, 1, 1)]
        for name, values in times.items():
            seen.setdefault(name, []).append(statistics.median(values))
    for engine in (*engines.values(), *later.values(), cached):
        engine.close()
    return seen


def _is_record(file: Path) -> bool:
    return file.is_file() and file.stat().st_size > MIB


def read_alone(files: Sequence[Path], *, direct: bool) -> float:
    """Return the seconds that four threads take to read ``files`` into memory that is there."""
    pages = max(file.stat().st_size for file in files) // mmap.PAGESIZE + 1
    buffers = [mmap.mmap(-1, pages * mmap.PAGESIZE) for _ in files]
    for buffer in buffers:
        buffer[:] = bytes(len(buffer))

    def read(file: Path, buffer: mmap.mmap) -> None:
        fd = os.open(file, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        os.preadv(fd, [buffer], 0)
        os.close(fd)

    with ThreadPoolExecutor(4) as threads:
        began = time.perf_counter()
        list(threads.map(read, files, buffers))
        return time.perf_counter() - began


def lookups(directory: Path, rounds: int) -> list[float]:
    """Return the microseconds of a lookup in the tier, in a step that asks about 2,048 chunks."""
    import torch
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    )

    from kvkeep.integrations.vllm.offload.engine import OffloadEngine
    from kvkeep.integrations.vllm.tier import KVKeepSpec, KVKeepTier

    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("layer",), 0),),
        worker_kv_bytes_per_block=4096,
        enable_kv_cache_events=False,
        extra_config={"cpu_bytes_to_use": 4096},
        engine_id="lookups",
        model=OffloadingModelConfig("none", "float32"),
        cache=OffloadingCacheConfig(16, 1),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
    )
    view: Any = memoryview(bytearray(4096)).cast("b", (1, 4096))
    layer = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=32, dtype=torch.float32)
    caches = KVCacheConfig(1, [], [KVCacheGroupSpec(["layer"], layer)])
    model = make_model(directory / "model")
    transfer = KVTransferConfig(**tier_in([]))
    arguments = EngineArgs(
        model, kv_transfer_config=transfer, skip_tokenizer_init=True, block_size=16
    )
    engine = OffloadEngine(arguments.create_engine_config(), caches)
    with engine.starting():
        spec = KVKeepSpec(config)
    tier = KVKeepTier(spec, view, "KVKeepTier", tiers=[f"file://{directory}/kv"])
    keys = [make_offload_key(os.urandom(32), 0) for _ in range(2048)]
    tier._store.store.put([key[:32] for key in keys], [bytes(64)] * len(keys))
    context = ReqContext("request")
    for at, key in enumerate(keys):
        context.set_offload_key_position(key, 16 * (at + 1))
    tier.on_new_request(context)
    took = []
    for _ in range(20 * rounds):
        began = time.thread_time()
        found = [tier.lookup(key, context) for key in keys]
        took.append((time.thread_time() - began) / len(keys) * 1e6)
        assert set(found) == {LookupResult.HIT}
        tier._lookups.next_step()
    tier.shutdown()
    return took


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds, a shorter prompt")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--dir", type=Path, help="where the disk tiers are to be")
    options = parser.parse_args()
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="kvkeep vllm ") as directory:
        rounds, length = (2, 1100) if options.quick else (5, 4100)
        seen = measure(Path(directory), rounds, length)
        per_chunk = lookups(Path(directory), rounds)

    def figure(text: str, name: str, beside: str = "", goal: float | None = None) -> Figure:
        values = seen[name]
        value = statistics.median(values) * 1e3
        if not beside:
            return Figure(text, "ms", value)
        ratios = [mine / theirs for mine, theirs in zip(values, seen[beside], strict=True)]
        words = {"hit alone": "vLLM's own hit", "floor": "own hit + disk"}.get(beside, "vLLM alone")
        return Figure(
            text, "ms", value, words, statistics.median(ratios), min(ratios), max(ratios), goal,
            "less",
        )  # fmt: skip

    figures = [
        figure("first token, cold, vLLM alone", "cold alone"),
        figure("… with the connector, which saves it", "cold connector", "cold alone", 1.03),
        figure("… with the tier, which saves it", "cold tier", "cold alone", 1.03),
        figure("… found in vLLM's own prefix cache", "hit alone"),
        figure("… found in the connector's memory", "hit connector", "hit alone"),
        figure("… found in vLLM's primary tier", "hit tier", "hit alone", 1.2),
        figure("… on disk after a restart, the connector", "disk connector", "hit alone"),
        figure("… on disk after a restart, the tier", "disk tier", "hit alone", 1.7),
        figure("    the disk alone, the same bytes", "disk alone"),
        figure("    … the connector", "disk connector", "floor"),
        figure("    … the tier", "disk tier", "floor"),
        figure("… in the page cache, the tier", "page cache tier", "hit alone", 1.7),
        Figure(
            "lookup in the tier", "µs/chunk", statistics.median(per_chunk), goal=1.0, better="less"
        ),
    ]
    title = f"vLLM on the CPU, {length:,} tokens, medians of {rounds} rounds"
    sys.exit(show(figures, title, as_json=options.json))


if __name__ == "__main__":
    main()
