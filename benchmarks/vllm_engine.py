"""Gain and cost of kvkeep inside vLLM: real vLLM on this machine's CPU.

A random Llama of 100 million parameters, and a prompt of 4,100 tokens: the time to the first token
cold, found in vLLM's own prefix cache, in kvkeep's memory tier, in its disk tier after a restart of
the engine, and through vLLM's own ExampleConnector. Engines are in processes of their own and take
turns: in each round everything is measured once, so that a neighbour slows all of it. Ratios are of
one round, and the figure is their median, with the smallest and the largest.

    .venv-vllm/bin/python benchmarks/vllm_engine.py           # about five minutes
    .venv-vllm/bin/python benchmarks/vllm_engine.py --quick   # two rounds, 1,100 tokens
    .venv-vllm/bin/python benchmarks/vllm_engine.py --json

Lookup and bookkeeping are those of one request of 32,768 tokens in blocks of 16. For scale: vLLM's
own offload manager takes 0.25 µs a block to look up, 1.9 µs to store, 1.4 µs to load.

(The file is not called ``vllm.py``, because that name would hide the package.)
"""

# ruff: noqa: PLC0415 - vLLM takes half a minute to import, and not every process here needs it

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from figures import Figure, show

if TYPE_CHECKING:
    from collections.abc import Callable

VOCABULARY = 32_000
BLOCK = 128
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
}  # fmt: skip
LAYERS: dict[str, Any] = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12}
HEADS: dict[str, Any] = {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64}


# --- in a process of its own -----------------------------------------------------------------


class Served:
    """One engine, controlled over its standard input, and restarted on demand."""

    def __init__(self, model: str, transfer: dict[str, Any] | None) -> None:
        self._model = model
        self._transfer = transfer
        self._llm: Any = None
        self.restart()

    def restart(self) -> float:
        """Start a new engine in the same process; its memory is empty."""
        import gc

        from vllm import LLM

        if self._llm is not None:
            self._llm.llm_engine.engine_core.engine_core.shutdown()
            self._llm = None
            gc.collect()
        more: dict[str, Any] = {}
        if self._transfer is not None:
            more["kv_transfer_config"] = self._transfer
        self._llm = LLM(
            self._model, enforce_eager=True, max_model_len=8192, dtype="bfloat16",
            block_size=BLOCK, skip_tokenizer_init=True, max_num_batched_tokens=8192, **more,
        )  # fmt: skip
        self.ask(0, 300, 2, 2)  # what is compiled or allocated at first use is not measured
        return 0.0

    def ask(self, seed: int, length: int, count: int, answer: int) -> float:
        """Return the seconds until ``count`` prompts have ``answer`` tokens each."""
        from vllm import SamplingParams

        rng = random.Random(seed)
        prompts = [
            {"prompt_token_ids": [rng.randrange(3, VOCABULARY) for _ in range(length)]}
            for _ in range(count)
        ]
        params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        self._llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - began

    def forget(self) -> float:
        """Empty vLLM's own prefix cache."""
        self._llm.llm_engine.engine_core.engine_core.scheduler.reset_prefix_cache()
        return 0.0

    def flush(self) -> float:
        """Flush kvkeep's store."""
        core = self._llm.llm_engine.engine_core.engine_core
        began = time.perf_counter()
        if hasattr(core.scheduler.connector, "_scheduler"):
            core.scheduler.connector._scheduler._shared.store.flush(120)
        else:
            (tier,) = core.scheduler.connector.connector_scheduler.manager.secondary_tiers
            while core.scheduler.connector.has_pending_push_work():
                core.step()
            tier._store.store.flush(120)
        return time.perf_counter() - began


