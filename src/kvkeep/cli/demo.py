"""``kvkeep demo``: questions about one document, cold against warm, token for token the same."""

from __future__ import annotations

import inspect
import json
import sys
from dataclasses import asdict, dataclass
from importlib import import_module
from statistics import median
from typing import TYPE_CHECKING

from kvkeep.cli.model import add_model_arguments, load, progress
from kvkeep.errors import require

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from kvkeep.cache import CacheStats, PagedCache
    from kvkeep.cli.model import Commands
    from kvkeep.engine import Completion, Runner, Tokenizer
    from kvkeep.tokens import TokenArray

__all__ = ["add_parser", "run"]

# The document: what the running Python says about these (PSF-2.0), which is also what the model
# that kvkeep ships has read.
SECTIONS = (
    "textwrap.dedent", "textwrap.shorten", "textwrap.wrap", "json.dumps", "heapq.merge",
    "heapq.nlargest", "shutil.copytree", "shutil.rmtree", "os.makedirs", "random.shuffle",
    "random.sample", "functools.partial", "statistics.median", "itertools.groupby",
)  # fmt: skip
SECTION_CHARACTERS = 700
ASKED = ("textwrap.dedent", "heapq.merge", "shutil.copytree", "random.shuffle")
FOLLOW_UP = "textwrap.shorten"
DIFFERENT = 1


@dataclass(frozen=True, slots=True)
class Row:
    """One request, run cold and warm."""

    request: str
    prompt_tokens: int
    reused_tokens: int
    ttft_cold_s: float
    ttft_warm_s: float
    identical: bool
    text: str

    @property
    def faster(self) -> float:
        """How many times sooner the first token comes."""
        return self.ttft_cold_s / self.ttft_warm_s


