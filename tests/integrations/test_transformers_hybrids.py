"""Models with windows, latent KV and states: reuse answers as a whole pass does.

The oracle is the model without a store. Prompts branch, go on, come in batches, and find records
that are damaged; stores are closed and opened on disk between them.
"""

from __future__ import annotations

import pytest
import torch
from hybrid_models import FAMILIES, REFUSED, build_hybrid
from random_models import BLOCK, padded, prompt
from transformers import DynamicCache

from kvkeep.core.errors import InvalidValue, UnsupportedModel
from kvkeep.integrations.transformers import KeptModel
from kvkeep.store import KVStore

pytestmark = pytest.mark.model

NEW = 5
CLOSE = 5e-4
"""Of the largest logit. Another state is off by 1e-1 and more."""
STEPS = {"Zamba2ForCausalLM": 1e-2, "NemotronHForCausalLM": 1e-2}
"""Of models whose passes over one token compute in another way than those over several."""
TEXT = prompt(150, seed=1)
BRANCH = torch.cat((TEXT[:, :100], prompt(60, seed=2)), 1)
OTHER = torch.cat((TEXT[:, :100], prompt(44, seed=3)), 1)


def asked(model, **inputs):
    return model.generate(
        **inputs, max_new_tokens=NEW, do_sample=False, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip


def check(kept, known=None, **inputs):
    """Ask with and without the store; return the new tokens of the first row.

    ``known`` keeps what the model by itself has answered.
    """
    known = {} if known is None else known
    key = tuple((name, str(inputs[name].tolist())) for name in sorted(inputs))
    if key not in known:
        known[key] = asked(kept.model, **inputs)
    want, got = known[key], asked(kept, **inputs)
    assert torch.equal(want.sequences, got.sequences)
    close = STEPS.get(type(kept.model).__name__, CLOSE)
    largest = max(float(one.abs().max()) for one in want.logits)
    pairs = zip(want.logits, got.logits, strict=True)
    assert max(float((a - b).abs().max()) for a, b in pairs) <= close * largest
    return want.sequences[:, -NEW:]


def opened(model, path):
    tiers = ["memory://64MiB", f"file://{path}?size=64MiB&sync=never"]
    return KeptModel(model, tiers=tiers, block_tokens=BLOCK, loading="all")


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - REFUSED.keys()))
def test_a_family(family, tmp_path):
    model, known = build_hybrid(family), {}
    with opened(model, tmp_path) as kept:
        answer = check(kept, known, input_ids=TEXT)
        assert kept.last.loaded == 0
        check(kept, known, input_ids=TEXT)
        assert kept.last.loaded >= 128
    with opened(build_hybrid(family), tmp_path) as kept:
        check(kept, known, input_ids=TEXT)
        assert kept.last.loaded >= 128, "after a restart"
        turn = torch.cat((TEXT, answer, prompt(11, seed=4)), 1)
        check(kept, known, input_ids=turn)
        assert kept.last.loaded >= 150 + NEW - 1, "the answer, too"
        check(kept, known, input_ids=BRANCH)
        check(kept, known, input_ids=OTHER)
        assert kept.last.loaded >= 64, "where prompts branch, a snapshot was taken"
        check(kept, known, **padded([BRANCH[0], TEXT[0, :120]]))
        check(kept, known, **padded([BRANCH[0], TEXT[0, :120]]))
        assert kept.last.loaded >= 64 + 64
    # Half of all records are damaged: less is found, and nothing wrong.
    for number, file in enumerate(sorted(tmp_path.glob("*/*"))):
        if len(file.name) == 64 and number % 2:
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 0x40
            file.write_bytes(data)
    with opened(model, tmp_path) as kept:
        check(kept, known, input_ids=TEXT)
        if family != "mistral":  # of windows alone, few records are needed, and these may be whole
            assert kept.last.loaded < 150 - 1
            assert kept.store.stats().tiers[1].counters["damaged"] > 0
        check(kept, known, input_ids=TEXT)


@pytest.mark.parametrize("family", REFUSED)
def test_what_does_not_go_on_exactly_is_refused_by_a_trial(family):
    with pytest.raises(UnsupportedModel, match=REFUSED[family]):
        KeptModel(build_hybrid(family))