def serve(model: str, transfer: str, *, kind: type[Served] = Served) -> None:
    """Read calls, one per line, and answer each with a number."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints
    served = kind(model, json.loads(transfer))
    print("0", file=answers, flush=True)
    for line in sys.stdin:
        name, *args = json.loads(line)
        print(repr(getattr(served, name)(*args)), file=answers, flush=True)


class Engine:
    """The controlling side of `Served`; ``script`` serves it, this one if none is given."""

    def __init__(
        self, model: str, transfer: dict[str, Any] | None, log: Path, script: Path | None = None
    ) -> None:
        path = str(script or Path(__file__).resolve())
        self._log = log.open("w")
        self._process = subprocess.Popen(
            [sys.executable, path, "--serve", model, json.dumps(transfer)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
        )  # fmt: skip
        self._log_path = log
        self._answer()

    def _answer(self) -> float:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"an engine ended:\n{self._log_path.read_text()[-3000:]}")
        return float(line)

    def __getattr__(self, name: str) -> Callable[..., float]:
        def call(*args: object) -> float:
            assert self._process.stdin is not None
            print(json.dumps([name, *args]), file=self._process.stdin, flush=True)
            return self._answer()

        return call

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._log.close()


# --- the parts -------------------------------------------------------------------------------


def make_model(path: Path) -> str:
    """Create the model with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, max_position_embeddings=8192, tie_word_embeddings=True,
        initializer_range=0.1, **LAYERS, **HEADS,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(str(path))
    return str(path)


def kvkeep_in(tiers: list[str]) -> dict[str, Any]:
    """Return the configuration of vLLM with kvkeep."""
    return {
        "kv_connector": "KVKeepConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "kvkeep.integrations.vllm",
        "kv_connector_extra_config": {"tiers": tiers},
    }  # fmt: skip


def example_in(directory: Path) -> dict[str, Any]:
    """Return the configuration of vLLM with its ExampleConnector."""
    return {
        "kv_connector": "ExampleConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(directory)},
    }  # fmt: skip


def requests(directory: Path, rounds: int, length: int) -> list[Figure]:
    """Measure times to the first token, and the speed of decoding."""
    model = make_model(directory / "model")
    disk = f"file://{directory}/kv?size=8GiB"
    plain = Engine(model, None, directory / "plain.log")
    kept = Engine(model, kvkeep_in(["memory://2GiB?touch=yes", disk]), directory / "kept.log")
    later = Engine(model, kvkeep_in(["memory://256MiB?touch=yes", disk]), directory / "later.log")
    example = Engine(model, example_in(directory / "example"), directory / "example.log")
    seen: dict[str, list[float]] = {}

    def note(name: str, *values: float) -> None:
        seen.setdefault(name, []).append(statistics.median(values))

    for turn in range(rounds):
        seed = 1000 + turn
        # One before the other and then the other way round: what drifts meanwhile evens out.
        pair = [("cold", plain), ("cold kept", kept)]
        times: dict[str, list[float]] = {name: [] for name, _ in pair}
        for number, order in enumerate((pair, pair[::-1]) if turn % 2 else (pair[::-1], pair)):
            for name, engine in order:
                times[name].append(engine.ask(seed + 100 * number, length, 1, 1))
        for name, values in times.items():
            note(name, *values)
        kept.flush()
        plain.ask(seed, length, 1, 1)
        hits: dict[str, list[float]] = {"own": [], "memory": []}
        for _ in range(5):
            hits["own"].append(plain.ask(seed, length, 1, 1))
            kept.forget()
            hits["memory"].append(kept.ask(seed, length, 1, 1))
        for name, values in hits.items():
            note(name, *values)
        later.restart()
        note("disk", later.ask(seed, length, 1, 1))
        note("cold example", example.ask(seed, length, 1, 1))
        example.forget()
        note("example", example.ask(seed, length, 1, 1))
        for name, engine in [("decode", plain), ("decode kept", kept)][:: 1 if turn % 2 else -1]:
            first = engine.ask(seed + 5000, 60, 8, 1)
            note(name, 8 * 255 / (engine.ask(seed + 9000, 60, 8, 256) - first))
    for engine in (plain, kept, later, example):
        engine.close()

    def figure(text: str, name: str, beside: str = "", goal: float | None = None) -> Figure:
        values, decode = seen[name], name.startswith("decode")
        scale, unit = (1.0, "tokens/s") if decode else (1e3, "ms")
        value = statistics.median(values) * scale
        if not beside:
            return Figure(text, unit, value)
        ratios = [mine / theirs for mine, theirs in zip(values, seen[beside], strict=True)]
        words = {"cold": "cold", "own": "vLLM's own hit", "decode": "without"}[beside]
        return Figure(
            text, unit, value, words, statistics.median(ratios), min(ratios), max(ratios), goal,
            "more" if decode else "less",
        )  # fmt: skip

    return [
        figure("first token, cold, vLLM alone", "cold"),
        figure("… with kvkeep, which saves it", "cold kept", "cold", 1.03),
        figure("… with ExampleConnector", "cold example", "cold"),
        figure("… found in vLLM's own prefix cache", "own", "cold"),
        figure("… found in kvkeep's memory", "memory", "own", 1.5),
        figure("… found on kvkeep's disk after a restart", "disk", "own", 2.0),
        figure("… found by ExampleConnector", "example", "own"),
        figure("decoding, 8 at once, vLLM alone", "decode"),
        figure("… with kvkeep", "decode kept", "decode", 0.99),
    ]


