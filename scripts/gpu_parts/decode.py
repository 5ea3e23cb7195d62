"""Part "decode": tokens a second with a store below the pool, beside those without."""

from __future__ import annotations

from contextlib import ExitStack
from operator import eq
from typing import TYPE_CHECKING

from gpu_parts.answers import Bench
from gpu_parts.figures import Row, ratios
from kvkeep.serve.engine import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu_parts.answers import Tokens
    from gpu_parts.figures import Report, Setting
    from kvkeep.serve.engine import Engine

__all__ = ["run"]


def run(report: Report, setting: Setting) -> None:
    """Let engines with and without a store take turns on new prompts."""
    count, length = setting.pick(16, 4, 2), setting.pick(512, 256, 40)
    steps = setting.pick(128, 32, 8)
    bench = Bench(report, setting, count * (length + steps + 64))
    without: list[float] = []
    with_store: list[float] = []
    same = total = kept = 0
    rounds = setting.pick(5, 3, 1)
    for number in range(-1, rounds):
        prompts = [bench.prompt(length) for _ in range(count)]
        rates: dict[bool, float] = {}
        answers: dict[bool, list[tuple[int, ...]]] = {}
        stored = 0
        for keeps in (False, True) if number % 2 else (True, False):
            with ExitStack() as stack:
                store = None
                if keeps:
                    store = stack.enter_context(bench.store(2 * count * (length + steps)))
                engine = stack.enter_context(bench.engine(store))
                rates[keeps], answers[keeps] = _rate(engine, prompts, steps)
                stored += engine.stats().kept_tokens
        if number < 0:
            continue
        without.append(rates[False])
        with_store.append(rates[True])
        kept += stored
        same += sum(map(eq, answers[False], answers[True]))
        total += count
    report.note(
        f"{count} requests at once whose {length:,} tokens are in the pool, {steps} greedy tokens "
        "each. What they generate is stored in memory and on disk."
    )
    case = f"{count} at once"
    report.add(
        Row(case, "without a store", "tokens/s", tuple(without)),
        Row(
            case, "with memory and disk", "tokens/s", tuple(with_store),
            ratios(without, with_store),
            note=f"{same} of {total} answers equal; {kept / rounds:,.0f} tokens stored a round",
        ),
    )  # fmt: skip


def _rate(
    engine: Engine, prompts: Sequence[Tokens], steps: int
) -> tuple[float, list[tuple[int, ...]]]:
    """Return tokens a second behind the first token of each answer, and the answers."""
    engine.generate(prompts, SamplingParams(max_tokens=1))
    done = engine.generate(prompts, SamplingParams(max_tokens=steps, ignore_eos=True))
    seconds = max(one.seconds for one in done) - min(one.ttft_s for one in done)
    return len(done) * (steps - 1) / seconds, [one.tokens for one in done]
