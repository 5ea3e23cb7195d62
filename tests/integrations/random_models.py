"""Small random models of many families, and texts for them."""

from __future__ import annotations

import functools
from weakref import WeakKeyDictionary

import torch
import transformers

BLOCK = 16
WINDOW = 9  # smaller than the prompts, and no divisor of a block
VOCABULARY = 160

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,  # large, so that one wrong byte of KV shows in the answer
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FAMILIES = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {},
    "Mistral": {"sliding_window": WINDOW},
    "Gemma": {"tie_word_embeddings": False},  # tied, a random model repeats its last token
    "Gemma2": {
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 16,
        "tie_word_embeddings": False,
    },
    "Gemma3Text": {
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 16,
        "tie_word_embeddings": False,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}


def build(family="Llama", *, seed=7, **changes):
    """A random model of the family, the same at every call."""
    how = {name: changes.pop(name) for name in ("attn_implementation",) if name in changes}
    config = getattr(transformers, f"{family}Config")(
        **{**SHAPE, **FAMILIES.get(family, {}), **changes}
    )
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, **how)
    return model.eval()


def prompt(tokens, seed=1):
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (1, tokens), generator=random)


def computed(model):
    """A list that grows by the tokens of each forward pass of ``model`` from now on.

    Not by a hook: the model would be another one with it.
    """
    counts = _COUNTS[model.get_input_embeddings()] = []
    return counts


_COUNTS = WeakKeyDictionary()
_FORWARD = torch.nn.Embedding.forward


@functools.wraps(_FORWARD)
def _counting(embedding, tokens):
    if embedding in _COUNTS:
        _COUNTS[embedding].append(tokens.numel())
    return _FORWARD(embedding, tokens)


torch.nn.Embedding.forward = _counting


def padded(texts, pad=0):
    """The arguments of a batch: [tokens] each, padded on the left to the longest."""
    columns = max(map(len, texts))
    ids = torch.full((len(texts), columns), pad)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, columns - len(text) :] = text
        mask[row, columns - len(text) :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def alone(model, texts, new, **how):
    """What each text is answered when it is asked for alone: the new tokens, row by row."""
    return [model.generate(text[None], max_new_tokens=new, **how)[0, len(text) :] for text in texts]
