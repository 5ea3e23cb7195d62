"""Real servers as fixtures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from browsing import opened  # noqa: F401 - fixtures
from real_server import running

from kvkeep.serve.models import bundled_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from real_server import Running


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """One server for all tests of a module."""
    with running() as one:
        yield one


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer with random weights, and the bundled model's tokenizer.

    A token takes it a third of the time: for tests to which it does not matter what is said.
    """
    import transformers

    folder = tmp_path_factory.mktemp("small-model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(bundled_model())
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=8192,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def start_server() -> Any:
    """``with start_server(limits=Limits(…), **settings) as server:`` for one of your own."""
    return running
