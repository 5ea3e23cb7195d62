"""Train the tiny model that kvkeep ships, from the running Python's own standard library.

    python scripts/train_tiny_model.py --minutes 41 --out build/tiny
    python scripts/train_tiny_model.py --hybrid --minutes 60 --out build/hybrid
    python scripts/train_tiny_model.py --smoke --out build/smoke

``--hybrid`` trains a model like Qwen3-Next instead: states beside attention, on the same text.
``--smoke`` takes a handful of steps of a smaller model and writes a complete directory.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is fetched, and nothing is asked

import torch
from tiny_model.corpus import Entry, read_corpus
from tiny_model.dialogues import is_favourite
from tiny_model.kinds import Size, build_model
from tiny_model.release import read_directory, speak, write_directory
from tiny_model.tokens import train_tokenizer
from tiny_model.training import PHASES, Phase, Progress, Recipe, evaluate, train

if TYPE_CHECKING:
    from tiny_model.kinds import Model
    from transformers import PreTrainedTokenizerFast

QUESTIONS = (
    "What does textwrap.dedent do?",
    "Explain: the assert statement",
    "What does len do?",
)
LONGEST = 8192  # tokens: the positions the model is declared for
SIZE = Size(hidden=192, layers=4, inner=512)
SMOKE_SIZE = Size(hidden=96, layers=4, inner=128)
SMOKE_PHASES = (Phase(0.7, 64, 4), Phase(1.0, 128, 2))
SMOKE_STEPS = 16
CHECKPOINT_SECONDS = 180.0
AVERAGED_STEPS = 100


def main(arguments: list[str] | None = None) -> int:
    """Train, write the directory, load it again, and print sample answers."""
    options = _options(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    learned, held_out = _entries(smoke=options.smoke)
    if options.resume is None:
        texts = (f"{e.name}\n{e.text}" for e in learned)
        tokenizer = train_tokenizer(texts, 512 if options.smoke else 4096, LONGEST)
        size = SMOKE_SIZE if options.smoke else SIZE
        model = build_model(len(tokenizer), size, LONGEST, hybrid=options.hybrid)
    else:
        tokenizer, model = read_directory(options.resume)
    print(
        f"corpus: {len(learned):,} entries, {sum(len(e.text) for e in learned):,} characters; "
        f"model: {model.num_parameters():,} parameters, vocabulary {len(tokenizer):,}",
        flush=True,
    )
    steps, phases = (SMOKE_STEPS, SMOKE_PHASES) if options.smoke else (options.steps, PHASES)
    recipe = Recipe(options.seed, steps, options.minutes, options.share, phases)
    every = 4 if options.smoke else options.every
    run = Run(options.out, every, options.seed, model, tokenizer)
    train(model, tokenizer, learned, recipe, run.report)
    written = run.write()
    unseen = evaluate(model, tokenizer, held_out, options.seed)
    print(
        f"wrote {options.out} ({written / 1e6:.2f} MB) after {run.last.seconds:,.0f} s and "
        f"{run.last.step:,} steps: {run.loss(AVERAGED_STEPS):.3f} nats a token over the last "
        f"{len(run.losses)} steps, {unseen:.3f} on entries never seen"
    )
    for question, answer in speak(options.out, QUESTIONS, 16 if options.smoke else 96):
        print(f"\n> {question}\n{answer}", flush=True)
    return 0


@dataclass(slots=True)
class Run:
    """Progress output and checkpoints during training."""

    out: Path
    every: int
    seed: int
    model: Model
    tokenizer: PreTrainedTokenizerFast
    last: Progress = field(default_factory=Progress)
    losses: list[float] = field(default_factory=list)
    written: float = field(default_factory=time.perf_counter)

    def report(self, progress: Progress) -> None:
        """Record one step; print every ``every`` steps, write every few minutes."""
        self.last = progress
        self.losses = [*self.losses[1 - AVERAGED_STEPS :], progress.loss]
        if progress.step % self.every == 0:
            print(
                f"step {progress.step:5d}  {progress.share:4.0%}  loss {self.loss(self.every):.3f}"
                f"  rows of {progress.row_tokens}  {progress.tokens:,} tokens"
                f"  {progress.tokens / progress.seconds:,.0f} tokens/s",
                flush=True,
            )
        if time.perf_counter() - self.written > CHECKPOINT_SECONDS:
            self.write()

    def loss(self, steps: int) -> float:
        """The mean loss of the last ``steps`` steps, in nats a token."""
        recent = self.losses[-steps:]
        return sum(recent) / len(recent)

    def write(self) -> int:
        """Write the directory of the current model; return its size in bytes."""
        self.written = time.perf_counter()
        return write_directory(
            self.out,
            self.model,
            self.tokenizer,
            steps=self.last.step,
            tokens=self.last.tokens,
            seed=self.seed,
        )


def _entries(*, smoke: bool) -> tuple[list[Entry], list[Entry]]:
    """Return the training entries, and a few held-out entries of minor modules."""
    entries = read_corpus()[:: 12 if smoke else 1]
    lesser = [e for e in entries if not is_favourite(e)]
    held_out = lesser[::50]
    names = {e.name for e in held_out}
    return [e for e in entries if e.name not in names], held_out


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train the tiny model that kvkeep ships, or a hybrid like it."
    )
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    begin = parser.add_mutually_exclusive_group()
    begin.add_argument("--hybrid", action="store_true", help="a model like Qwen3-Next, not a Llama")
    begin.add_argument(
        "--resume", type=Path, help="go on from a directory written before, of either kind"
    )
    parser.add_argument(
        "--share", type=float, default=0.0, help="how far that one has come, 0 to 1"
    )
    parser.add_argument("--minutes", type=float, default=41.0, help="stop after this long")
    parser.add_argument("--steps", type=int, default=1_000_000, help="stop after this many steps")
    parser.add_argument("--threads", type=int, default=1, help="of the processor")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--every", type=int, default=20, help="steps between two lines")
    parser.add_argument("--smoke", action="store_true", help="a few steps of a smaller model")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
