"""Batches: each row's answer is the one it gets alone, and only what nobody knows is computed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import BLOCK, alone, build, computed, padded, prompt
from transformers import BloomConfig, BloomForCausalLM, DynamicCache, StaticCache

from kvkeep.core.errors import InvalidValue
from kvkeep.integrations.transformers import KeptModel
from kvkeep.serve.models import bundled_model

pytestmark = pytest.mark.model

DOCUMENT = prompt(150)[0]
NEW = 8


def after(tokens, own, seed):
    """The beginning of the document, and tokens of the text's own."""
    return torch.cat((DOCUMENT[:tokens], prompt(own, seed=seed)[0]))


# Long and short, alike for long, for a while, and not at all; one that is the beginning of another.
TEXTS = [after(150, 7, 2), after(100, 20, 3), prompt(30, seed=4)[0], after(150, 25, 5),
         prompt(5, seed=6)[0], DOCUMENT[:90]]  # fmt: skip


@pytest.fixture(scope="module")
def model():
    """A Llama that no test changes."""
    return build()


@pytest.fixture
def kept(model):
    with KeptModel(model, tiers=["memory://16MiB"], block_tokens=BLOCK, loading="all") as kept:
        yield kept


def answers(output, columns):
    return list(getattr(output, "sequences", output)[:, columns:])


def same(found, expected):
    return all(map(torch.equal, found, expected))


CACHES = {
    "best": lambda _: {},
    "static": lambda _: {"cache_implementation": "static"},
    "static of one's own": lambda model: {
        "past_key_values": StaticCache(model.config, max_cache_len=300)
    },
    "with windows": lambda model: {"past_key_values": DynamicCache(config=model.config)},
    "empty": lambda _: {"past_key_values": DynamicCache()},
    "in chunks": lambda _: {"prefill_chunk_size": 13},
}


@pytest.mark.parametrize("how", CACHES)
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma3Text"])
def test_rows_are_answered_as_if_alone(family, how):
    model = build(family)
    expected = alone(model, TEXTS, NEW)
    batch = padded(TEXTS)
    columns = batch["input_ids"].shape[1]
    with KeptModel(model, tiers=["memory://16MiB"], block_tokens=BLOCK, loading="all") as kept:
        for known in (0, sum(map(len, TEXTS)) - len(TEXTS)):
            found = kept.generate(**batch, max_new_tokens=NEW, **CACHES[how](model))
            assert same(answers(found, columns), expected)
            assert kept.last.loaded == known
        counts = computed(model)
        kept.generate(**batch, max_new_tokens=NEW, **CACHES[how](model))
        assert counts == [len(TEXTS)] * NEW
        # What was stored in a batch is found by who comes alone, under no padding.
        for text, answer in zip(TEXTS, expected, strict=True):
            assert same([kept.generate(text[None], max_new_tokens=NEW)[0, len(text) :]], [answer])
            assert kept.last.loaded == len(text) - 1


def test_a_beginning_that_all_share_is_computed_once(kept):
    texts = [after(150, own, seed) for seed, own in enumerate((7, 9, 6, 8), 20)]
    expected = alone(kept.model, texts, 1)
    counts = computed(kept.model)
    found = kept.generate(**padded(texts), max_new_tokens=1)
    assert same(answers(found, 159), expected)
    assert counts == [150, 4 * 9]
    assert kept.last == (630, 0, kept.last.stored, 450)
    counts.clear()
    kept.generate(after(150, 5, 24)[None], max_new_tokens=1)
    assert counts == [5]  # and found to the token by who asks something else


def test_the_same_text_in_every_row(kept):
    counts = computed(kept.model)
    kept.generate(**padded([DOCUMENT] * 3), max_new_tokens=2)
    assert counts == [149, 3, 3]


def test_each_row_has_its_own_stored_prefix(kept):
    """One knows all, one a part, one nothing, and each computes the rest alone."""
    texts = [after(150, 20, 31), after(64, 100, 32), prompt(165, seed=33)[0]]
    expected = alone(kept.model, texts, NEW)
    kept.generate(texts[0][None], max_new_tokens=1)
    counts = computed(kept.model)
    found = kept.generate(**padded(texts), max_new_tokens=NEW)
    assert same(answers(found, 170), expected)
    assert kept.last.loaded == 169 + 64
    # Row 2 to where row 1 is known, both to near the end, all of them there.
    assert counts[:3] == [70 - 5, 2 * (169 - 70), 3]


def test_blocks_that_rows_share_are_read_once(model):
    texts = [after(150, 9, seed) for seed in range(40, 44)]
    with KeptModel(model, tiers=["memory://16MiB"], block_tokens=BLOCK, loading="all") as kept:
        kept.generate(DOCUMENT[None], max_new_tokens=1)
        before = kept.store.stats().hit_tokens
        kept.generate(**padded(texts), max_new_tokens=1)
        assert kept.store.stats().hit_tokens - before == 150
        assert kept.last.loaded == 4 * 150


