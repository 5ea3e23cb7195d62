"""Hybrid models through HTTP: the answers of each model by itself, cold, cached and restarted."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from real_server import NAME, Running

from hybrid_families import FAMILIES, NOT_RESUMING, amplified
from kvkeep.core.geometry import KVGeometry
from kvkeep.serve.engine import Engine, Limits, Runner, Tokenizer
from kvkeep.serve.models import bundled_model
from kvkeep.serve.server import ServerSettings
from kvkeep.store import KVStore

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("load_first")]

COUNT = 4
SERVED = [family for family in FAMILIES if family not in NOT_RESUMING]
TRUNK = np.random.default_rng(1).integers(3, 4000, 70).tolist()
PROMPTS = [[*TRUNK, 5, 6], [*TRUNK[:66], 9, 8, 7], TRUNK[:20]]


def build(family):
    """Return a model with the vocabulary of the bundled tokenizer, and a copy of it to serve."""
    words = {"vocab_size": 4096}
    if "vocab_size_per_layer_input" in FAMILIES[family]:
        words["vocab_size_per_layer_input"] = 4096
    model = amplified(family, **words)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    return model, copy.deepcopy(model)


def alone(model, prompt):
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(COUNT):
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


class Served:
    """A server of a model, over tiers that outlive it."""

    def __init__(self, runner, *tiers):
        self.store = KVStore(
            runner.geometry, model=NAME, revision=runner.identity, tiers=tiers, block_tokens=32,
            snapshots=runner.layout is not None,
        )  # fmt: skip
        tokenizer = Tokenizer.load(bundled_model())
        self.engine = Engine(
            runner, runner.cache(), tokenizer, limits=Limits(step_tokens=50), store=self.store,
            load_timeout=20,
        )  # fmt: skip
        self.server = Running(self.engine, ServerSettings(name=NAME))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        try:
            self.server.assert_idle()
        finally:
            self.server.stop()
            self.store.close()

    def ask(self, prompts):
        """Return the texts, and the reused tokens, of prompts that are sent at once."""

        def one(prompt):
            body = {"prompt": prompt, "max_tokens": COUNT, "temperature": 0}
            answer = self.server.http.post("/v1/completions", json=body).raise_for_status().json()
            usage = answer["usage"]
            return (
                answer["choices"][0]["text"],
                usage["prompt_tokens_details"]["cached_tokens"],
                usage["kvkeep"]["loaded_tokens"],
            )

        with ThreadPoolExecutor(len(prompts)) as threads:
            return list(zip(*threads.map(one, prompts), strict=True))


@pytest.mark.parametrize("family", SERVED)
def test_answers_are_those_of_the_model(family, tmp_path):
    plain, model = build(family)
    geometry = KVGeometry.from_config(model.config, dtype="float32")
    runner = Runner(model, geometry, num_pages=2500, page_size=4)
    tokenizer = Tokenizer.load(bundled_model())
    want = tuple(tokenizer.decode(alone(plain, prompt)) for prompt in PROMPTS)
    tiers = "memory://16MiB", f"file://{tmp_path}/tier?size=256MiB"
    with Served(runner, *tiers) as served:
        texts, _, _ = served.ask(PROMPTS)
        assert texts == want
        texts, cached, _ = served.ask(PROMPTS)
        assert texts == want
        assert min(cached[:2]) >= 64
        told = served.server.http.get("/kv/explain/latest")
        if told.status_code == 200:
            assert told.json()
        assert served.server.http.get("/kv/map").raise_for_status().json()
        assert served.server.http.get("/metrics").status_code == 200
    with Served(runner, *tiers) as served:
        texts, cached, loaded = served.ask(PROMPTS)
        assert texts == want
        assert min(cached[:2]) >= 64
        assert sum(loaded) >= 64
