"""A kept model on a GPU: answers from memory and a disk are those of the model alone."""

from __future__ import annotations

import pytest
import torch
from hybrid_models import build_hybrid
from random_models import BLOCK, build, padded, prompt

from kvkeep.integrations.transformers import KeptModel

pytestmark = pytest.mark.model

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
NEW = 5
TEXTS = [
    prompt(70, seed=1)[0], torch.cat((prompt(70, seed=1)[0][:50], prompt(5, seed=2)[0]))
]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["Llama", "Gemma3Text", "lfm2", "falcon_h1", "deepseek_v3"])
def test_answers_from_memory_and_a_disk(family, device, tmp_path):
    def made():
        plain = build(family) if family[0].isupper() else build_hybrid(family)
        return plain.to(device)

    batch = {name: one.to(device) for name, one in padded(TEXTS).items()}
    turn = torch.cat((TEXTS[0], prompt(9, seed=3)[0]))[None].to(device)
    tiers = ["memory://64MiB", f"file://{tmp_path}?size=64MiB&sync=never"]
    for found in (0, 64):  # nothing; all on the disk, after a restart
        model = made()
        with KeptModel(model, tiers=tiers, block_tokens=BLOCK, loading="all") as kept:
            how = {"max_new_tokens": NEW, "do_sample": False}
            for least in (found, 64):
                want, got = model.generate(**batch, **how), kept.generate(**batch, **how)
                assert got.device == want.device
                assert torch.equal(got, want)
                assert kept.last.loaded >= least
            assert torch.equal(kept.generate(turn, **how), model.generate(turn, **how))
            assert kept.last.loaded >= 64