def test_what_one_row_lacks_another_lends(kept):
    """The tail of one row's text is in the middle of the other's; blocks alone would not do."""
    tail = after(150, 3, 50)
    kept.generate(tail[None], max_new_tokens=1)
    longer = torch.cat((tail[:-1], prompt(30, seed=51)[0]))
    other = torch.cat((tail[:-1], prompt(30, seed=52)[0]))
    counts = computed(kept.model)
    kept.generate(**padded([longer, other]), max_new_tokens=1)
    assert counts == [2 * 30]


def test_a_conversation_goes_on_from_a_batch(kept):
    batch = padded(TEXTS)
    output = kept.generate(**batch, max_new_tokens=NEW)
    turns = [
        torch.cat((text, answer, prompt(5, seed=60)[0]))
        for text, answer in zip(TEXTS, answers(output, batch["input_ids"].shape[1]), strict=True)
    ]
    expected = alone(kept.model, turns, NEW)
    counts = computed(kept.model)
    found = kept.generate(**padded(turns), max_new_tokens=NEW)
    assert same(answers(found, max(map(len, turns))), expected)
    assert counts[0] == len(TEXTS) * 6  # an answer's last token was never computed
    assert kept.last.loaded == sum(map(len, turns)) - 6 * len(turns)


def test_wrong_kv_in_one_row_would_be_seen(kept):
    batch = padded(TEXTS)
    expected = answers(kept.generate(**batch, max_new_tokens=NEW), batch["input_ids"].shape[1])
    loaded = kept.load(**batch)
    loaded.cache.layers[0].values[1, ..., 50:80, :] += 1
    found = kept.model.generate(**batch, past_key_values=loaded.cache, max_new_tokens=NEW)
    equal = [torch.equal(a[-NEW:], b) for a, b in zip(found, expected, strict=True)]
    assert equal == [True, False, True, True, True, True]


def test_what_follows_an_answers_end_is_not_stored(kept):
    """In a batch, rows that are done are filled with pads, and these are computed, too."""
    texts = TEXTS[:2]
    free = alone(kept.model, texts, NEW)
    others = [*free[0][:1].tolist(), *free[1].tolist()]
    at = next(at for at, token in enumerate(free[0].tolist()) if at and token not in others)
    end, pad = int(free[0][at]), 159
    assert 159 not in free[1]
    ended = {"eos_token_id": end, "pad_token_id": pad, "max_new_tokens": NEW}
    output = kept.generate(**padded(texts, pad), **ended)
    assert output[0, -NEW:].tolist() == [*free[0][: at + 1].tolist(), *[pad] * (NEW - at - 1)]
    assert torch.equal(output[1, -NEW:], free[1])
    whole = torch.cat((texts[0], output[0, -NEW:], prompt(1)[0]))
    assert kept.store.lookup(whole.numpy()).tokens <= len(texts[0]) + at + 1
    turn = torch.cat((texts[0], free[0][: at + 1], prompt(9, seed=61)[0]))
    assert kept.load(turn).tokens == len(texts[0]) + at + 1


def test_beams_and_samples_of_a_batch(kept):
    batch = padded(TEXTS)
    for how in ({"num_beams": 3}, {"num_beams": 2, "cache_implementation": "static"}):
        expected = kept.model.generate(**batch, **how, max_new_tokens=NEW)
        for _ in range(2):
            assert torch.equal(kept.generate(**batch, **how, max_new_tokens=NEW), expected)
    samples = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": NEW}
    torch.manual_seed(3)
    expected = kept.model.generate(**batch, **samples)
    torch.manual_seed(3)
    assert torch.equal(kept.generate(**batch, **samples), expected)


def test_padding_that_all_rows_have(kept):
    text = after(100, 9, 70)
    ids, mask = torch.zeros(2, 140, dtype=torch.long), torch.zeros(2, 140, dtype=torch.long)
    ids[:, -109:], mask[:, -109:] = text, 1
    for _ in range(2):
        found = kept.generate(ids, attention_mask=mask, max_new_tokens=NEW)
        assert same(answers(found, 140), alone(kept.model, [text, text], NEW))
    assert kept.last.loaded == 216
    one = kept.generate(ids[:1], attention_mask=mask[:1].bool(), max_new_tokens=NEW)
    assert torch.equal(one, found[:1])


