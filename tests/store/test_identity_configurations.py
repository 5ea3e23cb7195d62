"""Every attribute of a configuration: changing it leaves the logits as they are, bit for bit, or it
changes the identity of the model.

The table of attributes is made by the configuration itself: what it writes to ``config.json``, what
it holds besides, and what building and computing ask it for (also what is not there, and could be).
"""

from __future__ import annotations

import copy
import functools
from collections import Counter

import pytest
import torch
import transformers

from kvkeep.store import model_identity

pytestmark = pytest.mark.model

WINDOW = 5
SHAPE = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.7,  # large, so that a change shows in the logits
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
KINDS = ["full_attention", "sliding_attention"]
FAMILIES = {
    "Llama": {},
    "Qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": KINDS},
    "Qwen3": {},
    "Mistral": {"sliding_window": WINDOW},
    "Gemma2": {"sliding_window": WINDOW, "query_pre_attn_scalar": 4},
    "Gemma3Text": {"sliding_window": WINDOW, "query_pre_attn_scalar": 4, "layer_types": KINDS},
}
ROPES = [
    {"rope_type": "default", "rope_theta": 500.0},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
     "original_max_position_embeddings": 16},
    {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0,
     "original_max_position_embeddings": 16},
    {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
     "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
]  # fmt: skip
TOKENS = torch.arange(3, 27)[None]  # longer than the windows, and than what ropes are scaled from


def others(name, value):
    """Other values that could stand in place of ``value``."""
    match value:
        case bool():
            return [not value]
        case int():
            return [value + 1, 2 * value]
        case float():
            return [value * 3 + 0.01]
        case str() if name.endswith("act") or "activation" in name:
            return ["relu", "gelu"]
        case str() if "attn_implementation" in name:
            return ["eager"]
        case str():
            return [f"{value}x"]
        case torch.dtype():
            return [torch.bfloat16]
        case list() | tuple():
            return [[*value[1:], *value[:1]], []]
        case dict() if name.startswith("rope"):
            nested = all(isinstance(one, dict) for one in value.values())
            return [dict.fromkeys(value, rope) if nested else rope for rope in ROPES]
        case dict():
            return [{}]
        case None:
            return [3, 0.5]
    return []


def build(config):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def logits(model):
    with torch.inference_mode():
        return model(TOKENS, use_cache=False).logits


def table(config, monkeypatch):
    """The names of all attributes, with their values; None for those that are only asked for."""
    asked = set()
    kind = type(config)
    plain = kind.__getattribute__

    @functools.wraps(plain)
    def noting(self, name):
        asked.add(name)
        return plain(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "__getattribute__", noting)
        logits(build(config))
    names = {*config.to_dict(), *vars(config), *asked}
    return {
        name: getattr(config, name, None)
        for name in sorted(names)
        if not name.startswith("__") and not callable(getattr(config, name, None))
    }


def changed(config, name, value):
    """``config`` with another value, as another ``config.json`` or an assignment would make it."""
    written = config.to_dict()
    if name in written:
        other = type(config).from_dict({**written, name: value})
        other._attn_implementation = config._attn_implementation
        return other
    other = copy.deepcopy(config)
    setattr(other, name, value)
    return other


@pytest.mark.parametrize("family", FAMILIES)
def test_an_attribute_changes_the_identity_or_no_logit(family, monkeypatch):
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **FAMILIES[family]})
    base = build(config)
    weights, expected, identity = base.state_dict(), logits(base), model_identity(base)
    assert model_identity(build(copy.deepcopy(config))) == identity
    outcomes = Counter()
    for name, value in table(config, monkeypatch).items():
        for other in others(name, value):
            try:
                model = build(changed(config, name, other))
                model.load_state_dict(weights, strict=False)
                got = logits(model)
            except Exception:  # noqa: BLE001 - the many ways to refuse a configuration, or weights
                outcomes["refused"] += 1
                continue
            same = got.dtype == expected.dtype and torch.equal(got, expected)
            told = model_identity(model) != identity
            assert same or told, f"{name} = {other!r} gives other logits and the same identity"
            outcomes["same" if same else "other"] += 1
    assert outcomes["other"] >= 10, outcomes  # else nothing was shown
