"""The finished directory: weights, tokenizer, chat template, and the notice beside them."""

from __future__ import annotations

import copy
import platform
from typing import TYPE_CHECKING

import torch
from transformers import GenerationConfig

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

__all__ = ["NOTICE", "write_directory"]

NOTICE = """\
kvkeep tiny model

What it is
  A Llama of {parameters} parameters ({layers} layers, {heads} heads over {kv_heads} KV heads of
  {head_dim}, tied embeddings), so small that it ships with the library: it makes the demo and the
  tests of kvkeep run offline on readable text.

Data
  The standard library of CPython {python}, and nothing else: the docstrings of its public
  modules, classes and functions, and the topics of the language reference that help() shows.
  Copyright (c) 2001-2023 Python Software Foundation; All Rights Reserved.
  Used under the Python Software Foundation License Version 2 (PSF-2.0),
  https://docs.python.org/3/license.html
  The changes made: text cut into questions, answers and documents, and learned by a model, which
  repeats passages of it.

How it was made
  scripts/train_tiny_model.py, from random weights, {steps} steps, {tokens} tokens, seed {seed}.
  The weights are licensed as kvkeep itself is (Apache-2.0); text that they repeat stays under
  PSF-2.0.

What it is not good for
  Facts, reasoning, arithmetic, other languages, code you would run, or any use where an answer
  must be right. It knows by heart some of what it read and makes up the rest in the same tone.
"""


def write_directory(
    folder: Path,
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    *,
    steps: int,
    tokens: int,
    seed: int,
) -> int:
    """Write everything `from_pretrained` needs, weights in bfloat16; the directory's bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    final = copy.deepcopy(model).to(torch.bfloat16).eval()
    final.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
        max_new_tokens=128,
    )
    final.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = final.config
    notice = NOTICE.format(
        parameters=f"{sum(p.numel() for p in final.parameters()):,}",
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        python=platform.python_version(),
        steps=f"{steps:,}",
        tokens=f"{tokens:,}",
        seed=seed,
    )
    (folder / "NOTICE").write_text(notice, encoding="utf-8")
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