@pytest.mark.parametrize("family", ["qwen3_next", "gemma3_text", "deepseek_v3"])
def test_beams_samples_chunks_and_bfloat16(family):
    model = build_hybrid(family)
    with KeptModel(model, block_tokens=BLOCK, loading="all") as kept:
        for how in ({"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}):
            for _ in range(2):
                want = model.generate(TEXT, max_new_tokens=NEW, **how)
                assert torch.equal(kept.generate(TEXT, max_new_tokens=NEW, **how), want)
        want = model.generate(OTHER, max_new_tokens=NEW)
        assert torch.equal(kept.generate(OTHER, max_new_tokens=NEW, prefill_chunk_size=40), want)
    half = build_hybrid(family).to(torch.bfloat16)
    with KeptModel(half, block_tokens=BLOCK, loading="all") as kept:
        first = kept.generate(TEXT, max_new_tokens=NEW)
        assert torch.equal(kept.generate(TEXT, max_new_tokens=NEW), first), "at the same cuts"
        assert kept.last.loaded >= 128


@pytest.mark.parametrize("family", ["qwen3_next", "gemma3_text", "deepseek_v3", "falcon_h1"])
def test_load_and_save_with_the_models_own_cache(family):
    model = build_hybrid(family)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(TEXT[:, :96], past_key_values=cache)
    with KeptModel(model, block_tokens=BLOCK, loading="all") as kept:
        assert kept.load(TEXT).tokens == 0
        assert kept.save(TEXT[:, :96], cache) == 96
        assert kept.save(TEXT[:, :96], cache) == 0
        for _ in range(2):  # what is loaded belongs to the caller: the model changes it
            loaded = kept.load(TEXT)
            assert loaded.tokens == 96
            want = model.generate(TEXT, max_new_tokens=NEW)
            got = model.generate(TEXT, past_key_values=loaded.cache, max_new_tokens=NEW)
            assert torch.equal(want, got)
        two = padded([TEXT[0], TEXT[0, :120]])
        assert kept.load(**two).tokens == 0, "no column at which both have a snapshot"
        assert kept.load(TEXT.repeat(2, 1)).tokens == 96


def test_a_cache_of_the_users_cannot_take_states():
    with KeptModel(build_hybrid("qwen3_next"), block_tokens=BLOCK, loading="all") as kept:
        for how in (
            {"cache_implementation": "static"},
            {"past_key_values": DynamicCache(config=kept.model.config)},
        ):
            with pytest.raises(InvalidValue, match=r"keeps states|LinearAttentionLayer"):
                kept.generate(TEXT, max_new_tokens=2, **how)
        assert torch.equal(
            kept.generate(TEXT, max_new_tokens=NEW), kept.model.generate(TEXT, max_new_tokens=NEW)
        )


def test_windows_are_not_kept_whole():
    """In a cache of the model's own, a sliding layer holds its window, and no more."""
    with KeptModel(build_hybrid("gemma3_text"), block_tokens=BLOCK, loading="all") as kept:
        kept.generate(TEXT, max_new_tokens=1)
        cache = kept.load(TEXT).cache
        assert [layer.keys.shape[-2] for layer in cache.layers] == [8, 149, 8, 149]


def test_a_store_for_whole_blocks_keeps_windows_whole_as_ever():
    model = build_hybrid("mistral")
    geometry = KeptModel(model).store.geometry
    with (
        KVStore(geometry, model=model, layout="HND", block_tokens=BLOCK) as store,
        KeptModel(model, store=store) as kept,
    ):
        assert not store.snapshots
        check(kept, input_ids=TEXT)
        check(kept, input_ids=TEXT)
        assert kept.last.loaded == 149
    latent = build_hybrid("deepseek_v3")
    with (
        KVStore(KeptModel(latent).store.geometry, model=latent, layout="HND", snapshots=False) as s,
        pytest.raises(InvalidValue, match=r"latent KV; open it with .*snapshots=True"),
    ):
        KeptModel(latent, store=s)


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_next"])
def test_conversations_are_followed(family, tmp_path):
    """Each turn goes on where the last answer ended: all but the first are returns."""
    tiers = ["memory://64MiB?policy=returns", f"file://{tmp_path}?size=64MiB&policy=returns"]
    with KeptModel(build_hybrid(family), tiers=tiers, block_tokens=BLOCK, loading="all") as kept:
        text = prompt(40, seed=1)
        for turn in range(3):
            text = kept.generate(text, max_new_tokens=BLOCK, do_sample=False)
            text = torch.cat((text, prompt(10, seed=9 + turn)), 1)
        conversations = kept.store._tiered.conversations
        assert len(conversations) == 1
        assert [wait.turns for wait in conversations.returns] == [3]
        assert len(conversations.waits) > 0
        conversations.check()


def test_answers_that_later_prompts_lack_are_stored_no_longer(tmp_path):
    """As of a chat template that leaves reasoning out: each turn goes on where the answer began."""
    with opened(build_hybrid("gemma3_text"), tmp_path) as kept:
        for talk in range(10):
            first = prompt(20, seed=3 * talk)
            kept.generate(first, max_new_tokens=2 * BLOCK)
            kept.generate(torch.cat((first, prompt(6, seed=3 * talk + 1)), 1), max_new_tokens=1)
            assert kept.last.loaded >= 19
        before = kept.store.stats()
        kept.generate(prompt(20, seed=100), max_new_tokens=2 * BLOCK)
        after = kept.store.stats()
        assert after.unread_tokens - before.unread_tokens == 2 * BLOCK - 1
        assert after.put_tokens - before.put_tokens <= 20
