"""Layer groups against the caches that Transformers fills from tiny random models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvkeep.core.geometry import KVGeometry

if TYPE_CHECKING:
    from pathlib import Path

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from hybrid_families import FAMILIES, configuration  # noqa: E402 - it needs transformers

pytestmark = pytest.mark.model

TOKENS = 20
Kept = list[tuple[tuple[int, ...], str]]
"""Shapes and element types of the tensors that one layer keeps."""


def filled(config: Any, dtype: Any) -> list[Kept]:
    """What each layer of a model keeps after a prompt of `TOKENS` tokens."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        output = model(torch.ones(1, TOKENS, dtype=torch.long), use_cache=True)
    cache = output["past_key_values" if "past_key_values" in output else "cache_params"]
    layers: list[list[Any]] = []
    for layer in cache.layers:
        tensors = [getattr(layer, "keys", None), getattr(layer, "values", None)]
        for states in ("conv_states", "recurrent_states"):
            tensors += getattr(layer, states, {}).values()
        layers.append(tensors)
    for number, tensor in enumerate(getattr(cache, "linear_cache", [])):  # MiniMax's own
        layers += [[] for _ in range(number + 1 - len(layers))]
        layers[number].append(tensor)
    return [
        sorted(
            (tuple(tensor.shape[1:]), str(tensor.dtype).removeprefix("torch."))
            for tensor in tensors
            if tensor is not None and len(tensor) and tensor.numel()
        )
        for tensors in layers
    ]


def expected(geometry: KVGeometry, layers: int) -> list[Kept]:
    """The same from the geometry."""
    kept: list[Kept] = [[] for _ in range(layers)]
    for group in geometry.groups:
        for layer in group.layers:
            if (shape := group.shape) is not None:
                # Transformers keeps what the next token needs of a window: one less than its span.
                tokens = TOKENS if group.span is None else min(TOKENS, group.span - 1)
                widths = [shape.head_dim, shape.value_dim]
                if shape.latent_dim is not None:
                    widths = [shape.latent_dim, shape.head_dim - shape.latent_dim]
                kept[layer] += [
                    ((shape.kv_heads, tokens, width or 0), geometry.dtype) for width in widths
                ]
            kept[layer] += [(tensor.shape, tensor.dtype) for tensor in group.state]
    return [sorted(tensors) for tensors in kept]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_layer_keeps_what_its_groups_say(family: str, dtype: str) -> None:
    config = configuration(family)
    kept = filled(config, getattr(torch, dtype))
    assert expected(KVGeometry.from_config(config, dtype=dtype), len(kept)) == kept
    config.dtype = getattr(torch, dtype)
    assert expected(KVGeometry.from_config(config), len(kept)) == kept


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_configuration_gives_the_same_groups(family: str, tmp_path: Path) -> None:
    config = configuration(family)
    config.save_pretrained(tmp_path)
    geometry = KVGeometry.from_config(config)
    assert KVGeometry.from_config(tmp_path) == geometry
    assert KVGeometry.from_config(config.to_dict()).groups == geometry.groups


# --- plain models, as their families configure them -------------------------------------------

# Small experts only: on the meta device size costs nothing, but building modules does.
PLAIN = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "cohere2",
    "phi3",
    "olmo3",
    "smollm3",
    "starcoder2",
    "exaone4",
    "falcon",
    "gpt_bigcode",
    "gpt2",
    "gptj",
    "gpt_neox",
    "opt",
    "bloom",
    "mpt",
    "minicpm3",
    "gpt_oss",
]


@pytest.mark.parametrize("family", PLAIN)
def test_the_cache_of_a_plain_model_has_this_shape(family: str) -> None:
    config = transformers.AutoConfig.for_model(family)
    layers = 8 if family != "bloom" else config.num_hidden_layers
    config = transformers.AutoConfig.for_model(family, num_hidden_layers=layers)
    geometry = KVGeometry.from_config(config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="eager"
        )
        cache = model(torch.zeros(1, 3, dtype=torch.long), use_cache=True).past_key_values
    assert geometry.layers == len(cache.layers)
    for layer, held in enumerate(cache.layers):
        elements = sum(tensor[:, :, 0].numel() for tensor in (held.keys, held.values))
        assert 2 * elements * geometry.layers == geometry.bytes_per_token  # bfloat16 is assumed
        assert held.keys.shape[1] == geometry.kv_heads
        assert geometry.windows[layer] == getattr(held, "sliding_window", None)
