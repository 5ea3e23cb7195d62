"""Plain Transformers models over the store: the same answers, and less computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import transformers
from hybrid_models import build_hybrid
from random_models import BLOCK, FAMILIES, build, computed, padded, prompt
from transformers import DynamicCache, GenerationConfig, StaticCache
from transformers.generation.streamers import BaseStreamer

import warm
from kvkeep.core.errors import IllegalStep, InvalidValue, UnsupportedModel
from kvkeep.core.geometry import KVGeometry
from kvkeep.integrations.transformers import KeptModel, revision_of
from kvkeep.serve.models import bundled_model
from kvkeep.store import KVStore
from warm import PYTHON

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def model():
    """A Llama that no test changes."""
    return build()


@pytest.fixture
def kept(model):
    """It, over a store of the test's own."""
    with KeptModel(model, tiers=["memory://16MiB"], block_tokens=BLOCK, loading="all") as kept:
        yield kept


# --- the same answers ------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tokens", [5, BLOCK, BLOCK + 1, 4 * BLOCK + 7])
def test_greedy_answers_are_those_of_the_model_alone(family, tokens):
    model = build(family)
    first = prompt(tokens)
    expected = model.generate(first, max_new_tokens=12)
    turn = torch.cat((expected, prompt(3, seed=2)), 1)  # a conversation goes on
    expected_turn = model.generate(turn, max_new_tokens=12)
    with KeptModel(model, tiers=["memory://16MiB"], block_tokens=BLOCK, loading="all") as kept:
        for _ in range(2):
            assert torch.equal(kept.generate(first, max_new_tokens=12), expected)
        assert kept.last.loaded == tokens - 1
        assert torch.equal(kept.generate(input_ids=turn, max_new_tokens=12), expected_turn)
        assert kept.last.loaded == expected.shape[1] - 1


def test_only_what_was_not_stored_is_computed(model):
    with KeptModel(model, tiers=["memory://16MiB"], block_tokens=BLOCK, loading="all") as kept:
        counts = computed(model)
        text = kept.generate(prompt(40), max_new_tokens=10)
        assert counts == [40] + [1] * 9
        assert kept.last[:2] == (40, 0)
        counts.clear()
        kept.generate(torch.cat((text, prompt(5, seed=2)), 1), max_new_tokens=1)
        assert kept.last.prompt == 55
        assert kept.last.loaded == 49  # the last token that was generated was never computed
        assert counts == [55 - 49]
        other = torch.cat((text[:, :35], prompt(5, seed=3)), 1)
        kept.generate(other, max_new_tokens=1)
        assert kept.last[:2] == (40, 32)  # where texts part, blocks count


@pytest.mark.parametrize("snapshots", [False, True])
def test_lossy_kv_reaches_no_exact_tier(model, tmp_path, snapshots):
    lossy, exact = (f"file://{tmp_path}/{name}?size=64MiB&codec={name}" for name in ("int8", "raw"))
    ids = prompt(3 * BLOCK)

    def opened(*tiers):
        store = KVStore(
            KVGeometry.from_config(model.config, dtype="float32"), model=model,
            tiers=["memory://16MiB", *tiers], layout="HND", block_tokens=BLOCK, snapshots=snapshots,
        )  # fmt: skip
        return store, KeptModel(model, store=store, loading="all")

    def written():
        return sum(len(file.name) == 64 for file in (tmp_path / "raw").glob("*/*"))

    store, kept = opened(lossy)
    with store:
        kept.generate(ids, max_new_tokens=2)
    store, kept = opened(exact, lossy)
    with store:
        text = kept.generate(torch.cat((ids, prompt(2 * BLOCK, seed=2)), 1), max_new_tokens=BLOCK)
        assert kept.last.loaded == 3 * BLOCK
        assert store.flush()
        assert not written()
        cache, _ = kept.load(text)
        kept.model.generate(text, past_key_values=cache, max_new_tokens=1)
        store.clear()
        assert kept.save(text, cache) > 0
        assert store.flush()
        assert not written()
        kept.generate(prompt(2 * BLOCK, seed=3), max_new_tokens=2)
        assert store.flush()
        assert written()


