"""The finished directory: weights, tokenizer, chat template, and the notice beside them."""

from __future__ import annotations

import copy
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers import PreTrainedTokenizerFast

    from tiny_model.kinds import Model

__all__ = ["read_directory", "speak", "write_directory"]

NOTICE = """\
kvkeep tiny model

What it is
{what}

Data
  The standard library of CPython {python}, and nothing else: the docstrings of its public
  modules, classes and functions, and the topics of the language reference that help() shows.
  {copyright} All Rights Reserved.
  Used under the Python Software Foundation License Version 2 (PSF-2.0), which stands below.
  Summary of the changes: text cut into questions, answers and documents, and learned by a model
  that repeats passages of it.

How it was made
  scripts/train_tiny_model.py, from random weights, {steps} steps, {tokens} tokens, seed {seed}.
  The weights are licensed as kvkeep itself is (Apache-2.0); text that they repeat stays under
  PSF-2.0.

What it is not good for
  Facts, reasoning, arithmetic, other languages, code you would run, or any use where an answer
  must be right. It knows by heart some of what it read and makes up the rest in the same tone.


{licence}"""
WHAT = {
    "llama": """\
  A Llama of {parameters} parameters ({layers} layers, {heads} heads over {kv_heads} KV heads of
  {head_dim}, tied embeddings), so small that it ships with the library: it makes the demo and the
  tests of kvkeep run offline on readable text.""",
    "qwen3_next": """\
  A Qwen3-Next of {parameters} parameters without experts ({layers} layers, {full} of them
  attention: {heads} heads over {kv_heads} KV heads of {head_dim}; the others gated delta rules:
  {value_heads} heads of {value_dim}; tied embeddings). It learned the same text by the same
  script as the model that kvkeep ships.""",
}
PSF_LICENCE = Path(__file__).with_name("PSF-2.0.txt")


def write_directory(
    folder: Path,
    model: Model,
    tokenizer: PreTrainedTokenizerFast,
    *,
    steps: int,
    tokens: int,
    seed: int,
) -> int:
    """Write everything `from_pretrained` needs, weights in bfloat16; the directory's bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    final = copy.deepcopy(model).bfloat16()
    final.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
        max_new_tokens=128,
    )
    final.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    notice = NOTICE.format(
        what=_describe(final),
        python=platform.python_version(),
        copyright=sys.copyright.partition("\n")[0],
        licence=PSF_LICENCE.read_text(encoding="utf-8"),
        steps=f"{steps:,}",
        tokens=f"{tokens:,}",
        seed=seed,
    )
    (folder / "NOTICE").write_text(notice, encoding="utf-8")
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _describe(model: Model) -> str:
    config = model.config
    kind: str = config.model_type
    layer_types = getattr(config, "layer_types", None) or []
    return WHAT[kind].format(
        parameters=f"{sum(p.numel() for p in model.parameters()):,}",
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        full=layer_types.count("full_attention"),
        value_heads=getattr(config, "linear_num_value_heads", None),
        value_dim=getattr(config, "linear_value_head_dim", None),
    )


def read_directory(folder: Path) -> tuple[Any, Any]:
    """The tokenizer and the model (in float32) of a directory, loaded as a user would."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def speak(folder: Path, questions: Sequence[str], longest: int) -> Iterator[tuple[str, str]]:
    """Each question and the greedy answer of the model in ``folder``."""
    tokenizer, model = read_directory(folder)
    for question in questions:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt"
        )
        tokens = model.generate(**prompt, max_new_tokens=longest, do_sample=False)
        start = prompt["input_ids"].shape[1]
        yield question, tokenizer.decode(tokens[0, start:], skip_special_tokens=True)
