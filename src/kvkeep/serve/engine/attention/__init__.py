"""Attention over pages, the same code on CPU and GPU.

paged.py    under the name by which Transformers models find it
batch.py    the batch of one forward pass: which sequences, which pages, which rows
short.py    pieces that fit a core's cache, in groups
long.py     pieces that do not
cascade.py  a prefix that several sequences share, attended to once
flash.py    FlashAttention's kernels over page tables, where they are installed
setting.py  what all of these are planned with
"""
