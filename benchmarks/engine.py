"""The speed of the engine beside that of Transformers: same model, same run, by turns.

A Llama of 100 million random weights in float32 on a CPU, and prompts of random tokens, seeded. In
each round all contenders get the same work, one after the other; a ratio is that of one round, and
a spread is the minimum and maximum of all rounds. The contenders are in `contenders.py`.

    python benchmarks/engine.py                # the table, in some ten minutes
    python benchmarks/engine.py --json         # for machines
    python benchmarks/engine.py --quick        # one round of less, in a minute
    python benchmarks/engine.py --markdown     # the table of docs/benchmarks.md
    python benchmarks/engine.py --only shared  # some of the cases
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import sys
import tempfile
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers.utils import logging as transformers_logging

from contenders import PAGE, Generate, GenerateBatch, GenerateOnPrefix, Work
from kvkeep.core.cache import PagedCache
from kvkeep.serve.engine import Engine, Runner, SamplingParams, Tokenizer
from kvkeep.serve.models import bundled_model
from rounds import Bench, Row, alone, random_tokens, ratios

if TYPE_CHECKING:
    from collections.abc import Sequence

    from contenders import Contender, Tokens

CONCURRENT = 16
DRAFT = 8
# What the tiny model is asked about, and what it is given to answer from.
DOCUMENTED = ("textwrap.dedent", "heapq.merge", "shutil.copytree", "random.shuffle")


def first_token(bench: Bench) -> None:
    """(a) The first token of a prompt of 2,048 tokens: computed, and with all of it cached."""
    ours, rng = bench.ours, bench.rng()
    length = bench.scaled(2048)
    times: tuple[list[float], list[float]] = ([], [])
    ours.run(Work([random_tokens(rng, length)], [1]))
    for _ in range(2 * bench.rounds):
        prompt = random_tokens(rng, length)
        ours.cache.clear()
        for took in times:
            (done,) = ours.engine.generate([prompt], SamplingParams(max_tokens=1))
            took.append(done.ttft_s * 1e3)
        assert done.cached_tokens == length - 1, done.cached_tokens
    case = f"first token of {length:,}"
    computed, cached = map(tuple, times)
    bench.rows.append(Row(case, "cached", "ms", cached))
    bench.rows.append(Row(case, "computed", "ms", computed, ratios(computed, cached), goal=20))


def mixed(bench: Bench) -> None:
    """(b) 16 requests without a common prefix, with prompts and answers of all lengths."""

    def make(rng: np.random.Generator) -> Work:
        prompts = np.linspace(64, bench.scaled(512), CONCURRENT).astype(int)
        outputs = np.linspace(16, bench.scaled(128), CONCURRENT).astype(int)
        rng.shuffle(prompts)
        rng.shuffle(outputs)
        return Work([random_tokens(rng, length) for length in prompts], outputs.tolist())

    batching = GenerateBatch(bench.plain, at_once=CONCURRENT)
    others: list[Contender] = [Generate(bench.plain, batches=3), batching]
    bench.compare("16 requests of mixed lengths", make, others, goal=1)


def equal(bench: Bench) -> None:
    """(b) The best case of plain ``generate``: no padding, and all requests end together."""

    def make(rng: np.random.Generator) -> Work:
        length, count = bench.scaled(256), bench.scaled(64)
        return Work([random_tokens(rng, length) for _ in range(CONCURRENT)], [count] * CONCURRENT)

    batching = GenerateBatch(bench.plain, at_once=CONCURRENT)
    others: list[Contender] = [Generate(bench.plain, batches=1), batching]
    bench.compare("16 requests of equal lengths", make, others, goal=1)


def shared(bench: Bench) -> None:
    """(b) 16 requests that begin with the same 1,500 tokens, nothing of them cached before.

    The goal is against ``generate_batch``, which shares prefixes by itself. ``generate`` does not,
    but a caller who knows the prefix can compute it once by hand.
    """

    def make(rng: np.random.Generator) -> Work:
        prefix = random_tokens(rng, bench.scaled(1500))
        own = np.linspace(32, 96, CONCURRENT).astype(int)
        prompts = [np.concatenate((prefix, random_tokens(rng, length))) for length in own]
        return Work(prompts, [bench.scaled(64)] * CONCURRENT, prefix=len(prefix))

    # 4 is the best it has over such a prefix: 16 took 1.35 times as long on one thread, 1 took 1.1.
    batching = GenerateBatch(bench.plain, at_once=4)
    others: list[Contender] = [batching, GenerateOnPrefix(bench.plain)]
    bench.compare("16 requests, shared prefix", make, others, goal=3, judged=batching)


def overhead(bench: Bench) -> None:
    """(c) The share of a step outside `Runner.forward`: scheduler, cache and greedy choice."""
    ours, rng = bench.ours, bench.rng()
    engine, length, steps = ours.engine, bench.scaled(256), bench.scaled(64)
    ours.cache.clear()
    long = SamplingParams(max_tokens=4 * steps + 64, ignore_eos=True)
    running = [engine.add(random_tokens(rng, length), long) for _ in range(CONCURRENT)]
    computed = 0
    while computed != CONCURRENT:  # until all prompts are computed
        computed = _step(bench)[0]
    decode = [_step(bench) for _ in range(steps)]
    assert {one[0] for one in decode} == {CONCURRENT}
    chunked = []
    for _ in range(steps):
        engine.add(random_tokens(rng, length), SamplingParams(max_tokens=1))
        chunked.append(_step(bench))
    assert {one[0] for one in chunked} == {CONCURRENT + length}
    for request in running:
        engine.abort(request)
    for name, taken in ((f"{CONCURRENT} tokens", decode), (f"and a prompt of {length}", chunked)):
        outside = np.array([one[1] for one in taken]) * 1e3
        total = np.array([one[2] for one in taken]) * 1e3
        bench.rows.append(
            Row(
                "a step outside the model",
                name,
                "%",
                tuple((100 * outside / total).tolist()),
                goal=5,
                better="less",
                note=f"{np.median(outside):.2f} ms of {np.median(total):.1f}",
            )
        )


def _step(bench: Bench) -> tuple[int, float, float]:
    """Run one step; return its tokens, the seconds outside the forward pass, all seconds."""
    engine, runner = bench.ours.engine, bench.ours.runner
    before, inside, start = engine.stats().computed_tokens, runner.seconds, perf_counter()
    engine.step()
    seconds = perf_counter() - start
    outside = seconds - (runner.seconds - inside)
    return engine.stats().computed_tokens - before, outside, seconds


def drafts(bench: Bench) -> None:
    """(d) Speculative decoding, in tokens a second after the first token.

    What it is for: the tiny model that kvkeep ships answers from documentation in its prompt. What
    it must not cost: the large model draws from 32 tokens at random, so that whatever stands at the
    end stood somewhere before, and what followed there is hardly ever right. And what it can bring
    at best: random weights, left to their likeliest tokens, soon repeat themselves.
    """
    rng, large = bench.rng(), bench.ours.engine
    count = bench.scaled(128)
    loop = SamplingParams(max_tokens=count, ignore_eos=True)
    few = tuple((token, 100.0) for token in range(32))
    chance = replace(loop, temperature=1.0, seed=1, logit_bias=few)
    shuffled = rng.integers(0, len(few), 512, dtype=np.int32)
    _speculate(bench, "drafts, always wrong", large, [shuffled], chance, goal=0.95)
    _speculate(bench, "drafts, an answer that loops", large, [random_tokens(rng, 64)], loop)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several would wait for each other longer than they compute
    try:
        path = bundled_model()
        runner = Runner.load(path, num_pages=2048, page_size=PAGE, dtype="float32")
        tiny = Engine(runner, PagedCache(2048, PAGE))
        asked = _questions(Tokenizer.load(path))
        answer = SamplingParams(max_tokens=count)
        _speculate(bench, "drafts, answers that quote", tiny, asked, answer, goal=1.5)
        _speculate(bench, "drafts, 16 at once", tiny, asked * 4, answer, at_once=True)
    finally:
        torch.set_num_threads(threads)


def _speculate(
    bench: Bench,
    case: str,
    engine: Engine,
    prompts: Sequence[Tokens],
    params: SamplingParams,
    *,
    goal: float | None = None,
    at_once: bool = False,
) -> None:
    """Compare with and without drafts, by turns, on cached prompts."""
    ways = [replace(params, draft_tokens=DRAFT), params]
    rates: tuple[list[float], list[float]] = ([], [])
    before, same, rounds = engine.stats(), 0, 2 * bench.rounds
    engine.generate(prompts, replace(params, max_tokens=1))
    batches = [prompts] if at_once else [[prompt] for prompt in prompts]
    for _ in range(rounds):
        answers: list[list[tuple[int, ...]]] = []
        for how, rate in zip(ways, rates, strict=True):
            batched = [engine.generate(batch, how) for batch in batches]
            done = [one for batch in batched for one in batch]
            seconds = sum(
                max(one.seconds for one in batch) - min(one.ttft_s for one in batch)
                for batch in batched
            )
            rate.append(sum(len(one.tokens) - 1 for one in done) / seconds)
            answers.append([one.tokens for one in done])
        same += sum(a == b for a, b in zip(*answers, strict=True))
    after = engine.stats()
    drafted = after.drafted_tokens - before.drafted_tokens
    accepted = after.accepted_drafts - before.accepted_drafts
    drafting, without = map(tuple, rates)
    said = f"{accepted:,} of {drafted:,} drafts were right"
    bench.rows.append(Row(case, f"up to {DRAFT}", "tokens/s", drafting, note=said))
    said = f"{same} of {rounds * len(prompts)} answers equal"
    bench.rows.append(
        Row(case, "none", "tokens/s", without, ratios(drafting, without), goal=goal, note=said)
    )


def _questions(tokenizer: Tokenizer) -> list[Tokens]:
    """Return one question about each function, behind the documentation of all of them."""
    sections = []
    for name in DOCUMENTED:
        module, _, function = name.rpartition(".")
        text = inspect.getdoc(getattr(import_module(module), function)) or ""
        sections.append(f"# {name}\n\n{text}")
    system = "Answer from this document.\n\n" + "\n\n".join(sections)
    return [
        tokenizer.chat(
            [
                {"role": "system", "content": system},
                {"role": "user", "content": f"What does {name} do?"},
            ]
        )
        for name in DOCUMENTED
    ]


CASES = {case.__name__: case for case in (first_token, mixed, equal, shared, overhead, drafts)}


def main(arguments: list[str] | None = None) -> int:
    """Run all measurements and print them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--markdown", action="store_true", help="the table in Markdown")
    parser.add_argument("--quick", action="store_true", help="one round, of an eighth")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    scale, rounds = (0.125, 1) if options.quick else (1.0, options.rounds)
    with tempfile.TemporaryDirectory() as folder:
        make = partial(Bench, Path(folder), seed=options.seed, scale=scale, rounds=rounds)
        bench = alone(make)
    for name in options.only:
        if not options.json:
            print(f"… {name}", file=sys.stderr, flush=True)
        alone(CASES[name], bench)
    if options.quick:  # the goals are for the real thing
        bench.rows = [replace(row, goal=None) for row in bench.rows]
    if options.json:
        measured = {"threads": options.threads, "rows": [row.as_dict() for row in bench.rows]}
        print(json.dumps(measured, indent=1))
    else:
        print(f"{bench.parameters / 1e6:.0f} M parameters, float32, {options.threads} threads\n")
        _print(bench.rows, markdown=options.markdown)
    return 0