def test_one_token_is_always_computed(kept):
    """Else there would be no logits to choose the first new token from."""
    ids = prompt(2 * BLOCK)
    kept.generate(ids, max_new_tokens=4)
    counts = computed(kept.model)
    kept.generate(ids, max_new_tokens=1)
    assert counts == [1]


def test_wrong_kv_would_be_seen(kept):
    """The test of the tests above: with keys of other tokens the answer is another one."""
    ids = prompt(4 * BLOCK)
    expected = kept.generate(ids, max_new_tokens=12)
    loaded = kept.load(ids)
    loaded.cache.layers[0].values[..., 3, :] += 1
    other = kept.model.generate(ids, past_key_values=loaded.cache, max_new_tokens=12)
    assert not torch.equal(other, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_loaded_is_bit_for_bit_what_was_computed(dtype):
    model = build().to(dtype)
    ids = prompt(3 * BLOCK + 5)
    with KeptModel(model, tiers=["memory://16MiB"], block_tokens=BLOCK, loading="all") as kept:
        cache = DynamicCache()
        with torch.inference_mode():
            model(ids, past_key_values=cache)
        assert kept.save(ids[:, :-2], DynamicCache()) == 0
        assert kept.save(ids, cache) == ids.shape[1]
        longer = torch.cat((ids, prompt(1)), 1)
        loaded = kept.load(longer)
        assert loaded.tokens == ids.shape[1]
        assert kept.load(ids).tokens == 3 * BLOCK
        assert loaded.cache.get_seq_length() == loaded.tokens
        for mine, theirs in zip(loaded.cache.layers, cache.layers, strict=True):
            assert mine.keys.dtype == dtype
            assert torch.equal(mine.keys, theirs.keys[..., : loaded.tokens, :])
            assert torch.equal(mine.values, theirs.values[..., : loaded.tokens, :])


@pytest.mark.parametrize(
    "how",
    [
        {"num_beams": 3},
        {"num_beams": 3, "num_return_sequences": 2},
        {"return_dict_in_generate": True, "output_logits": True},
        {"repetition_penalty": 1.3},
        {"prefill_chunk_size": 7},
        {"generation_config": GenerationConfig(max_new_tokens=10, num_beams=2)},
        {"attention_mask": torch.ones(1, 50, dtype=torch.long)},
        {"eos_token_id": list(range(100))},
        {"pad_token_id": int(prompt(50)[0, 0])},
    ],
    ids=lambda how: next(iter(how)),
)
@pytest.mark.parametrize("family", ["Llama", "Gemma3Text"])
def test_other_ways_to_generate(family, how):
    model = build(family)
    how = {"max_new_tokens": 10, **how} if "generation_config" not in how else how
    mask = {"attention_mask": torch.ones(1, 50, dtype=torch.long)}
    expected = model.generate(prompt(50), **{**mask, **how})
    with KeptModel(model, tiers=["memory://16MiB"], block_tokens=BLOCK, loading="all") as kept:
        for _ in range(2):
            found = kept.generate(prompt(50), **how)
            assert torch.equal(
                getattr(found, "sequences", found), getattr(expected, "sequences", expected)
            )
        assert kept.last.loaded == 49
        following = torch.cat((prompt(50), prompt(9, seed=4)), 1)
        expected = model.generate(following, max_new_tokens=5)
        assert torch.equal(kept.generate(following, max_new_tokens=5), expected)


def close(mine, theirs):
    """Compare outputs of ``generate``: tensors, or tuples of them."""
    if isinstance(theirs, torch.Tensor):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
        return
    assert len(mine) == len(theirs)
    for one, other in zip(mine, theirs, strict=True):
        close(one, other)


@pytest.mark.parametrize(
    ("family", "beams"), [("Llama", 1), ("Llama", 3), ("Gemma3Text", 1), ("lfm2", 1)]
)
def test_everything_that_generate_returns_is_of_the_whole_prompt(family, beams):
    model = build_hybrid(family) if family == "lfm2" else build(family)
    model.set_attn_implementation("eager")
    asked = {
        "max_new_tokens": 6, "do_sample": False, "num_beams": beams,
        "return_dict_in_generate": True, "output_logits": True, "output_scores": True,
    }  # fmt: skip
    states = {"output_hidden_states": True, "output_attentions": True}
    for inputs in {"inputs": prompt(70)}, padded([prompt(70)[0], prompt(51, seed=5)[0]]):
        with KeptModel(model, tiers=["memory://16MiB"], block_tokens=BLOCK, loading="all") as kept:
            for number, more in enumerate((states, {}, {}, states)):
                want = model.generate(**inputs, **asked, **more)
                found = kept.generate(**inputs, **asked, **more)
                # Such a pass leaves states and windows of its end alone.
                if more or number == 2 or family == "Llama":
                    assert (kept.last.loaded > 0) == (not more)
                assert found.keys() == want.keys()
                for name in want.keys() - {"past_key_values"}:
                    close(found[name], want[name])
                lengths = (one.past_key_values.get_seq_length() for one in (found, want))
                assert len(set(lengths)) == 1


def test_sampled_answers_share_what_came_before(kept):
    torch.manual_seed(1)
    expected = kept.model.generate(
        prompt(50), do_sample=True, num_return_sequences=4, max_new_tokens=6
    )
    for _ in range(2):
        torch.manual_seed(1)
        found = kept.generate(prompt(50), do_sample=True, num_return_sequences=4, max_new_tokens=6)
        assert torch.equal(found, expected)
    assert kept.last.loaded == 49


def test_a_streamer_gets_every_token(kept):
    class Heard(BaseStreamer):
        def __init__(self):
            self.tokens = []

        def put(self, value):
            self.tokens += value.flatten().tolist()

        def end(self):
            self.tokens.append(None)

    for _ in range(2):
        heard = Heard()
        text = kept.generate(prompt(40), max_new_tokens=5, streamer=heard)
        assert heard.tokens == [*text[0].tolist(), None]


# --- load and save ---------------------------------------------------------------------------


def test_a_loop_of_ones_own(kept):
    ids = prompt(40)
    text = kept.model.generate(ids, max_new_tokens=8)
    for _ in range(2):
        cache, loaded = kept.load(ids)
        now = ids
        with torch.inference_mode():
            logits = kept.model(ids[:, loaded:], past_key_values=cache).logits
            for _ in range(8):
                now = torch.cat((now, logits[:, -1:].argmax(-1)), 1)
                logits = kept.model(now[:, -1:], past_key_values=cache).logits
        kept.save(now, cache)
        assert torch.equal(now, text)
    assert loaded == 2 * BLOCK


def test_rows_and_batches_of_one(kept):
    text = kept.generate(prompt(40), max_new_tokens=1)
    assert kept.load(text[0]).tokens == kept.load(text).tokens == 40


def test_a_loaded_cache_is_the_callers_own(kept):
    ids = prompt(3 * BLOCK)
    expected = kept.generate(ids, max_new_tokens=6)
    for layer in kept.load(ids).cache.layers:
        layer.keys.fill_(9)
        layer.values.fill_(9)
    assert torch.equal(kept.generate(ids, max_new_tokens=6), expected)


@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
def test_a_static_cache_is_stored_as_it_is(family):
    model = build(family)
    ids = prompt(3 * BLOCK)
    cache = StaticCache(config=model.config, max_cache_len=64)
    with torch.inference_mode():
        model(ids, past_key_values=cache)
    with KeptModel(model, tiers=["memory://16MiB"], block_tokens=BLOCK, loading="all") as kept:
        assert kept.save(ids, cache) == 3 * BLOCK
        expected = model.generate(ids, max_new_tokens=9)
        assert torch.equal(kept.generate(ids, max_new_tokens=9), expected)
        assert kept.last.loaded >= 2 * BLOCK


def test_a_window_that_was_passed_is_enough():
    """The model's own cache holds the last tokens of a window: what going on needs."""
    model = build("Mistral")
    cache = DynamicCache(config=model.config)
    text = prompt(3 * BLOCK + 9)
    with torch.inference_mode():
        model(text[:, : 3 * BLOCK], past_key_values=cache)
    with KeptModel(model, tiers=["memory://16MiB"], block_tokens=BLOCK, loading="all") as kept:
        kept.save(text[:, : 3 * BLOCK], cache)
        assert kept.load(text).tokens == 3 * BLOCK
        found = kept.generate(text, max_new_tokens=5)
        assert kept.last.loaded == 3 * BLOCK
        assert torch.equal(found, model.generate(text, max_new_tokens=5))
        short = text[:, : 2 * BLOCK]
        with pytest.raises(InvalidValue, match=r"holds 48 tokens and input_ids are 32"):
            kept.save(short, cache)


def test_caches_that_do_not_fit_are_refused(kept):
    cache = DynamicCache()
    with torch.inference_mode():
        kept.model(prompt(20), past_key_values=cache)
    with pytest.raises(InvalidValue, match="holds 20 tokens and input_ids are 19"):
        kept.save(prompt(19), cache)
    assert kept.save(prompt(20), DynamicCache()) == 0
    cache.layers.pop()
    with pytest.raises(InvalidValue, match="has 2 layers"):
        kept.save(prompt(20), cache)
    two = DynamicCache()
    with torch.inference_mode():
        kept.model(prompt(20).repeat(2, 1), past_key_values=two)
    with pytest.raises(InvalidValue, match="holds 2 texts and input_ids are 1"):
        kept.save(prompt(20), two)


# --- who finds what --------------------------------------------------------------------------


def loaded_by(model, store, tokens, **how):
    with KeptModel(model, tiers=store, block_tokens=BLOCK, loading="all", **how) as kept:
        return kept.load(tokens).tokens


@pytest.fixture
def folder(model, tmp_path):
    """A disk tier in which ``model`` stored a text."""
    tiers = ["memory://16MiB", f"file://{tmp_path}/kv?size=64MiB"]
    with KeptModel(model, tiers=tiers, block_tokens=BLOCK, loading="all") as kept:
        kept.generate(prompt(60), max_new_tokens=3)
        assert kept.store.flush(30)
    return tiers


def test_the_same_model_loaded_again_finds_it(folder):
    assert loaded_by(build(), folder, prompt(60)) == 59


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 8},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rms_norm_eps": 1e-3},
        {"family": "Qwen2"},
        {"family": "Mistral", "sliding_window": None},
    ],
    ids=str,
)
def test_another_model_does_not(folder, other):
    assert loaded_by(build(**other), folder, prompt(60)) == 0