def bookkeeping(rounds: int) -> list[Figure]:
    """Measure the scheduler's side for one long request."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    from kvkeep.integrations.vllm.groups import Group, Groups
    from kvkeep.integrations.vllm.kept import SharedStore
    from kvkeep.integrations.vllm.options import ConnectorOptions
    from kvkeep.integrations.vllm.scheduler import SchedulerSide
    from kvkeep.store import BlockStore

    init_none_hash(sha256)
    hasher, blocks = get_request_block_hasher(16, sha256), 2048
    groups, options = Groups((Group(("layer",), None),), 16, False), ConnectorOptions()
    store = BlockStore("benchmark", tiers=["memory://64MiB"])
    shared = SharedStore("benchmark", store, groups, [64])
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(world_size=1),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8192),
        max_concurrent_batches=1,
        model_config=SimpleNamespace(pooler_config=None, skip_tokenizer_init=True),
        kv_transfer_config=SimpleNamespace(
            engine_id="benchmark", is_kv_consumer=True, is_kv_producer=True
        ),
    )
    side = SchedulerSide(config, options, groups)
    tables = (list(range(1, blocks + 1)),)
    seconds: dict[str, list[float]] = {"lookup": [], "save": [], "load": []}

    def timed(name: str, call: Callable[..., Any], *args: object) -> Any:
        began = time.thread_time()  # it waits for nobody: a busy neighbour does not count
        result = call(*args)
        seconds[name].append((time.thread_time() - began) / blocks * 1e6)
        return result

    for turn in range(rounds * 4):
        rng = random.Random(turn)
        tokens = [rng.randrange(VOCABULARY) for _ in range(blocks * 16)]
        request = Request(
            f"r{turn}", tokens, SamplingParams(max_tokens=1), None, block_hasher=hasher
        )
        side.follow(request)
        output = SimpleNamespace(
            total_num_scheduled_tokens=blocks * 16,
            num_scheduled_tokens={request.request_id: blocks * 16},
            kv_connector_block_state=SimpleNamespace(get_block_ids=lambda _: tables),
        )
        plan = timed("save", side.plan, output)
        (span,) = plan.saves[0].spans
        assert len(span.keys) == blocks
        store.put(span.keys, [bytes(64)] * blocks)
        found = timed("lookup", side.matched, request, 0)
        assert found == blocks * 16
        table = SimpleNamespace(get_block_ids=lambda: tables)
        timed("load", side.allocated, request, table, found)
        side.finished(request, ([],))
        store.clear()
    side.close()
    shared.close()
    goals = {"lookup": 0.3, "save": 1.0, "load": 1.0}
    words = {"lookup": "lookup", "save": "bookkeeping of a save", "load": "bookkeeping of a load"}
    return [
        Figure(words[name], "µs/block", statistics.median(values), goal=goals[name], better="less")
        for name, values in seconds.items()
    ]


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds, a shorter prompt")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--dir", type=Path, help="where the disk tier is to be")
    parser.add_argument("--serve", nargs=2, metavar=("MODEL", "TRANSFER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ |= ENVIRONMENT
    if options.serve:
        serve(*options.serve)
        return
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="kvkeep vllm ") as directory:
        rounds, length = (2, 1100) if options.quick else (5, 4100)
        figures = requests(Path(directory), rounds, length) + bookkeeping(rounds)
    title = f"vLLM on the CPU, {length:,} tokens, medians of {rounds} rounds"
    sys.exit(show(figures, title, as_json=options.json))


if __name__ == "__main__":
    main()
