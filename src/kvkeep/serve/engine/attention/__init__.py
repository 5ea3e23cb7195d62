"""Attention over page tables, the same code on CPU and GPU.

hook.py     the attention function that Transformers models call
batch.py    the batch of one forward pass: pieces of sequences in one row of tokens
memory.py   where the KV of each layer lies, and which tokens the layer attends to
part.py     the batch over the pages of layers that share them
latent.py   latents, expanded to keys and values, or attended to as they are
plan.py     the terms of a plan: how large calls are, which piece lies where
long.py     pieces of many tokens, one by one
short.py    decoded tokens and drafts, many pieces in one call
cascade.py  a prefix that several sequences share, attended to once
dense.py    attention to gathered keys, whole or in part
flash.py    FlashAttention kernels over page tables, if installed: nothing is gathered
"""
