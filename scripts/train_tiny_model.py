"""Train the tiny model that kvkeep ships, from the running Python's own standard library.

    python scripts/train_tiny_model.py --minutes 40 --threads 1 --out build/tiny
    python scripts/train_tiny_model.py --smoke --out build/smoke

``--smoke`` takes a handful of steps of a smaller model and writes a complete directory.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is fetched, and nothing is asked

import torch
from tiny_model.corpus import read_corpus
from tiny_model.dialogues import FAVOURITES
from tiny_model.release import write_directory
from tiny_model.tokens import train_tokenizer
from tiny_model.training import Phase, Progress, Recipe, build_model, evaluate, train
from transformers import AutoModelForCausalLM, AutoTokenizer

PROBES = (
    "What does textwrap.dedent do?",
    "Explain: the assert statement",
    "What does len do?",
)
LONGEST = 8192
CHECKPOINT_SECONDS = 180.0


def main(arguments: list[str] | None = None) -> int:
    """Train, write the directory, load it again and let it speak."""
    options = _options(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    started = time.perf_counter()

    entries = read_corpus()
    if options.smoke:
        entries = entries[::12]
    held_out = [e for e in entries if not (e.is_topic or e.group in FAVOURITES)][::50]
    learned = [e for e in entries if e not in held_out]
    vocabulary = 512 if options.smoke else options.vocabulary
    tokenizer = train_tokenizer((f"{e.name}\n{e.text}" for e in learned), vocabulary, LONGEST)
    hidden, layers, inner = (96, 2, 128) if options.smoke else (options.hidden, options.layers, options.inner)
    model = build_model(len(tokenizer), hidden=hidden, layers=layers, inner=inner, longest=LONGEST)
    characters = sum(len(e.text) for e in learned)
    print(
        f"corpus: {len(learned):,} entries, {characters:,} characters; "
        f"model: {model.num_parameters():,} parameters, vocabulary {len(tokenizer):,}",
        flush=True,
    )

    recent: list[float] = []
    last_written = time.perf_counter()
    last = Progress(0, 0.0, 0.0, 0, 0.0, 0)

    def report(progress: Progress) -> None:
        nonlocal last, last_written
        last = progress
        recent.append(progress.loss)
        del recent[:-100]
        if progress.step % options.every == 0 or progress.share >= 1:
            print(
                f"step {progress.step:5d}  {progress.share:4.0%}  loss {_mean(recent[-options.every:]):.3f}  "
                f"rows of {progress.row_tokens}  {progress.tokens:,} tokens  "
                f"{progress.tokens / progress.seconds:,.0f} tokens/s",
                flush=True,
            )
        if time.perf_counter() - last_written > CHECKPOINT_SECONDS:
            _write(options, model, tokenizer, progress)
            last_written = time.perf_counter()

    smoke_phases = (Phase(0.7, 64, 4), Phase(1.0, 128, 2))
    recipe = Recipe(options.seed, 8 if options.smoke else options.steps, options.minutes)
    if options.smoke:
        recipe = Recipe(options.seed, 8, options.minutes, smoke_phases)
    train(model, tokenizer, learned, recipe, report)
    size = _write(options, model, tokenizer, last)
    print(
        f"wrote {options.out} ({size / 1e6:.2f} MB) after {time.perf_counter() - started:,.0f} s: "
        f"loss {_mean(recent):.3f} nats a token over the last {len(recent)} steps, "
        f"{evaluate(model, tokenizer, held_out, options.seed):.3f} on entries never seen"
    )
    _speak(options.out, 16 if options.smoke else 96)
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--minutes", type=float, default=40.0, help="stop after this long")
    parser.add_argument("--steps", type=int, default=1_000_000, help="stop after this many steps")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=192, help="a multiple of 96")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--inner", type=int, default=512)
    parser.add_argument("--every", type=int, default=20, help="steps between two lines")
    parser.add_argument("--smoke", action="store_true", help="a few steps of a smaller model")
    return parser.parse_args(arguments)


def _write(options, model, tokenizer, progress) -> int:
    return write_directory(
        options.out, model, tokenizer, steps=progress.step, tokens=progress.tokens, seed=options.seed
    )


def _speak(folder: Path, longest: int) -> None:
    """Load the directory as a user would and print what it answers, greedily."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for probe in PROBES:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": probe}], add_generation_prompt=True, return_tensors="pt"
        )
        answer = model.generate(**prompt, max_new_tokens=longest, do_sample=False)
        text = tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        print(f"\n> {probe}\n{text}", flush=True)


def _mean(values: list[float]) -> float:
    return sum(values) / max(1, len(values))


if __name__ == "__main__":
    sys.exit(main())
