"""A plain Transformers model that does not read the same document twice, or after a restart.

    python examples/transformers_store.py

It asks the bundled tiny model three times about one document, and shows how long the first token
takes: nothing stored; a second question, answered from memory; and a third after everything was
closed and opened again, answered from disk. Replace the model by your own: nothing else changes.
"""

from __future__ import annotations

import fnmatch
import inspect
import tempfile
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvkeep.integrations.transformers import KeptModel
from kvkeep.serve.models import bundled_model

model: Any = AutoModelForCausalLM.from_pretrained(bundled_model())
tokenizer = AutoTokenizer.from_pretrained(bundled_model())
document = inspect.getsource(fnmatch)


def ask(kept: KeptModel, question: str) -> None:
    """Time the first token, which reuse makes faster; then generate the whole answer."""
    inputs = tokenizer(document + question, return_tensors="pt")
    start = time.perf_counter()
    kept.generate(**inputs, max_new_tokens=1)
    seconds = time.perf_counter() - start
    reuse = kept.last
    assert reuse is not None
    print(
        f"first token after {seconds * 1000:6.1f} ms, "
        f"{reuse.loaded:5} of {reuse.prompt} prompt tokens loaded: {question.strip()!r}"
    )
    alone = model.generate(**inputs, max_new_tokens=8)
    answer: Any = kept.generate(**inputs, max_new_tokens=8)
    assert torch.equal(answer, alone)


model.generate(**tokenizer("warm up", return_tensors="pt"), max_new_tokens=1)
with tempfile.TemporaryDirectory() as folder:
    tiers = ["memory://256MiB", f"file://{folder}?size=1GiB"]
    with KeptModel(model, tiers=tiers) as kept:
        print("cold and warm:")
        ask(kept, "\n# What does translate do?\n")
        ask(kept, "\n# What does filter do?\n")
    print("closed, and opened again, as another process would:")
    with KeptModel(model, tiers=tiers) as kept:
        ask(kept, "\n# Where is fnmatchcase defined?\n")