def test_another_dtype_does_not(folder):
    assert loaded_by(build().half(), folder, prompt(60)) == 0


def test_a_fine_tune_of_one_layer_does_not(folder):
    tuned = build()
    with torch.no_grad():
        tuned.model.layers[1].mlp.up_proj.weight.mul_(1.01)
    assert loaded_by(tuned, folder, prompt(60)) == 0


def test_another_tenant_does_not(folder):
    assert loaded_by(build(), folder, prompt(60), tenant="mallory") == 0


def test_names_and_places_do_not_matter(tmp_path):
    """The revision is what the weights are, not where they lie or what they are called."""
    model = build()
    model.save_pretrained(tmp_path / "there")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "there")
    again.config.use_cache = False
    assert revision_of(again) == revision_of(model)


def test_a_store_that_is_shared(model):
    geometry = KVGeometry.from_config(model.config, dtype="float32")
    store = KVStore(
        geometry, model="llama", revision=revision_of(model), layout="HND", block_tokens=BLOCK
    )
    with store:
        with (
            KeptModel(model, store=store, loading="all") as one,
            KeptModel(model, store=store, loading="all") as two,
        ):
            one.generate(prompt(50), max_new_tokens=1)
            assert two.load(prompt(50)).tokens == 49
            alice = KeptModel(model, store=store, tenant="alice")
            assert alice.load(prompt(50)).tokens == 0
        assert KeptModel(model, store=store).load(prompt(50)).tokens == 49  # still open