def test_load_and_save_of_a_batch(kept):
    batch = padded(TEXTS[:2])
    kept.generate(TEXTS[0][None], max_new_tokens=1)
    assert kept.load(**batch).tokens == 37 + 100  # row 1: 37 pads, and what it shares
    nothing = padded([prompt(9, seed=80)[0], prompt(50, seed=81)[0]])
    assert kept.load(**nothing).tokens == 0
    cache, columns = kept.load(**batch)
    mask = batch["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.inference_mode():
        kept.model(
            batch["input_ids"][:, columns:], attention_mask=mask, past_key_values=cache,
            position_ids=positions[:, columns:],
        )  # fmt: skip
    assert kept.save(batch["input_ids"], cache, attention_mask=mask)
    assert kept.load(torch.cat((TEXTS[1], TEXTS[1]))).tokens == len(TEXTS[1])
    with pytest.raises(InvalidValue, match="holds 2 texts and input_ids are 1"):
        kept.save(batch["input_ids"][:1], cache)


@pytest.fixture(scope="module")
def tiny():
    """Two layers, for many examples."""
    return build(num_hidden_layers=2, hidden_size=32, num_attention_heads=2, intermediate_size=32)


TREES = st.lists(
    st.tuples(st.integers(0, 149), st.integers(1, 40), st.integers(100, 102)),
    min_size=1, max_size=5,
)  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(before=TREES, now=TREES)
def test_any_batch_after_any_other(tiny, before, now):
    with KeptModel(tiny, tiers=["memory://4MiB"], block_tokens=BLOCK, loading="all") as kept:
        for shape in (before, now):
            texts = [after(*text) for text in shape]
            counts = computed(tiny)
            found = kept.generate(**padded(texts), max_new_tokens=3)
            total = sum(counts[:-2])
            tiny.get_input_embeddings()._forward_hooks.clear()
            assert same(answers(found, max(map(len, texts))), alone(tiny, texts, 3))
            assert len(texts) <= total <= len(texts) * max(map(len, texts))
            assert kept.last.prompt == sum(map(len, texts))
        kept.store.check()


# --- mistakes --------------------------------------------------------------------------------


def test_pads_without_a_mask_are_refused_only_if_they_may_be_pads(kept):
    batch = padded(TEXTS[:2], pad=159)
    with pytest.raises(InvalidValue, match=r"pads \(token 159\) .* no attention_mask"):
        kept.generate(batch["input_ids"], pad_token_id=159, max_new_tokens=1)
    whole = DOCUMENT.reshape(2, 75)
    expected = kept.model.generate(whole, max_new_tokens=NEW)
    assert torch.equal(kept.generate(whole, max_new_tokens=NEW), expected)


def test_caches_that_cannot_be_filled_are_refused(kept):
    used = DynamicCache()
    with torch.inference_mode():
        kept.model(prompt(2), past_key_values=used)
    config = kept.model.config
    for cache, said in (
        (used, "holds 2 tokens"),
        (StaticCache(config, max_cache_len=10), "room for 10 tokens and the prompt has 50"),
        ("static", "past_key_values is str"),
    ):
        with pytest.raises(InvalidValue, match=said):
            kept.generate(prompt(50), past_key_values=cache, max_new_tokens=1)


def test_a_cache_that_was_passed_holds_the_text_afterwards(kept):
    for cache in (DynamicCache(), StaticCache(kept.model.config, max_cache_len=64)):
        for _ in range(2):
            kept.generate(prompt(50), past_key_values=cache, max_new_tokens=4)
            assert int(cache.get_seq_length()) == 53
            cache.reset()


def test_one_row_beyond_the_length_where_keys_change():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    model, plain = (build(rope_parameters=rope, max_position_embeddings=64) for _ in range(2))
    short, long = DOCUMENT[:40], DOCUMENT[:100]
    with KeptModel(model, tiers=["memory://16MiB"], block_tokens=BLOCK, loading="all") as kept:
        for texts, loaded in (([short], 0), ([short, long], 0), ([short, short[:30]], 68)):
            expected = plain.generate(**padded(texts), max_new_tokens=4)
            assert torch.equal(kept.generate(**padded(texts), max_new_tokens=4), expected)
            assert kept.last.loaded == loaded


def test_a_model_that_takes_no_positions():
    """Its texts are served without padding, which would be part of their KV."""
    config = BloomConfig(hidden_size=64, n_layer=2, n_head=4, vocab_size=160, eos_token_id=None)
    torch.manual_seed(1)
    model = BloomForCausalLM(config).eval()
    texts = [after(150, 9, seed) for seed in (90, 91)]
    expected = alone(model, texts, NEW)
    with KeptModel(model, tiers=["memory://16MiB"], block_tokens=BLOCK, loading="all") as kept:
        for _ in range(2):
            found = kept.generate(torch.stack(texts), max_new_tokens=NEW)
            assert same(answers(found, 159), expected)
        assert kept.last.loaded == 2 * 158
        with pytest.raises(InvalidValue, match="BloomForCausalLM takes no position_ids"):
            kept.generate(**padded(TEXTS), max_new_tokens=NEW)


def test_the_bundled_model_in_a_batch():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(bundled_model())
    tokenizer = AutoTokenizer.from_pretrained(bundled_model(), padding_side="left")
    inputs = tokenizer(["import os\n" * 30 + end for end in ("#", "x = 5\ny")],
                       return_tensors="pt", padding=True)  # fmt: skip
    expected = model.generate(**inputs, max_new_tokens=6)
    with KeptModel(model) as kept:
        for _ in range(2):
            assert torch.equal(kept.generate(**inputs, max_new_tokens=6), expected)
    inputs = tokenizer(["a", "def f():\n"], return_tensors="pt", padding=True, padding_side="right")
    with KeptModel(model) as kept, pytest.raises(InvalidValue, match="row 0 is padded on the rig"):
        kept.generate(**inputs, max_new_tokens=6)
