"""Loads that pay: the same answers, whatever the tier does meanwhile."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch
from random_models import build, prompt

from faults import FaultyBackend
from kvkeep.core.cost import CostModel, PrefillCost, TransferCost
from kvkeep.core.errors import InvalidValue
from kvkeep.integrations.transformers import KeptModel, revision_of
from kvkeep.integrations.transformers_model import geometry_of
from kvkeep.store import KVStore
from kvkeep.store.backends.memory import MemoryBackend
from kvkeep.store.tiers import PassThrough

pytestmark = pytest.mark.model

TOKENS = 701  # 43 blocks, a tail, and the last token, which is computed in any case
BLOCK = 16


@pytest.fixture(scope="module")
def model():
    return build(max_position_embeddings=1024)


@pytest.fixture(scope="module")
def expected(model):
    return model.generate(prompt(TOKENS), max_new_tokens=8)


@contextmanager
def kept_behind(model, *, token_s, byte_s, tokens=TOKENS, block=BLOCK):
    """A `KeptModel` whose store has a prompt in a tier, with costs that it believes."""
    faulty = FaultyBackend(MemoryBackend(64 << 20))
    cost = CostModel(
        None if token_s is None else PrefillCost(seconds_per_token=token_s),
        reads={} if byte_s is None else {"faulty": TransferCost(seconds_per_byte=byte_s)},
    )
    with KVStore(
        geometry_of(model), model="m", revision=revision_of(model), layout="HND",
        block_tokens=block, tiers=["memory://32MiB", faulty], policy=PassThrough(), cost=cost,
    ) as store:  # fmt: skip
        with KeptModel(model, store=store, loading="all") as before:
            before.generate(prompt(tokens), max_new_tokens=1)
        assert store.flush()
        memory = store._tiered.memory
        memory.remove(list(memory.catalogue.blocks()))
        try:
            yield KeptModel(model, store=store), faulty
        finally:
            faulty.heal()
        for tier in store._tiered.tiers:
            assert tier.reading.wait(20)
        store.check()
        assert store.cost.reading("faulty").queued == 0


@pytest.mark.parametrize(
    ("token_s", "byte_s"),
    [
        (None, None),
        (1e-3, None),
        (1e-3, 1e-12),
        (1e-3, 1e-6),
        (1e-3, 2e-6),
        (1e-3, 1.0),
        (1.0, 1.0),
    ],
)
def test_answers_are_those_of_the_model_alone(model, expected, token_s, byte_s):
    with kept_behind(model, token_s=token_s, byte_s=byte_s) as (kept, _):
        for _ in range(3):
            assert torch.equal(kept.generate(prompt(TOKENS), max_new_tokens=8), expected)
            assert 0 <= kept.last.loaded <= TOKENS - 1
        other = torch.cat((prompt(TOKENS)[:, :650], prompt(40, seed=3)), 1)
        want = model.generate(other, max_new_tokens=8)
        assert torch.equal(kept.generate(other, max_new_tokens=8), want)
        assert kept.last.loaded <= 650


def test_passes_teach_what_computing_takes(model):
    with KeptModel(model, tiers=["memory://16MiB"]) as kept:
        prefill = kept.store.cost.prefill
        assert not prefill.known
        for number in range(4):
            kept.generate(prompt(300, seed=number), max_new_tokens=3)
        assert prefill.observations == 4, "one pass each: those of single tokens do not count"
        assert 0 < prefill.prefill_s(0, 300) < 10


def test_a_tier_that_hangs_is_overtaken(model, expected):
    with kept_behind(model, token_s=1e-3, byte_s=1e-12) as (kept, faulty):
        faulty.hang("get")
        assert torch.equal(kept.generate(prompt(TOKENS), max_new_tokens=8), expected)
        assert kept.last.loaded == 0


def test_a_block_that_hangs_is_computed(model, expected):
    with kept_behind(model, token_s=1e-2, byte_s=1e-12) as (kept, faulty):
        faulty.hang("get", times=1)
        assert torch.equal(kept.generate(prompt(TOKENS), max_new_tokens=8), expected)
        assert kept.last.loaded <= TOKENS - 2


@pytest.mark.parametrize("fault", ["flip", "truncate", "fail"])
@pytest.mark.parametrize("times", [1, 3, None])
def test_damaged_and_missing_blocks_are_computed(model, expected, fault, times):
    with kept_behind(model, token_s=1e-2, byte_s=1e-12) as (kept, faulty):
        getattr(faulty, fault)(*(["get"] if fault == "fail" else []), times=times)
        assert torch.equal(kept.generate(prompt(TOKENS), max_new_tokens=8), expected)
        assert kept.last.loaded < TOKENS - 1
        faulty.heal()
        assert torch.equal(kept.generate(prompt(TOKENS), max_new_tokens=8), expected)


def test_kv_that_is_removed_meanwhile_is_computed(model, expected):
    with kept_behind(model, token_s=1e-2, byte_s=1e-12) as (paying, faulty):
        kept = KeptModel(model, store=paying.store, loading="all")
        faulty.hang("get")
        answers = []
        asking = threading.Thread(
            target=lambda: answers.append(kept.generate(prompt(TOKENS), max_new_tokens=8))
        )
        asking.start()
        faulty.wait_inside("get", 2)
        remover = threading.Thread(
            target=kept.store.remove, args=(prompt(TOKENS)[0, :-1].numpy(), 160)
        )
        remover.start()
        faulty.heal()
        remover.join(20)
        asking.join(60)
        assert torch.equal(answers[0], expected)


def test_rows_of_a_batch_load_what_pays(model):
    texts = [prompt(400, seed=1)[0], prompt(400, seed=2)[0], prompt(400, seed=1)[0]]
    batch = torch.stack(texts)
    want = model.generate(batch, max_new_tokens=6)
    with KeptModel(model, tiers=["memory://16MiB"]) as kept:
        for _ in range(3):
            assert torch.equal(kept.generate(batch, max_new_tokens=6), want)


def test_how_to_load_is_one_of_two(model):
    with pytest.raises(InvalidValue, match="loading is 'some'; it is 'paying' or 'all'"):
        KeptModel(model, loading="some")