@pytest.mark.parametrize("other", [{"num_hidden_layers": 2}, {"head_dim": 8}])
def test_a_store_for_another_model_is_refused(model, other):
    geometry = KVGeometry.from_config(build(**other).config, dtype="float32")
    with (
        KVStore(geometry, model="other@1", layout="HND") as store,
        pytest.raises(InvalidValue, match="this model needs"),
    ):
        KeptModel(model, store=store)


def test_a_store_in_another_layout_is_refused(model):
    with (
        KVStore(
            KVGeometry.from_config(model.config, dtype="float32"), model="m@1", layout="NHD"
        ) as store,
        pytest.raises(InvalidValue, match="in layout HND"),
    ):
        KeptModel(model, store=store)


# --- disk ------------------------------------------------------------------------------------

AGAIN = """
import sys, torch, transformers
from kvkeep.integrations.transformers import KeptModel
from kvkeep.serve.models import bundled_model
model = transformers.AutoModelForCausalLM.from_pretrained(bundled_model())
ids = torch.arange(100, 300)[None]
tiers = ["memory://16MiB", sys.argv[1]]
with KeptModel(model, tiers=tiers, block_tokens=16, loading="all") as kept:
    text = kept.generate(ids, max_new_tokens=8)
print(kept.last.loaded, *text[0].tolist())
"""


