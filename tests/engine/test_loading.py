"""Models that can be served load; others are refused by name, most before they are read."""

from __future__ import annotations

import json
import socket

import pytest
import transformers

from hybrid_families import FAMILIES, NOT_RESUMING, amplified, configuration
from kvkeep.core.errors import InvalidValue, UnsupportedModel
from kvkeep.core.geometry import AttentionShape, KVGeometry, LayerGroup
from kvkeep.serve.engine import Runner, loading

pytestmark = pytest.mark.model

TINY = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*_):
        pytest.fail("something tried to reach a network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def write(folder, config, architecture):
    config.architectures = [architecture]
    config.save_pretrained(folder)


def test_no_such_directory(tmp_path):
    with pytest.raises(InvalidValue, match=r"no model at .*nowhere: no such directory"):
        loading.load_config(tmp_path / "nowhere")


def test_the_name_of_a_hub_is_no_directory(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidValue, match="no such directory"):
        loading.load_config("org/some-model")


def test_a_file(tmp_path):
    (tmp_path / "weights").touch()
    with pytest.raises(InvalidValue, match="not a directory"):
        loading.load_config(tmp_path / "weights")


def test_an_empty_directory(tmp_path):
    with pytest.raises(InvalidValue, match=r"no config\.json"):
        loading.load_config(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"model_type": "no such type"}', '{"model_type": 3}', '"llama"'],
)
def test_a_configuration_that_is_none(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UnsupportedModel, match=r"config\.json"):
        loading.load_config(tmp_path)


@pytest.mark.parametrize(
    ("name", "architecture", "says"),
    [
        ("BertConfig", "BertForMaskedLM", "BertForMaskedLM, which is not a causal"),
        ("T5Config", "T5ForConditionalGeneration", "not a causal"),
        ("ViTConfig", "ViTForImageClassification", "not a causal"),
        ("LlamaConfig", "LlamaForSequenceClassification", "not a causal"),
        ("RecurrentGemmaConfig", "RecurrentGemmaForCausalLM", "recurrent state in its modules"),
        ("DeepseekV32Config", "DeepseekV32ForCausalLM", "an index key beside"),
    ],
)
def test_models_of_other_kinds(tmp_path, name, architecture, says):
    write(tmp_path, getattr(transformers, name)(), architecture)
    with pytest.raises(UnsupportedModel, match=says):
        loading.load_config(tmp_path)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - NOT_RESUMING))
def test_the_configuration_of_each_family(tmp_path, family):
    """Transformers' flags of the class do not tell whether attention over pages works."""
    config = configuration(family)
    config.architectures = [transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    config.save_pretrained(tmp_path)
    assert loading.load_config(tmp_path).model_type == config.model_type


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "mamba2"])
def test_a_directory_with_a_model_with_states(tmp_path, family):
    amplified(family).save_pretrained(tmp_path)
    assert Runner.load(tmp_path, memory="4MiB", device="cpu").layout.state is not None


@pytest.mark.parametrize(
    ("family", "says"),
    [
        ("jamba", "cannot go on from a state: in pieces, layer 0 .* computes other values"),
        ("zamba", "hands its attention no number of its layer"),
        ("minimax", "MiniMax uses cache of its own .* 'transformers.cache_utils.DynamicCache'"),
    ],
)
def test_a_directory_with_a_model_that_cannot_go_on(tmp_path, family, says):
    amplified(family).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=says) as refusal:
        Runner.load(tmp_path, memory="4MiB", device="cpu")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "config",
    [
        transformers.FalconConfig(vocab_size=64, alibi=True, **TINY),
        transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2),
    ],
    ids=["falcon", "bloom"],
)
def test_attention_that_cannot_be_replaced(tmp_path, config):
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="does not let its attention be replaced"):
        Runner.load(tmp_path, num_pages=16, device="cpu")


def test_a_runner_of_a_geometry_whose_layers_differ(make_model):
    groups = [LayerGroup("full", (layer,), AttentionShape(1 + layer, 8)) for layer in range(2)]
    says = (
        r"layer 0 brings K and V of heads × width \[2, 16, 2, 16\]; the geometry has \[1, 8, 1, 8\]"
    )
    with pytest.raises(UnsupportedModel, match=says):
        Runner(make_model("llama"), KVGeometry.of(groups), num_pages=4, page_size=4)


def test_both_directions(tmp_path):
    write(tmp_path, transformers.Gemma2Config(), "Gemma2ForCausalLM")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "is_causal": False}))
    with pytest.raises(UnsupportedModel, match="both directions"):
        loading.load_config(tmp_path)


def test_code_that_comes_with_a_model_is_not_run(tmp_path):
    config = {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "theirs.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(UnsupportedModel):
        loading.load_config(tmp_path)


@pytest.mark.parametrize("weights", [None, b"", b"\0" * 64, b"\xff" * 64])
def test_weights_that_are_missing_or_broken(tmp_path, weights, make_model):
    make_model("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    if weights is None:
        file.unlink()
    else:
        file.write_bytes(weights)
    with pytest.raises(UnsupportedModel, match="cannot load the weights"):
        Runner.load(tmp_path, num_pages=4, device="cpu")


def test_weights_of_another_shape(tmp_path, make_model):
    make_model("llama").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "hidden_size": 32}))
    with pytest.raises(UnsupportedModel, match="cannot load the weights"):
        Runner.load(tmp_path, num_pages=4, device="cpu")


def test_devices_and_dtypes_that_are_none(tmp_path, make_model):
    make_model("llama").save_pretrained(tmp_path)
    with pytest.raises(InvalidValue, match="no torch device is named 'abacus'"):
        Runner.load(tmp_path, num_pages=4, device="abacus")
    with pytest.raises(InvalidValue, match=r"dtype is one of .*, got int8"):
        Runner.load(tmp_path, num_pages=4, device="cpu", dtype="int8")


@pytest.mark.parametrize("settings", [None, 7, [7, 9]])
def test_end_tokens(settings, make_model):
    model = make_model("llama", eos_token_id=5)
    model.generation_config.eos_token_id = settings
    expected = {5} if settings is None else {7, *([9] if settings == [7, 9] else [])}
    assert loading.end_tokens(model) == expected


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        (None, 512),
        ({"rope_type": "default", "rope_theta": 1e4}, 512),
        ({"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}, 512),
        (
            {
                "rope_type": "dynamic",
                "factor": 4.0,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 128,
            },
            128,
        ),
    ],
)
def test_rotary_embeddings_that_depend_on_length_stay_on_one_side(rope, longest):
    config = transformers.LlamaConfig(max_position_embeddings=512, rope_parameters=rope)
    assert loading.context_tokens(config) == longest
