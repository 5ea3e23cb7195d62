"""The tiny model that ships with kvkeep: a Hugging Face directory, loaded without a network.

Its training data, licence and limits are in ``tiny/NOTICE``.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

__all__ = ["bundled_model"]


def bundled_model() -> Path:
    """Return the directory of the tiny model: weights, tokenizer, chat template, NOTICE.

    Pass it to ``AutoModelForCausalLM.from_pretrained`` and ``AutoTokenizer.from_pretrained``.
    kvkeep is installed as files: a model in a zipped package could not be mapped into memory.
    """
    folder = files(__name__) / "tiny"
    assert isinstance(folder, Path), "kvkeep must be installed as files, not imported from a zip"
    return folder