def add_parser(commands: Commands) -> None:
    """Name the arguments."""
    parser = commands.add_parser(
        "demo",
        help="run a real model cold and warm, and compare",
        description="Ask a model about one long document: every prompt computed in full (cold), "
        "then through one cache (warm). Fails if a single generated token differs.",
    )
    add_model_arguments(parser, memory="256MiB")
    parser.add_argument("--max-tokens", metavar="N", type=int, default=64, help="of an answer")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run, compare, print; 1 if the two runs differ."""
    # float32: in half precision the order of summing can decide between two like tokens.
    runner, tokenizer = load(args, dtype="float32")
    demo = Demo(runner, tokenizer, args.max_tokens)
    with progress("cold: every prompt computed in full", of=len(demo.names)) as advance:
        cold = demo.run_cold(advance)
    with progress("warm: the same through one cache", of=len(demo.names)) as advance:
        warm, stats = demo.run_warm(advance)
    rows = [
        Row(
            request=name,
            prompt_tokens=after.prompt_tokens,
            reused_tokens=after.cached_tokens,
            ttft_cold_s=before.ttft_s,
            ttft_warm_s=after.ttft_s,
            identical=before.tokens == after.tokens,
            text=after.text,
        )
        for name, before, after in zip(demo.names, cold, warm, strict=True)
    ]
    if args.json:
        print(json.dumps(_as_json(rows, stats)))
    else:
        _print(rows)
    return 0 if all(row.identical for row in rows) else DIFFERENT


class Demo:
    """The requests, and the two ways to run them. The cold run comes first."""

    def __init__(self, runner: Runner, tokenizer: Tokenizer, max_tokens: int) -> None:
        from kvkeep.engine import SamplingParams  # noqa: PLC0415 - needs torch

        self._runner = runner
        self._tokenizer = tokenizer
        self._params = SamplingParams(max_tokens=max_tokens)
        system = f"Answer from this document.\n\n{read_document()}"
        self._talks = [
            [{"role": "system", "content": system}, {"role": "user", "content": _question(name)}]
            for name in ASKED
        ]
        self._prompts = [self._tokens(talk) for talk in self._talks]
        self.names = [*ASKED, f"then {FOLLOW_UP}"]

    def run_cold(self, advance: Callable[[], object]) -> list[Completion]:
        """Every request with a cache of its own, which knows nothing."""
        self._ask(self._cache(), self._prompts[0][:64])  # torch warms up, unmeasured
        done = [self._ask(self._cache(), prompt, advance) for prompt in self._prompts]
        # The second turn of the last conversation follows on what the model has answered.
        talk = self._talks[-1]
        talk += [
            {"role": "assistant", "content": done[-1].text},
            {"role": "user", "content": _question(FOLLOW_UP)},
        ]
        self._prompts.append(self._tokens(talk))
        return [*done, self._ask(self._cache(), self._prompts[-1], advance)]

    def run_warm(self, advance: Callable[[], object]) -> tuple[list[Completion], CacheStats]:
        """The same requests, one after the other, through one cache."""
        cache = self._cache()
        done = [self._ask(cache, prompt, advance) for prompt in self._prompts]
        return done, cache.stats()

    def _ask(
        self, cache: PagedCache, prompt: TokenArray, advance: Callable[[], object] | None = None
    ) -> Completion:
        from kvkeep.engine import Engine  # noqa: PLC0415

        engine = Engine(self._runner, cache, self._tokenizer)
        (completion,) = engine.generate([prompt], self._params)
        if advance is not None:
            advance()
        return completion

    def _cache(self) -> PagedCache:
        from kvkeep.cache import PagedCache  # noqa: PLC0415

        return PagedCache(self._runner.num_pages, self._runner.page_size)

    def _tokens(self, talk: list[dict[str, str]]) -> TokenArray:
        if self._tokenizer.has_chat_template:
            return self._tokenizer.chat(talk)
        return self._tokenizer.encode("\n\n".join(turn["content"] for turn in talk) + "\n\n")


def read_document() -> str:
    """The sections, each under its name, cut to whole paragraphs."""
    return "\n\n".join(f"# {name}\n\n{_section(name)}" for name in SECTIONS)


def _section(name: str) -> str:
    module, _, attribute = name.rpartition(".")
    text = inspect.getdoc(getattr(import_module(module), attribute)) or ""
    kept = ""
    for paragraph in text.split("\n\n"):
        if kept and len(kept) + len(paragraph) > SECTION_CHARACTERS:
            break
        kept += paragraph + "\n\n"
    return kept.strip()


def _question(name: str) -> str:
    return f"What does {name} do?"


def _totals(rows: list[Row]) -> dict[str, float]:
    prompt = sum(row.prompt_tokens for row in rows)
    reused = sum(row.reused_tokens for row in rows)
    return {
        "prompt_tokens": prompt,
        "reused_tokens": reused,
        "reused_share": reused / prompt,
        "ttft_median_ratio": median(row.faster for row in rows),
    }


def _as_json(rows: list[Row], stats: CacheStats) -> dict[str, object]:
    return {
        "requests": [{**asdict(row), "faster": row.faster} for row in rows],
        "identical": all(row.identical for row in rows),
        **_totals(rows),
        "cache": stats.as_dict(),
    }


def _print(rows: list[Row]) -> None:
    console = require("rich.console", "cli").Console()
    console.print(
        f"{len(rows)} questions about one document: {_question('…')}\n"
        "cold  every prompt is computed in full\n"
        "warm  all go through one cache\n"
        "TTFT  time to first token",
        markup=False,
    )
    box = require("rich.box", "cli").SIMPLE_HEAD
    table = require("rich.table", "cli").Table(box=box, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("\nquestion", no_wrap=True)
    for heading in (
        "prompt\ntokens", "reused\ntokens", "TTFT\ncold", "TTFT\nwarm", "\nratio", "same\ntokens",
    ):  # fmt: skip
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.request,
            f"{row.prompt_tokens:,}",
            f"{row.reused_tokens:,}",
            _milliseconds(row.ttft_cold_s),
            _milliseconds(row.ttft_warm_s),
            f"{row.faster:.1f}×",
            "yes" if row.identical else "NO",
        )
    console.print(table)
    console.print(f"> {_question(rows[0].request)}", markup=False)
    console.print(f"{rows[0].text.strip()}\n", markup=False)
    totals = _totals(rows)
    console.print(
        f"{totals['prompt_tokens']:,} prompt tokens, {totals['reused_share']:.0%} reused; "
        f"the first token came {totals['ttft_median_ratio']:.1f}× sooner (median)",
        markup=False,
    )
    if not all(row.identical for row in rows):
        print("kvkeep: the warm run generated other tokens than the cold one", file=sys.stderr)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:,.1f} ms" if seconds < 0.1 else f"{seconds * 1000:,.0f} ms"
