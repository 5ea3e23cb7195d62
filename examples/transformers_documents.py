"""Questions about one long document, on a plain Transformers model that reads it once.

    python examples/transformers_documents.py                   # the model that is shipped
    python examples/transformers_documents.py --model PATH --document report.txt

Asked are four questions at once, one alone, four others, and four more after everything was closed
and opened again. Each line shows how long the first token took, and what of the prompts had to be
computed for it. The cells (`# %%`) open as a notebook in editors that know them.
"""

# %% What is asked: four questions at a time, each behind the whole document.
from __future__ import annotations

import argparse
import inspect
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvkeep.integrations.transformers import KeptModel
from kvkeep.serve.models import bundled_model

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--model", default=bundled_model(), help="a directory, or a name on the hub")
parser.add_argument("--document", type=Path, help="a text; without it, a module's source")
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
arguments, _ = parser.parse_known_args()  # a notebook has arguments of its own

QUESTIONS = [
    [
        "What does dedent do?",
        "Where is the width?",
        "What is fix_sentence_endings?",
        "Who wrote it?",
    ],
    ["What does shorten do?", "What is a chunk?", "Which module is imported?", "What about tabs?"],
    ["Where is fill defined?", "What does wrap return?", "What is indented?", "Is there a test?"],
]
SINGLE = "How are long words broken?"

# %% The model, as always. Prompts of several lengths make a batch when they are padded on the left.


def load() -> Any:
    """Load in float32 on a CPU, where answers can be compared token by token."""
    dtype = torch.float32 if arguments.device == "cpu" else "auto"
    loaded: Any = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype)
    return loaded.to(arguments.device).eval()


model = load()
tokenizer = AutoTokenizer.from_pretrained(arguments.model, padding_side="left")
if tokenizer.pad_token is None:
    tokenizer.pad_token = tokenizer.eos_token

document = arguments.document.read_text() if arguments.document else inspect.getsource(textwrap)
room = int(getattr(model.config.get_text_config(), "max_position_embeddings", 4096)) - 256
document = tokenizer.decode(tokenizer(document)["input_ids"][: min(room, 1500)])


def prompts(questions: list[str]) -> Any:
    """Return the batch: the document and a question in each row."""
    texts = [f"{document}\n\n# Question: {question}\n# Answer:" for question in questions]
    return tokenizer(texts, return_tensors="pt", padding=True).to(arguments.device)


# %% Asking, and a picture of it: a bar as long as the time to the first token.
longest = 0.0


def ask(what: str, questions: list[str], kept: KeptModel | None = None) -> None:
    """Time the first token; with kvkeep, check that the answers are the model's own."""
    global longest  # noqa: PLW0603
    inputs = prompts(questions)
    start = time.perf_counter()
    (kept or model).generate(**inputs, max_new_tokens=1)
    seconds = time.perf_counter() - start
    longest = max(longest, seconds)
    bar = "█" * max(1, round(30 * seconds / longest))
    total = computed = int(inputs["attention_mask"].sum())
    if kept is not None:
        assert kept.last is not None
        computed = total - kept.last.loaded - kept.last.shared
        answers: Any = kept.generate(**inputs, max_new_tokens=8)
        if model.dtype == torch.float32:
            assert torch.equal(answers, model.generate(**inputs, max_new_tokens=8))
    print(f"{what:37} {seconds:7.3f} s {bar:30} {computed:6,} of {total:6,} tokens computed")


# %% Nothing is kept: four questions, and the document is read four times.
model.generate(**tokenizer("warm up", return_tensors="pt").to(arguments.device), max_new_tokens=2)
ask("without kvkeep, four questions", QUESTIONS[0])

# %% kvkeep, with memory and a disk. The first four questions share the document among them.
folder = tempfile.TemporaryDirectory()
tiers = ["memory://512MiB", f"file://{folder.name}?size=2GiB"]
with KeptModel(model, tiers=tiers) as kept:
    ask("kvkeep, the same four, cold", QUESTIONS[0], kept)
    ask("one more question", [SINGLE], kept)
    ask("four others", QUESTIONS[1], kept)

# %% Another day: all is closed, the model is loaded again, the disk still has the document.
model = load()
with KeptModel(model, tiers=tiers) as kept:
    ask("after a restart, four more, from disk", QUESTIONS[2], kept)
folder.cleanup()