def run_again(url):
    done = warm.run(
        [*PYTHON, "-c", AGAIN, url],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    loaded, *tokens = map(int, done.stdout.split())
    return loaded, tokens


def block_files(folder: Path):
    """The files that hold records, the larger part of all bytes."""
    return [file for file in folder.glob("?" * 32 + "/" + "?" * 64) if file.stat().st_size > 8192]


def test_a_process_started_later_goes_on_from_disk(tmp_path):
    url = f"file://{tmp_path}/kv?size=64MiB"
    cold, expected = run_again(url)
    assert cold == 0
    assert run_again(url) == (199, expected)


@pytest.mark.parametrize("harm", ["flip", "truncate", "empty", "remove"])
def test_blocks_that_were_damaged_are_computed_again(folder, tmp_path, harm):
    model = build()
    expected = model.generate(prompt(60), max_new_tokens=9)
    files = block_files(tmp_path / "kv")
    assert files
    for file in files:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        match harm:
            case "flip":
                file.write_bytes(content)
            case "truncate":
                file.write_bytes(content[: len(content) // 2])
            case "empty":
                file.write_bytes(b"")
            case "remove":
                file.unlink()
    with KeptModel(model, tiers=folder, block_tokens=BLOCK, loading="all") as kept:
        assert torch.equal(kept.generate(prompt(60), max_new_tokens=9), expected)
        assert kept.last.loaded == 0


# --- mistakes --------------------------------------------------------------------------------


LEFT = torch.tensor([[0, 1, 1, 1, 1]])
RIGHT = torch.tensor([[1, 1, 1, 1, 0]])
HOLE = torch.tensor([[1, 1, 0, 1, 1]])


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({}, "needs its prompts"),
        ({"inputs": prompt(5), "input_ids": prompt(5)}, "needs its prompts"),
        ({"inputs": prompt(5)[0]}, r"\[rows, tokens\] is needed"),
        ({"inputs": prompt(5)[:, :0]}, "at least one token"),
        ({"inputs": "hello"}, "input_ids is str; it is a tensor"),
        ({"inputs": [1, 2, 3]}, "input_ids is list; it is a tensor"),
        ({"inputs": {"input_ids": prompt(5)}}, r"is dict; .* generate\(\*\*tokenizer"),
        ({"inputs": prompt(5).float()}, "tokens are integer ids"),
        ({"inputs": prompt(5), "attention_mask": [1] * 5}, "attention_mask is list; it is a"),
        ({"inputs": prompt(5), "attention_mask": torch.ones(1, 4)}, r"shaped \(1, 4\)"),
        ({"inputs": prompt(5), "attention_mask": prompt(5)}, "a 1 for each token"),
        (
            {"inputs": prompt(5), "attention_mask": RIGHT},
            "padded on the right.*side=.left",
        ),
        ({"inputs": prompt(5), "attention_mask": HOLE}, "row 0 has zeros .* inside its text"),
        ({"inputs": prompt(5), "attention_mask": 0 * LEFT}, "row 0 is all padding"),
        ({"inputs": prompt(10).reshape(2, 5), "pad_token_id": int(prompt(10)[0, 5])}, "no attent"),
        ({"inputs": prompt(5), "cache_implementation": "quantized"}, "'static' and 'dynamic' are"),
        ({"inputs": prompt(5), "cache_implementation": "offloaded"}, "'static' and 'dynamic' are"),
        ({"inputs": prompt(5), "generation_config": GenerationConfig(use_cache=False)}, "use_cac"),
        ({"inputs": prompt(5), "use_cache": False}, "no KV to store"),
        ({"inputs": prompt(5), "token_healing": True}, "token_healing"),
        ({"inputs": prompt(5), "prompt_lookup_num_tokens": 3}, "does not continue from a loaded"),
        ({"inputs": prompt(5), "assistant_model": build()}, "does not continue from a loaded"),
        ({"inputs": prompt(5), "inputs_embeds": torch.zeros(1, 5, 64)}, "pass input_ids"),
        ({"inputs": prompt(5), "pixel_values": torch.zeros(1, 3)}, "pixel_values would change"),
        ({"inputs": prompt(5), "position_ids": prompt(5)}, "position_ids would change"),
    ],
)
def test_what_generate_refuses(kept, how, said):
    with pytest.raises(InvalidValue, match=said):
        kept.generate(**{"max_new_tokens": 2, **how})
    assert kept.last is None


@pytest.mark.parametrize("given", [None, "hello", [1, 2, 3], {"input_ids": prompt(5)}])
def test_texts_that_are_no_tensors_are_refused(kept, given):
    with pytest.raises(InvalidValue, match=r"input_ids is .*; it is a tensor"):
        kept.load(given)
    with pytest.raises(InvalidValue, match=r"input_ids is .*; it is a tensor"):
        kept.save(given, DynamicCache())


@pytest.mark.parametrize("given", [None, ((torch.zeros(1), torch.zeros(1)),), "cache"])
def test_caches_that_are_none_are_refused(kept, given):
    with pytest.raises(InvalidValue, match=r"past_key_values is .*; give the cache"):
        kept.save(prompt(5), given)


def test_weights_that_change_are_noticed():
    model = build()
    with KeptModel(model, tiers=["memory://16MiB"], block_tokens=BLOCK, loading="all") as kept:
        kept.generate(prompt(40), max_new_tokens=1)
        with torch.no_grad():
            model.lm_head.weight.mul_(2)
        for call in (kept.generate, kept.load):
            with pytest.raises(IllegalStep, match="make another KeptModel"):
                call(prompt(40))


def buffer(model):
    model.model.rotary_emb.inv_freq.mul_(0.5)


def replaced(model):
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight = torch.nn.Parameter(layer.self_attn.k_proj.weight * 1.5)


def data(model):
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight.data = layer.self_attn.k_proj.weight.data * 1.5


def through_data(model):
    for parameter in model.parameters():
        parameter.data.mul_(1.2)


def epsilon(model):
    model.model.layers[1].input_layernorm.variance_epsilon = 0.1


def swapped(model):
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]


