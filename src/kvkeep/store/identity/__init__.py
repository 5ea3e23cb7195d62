"""Identity of a model: a digest of everything that decides the numbers in its KV.

modules.py   `model_identity`; what a module computes, as lines of text
values.py    attributes, functions, classes and tensors as text; which are left out
watch.py     `ModelWatch`: notices that a loaded model changed
files.py     digests of models in files
"""

from __future__ import annotations

from kvkeep.core.errors import require

require("torch", "store")  # first, so that the error names the extra to install

from kvkeep.store.identity.files import weights_digest  # noqa: E402
from kvkeep.store.identity.modules import is_loaded, model_identity  # noqa: E402
from kvkeep.store.identity.watch import ModelWatch  # noqa: E402

__all__ = ["ModelWatch", "is_loaded", "model_identity", "weights_digest"]
