"""A batch of prompts about one document on a Transformers model, with and without kvkeep.

Four prompts of 1,500 shared tokens and 20 to 80 of their own, a random Llama of 4 layers in float32
on one CPU core; the first token of all four. Counted is processor time, the store's threads
included, which a neighbour on the machine hardly changes. In each round everything is measured
once; shown is the median with the smallest and the largest, and ratios are of one round.

    python benchmarks/kept_model.py             # about a minute
    python benchmarks/kept_model.py --rounds 3 --layers 8
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from kvkeep.integrations.transformers import KeptModel

if TYPE_CHECKING:
    from collections.abc import Callable

SHARED, OWN, VOCABULARY = 1500, (20, 40, 60, 80), 4096


def build(layers: int) -> Any:
    """Build a Llama with seeded random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1536, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=4096,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return model.eval()


def batch(document: torch.Tensor, seed: int) -> dict[str, torch.Tensor]:
    """Return rows with the document and own tokens behind it, padded on the left."""
    random = torch.Generator().manual_seed(seed)
    columns = SHARED + max(OWN)
    ids = torch.zeros(len(OWN), columns, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, own in enumerate(OWN):
        text = torch.cat((document, torch.randint(1, VOCABULARY, (own,), generator=random)))
        ids[row, -len(text) :], mask[row, -len(text) :] = text, 1
    return {"input_ids": ids, "attention_mask": mask}


def seconds(generate: Callable[..., Any], inputs: dict[str, torch.Tensor]) -> float:
    """Return the processor seconds to the first token of all rows."""
    start = time.process_time()
    generate(**inputs, max_new_tokens=1)
    return time.process_time() - start


def one_round(model: Any, number: int) -> dict[str, float]:
    """Measure everything once, with a new document."""
    random = torch.Generator().manual_seed(number)
    document = torch.randint(1, VOCABULARY, (SHARED,), generator=random)
    first, others, more = (batch(document, 10 * number + at) for at in range(3))
    found = {"Transformers alone": seconds(model.generate, first)}
    with tempfile.TemporaryDirectory() as folder:
        tiers = ["memory://512MiB?touch=yes", f"file://{folder}?size=1GiB"]
        with KeptModel(model, tiers=tiers) as kept:
            found["cold: the document computed once"] = seconds(kept.generate, first)
            found["warm: other questions, from memory"] = seconds(kept.generate, others)
            found["warm: the same prompts again"] = seconds(kept.generate, others)
            kept.store.flush()
        with KeptModel(model, tiers=tiers) as kept:
            found["restarted: other questions, from disk"] = seconds(kept.generate, more)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=4)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = build(arguments.layers)
    one_round(model, 0)  # warms up
    rounds = [one_round(model, number) for number in range(1, arguments.rounds + 1)]
    base = [one["Transformers alone"] for one in rounds]
    for name in rounds[0]:
        times = [one[name] for one in rounds]
        faster = statistics.median(b / t for b, t in zip(base, times, strict=True))
        middle, low, high = statistics.median(times), min(times), max(times)
        print(f"{name:40} {middle:7.3f} s ({low:.3f} … {high:.3f})  {faster:6.1f} times as fast")


if __name__ == "__main__":
    main()
