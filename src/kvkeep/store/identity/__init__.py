"""Identity of a model: one text that names everything which decides the numbers in its KV.

base.py      `model_identity`, of a loaded module or of a directory
modules.py   what a module computes, as lines of text
values.py    attributes, functions and classes as text
tensors.py   digests of tensors: every byte is read
files.py     the identity of a model directory that another process loads
watch.py     `ModelWatch`: notices that a loaded model changed
weights.py   a digest of the weights in files, kept in weights_cache.py
"""

from __future__ import annotations

from kvkeep.store.identity.base import is_loaded, model_identity
from kvkeep.store.identity.watch import ModelWatch
from kvkeep.store.identity.weights import weights_digest

__all__ = ["ModelWatch", "is_loaded", "model_identity", "weights_digest"]
