"""kvkeep inside what others made: one module each, imported by its name.

    transformers.py   generate on a plain Transformers model, with KV from the store

Nothing is imported here, so each needs its own packages alone.
"""
