"""Identity of a model: a digest of everything that decides the numbers in its KV.

base.py      `model_identity`, of a loaded module or of a directory of files
modules.py   what a module computes, as lines of text
values.py    attributes, functions, classes and tensors as text; which are left out
watch.py     `ModelWatch`: notices that a loaded model changed
weights.py   a digest of weights in files
"""

from __future__ import annotations

from kvkeep.core.errors import require

require("torch", "store")  # first, so that the error names the extra to install

from kvkeep.store.identity.base import is_loaded, model_identity  # noqa: E402
from kvkeep.store.identity.watch import ModelWatch  # noqa: E402
from kvkeep.store.identity.weights import weights_digest  # noqa: E402

__all__ = ["ModelWatch", "is_loaded", "model_identity", "weights_digest"]