def _print(rows: Sequence[Row], *, markdown: bool) -> None:
    heading = ("case", "what", "median", "spread", "faster by", "goal", "")
    table = [heading, *(_cells(row) for row in rows)]
    widths = [max(len(cells[column]) for cells in table) for column in range(len(heading))]
    for at, cells in enumerate(table):
        if markdown:
            print(f"| {' | '.join(cells)} |")
            if at == 0:
                print("|---|---|--:|--:|--:|--:|---|")
        else:
            print("  ".join(map(str.ljust, cells, widths)).rstrip())


def _cells(row: Row) -> tuple[str, ...]:
    digits = 0 if row.median >= 100 else 1
    goal = ""
    if row.goal is not None:
        sign = "≥" if row.better == "more" else "≤"
        unit = row.unit if row.ratio is None else "×"
        goal = f"{sign} {row.goal:g} {unit} {'✓' if row.met else '✗'}"
    ratio = ""
    if row.ratio is not None:
        ratio = f"{row.ratio:.2f}× ({min(row.ratios):.2f} … {max(row.ratios):.2f})"
    return (
        row.case,
        row.name,
        f"{row.median:,.{digits}f} {row.unit}",
        f"{min(row.values):,.{digits}f} … {max(row.values):,.{digits}f}",
        ratio,
        goal,
        row.note,
    )


if __name__ == "__main__":
    sys.exit(main())
