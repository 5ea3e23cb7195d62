"""vLLM engines with kvkeep in them, and what they answer."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import random
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models import VOCABULARY
from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.v1.engine import utils as engine_processes
from vllm.v1.executor import multiproc_executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from kvkeep.integrations import loaded
from kvkeep.integrations.vllm.stats import Counts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from multiprocessing.connection import Connection

    from kvkeep.store import BlockStore

BLOCK = 32

# vLLM is a million objects. It freezes them when an engine starts, thaws them when it ends, and
# then collects them several times over: most of what an engine costs here. They stay frozen.
_freeze = gc.freeze
gc.freeze = gc.unfreeze = lambda: None
MANY = 20_000
"""Objects; an engine that has ended leaves less than these, unless it was the first to import."""


def freeze() -> None:
    """Exclude all present objects from later garbage collections."""
    gc.collect()
    _freeze()


def _register_once() -> None:
    """Let vLLM look through all modules for kernels to replace once, and not for each engine."""
    try:
        from vllm.triton_utils import dispatcher
    except ImportError:  # an older vLLM, which does not
        return
    register, replaced = dispatcher.register_kernels, set[tuple[str, int]]()

    def registered(overrides: Mapping[str, Any]) -> None:
        new = {name: by for name, by in overrides.items() if (name, id(by)) not in replaced}
        if new:
            register(new)
            replaced.update((name, id(by)) for name, by in new.items())

    dispatcher.register_kernels = registered


_register_once()


@dataclass(frozen=True)
class Answer:
    tokens: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...]
    cached: int

    def differs(self, other: Answer) -> float:
        """How far the most different logprob is; infinite where tokens are others."""
        if self.tokens != other.tokens:
            return float("inf")
        return max(
            abs(value - theirs.get(token, -99.0))
            for mine, theirs in zip(self.logprobs, other.logprobs, strict=True)
            for token, value in mine.items()
        )


class Engine:
    """An LLM in this process, and a look at what kvkeep does in it."""

    def __init__(self, llm: LLM) -> None:
        self.llm: Any = llm
        self.core: Any = llm.llm_engine.engine_core.engine_core
        self.counted: dict[str, float] = {}
        self._listen()

    def _listen(self) -> None:
        """Keep what the connector tells vLLM, which forgets it."""
        take, counted = Counts.take, self.counted

        def kept(counts: Counts) -> Any:
            stats = take(counts)
            for name, amount in (stats.data if stats else {}).items():
                counted[name] = counted.get(name, 0) + amount
            return stats

        self._take, self._kept = take, kept

    def __getitem__(self, name: str) -> float:
        return self.counted.get(name, 0)

    @property
    def store(self) -> BlockStore:
        return self.core.scheduler.connector._scheduler._shared.store  # type: ignore[no-any-return]

    def ask(
        self,
        prompts: Sequence[list[int]],
        *,
        salt: str | None = None,
        kvkeep: object = None,
        lora: object = None,
        **sampling: Any,
    ) -> list[Answer]:
        params = {"temperature": 0.0, "max_tokens": 6, "logprobs": 5, "ignore_eos": True} | sampling
        if kvkeep is not None:
            params["extra_args"] = {"kv_transfer_params": {"kvkeep": kvkeep}}
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        if salt is not None:
            asked = [one | {"cache_salt": salt} for one in asked]
        Counts.take = self._kept  # type: ignore[method-assign]
        try:
            outputs = self.llm.generate(
                asked, SamplingParams(**params), use_tqdm=False, lora_request=lora
            )
        finally:
            Counts.take = self._take  # type: ignore[method-assign]
        return [
            Answer(
                tuple(one.token_ids),
                tuple(
                    {token: found.logprob for token, found in step.items()} for step in one.logprobs
                ),
                output.num_cached_tokens or 0,
            )
            for output in outputs
            for one in output.outputs
        ]

    def forget(self) -> None:
        """Empty vLLM's own prefix cache, and not kvkeep's."""
        assert self.core.scheduler.reset_prefix_cache()

    def forget_all(self) -> None:
        """Empty what vLLM has of its own; what kvkeep has stays."""
        self.forget()


def process_begins() -> None:
    """From now on files are as old as this process.

    Engines of tests share a process, which is older than the models that a test makes; where
    engines have processes of their own, it is the other way round.
    """
    now = time.time()
    loaded.process_began = lambda: now


@contextmanager
def engine(model: str, tiers: Sequence[str] | None = None, **more: Any) -> Iterator[Engine]:
    """An engine that keeps its KV in ``tiers``; without: vLLM as it is."""
    extra = more.pop("extra", {})
    settings: dict[str, Any] = {
        "enforce_eager": True, "max_model_len": 2048, "dtype": "float32", "block_size": BLOCK,
        "disable_log_stats": False, "enable_prefix_caching": True,
        "num_gpu_blocks_override": 1024,  # a whole GiB takes its time to be filled with zeros
    }  # fmt: skip
    if tiers is not None:
        settings["kv_transfer_config"] = {
            "kv_connector": "KVKeepConnector",
            "kv_connector_module_path": "kvkeep.integrations.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"tiers": list(tiers), "compare_costs": False, **extra},
        }
    process_begins()
    try:
        running = Engine(LLM(model, **(settings | more)))
    except BaseException:
        ensure_kv_transfer_shutdown()  # vLLM would give what is left of it to the next engine
        cleanup_dist_env_and_memory()  # and its groups of ranks, of which a model may need more
        raise
    try:
        yield running
    finally:
        running.core.shutdown()
        # What vLLM does when it is collected must not happen to the next engine.
        running.llm = running.core = None
        gc.collect()
        if len(gc.get_objects()) > MANY:
            _freeze()


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{length} {seed}")
    return [rng.randrange(3, VOCABULARY) for _ in range(length)]


# Importing vLLM is most of what a process costs: one has done it, and the others are its forks.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["conftest", "imported"])
_FORK = multiprocessing.get_context("fork")


def start_forks() -> None:
    """Start the process that others are forks of; it finds the modules of tests."""
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, [path])])
    try:
        forkserver.ensure_running()
    finally:
        if path is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = path


def apart(call: str, *args: str) -> None:
    """Run ``module:function`` on ``args`` in a process of its own; what it raises is a failure."""
    with tempfile.NamedTemporaryFile("r") as said:
        start_forks()
        process = FORKS.Process(target=_called, args=(said.name, call, *args))
        process.start()
        process.join()
        assert process.exitcode == 0, said.read()[-6000:]


def _called(said: str, call: str, *args: str) -> None:
    with Path(said).open("w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    fork_workers()
    _call_with(call, *args)


def beside(call: str, *args: object) -> tuple[Any, Connection]:
    """Start ``module:function`` on a connection and ``args`` in a process of its own.

    Return the process, and the connection through which it sends.
    """
    start_forks()
    receives, sends = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=_call_with, args=(call, sends, *args))
    process.start()
    sends.close()
    return process, receives


def _call_with(call: str, *args: object) -> None:
    module, _, function = call.partition(":")
    getattr(importlib.import_module(module), function)(*args)


def fork_workers() -> None:
    """Let engines and workers that are started here be forks: vLLM starts them anew on CPUs.

    It then leaves the shared memory of workers behind, which is removed here.
    """
    shutdown = MultiprocExecutor.shutdown

    def cleaned(executor: Any) -> None:
        lines = [
            line
            for worker in multiprocessing.active_children()
            for line in Path(f"/proc/{worker.pid}/maps").read_text().splitlines()
        ]
        shutdown(executor)
        for left in {line.split()[-1] for line in lines if "/dev/shm/vllm_" in line}:
            Path(left).unlink(missing_ok=True)

    engine_processes.get_mp_context = multiproc_executor.get_mp_context = lambda: _FORK
    MultiprocExecutor.shutdown = cleaned


LENGTHS = (1, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129, 160, 191, 192, 193, 300, 511, 700)
PROMPTS = [prompt(length) for length in LENGTHS]


def found(length: int, block: int = BLOCK) -> int:
    """Tokens of a stored prompt that need not be computed: whole blocks, unless it is one token."""
    blocks = length // block
    gain = min(blocks * block, length - 1)
    return blocks * block if gain >= block else 0


def same(left: Sequence[Answer], right: Sequence[Answer], most: float = 1e-4) -> None:
    for at, (mine, theirs) in enumerate(zip(left, right, strict=True)):
        assert mine.differs(theirs) <= most, f"answer {at}: {mine.differs(theirs)}"
