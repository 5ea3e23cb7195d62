"""The models of `kv_codecs.py`: the bundled one, and a small Llama that is trained here.

It learns the text of Python's own library, and differs from the bundled model in what a codec
sees: heads of 64 in place of 32, grouped-query attention of 2 to 1, more layers, no text learned by
heart. Training is seeded, takes about five minutes of one core, and is done once: the weights are
kept in ``build/codecs_model``.

    python benchmarks/codecs_model.py            # train, and print the loss
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from codec_probe import ReuseProbe
from kvkeep.serve.models import bundled_model

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import LlamaForCausalLM

__all__ = ["Trained", "bundled_probe", "rows_of", "second_model", "texts"]

HOME = Path(__file__).parents[1] / "build" / "codecs_model"
SEED = 7
ROPE_BASE = 10_000.0
PHASES = ((150, 256, 8), (110, 512, 4), (40, 2560, 1))
"""Steps, tokens of a row, rows of a step: short rows teach words, long ones teach distance."""
WARMUP = 20
HELD_OUT = 8  # of so many entries, one is never trained on


def bundled_probe(tokens: int = 2048, following: int = 256, prompts: int = 1) -> ReuseProbe:
    """The bundled model on the Python language reference, most of which it was trained on."""
    text = "\n\n".join(topics[name] for name in sorted(topics)[::7])
    return ReuseProbe(_loaded(bundled_model()), rows_of(text, tokens + following, prompts),
                      following=following)  # fmt: skip


def _loaded(path: Any) -> Any:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415
    from transformers.utils import logging  # noqa: PLC0415

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model.eval()


def rows_of(text: str, length: int, rows: int) -> Tensor:
    """Return [rows, length] token ids of ``text``, one after the other."""
    from transformers import AutoTokenizer  # noqa: PLC0415

    ids = torch.tensor(AutoTokenizer.from_pretrained(bundled_model())(text).input_ids)
    return ids[: min(rows, len(ids) // length) * length].view(-1, length)


class Trained(NamedTuple):
    """The model, and its loss on text that it was not trained on, in nats a token."""

    model: LlamaForCausalLM
    loss: float


def second_model(home: Path = HOME) -> Trained:
    """Return the model: from ``home`` if it is there, else trained now and written there."""
    from transformers import LlamaForCausalLM  # noqa: PLC0415

    said = home / "loss.json"
    if not said.exists():
        model, loss = _train()
        model.save_pretrained(home)
        said.write_text(json.dumps({"loss": loss}))
    return Trained(
        LlamaForCausalLM.from_pretrained(home, dtype=torch.float32),
        float(json.loads(said.read_text())["loss"]),
    )


def texts() -> tuple[list[str], list[str]]:
    """Return what is trained on, and what is held out: entries of Python's documentation."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
    from tiny_model.corpus import read_corpus  # noqa: PLC0415

    entries = [f"{one.name}\n{one.text}\n\n" for one in read_corpus()]
    learned = [one for i, one in enumerate(entries) if i % HELD_OUT]
    return learned, entries[::HELD_OUT]


def _train() -> tuple[LlamaForCausalLM, float]:
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    torch.manual_seed(SEED)
    tokenizer = AutoTokenizer.from_pretrained(bundled_model())
    learned, held_out = (
        torch.tensor(tokenizer("".join(part), verbose=False).input_ids) for part in texts()
    )
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=256,
            intermediate_size=640,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=8192,
            rope_parameters={"rope_type": "default", "rope_theta": ROPE_BASE},
            tie_word_embeddings=True,
        )
    )
    matrices = [one for one in model.model.layers.parameters() if one.ndim == 2]
    ids = set(map(id, matrices))
    others = [one for one in model.parameters() if id(one) not in ids]
    optimisers = [
        torch.optim.Muon(matrices, lr=2e-2, momentum=0.95, weight_decay=0.0),
        torch.optim.AdamW(others, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    rates = [group["lr"] for one in optimisers for group in one.param_groups]
    total = sum(steps for steps, _, _ in PHASES)
    done, began = 0, time.time()
    for steps, row, rows in PHASES:
        for _ in range(steps):
            share = min(1.0, (done + 1) / WARMUP, (total - done) / (total * 0.4))
            for one, rate in zip(optimisers, rates, strict=True):
                one.param_groups[0]["lr"] = rate * share
            starts = torch.randint(len(learned) - row, (rows,)).tolist()
            batch = torch.stack([learned[at : at + row] for at in starts])
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(batch, labels=batch).loss
            loss.backward()
            for one in optimisers:
                one.step()
                one.zero_grad()
            done += 1
            if done % 20 == 0:
                said = f"step {done} of {total}: {loss.item():.3f} nats"
                print(f"{said}, {time.time() - began:.0f} s", file=sys.stderr, flush=True)
    return model, _loss(model, held_out)


@torch.inference_mode()
def _loss(model: LlamaForCausalLM, text: Tensor, row: int = 2048, rows: int = 6) -> float:
    model.train(False)
    losses = [
        float(model(part[None], labels=part[None]).loss)
        for part in (text[i * row : (i + 1) * row] for i in range(min(rows, len(text) // row)))
    ]
    return sum(losses) / len(losses)


if __name__ == "__main__":
    torch.set_num_threads(1)
    trained = second_model()
    print(f"{trained.model.num_parameters():,} parameters, {trained.loss:.3f} nats a token")