@pytest.mark.parametrize(
    "change",
    [buffer, replaced, data, through_data, epsilon, swapped,
     lambda model: model.set_attn_implementation("eager")],
)  # fmt: skip
def test_a_live_model_that_changes_is_noticed_at_the_next_call(change):
    model = build()
    with KeptModel(model, tiers=["memory://16MiB"], block_tokens=BLOCK, loading="all") as kept:
        kept.generate(prompt(40), max_new_tokens=1)
        with torch.no_grad():
            change(model)
            model(prompt(50, seed=2), past_key_values=(cache := DynamicCache()))
        with pytest.raises(IllegalStep, match=r"the model was changed.*make another KeptModel"):
            kept.generate(prompt(40), max_new_tokens=1)
        with pytest.raises(IllegalStep, match="the model was changed"):
            kept.load(prompt(40))
        with pytest.raises(IllegalStep, match=r"the model was changed.*make another KeptModel"):
            kept.save(prompt(50, seed=2), cache)
        assert kept.store.lookup(prompt(50, seed=2)[0].numpy()).tokens == 0
        with pytest.raises(InvalidValue, match="holds KV of the model"):
            KeptModel(model, store=kept.store)


def scaled(model):
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):  # attention has a number so named
            module.scaling["one"] = 7.0


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")  # two adapters are meant
@pytest.mark.filterwarnings("ignore:Adapter one was active")  # and one that is used is deleted
@pytest.mark.parametrize(
    "change",
    [
        scaled,
        lambda model: model.disable_adapters(),
        lambda model: model.set_adapter("two"),
        lambda model: model.delete_adapter("one"),
        lambda model: model.get_parameter(
            "model.layers.0.self_attn.k_proj.lora_B.one.weight"
        ).data.mul_(2),
    ],
    ids=["scaling", "disabled", "another", "deleted", "weights"],
)
def test_adapters_that_change_are_noticed_at_the_next_call(change):
    peft = pytest.importorskip("peft")
    model = build()
    for name in ("two", "one"):
        how = peft.LoraConfig(r=4, target_modules=["k_proj"], init_lora_weights=False)
        model.add_adapter(how, name)
    model.set_adapter("one")
    model.eval()
    with KeptModel(model, tiers=["memory://16MiB"], block_tokens=BLOCK, loading="all") as kept:
        kept.generate(prompt(40), max_new_tokens=1)
        kept.generate(prompt(40), max_new_tokens=1)
        assert kept.last.loaded == 39
        change(model)
        with pytest.raises(IllegalStep, match=r"the model was changed.*make another KeptModel"):
            kept.generate(prompt(40), max_new_tokens=1)


