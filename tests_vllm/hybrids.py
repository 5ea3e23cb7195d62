"""Hybrid models in engines, and what kvkeep stores of them."""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from engines import Answer, Engine, engine
from models import make_lfm2, make_qwen_next
from versions import OLD
from vllm.v1.kv_cache_interface import MambaSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

STATES = 3  # both models have three layers with a state, each in its own group


@dataclass
class Written:
    """Keys that were given to the store, in order, of blocks with KV and of states."""

    blocks: list[bytes] = field(default_factory=list)
    states: list[bytes] = field(default_factory=list)


@dataclass(frozen=True)
class Hybrid:
    """A model, and the size of its blocks in tokens."""

    name: str
    path: str
    block: int
    settings: dict[str, Any]

    @contextmanager
    def engine(self, tiers: Sequence[str] | None, **more: Any) -> Iterator[Engine]:
        with engine(self.path, tiers, **(self.settings | more)) as one:
            assert one.core.scheduler.block_size == self.block
            yield one

    @property
    def exact(self) -> bool:
        """Whether vLLM itself says the same however a prompt is cut; its LFM2 on CPUs does not."""
        return self.name == "qwen3_next"

    def cut(self, prompt: Sequence[int]) -> int:
        """The last boundary before the last token: there vLLM keeps a state of a prompt."""
        return (len(prompt) - 1) // self.block * self.block

    @contextmanager
    def watched(self, one: Engine) -> Iterator[Written]:
        """See what is written meanwhile."""
        written, store, write = Written(), one.store, one.store.write
        state = state_bytes(one)

        def seen(keys: list[bytes], sizes: list[int], fill: Any, **more: Any) -> int:
            (written.states if set(sizes) == {state} else written.blocks).extend(keys)
            return write(keys, sizes, fill, **more)

        store.write = seen  # type: ignore[method-assign, assignment]
        try:
            yield written
        finally:
            store.write = write  # type: ignore[method-assign]


def described(name: str, path: str) -> Hybrid:
    """The model in this directory."""
    if name == "qwen3_next":  # a convolution in bfloat16 and a delta rule in float32
        settings = {"dtype": "bfloat16", "block_size": 64}
        return Hybrid(name, path, 64, settings)
    return Hybrid(name, path, 32, {})


def state_bytes(one: Engine) -> int:
    """The bytes of a state, as vLLM lays it out for this processor; all groups have one size."""
    config = one.core.scheduler.kv_cache_config
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    (size,) = {
        sum(
            math.prod(shape) * dtype.itemsize
            for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
        )
        for spec in specs
        if isinstance(spec, MambaSpec)
    }
    return size


def make_hybrid(name: str, directory: Path) -> Hybrid:
    if name == "lfm2" and OLD:
        pytest.skip("before 0.32 vLLM cannot compute short convolutions of width 3 on CPUs")
    make = make_qwen_next if name == "qwen3_next" else make_lfm2
    return described(name, make(directory / name))


def each(one: Engine, prompts: Sequence[list[int]], **more: Any) -> list[Answer]:
    """Ask one after another: vLLM's LFM2 says other things to a prompt in a batch, on CPUs."""
    return [one.ask([prompt], **more)[0] for prompt in prompts]


def exactly(left: Sequence[Answer], right: Sequence[Answer]) -> None:
    """Tokens, logprobs and the number of cached tokens are the same, bit for bit."""
    for at, (mine, theirs) in enumerate(zip(left, right, strict=True)):
        assert mine == theirs, f"answer {at}: {mine.differs(theirs)} {mine.cached} {theirs.cached}"


def counters(one: Engine, name: str) -> list[float]:
    return [tier.counters[name] for tier in one.store.stats()]


@contextmanager
def loads_checked(one: Engine) -> Iterator[list[int]]:
    """Compare pages with their records after each load; count the pages, by group, in the list."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    worker = get_kv_transfer_group()._worker
    counted = [0] * len(worker._pages)
    load = worker._load

    def checked(loading: Any, *more: Any) -> None:
        load(loading, *more)
        for span in loading.load.spans:
            pages, size = worker._pages[span.group], worker.shared.sizes[span.group]
            for at, key in enumerate(span.keys):
                record, page = bytearray(size), bytearray(size)
                assert one.store.get([key], [memoryview(record)]) == 1
                pages.filler(span.pages)(at, memoryview(page))
                counted[span.group] += record == page

    worker._load = checked
    try:
        yield counted
    finally:
        worker._load = load


@contextmanager
def zeroed(one: Engine, key: bytes, size: int) -> Iterator[None]:
    """Another record under this key, with a right checksum."""
    kept = bytearray(size)
    assert one.store.get([key], [memoryview(kept)]) == 1
    for record in (bytes(size), bytes(kept)):
        one.store.remove([key])
        assert one.store.put([key], [record]) == 1
        if record != kept:
            yield
