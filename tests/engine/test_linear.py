"""Packed linear layers equal plain ones, for any number of rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kvkeep.serve.engine import loading
from kvkeep.serve.engine.loading import PackedLinear, pack

pytestmark = pytest.mark.model


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 9, 16, 63, 64, 65, 300])
@pytest.mark.parametrize("bias", [True, False])
def test_packed_is_plain_to_rounding(rows, bias):
    torch.manual_seed(0)
    layer = nn.Linear(96, 160, bias=bias)
    given = torch.randn(1, rows, 96)
    with torch.inference_mode():
        expected = layer(given)
        packed = PackedLinear.of(layer)
        assert packed is layer
        found = packed(given)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_few_rows_do_use_the_packed_weights():
    layer = PackedLinear.of(nn.Linear(8, 8, bias=False))
    with torch.inference_mode():
        layer.weight.zero_()  # no plain layer is left
        assert not layer(torch.ones(2, 8)).any()
        assert layer(torch.ones(3, 8)).any()
        assert not layer(torch.ones(65, 8)).any()


def test_a_model_is_packed_within_bounds(make_model, monkeypatch):
    model = make_model("qwen2", tie_word_embeddings=True)
    before = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    ids = torch.arange(1, 13)[None]
    with torch.inference_mode():
        expected = model(input_ids=ids, use_cache=False).logits
        monkeypatch.setattr(loading, "MOST_BYTES", 1000)
        assert pack(model) == 0
        assert not any(isinstance(module, PackedLinear) for module in model.modules())
        monkeypatch.undo()
        assert pack(model) == sum(module.weight.nbytes for module in before.values())
        found = model(input_ids=ids, use_cache=False).logits
    assert pack(model) == 0  # nothing is left to pack
    assert all(type(module) is PackedLinear for module in before.values())
    assert model.lm_head.weight is model.get_input_embeddings().weight
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_half_precision_and_subclasses_stay_as_they_are():
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(4, 4).bfloat16(), Own(4, 4), nn.Linear(4, 4))
    assert pack(model) == 64
    assert [type(module) for module in model] == [nn.Linear, Own, PackedLinear]