def test_a_model_that_is_as_it_was_goes_on():
    """What it looks like is compared at each call, and what it is where that is another."""
    model = build()
    with KeptModel(model, tiers=["memory://16MiB"], block_tokens=BLOCK, loading="all") as kept:
        kept.generate(prompt(40), max_new_tokens=1)
        with torch.no_grad():
            model.lm_head.weight.add_(0.0)
            model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight.clone())
        model.set_attn_implementation("eager")
        model.set_attn_implementation("sdpa")
        kept.generate(prompt(40), max_new_tokens=1)
        assert kept.last.loaded == 39


def test_a_store_of_another_model_of_the_same_shape_is_refused(model):
    """Named by hand, it is the first model's that it is given to."""
    geometry = KVGeometry.from_config(model.config, dtype="float32")
    with KVStore(geometry, model="mine@1", layout="HND", block_tokens=BLOCK) as store:
        KeptModel(model, store=store)
        with pytest.raises(InvalidValue, match="'mine' holds KV of the model"):
            KeptModel(build(seed=8), store=store)
        KeptModel(build(), store=store)
    with (
        KVStore(geometry, model=model, layout="HND", block_tokens=BLOCK) as store,
        pytest.raises(InvalidValue, match="'llama' holds KV of the model"),
    ):
        KeptModel(build(seed=8), store=store)


