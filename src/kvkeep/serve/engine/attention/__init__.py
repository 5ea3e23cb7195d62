"""Attention over page tables, the same code on CPU and GPU.

batch.py    the batch of one forward pass: pieces of sequences in one row of tokens; the attention
            function that Transformers models call
memory.py   where the KV of each layer lies, which tokens it attends to, and latents
plan.py     the calls of a pass: pieces of many tokens one by one; decoded tokens and drafts, many
            in one call; a prefix that several sequences share, once
dense.py    attention to gathered keys, whole or in part
flash.py    FlashAttention kernels over page tables, if installed: nothing is gathered
"""
