"""Part "first_token": cold, and from the pool, pinned memory and a disk.

KV that was loaded is compared with what was computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gpu_parts.answers import PAGE, Bench
from gpu_parts.figures import Row, ratios

if TYPE_CHECKING:
    from gpu_parts.answers import Tokens
    from gpu_parts.figures import Report, Setting
    from kvkeep.serve.engine import Engine
    from kvkeep.store import KVStore

__all__ = ["run"]

_COLD = "computed"


def run(report: Report, setting: Setting) -> None:
    """Measure prompts of several lengths."""
    lengths = {"full": (2048, 8192, 32_768), "small": (512, 1024), "smallest": (96,)}[setting.size]
    bench = Bench(report, setting, lengths[-1])
    report.note(
        "From a request's arrival to its first token. The engine loads what it expects to load "
        "faster than it computes, and computes the rest meanwhile; “all loaded” waits for all. "
        "Memory is pinned on a GPU. Reads pass the page cache by where the disk allows that."
    )
    for length in lengths:
        _Length(bench, length).measure(report, setting.pick(3, 3, 1))


class _Length:
    """Prompts of one length: for each kind of hit, seconds, and shares that were loaded."""

    def __init__(self, bench: Bench, length: int) -> None:
        self._bench = bench
        self._length = length
        self._taken: dict[str, list[float]] = {}
        self._loaded: dict[str, list[float]] = {}
        self._right: dict[str, bool] = {}
        self._told: dict[str, str] = {}

    def measure(self, report: Report, rounds: int) -> None:
        """Ask new prompts, a round before not counted, and add a row for each kind of hit."""
        self._round()
        self._taken.clear()
        self._loaded.clear()
        for _ in range(rounds):
            self._round()
        cold = self._taken[_COLD]
        for name, taken in self._taken.items():
            loaded = self._loaded[name]
            note = f"{sum(loaded) / len(loaded):.0%} loaded" if "from" in name else ""
            if name in self._right:
                note += f", {self._told[name]}"
            report.add(Row(
                f"{self._length:,} tokens", name, "ms", tuple(one * 1e3 for one in taken),
                () if name == _COLD else ratios(taken, cold), self._right.get(name), note,
            ))  # fmt: skip

    def _round(self) -> None:
        bench = self._bench
        prompt = bench.prompt(self._length)
        with bench.engine() as engine:
            self._note(_COLD, *_asked(bench, engine, prompt))
            self._note("hit in the pool", *_asked(bench, engine, prompt))
        with bench.store(self._length) as store:
            pages = bench.keep(store, prompt)
            self._hits("from memory", store, prompt, pages)
        for forced in (False, True):  # each with empty memory
            with bench.store(self._length) as store:
                self._hits("from disk", store, prompt, pages, (forced,))

    def _hits(
        self,
        name: str,
        store: KVStore,
        prompt: Tokens,
        pages: torch.Tensor,
        ways: tuple[bool, ...] = (False, True),
    ) -> None:
        """Ask with an empty pool; where all is loaded, compare the pages."""
        bench = self._bench
        for forced in ways:
            with bench.engine(store, load_all=forced) as engine:
                label = f"{name}, all loaded" if forced else name
                self._note(label, *_asked(bench, engine, prompt))
                if forced:
                    found = bench.pages(engine, prompt)
                    loaded = engine.stats().loaded_tokens // PAGE
                    same = min(loaded, len(found), len(pages))
                    right = same > 0 and torch.equal(found[:same], pages[:same])
                    if self._right.setdefault(label, True):
                        wrong = "pages differ" if same else "no page was loaded to compare"
                        self._told[label] = "pages equal byte by byte" if right else wrong
                        self._right[label] = right

    def _note(self, name: str, seconds: float, loaded: float) -> None:
        self._taken.setdefault(name, []).append(seconds)
        self._loaded.setdefault(name, []).append(loaded)


def _asked(bench: Bench, engine: Engine, prompt: Tokens) -> tuple[float, float]:
    """Return the seconds to the first token, and the share of the prompt that was loaded."""
    done = bench.first_token(engine, prompt)
    return done.ttft_s, done.loaded_tokens / len(prompt)
