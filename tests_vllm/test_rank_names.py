"""Which engines below vLLM's offloading share KV, and which must not: names of ranks and blocks."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from engines import BLOCK, PROMPTS, apart, prompt
from models import make_qwen_next
from tiered import TieredEngine, tiered

from kvkeep.core.errors import InvalidValue, UnsupportedModel
from kvkeep.integrations.vllm.offload import spec as spec_module
from kvkeep.integrations.vllm.offload.spec import canonical_of
from kvkeep.integrations.vllm.tier import namespace_of_rows

if TYPE_CHECKING:
    from pathlib import Path

    from kvkeep.core.keys import Namespace


def spec_of(one: TieredEngine) -> Any:
    return one.tier._offloading_spec


def named(one: TieredEngine, ranks: int, *, portable: bool) -> Namespace:
    """The namespace that this engine would have with so many ranks."""
    engine, spec = one.tier._engine, spec_of(one)
    config = copy.copy(engine.config)
    config.parallel_config = copy.copy(config.parallel_config)
    config.parallel_config.tensor_parallel_size = config.parallel_config.world_size = ranks
    config.compilation_config = copy.copy(config.compilation_config)
    passes = copy.copy(config.compilation_config.pass_config)
    passes.fuse_allreduce_rms = ranks > 1  # as on GPUs
    config.compilation_config.pass_config = passes
    (note,) = spec.notes
    notes = [replace(note, portable=portable)] * ranks
    return namespace_of_rows(replace(engine, config=config), one.tier._options, spec, notes)


def test_ranks_are_named_where_rows_tell_them(llama: str, tmp_path: Path) -> None:
    disk = f"file://{tmp_path}/kv?size=64MiB"
    with tiered(llama, disk) as one:
        assert spec_of(one).config.canonical_layout
        names = [named(one, ranks, portable=True) for ranks in (1, 2, 4)]
        assert names == [one.store.namespace] * 3
        others = [named(one, ranks, portable=False) for ranks in (1, 2, 4)]
        assert len({repr(name) for name in [*others, one.store.namespace]}) == 4
        one.ask(PROMPTS[-2:])
        one.forget_all()
        engine, config = one.tier._engine, spec_of(one).config
        given = {name: each for name, each in config.extra_config.items() if "layout" not in name}
        direct = replace(config, canonical_layout=False, extra_config=given)
        assert canonical_of(engine, direct) is not None
        config = copy.copy(engine.config)
        config.model_config = copy.copy(config.model_config)
        config.model_config.quantization = "fp8"  # each rank has scales of its own
        assert canonical_of(replace(engine, config=config), direct) is None
    # Hashes of blocks of another size are others: vLLM has no key in common.
    with tiered(llama, disk, block_size=64) as one:
        assert [answer.cached for answer in one.ask(PROMPTS[-2:])] == [0, 0]


def test_workers_that_cannot_place_their_pages_tell_so(llama: str, tmp_path: Path) -> None:
    """vLLM expects the layout by the model, and the pages turn out to be others."""
    apart("test_rank_names:other_pages", llama, f"file://{tmp_path}/kv?size=64MiB")


def other_pages(llama: str, disk: str) -> None:
    """In a process of its own, in which vLLM leaves engines behind that do not start."""
    take_notes = spec_module.take_notes

    def two_minds(engine: str, ranks: int) -> Any:
        (note,) = take_notes(engine, ranks)
        return [note, replace(note, canonical=not note.canonical)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spec_module, "is_portable", lambda caches: False)
        with tiered(llama, disk) as one:
            assert not spec_of(one).config.canonical_layout
            one.ask(PROMPTS[-1:])
            one.forget_all()
            assert one.ask(PROMPTS[-1:])[0].cached == len(PROMPTS[-1]) // BLOCK * BLOCK
        with patch.context() as more:
            more.setattr(spec_module, "leave_note", lambda *_: None)
            with pytest.raises(InvalidValue, match="worker 0 did not tell"):
                tiered(llama, disk).__enter__()
        patch.setattr(spec_module, "take_notes", two_minds)
        with pytest.raises(UnsupportedModel, match="in different layouts"):
            tiered(llama, disk).__enter__()


def test_models_with_states_keep_their_ranks(tmp_path: Path) -> None:
    path = make_qwen_next(tmp_path / "qwen")
    disk = f"file://{tmp_path}/kv?size=64MiB"
    with tiered(path, disk, dtype="bfloat16", block_size=64) as one:
        assert not spec_of(one).config.canonical_layout
        (note,) = spec_of(one).notes
        assert not note.portable
        mine = [prompt(3 * 64 + 9, seed=80)]
        one.ask(mine)
        one.forget_all()
        assert one.ask(mine)[0].cached == 3 * 64
