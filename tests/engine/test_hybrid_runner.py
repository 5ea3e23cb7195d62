"""Hybrid models over pages, rows and states equal those models by themselves, however cut."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from hybrid_families import FAMILIES, NOT_RESUMING, WINDOW, amplified
from kvkeep.core.errors import IllegalStep, InvalidValue, UnsupportedModel
from kvkeep.core.geometry import KVGeometry
from kvkeep.core.groups.tensors import GroupedTensors
from kvkeep.serve.engine import Piece, Runner
from kvkeep.serve.engine.attention import batch, memory
from kvkeep.serve.engine.attention.dense import Scoring
from kvkeep.serve.engine.attention.memory import LatentMaps, Reach
from kvkeep.serve.engine.model import survey, wrapped

pytestmark = pytest.mark.model

PAGE_SIZE = 4
TOKENS = 90
RESUMING = [family for family in FAMILIES if family not in NOT_RESUMING]
# Relative to the largest logit. Delta rules round differently where a cut is off their grid.
EXACT, DELTA = 1e-5, 2e-4
# Where passes end, of two sequences: on grids of 4, 32 and 64 tokens and off them, then one by one.
CUTS = ([37, 64, 65, 86, 87, 88, 89, 90], [3, 5, 64, 79, 80, 81, 82, 83])


def tokens(count, seed):
    return np.random.default_rng(seed).integers(0, 64, count).astype(np.int32)


def near(family):
    # Nemotron's step for one token is another formula than that for many.
    loose = family.startswith(("qwen", "olmo_hybrid", "kimi", "bailing", "nemotron"))
    return DELTA if loose else EXACT


@dataclass
class Running:
    sequence: Any
    position: int

    def piece(self, stop):
        start, self.position = self.position, stop
        groups, pages = self.sequence.groups, self.sequence.pages.copy()
        new = self.sequence.tokens[start:stop].copy()
        if groups is None:
            return Piece(new, start, pages, len(new))
        rows = tuple(table.copy() for table in groups.tables)
        return Piece(new, start, pages, len(new), rows, groups.state)


class Hybrid:
    """A model by itself, and over pages. ``reuse=False``: pages that nothing keeps are NaN."""

    def __init__(self, family, *, dtype=torch.float32, num_pages=1600, reuse=True, **changes):
        self.plain = amplified(family, dtype, **changes)
        geometry = KVGeometry.from_config(
            self.plain.config, dtype=str(dtype).removeprefix("torch.")
        )
        self.runner = Runner(
            copy.deepcopy(self.plain), geometry, num_pages=num_pages, page_size=PAGE_SIZE
        )
        self.cache = self.runner.cache(reuse=reuse)
        self.running = []
        self._used = set()

    def whole(self, prompt):
        ids = torch.from_numpy(np.asarray(prompt, np.int64))[None]
        with torch.inference_mode():
            return self.plain(input_ids=ids, use_cache=False).logits[0].float()

    def open(self, prompt):
        sequence = self.cache.open(prompt)
        self.running.append(Running(sequence, sequence.num_cached))
        return self.running[-1]

    def forward(self, *stops):
        """Compute each sequence up to its stop, in one pass; return the logits of each."""
        for one in self.running:
            self._copy(one)  # states that forks begin with, before any pass changes them
        for one, stop in zip(self.running, stops, strict=True):
            if one.sequence.groups is not None:
                self.runner.copy(one.sequence.groups.reach(stop))
            self._copy(one)
        if not self.cache.reuse:
            self._ruin()
        pieces = [one.piece(stop) for one, stop in zip(self.running, stops, strict=True)]
        logits = self.runner.forward(pieces).float()
        ends = np.cumsum([len(piece.tokens) for piece in pieces])
        return logits.tensor_split(ends[:-1].tolist())

    def _copy(self, one):
        groups = one.sequence.groups
        self.runner.copy([*one.sequence.copies(), *(() if groups is None else groups.copies())])

    def _ruin(self):
        """Fill pages without an owner with NaN, and those of an empty state; clean new ones."""
        groups = self.runner.groups
        if groups is None:
            return
        used = set()
        for one in self.running:
            tables = [one.sequence.pages, *one.sequence.groups.tables]
            if one.position:
                tables.append(np.array(one.sequence.groups.state, ndmin=1))
            for table in tables:
                used.update(page for page in table.ravel().tolist() if page is not None)
        self._fill(set(range(groups.num_pages)) - used, 0xFF)  # NaN in every dtype
        self._fill(used - self._used - self._states(), 0x41)
        self._used = used

    def _states(self):
        return {
            page
            for one in self.running
            if one.sequence.groups.state is not None
            for page in one.sequence.groups.state.tolist()
        }

    def _fill(self, pages, byte):
        groups = self.runner.groups
        ids = np.array(sorted(pages - {-1}), np.int32)
        groups.write(ids, torch.full((len(ids), groups.plan.page_bytes), byte, dtype=torch.uint8))

    def compute(self, one, stop, *, at=()):
        """Compute ``one`` alone up to ``stop``, with checkpoints; return the logits."""
        others, self.running = self.running, [one]
        parts = []
        for end in [*(stop_ for stop_ in at if one.position < stop_ < stop), stop]:
            parts.append(self.forward(end)[0])
            if end in at and one.sequence.groups is not None:
                made = one.sequence.groups.checkpoint(end)
                self.runner.copy([] if made is None else [made])
        self.running = others
        return torch.cat(parts)

    def assert_near(self, logits, expected, most):
        assert logits.isfinite().all()
        assert len(logits) == len(expected)
        apart = (logits - expected).abs().max() / expected.abs().max()
        assert apart <= most, f"apart by {apart:.1e}, at most {most:.0e}"


@pytest.mark.parametrize("family", RESUMING)
def test_cut_passes_equal_one_whole_pass(family):
    """In batches, with rows behind windows freed and full of NaN."""
    hybrid = Hybrid(family, reuse=False)
    prompts = tokens(TOKENS, 1), tokens(CUTS[1][-1], 2)
    for prompt in prompts:
        hybrid.open(prompt)
    passes = [hybrid.forward(*stops) for stops in zip(*CUTS, strict=True)]
    for prompt, parts in zip(prompts, zip(*passes, strict=True), strict=True):
        hybrid.assert_near(torch.cat(parts), hybrid.whole(prompt), near(family))


@pytest.mark.parametrize("family", RESUMING)
def test_what_is_kept_is_used_by_others(family):
    """Rows and states that one sequence left, and a fork, go on as one whole pass does."""
    hybrid = Hybrid(family)
    prompt, other = tokens(70, 1), np.concatenate((tokens(70, 1)[:66], tokens(20, 2)))
    first = hybrid.open(prompt)
    logits = hybrid.compute(first, 70, at=(64,))
    hybrid.assert_near(logits, hybrid.whole(prompt), near(family))
    first.sequence.publish(70)
    second = hybrid.open(other)
    assert second.position >= 64
    fork = hybrid.running[0].sequence.fork()
    hybrid.running.append(Running(fork, 70))
    more = tokens(12, 3)
    fork.append(more)
    first.sequence.append(more[::-1])
    parts = [hybrid.forward(*stops) for stops in ([72, 80, 71], [82, 86, 82])]
    for number, start in enumerate((70, second.position, 70)):
        running = hybrid.running[number].sequence
        expected = hybrid.whole(running.tokens)
        got = torch.cat([part[number] for part in parts])
        hybrid.assert_near(got, expected[-len(got) :], near(family))
        assert start
    hybrid.cache.check()


@pytest.mark.parametrize("family", ["qwen3_next", "gemma3_text"])
def test_half_precision(family):
    hybrid = Hybrid(family, dtype=torch.bfloat16, reuse=False)
    prompt = tokens(TOKENS, 1)
    hybrid.open(prompt)
    got = torch.cat([hybrid.forward(stop)[0] for stop in CUTS[0]])
    expected = hybrid.whole(prompt)
    hybrid.assert_near(got, expected, 0.1)
    assert torch.cosine_similarity(got, expected).min() > 0.995
    kept = {part.name: part.dtype for part in hybrid.runner.groups.state_parts}
    if family == "qwen3_next":
        assert kept == {"conv": torch.bfloat16, "recurrent": torch.float32}


@pytest.mark.parametrize("family", sorted(NOT_RESUMING))
def test_what_does_not_go_on_from_its_state_is_refused_by_name(family):
    with pytest.raises(UnsupportedModel, match="(?i)" + family.replace("_", "")) as error:
        Hybrid(family)
    assert "cannot" in str(error.value) or "layer" in str(error.value)


@pytest.mark.parametrize("family", ["jamba", "mamba", "falcon_mamba"])
def test_small_weights_do_not_hide_it(family):
    """As models are initialised, a lost state changes their logits by less than rounding may."""
    model = amplified(family)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() > 1:
                weights.div_(6)
    for dtype in (torch.bfloat16, torch.float32):
        geometry = KVGeometry.from_config(model.config, dtype=str(dtype).removeprefix("torch."))
        with pytest.raises(UnsupportedModel, match=r"cannot go on from a state: .*, layer 0 \("):
            Runner(copy.deepcopy(model).to(dtype), geometry, num_pages=1600, page_size=PAGE_SIZE)


# --- what the proof finds ---------------------------------------------------------------------


def load(family, geometry=None, *, num_pages=1600, **changes):
    model = amplified(family, **changes)
    geometry = (
        KVGeometry.from_config(model.config, dtype="float32") if geometry is None else geometry
    )
    return Runner(model, geometry, num_pages=num_pages, page_size=PAGE_SIZE)


def other_spans(family, change):
    geometry = KVGeometry.from_config(amplified(family).config, dtype="float32")
    groups = [
        replace(group, span=None if group.span is None else group.span + change)
        for group in geometry.groups
    ]
    return KVGeometry.of(groups, dtype="float32")


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize(
    "family", ["gemma3_text", "gpt_oss", "mimo_v2_flash", "llama4_text", "lfm3"]
)
def test_a_geometry_with_another_window_is_refused(family, change):
    with pytest.raises(UnsupportedModel, match="has another attention than its geometry"):
        load(family, other_spans(family, change))


def test_the_size_of_a_large_window_is_proved_too():
    changes = {"sliding_window": 4096}
    runner = load("gemma3_text", num_pages=5000, **changes)
    assert runner.layout.windows[0].span == 4096
    groups = [
        replace(group, span=None if group.span is None else 4097)
        for group in runner.geometry.groups
    ]
    with pytest.raises(UnsupportedModel, match="token 4096 does not attend to token 0"):
        load("gemma3_text", KVGeometry.of(groups, dtype="float32"), num_pages=5000, **changes)


def nothing(*_, **__):
    return None


@pytest.mark.parametrize(
    ("family", "place", "fault"),
    [
        ("qwen3_next", (wrapped.PassStates, "write"), nothing),
        ("lfm2", (wrapped.PassStates, "write"), nothing),
        ("falcon_h1", (GroupedTensors, "copy"), nothing),
        ("gemma3_text", (memory, "reaches"), lambda _: dict.fromkeys(range(4), Reach(WINDOW - 1))),
        ("gpt_oss", (batch, "Scoring"), lambda scale, cap, _: Scoring(scale, cap)),
        ("deepseek_v3", (LatentMaps, "value"), lambda maps, out: out[..., :16]),
        ("bamba", (survey._Seen, "keeps_state"), nothing),
        ("gemma3n_text", (survey._Seen, "_attends_elsewhere"), nothing),
    ],
)
def test_a_fault_fails_the_proof(monkeypatch, family, place, fault):
    load(family)
    monkeypatch.setattr(*place, fault)
    with pytest.raises(UnsupportedModel):
        load(family)


# --- details ----------------------------------------------------------------------------------


def test_llama_4_scales_queries_by_their_positions():
    """Not by their rows of the batch: its code counts from the length of the cache."""
    hybrid = Hybrid("llama4_text", reuse=False, floor_scale=4, attn_scale=1.0)
    prompts = tokens(40, 1), tokens(40, 2)
    for prompt in prompts:
        hybrid.open(prompt)
    parts = [hybrid.forward(*stops) for stops in ([13, 30], [39, 31], [40, 40])]
    for number, prompt in enumerate(prompts):
        got = torch.cat([part[number] for part in parts])
        hybrid.assert_near(got, hybrid.whole(prompt), EXACT)


def test_many_sequences_decode_in_one_call():
    """Each with its own state, whatever their order among longer pieces."""
    hybrid = Hybrid("qwen3_next", reuse=False, num_pages=6000)
    prompts = [tokens(12 + number, number) for number in range(7)]
    for prompt in prompts:
        hybrid.open(prompt)
    lengths = [len(prompt) for prompt in prompts]
    begun = [length - (1 if number % 3 else 4) for number, length in enumerate(lengths)]
    calls = []
    mixer = hybrid.runner.model.model.layers[0].linear_attn
    handle = mixer.in_proj_ba.register_forward_hook(
        lambda _, given, __: calls.append(tuple(given[0].shape[:2]))
    )
    parts = [hybrid.forward(*begun)]
    calls.clear()
    parts.append(hybrid.forward(*lengths))
    handle.remove()
    assert calls == [(4, 1), (1, 4), (1, 4), (1, 4)]
    for number, prompt in enumerate(prompts):
        got = torch.cat([part[number] for part in parts])
        hybrid.assert_near(got, hybrid.whole(prompt), DELTA)


def test_a_pass_that_fails_leaves_the_states(monkeypatch):
    hybrid = Hybrid("lfm2", reuse=False)
    one = hybrid.open(tokens(20, 1))
    hybrid.forward(9)
    before = hybrid.runner.groups.read_state(one.sequence.groups.state)

    def fail(*_, **__):
        raise RuntimeError("no memory")

    monkeypatch.setattr(hybrid.runner.model.lm_head, "forward", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        hybrid.forward(20)
    after = hybrid.runner.groups.read_state(one.sequence.groups.state)
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("family", ["qwen3_next", "deepseek_v3"])
def test_a_model_over_pages_refuses_to_run_without_them(family):
    runner = load(family)
    with pytest.raises(IllegalStep, match=r"use Runner\.forward"):
        runner.model(input_ids=torch.tensor([[1, 2]]), use_cache=False)


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_next", "deepseek_v3"])
def test_a_change_of_the_model_is_noticed_and_a_pass_is_none(family):
    hybrid = Hybrid(family, reuse=False)
    hybrid.open(tokens(20, 1))
    hybrid.runner.check_model()
    hybrid.forward(20)
    hybrid.runner.check_model()
    with torch.no_grad():
        hybrid.runner.model.lm_head.weight.add_(1)
    with pytest.raises(IllegalStep, match="was changed"):
        hybrid.runner.check_model()


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_next", "mamba2"])
def test_the_longest_sequence_counts_rows_and_states(family):
    runner = load(family, num_pages=600)
    longest = runner.max_tokens
    assert runner.plan.pages_for(longest) <= 600
    assert longest == runner.context_tokens or runner.plan.pages_for(longest + 1) > 600


def test_a_pool_that_holds_no_sequence():
    with pytest.raises(InvalidValue, match=r"3 pages hold no sequence of this model: .* takes"):
        load("qwen3_next", num_pages=3)


def test_a_directory_is_loaded_with_pages_for_a_budget(tmp_path):
    model = amplified("gpt_oss")
    model.save_pretrained(tmp_path)
    runner = Runner.load(tmp_path, memory="2MiB", page_size=PAGE_SIZE, device="cpu")
    assert runner.num_pages == 2**21 // runner.plan.page_bytes
    assert runner.cache().num_pages == runner.num_pages
    assert runner.plan.layout == runner.layout