def test_a_store_made_of_the_model_is_the_one_that_kept_models_make(model, folder):
    geometry = KVGeometry.from_config(model.config, dtype="float32")
    how = {"layout": "HND", "block_tokens": BLOCK, "tiers": folder}
    with KVStore(geometry, model=build(), **how) as store, KeptModel(model, store=store) as kept:
        assert kept.load(prompt(60)).tokens == 59


def test_dropout_is_not_stored():
    model = build().train()
    with KeptModel(model, tiers=["memory://16MiB"]) as kept, torch.no_grad():
        with pytest.raises(IllegalStep, match=r"model\.eval\(\)"):
            kept.generate(prompt(5), max_new_tokens=1)
        model(prompt(50), past_key_values=(cache := DynamicCache()))
        with pytest.raises(IllegalStep, match=r"model\.eval\(\)"):
            kept.save(prompt(50), cache)


def test_models_that_cannot_be_kept_are_refused(model):
    refused = {
        "got Linear": torch.nn.Linear(2, 2),
        "got LlamaModel": model.model,
    }
    for said, other in refused.items():
        with pytest.raises(UnsupportedModel, match=said):
            KeptModel(other)
    spread = build()
    spread.hf_device_map = {"model": 0, "lm_head": "cpu"}
    with pytest.raises(UnsupportedModel, match="lies on 0, cpu"):
        KeptModel(spread)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_lengths_that_change_every_key_are_left_out(rope_type):
    """Beyond the length, the same tokens have other keys: nothing of such a text is exchanged."""
    rope = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 4.0}
    if rope_type == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
        rope |= {"original_max_position_embeddings": 64}
    positions = 256 if rope_type == "longrope" else 64
    model, alone = (
        build(rope_parameters=rope, max_position_embeddings=positions) for _ in range(2)
    )  # two, because a model remembers how long its last text was
    text = prompt(120)
    with KeptModel(model, tiers=["memory://16MiB"], block_tokens=BLOCK, loading="all") as kept:
        for tokens, loaded in ((40, 0), (40, 39), (100, 0), (45, 39), (100, 0), (50, 44)):
            expected = alone.generate(text[:, :tokens], max_new_tokens=9)
            found = kept.generate(text[:, :tokens], max_new_tokens=9)
            assert torch.equal(found, expected)
            assert kept.last.loaded == loaded


def test_the_bundled_model_three_lines():
    model = transformers.AutoModelForCausalLM.from_pretrained(bundled_model())
    inputs = transformers.AutoTokenizer.from_pretrained(bundled_model())(
        "def dedent(text):\n" * 40, return_tensors="pt"
    )
    expected = model.generate(**inputs, max_new_tokens=10)
    with KeptModel(model) as kept:
        for _ in range(2):
            assert torch.equal(kept.generate(**inputs, max_new_tokens=10), expected)
        assert kept.last.loaded == kept.last.prompt - 1
    assert "LlamaForCausalLM" in repr(kept)


def test_answers_that_later_prompts_lack_are_stored_no_longer(kept):
    """As of a chat template that leaves reasoning out: each turn goes on where the answer began."""
    for talk in range(10):
        first = prompt(20, seed=3 * talk)
        kept.generate(first, max_new_tokens=2 * BLOCK)
        turn = torch.cat((first, prompt(6, seed=3 * talk + 1)), 1)
        kept.generate(turn, max_new_tokens=1)
        assert kept.last.loaded >= 19  # 20 once answers are stored no longer
    before = kept.store.stats()
    kept.generate(prompt(20, seed=100), max_new_tokens=2 * BLOCK)
    after = kept.store.stats()
    assert after.unread_tokens - before.unread_tokens == 2 * BLOCK - 1
    assert kept.last.stored == 19 + 4  # the prompt but for a token, and its tail with that token
