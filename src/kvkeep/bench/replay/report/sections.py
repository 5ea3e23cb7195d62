"""The sections of the page: charts, and tables behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvkeep.bench.replay.outcome import GROUP_REASONS, REASONS, reasons_of
from kvkeep.bench.replay.prices import FORMULA
from kvkeep.bench.replay.report.charts import PERCENTILES
from kvkeep.bench.replay.report.jobs import jobs_section
from kvkeep.bench.replay.report.markup import (
    bar,
    chart,
    choice,
    details,
    escaped,
    key,
    section,
    table,
)
from kvkeep.bench.replay.words import count, duration, money, number, share, shown, tokens

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvkeep.bench.replay.outcome import Outcome
    from kvkeep.bench.replay.prices import Prices
    from kvkeep.bench.replay.report.arranged import Arranged, PolicyCurve

__all__ = ["sections"]

_CLASSES = {"reused": "hit"} | {reason: f"m{at}" for at, reason in enumerate(REASONS)}
_CLASSES |= dict.fromkeys(GROUP_REASONS, "m5")  # a model has one of them
_FEW = 12  # rows of a table that is not folded away


def sections(found: Arranged, prices: Prices | None, span_s: float) -> Iterator[str]:
    """Yield all sections that have data."""
    yield _rates(found)
    if found.policies:
        yield _misses(found)
    if any(outcome.groups for _, outcome in found.each()):
        yield _groups(found)
    yield _closer(found)
    if any(outcome.latency for _, outcome in found.each()):
        yield _latency(found)
    if any(outcome.latency.get("jobs") for _, outcome in found.each()):
        yield jobs_section(found)
    if any(outcome.tiers for _, outcome in found.each()):
        yield _tiers(found)
    if prices is not None and span_s > 0 and found.policies:
        yield _costs(found, prices, span_s)
    if any(len(outcome.namespaces) > 1 for _, outcome in found.each()):
        yield _namespaces(found)


def _rates(found: Arranged) -> str:
    head = [
        "policy", "capacity, tokens", "hit rate", "token hit rate", "reused tokens",
        "computed tokens", "evicted pages", "refused requests", "replayed in",
    ]  # fmt: skip
    rows = [
        _result(outcome, line.name, bound=False)
        for line in found.policies
        for outcome in line.outcomes
    ]
    if found.belady is not None:
        rows += [_result(one, "belady (bound)", bound=True) for one in found.belady.outcomes]
    if found.infinite is not None:
        rows.append(_result(found.infinite, "infinite (bound)", bound=True))
    behind = table("Every policy and capacity", head, rows)
    note = (
        "No policy gets above the shaded area, which ends at the optimum that knows the future."
        if found.belady is not None and found.policies
        else "More memory reuses more blocks."
    )
    drawn = chart("rates", "Hit rate against capacity", note, details("The figures", behind))
    return section("hit-rate", "How much is reused", drawn)


def _result(outcome: Outcome, name: str, *, bound: bool) -> list[str]:
    return [
        name,
        count(outcome.capacity_tokens),
        share(outcome.hit_rate),
        share(outcome.token_hit_rate),
        count(outcome.hit_tokens),
        count(outcome.tokens - outcome.hit_tokens),
        *(["–", "–"] if bound else [count(outcome.evicted_pages), count(outcome.refused)]),
        duration(outcome.seconds),
    ]


def _misses(found: Arranged) -> str:
    reasons = [
        reason for reason in reasons_of([outcome for _, outcome in found.each()])
        if any(outcome.misses.get(reason) for _, outcome in found.each())
    ]  # fmt: skip
    groups = []
    for capacity in found.capacities:
        bars = [
            _bar(line.name, outcome, reasons)
            for line in found.policies
            if (outcome := line.at(capacity)) is not None
        ]
        groups.append(f"<h3>With {escaped(tokens(capacity))} tokens</h3>{''.join(bars)}")
    colours = key([(_CLASSES.get(one, "m4"), one) for one in ("reused", *reasons)])
    head = ["policy", "capacity, tokens", "prompt tokens", "reused", *reasons]
    rows = (
        [
            line.name,
            count(outcome.capacity_tokens),
            count(outcome.tokens),
            count(outcome.hit_tokens),
        ]
        + [count(outcome.misses.get(reason, 0)) for reason in reasons]
        for line, outcome in found.each()
    )
    return section(
        "misses",
        "What became of every prompt token",
        "<p>A token is reused, or computed for one reason. These are shares of tokens; hit rates "
        "are shares of blocks, and the last block of a prompt is rarely full.</p>",
        f'<div class="bars">{colours}{"".join(groups)}</div>',
        details("The figures", table("Prompt tokens, reused or computed", head, rows)),
    )


def _bar(name: str, outcome: Outcome, reasons: Sequence[str]) -> str:
    whole = max(1, outcome.tokens)
    parts = [("reused", outcome.hit_tokens)] + [
        (one, outcome.misses.get(one, 0)) for one in reasons
    ]
    return bar(
        name,
        f"{share(outcome.hit_tokens / whole)} reused",
        [
            (_CLASSES.get(reason, "m4"), amount / whole, f"{reason}: {share(amount / whole)}")
            for reason, amount in parts
        ],
    )


def _closer(found: Arranged) -> str:
    options = [(str(one), f"{tokens(one)} tokens") for one in found.capacities]
    chosen = choice("capacity", "Capacity", options, first=(len(options) - 1) // 2)
    behind = details("The figures", '<div class="filled"></div>')
    charts = [
        chart("time", "Hit rate over time",
               "In hundredths of the trace's duration. The cache begins empty.", behind),
        chart("gap", "Reuse gaps: the time between two uses of a block",
               "Reused blocks, by the time since their last use. The grey area is all possible "
               "reuse; where a line falls below it, blocks were evicted too early.", behind),
        chart("life", "Lifetimes: the time from storing a block to its eviction",
               "Evicted blocks, by their time in the cache.", behind),
        chart("ago", "Evicted too early: the time since missing tokens were evicted",
               "Tokens computed again, by the time since their eviction. Those on the left were "
               "nearly kept.", behind),
    ]  # fmt: skip
    if any(outcome.latency.get("rows") for _, outcome in found.each()):
        charts.append(chart("wait", "Times to first token",
                             "Requests, by their time to first token.", behind))  # fmt: skip
    return section("closer", "One capacity in detail", chosen, *charts)


def _latency(found: Arranged) -> str:
    chosen = choice("percentile", "Percentile", [(one, one) for one in PERCENTILES])
    head = [
        "policy", "capacity, tokens", *(f"TTFT {one}" for one in PERCENTILES),
        "queueing p50", "queueing p99", "whole answer p50", "computing", "saved", "busy",
    ]  # fmt: skip
    rows = (_times(line, outcome) for line, outcome in found.each() if outcome.latency)
    behind = details("The figures", table("Time to first token", head, rows))
    drawn = chart("ttft", "Time to first token against capacity",
                   "Reuse saves computing and waiting.", behind)  # fmt: skip
    return section("latency", "How long until the first token", chosen, drawn)


def _times(line: PolicyCurve, outcome: Outcome) -> list[str]:
    ttft, queue = outcome.latency.get("ttft_s") or {}, outcome.latency.get("queue_s") or {}
    busy = outcome.latency.get("utilisation")
    return [
        line.name,
        count(outcome.capacity_tokens),
        *(_seconds(ttft.get(one)) for one in PERCENTILES),
        *(_seconds(queue.get(one)) for one in ("p50", "p99")),
        _seconds((outcome.latency.get("total_s") or {}).get("p50")),
        *(_seconds(outcome.latency.get(one)) for one in ("prefill_s", "saved_s")),
        "–" if busy is None else share(busy),
    ]


def _seconds(value: float | None) -> str:
    return "–" if value is None else duration(value)


def _groups(found: Arranged) -> str:
    fields: list[str] = []
    rows = [(line, outcome) for line, outcome in found.each() if outcome.groups]
    for _, outcome in rows:
        fields += [one for one in outcome.groups if one not in fields]
    head = ["policy", "capacity, tokens", *(shown(one.replace("_", " "), 30) for one in fields)]
    body = (
        [line.name, count(outcome.capacity_tokens)]
        + [_cell(outcome.groups.get(one)) for one in fields]
        for line, outcome in rows
    )
    behind = table("Rows of windows, and checkpoints", head, body)
    if len(rows) > _FEW:
        behind = details("The figures", behind)
    return section(
        "groups",
        "Windows and states",
        "<p>A prompt resumes where all layers agree. Pages are those of the pool, which all layers "
        "share; bounds are those of a model without windows and states.</p>",
        behind,
    )


def _tiers(found: Arranged) -> str:
    fields: list[str] = []
    rows: list[tuple[PolicyCurve, Outcome, dict[str, Any]]] = []
    for line, outcome in found.each():
        for tier in outcome.tiers:
            rows.append((line, outcome, tier))
            fields += [one for one in tier if one != "name" and one not in fields]
    head = ["policy", "tier", "pool, tokens", *(shown(one, 30) for one in fields)]
    body = (
        [line.name, shown(tier.get("name", "")), count(outcome.capacity_tokens)]
        + [_cell(tier.get(one)) for one in fields]
        for line, outcome, tier in rows
    )
    behind = table("Requests to each tier, and writes", head, body, names=2)
    if len(rows) > _FEW:
        behind = details("The figures", behind)
    return section("tiers", "Tiers below", behind)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return shown(value)
    return count(value) if isinstance(value, int) else number(value)


def _costs(found: Arranged, prices: Prices, span_s: float) -> str:
    head = ["policy", "capacity, tokens", "hit rate", "memory", "disk", "GPU time", "a month"]
    rows = []
    for line, outcome in found.priced():
        cost = prices.month(outcome, span_s)
        assert cost is not None
        amounts = (cost.memory, cost.disk, cost.gpu, cost.total)
        rows.append([
            line.name, count(outcome.capacity_tokens), share(outcome.hit_rate),
            *(money(one, prices.currency) for one in amounts),
        ])  # fmt: skip
    given = (
        f"Prices: {money(prices.gpu_hour, prices.currency)} a GPU hour, which prefills "
        f"{count(prices.prefill_tokens_per_s)} tokens a second; "
        f"{money(prices.memory_gib_month, prices.currency)} a GiB of memory and "
        f"{money(prices.disk_gib_month, prices.currency)} a GiB of disk a month; "
        f"{count(prices.kv_bytes_per_token)} bytes of KV a token. The trace covers "
        f"{duration(span_s)}; a month is taken to consist of such spans."
    )
    drawn = chart(
        "cost",
        "Cost of a month against hit rate",
        "Each point is a policy with a capacity; lower is cheaper, further right reuses more.",
        details("The figures", table("Cost of a month", head, rows)),
    )
    formula = FORMULA[0].upper() + FORMULA[1:]
    return section(
        "cost", "What it costs", drawn, f"<p>{escaped(given)}</p><p>{escaped(formula)}</p>"
    )


def _namespaces(found: Arranged) -> str:
    tables = []
    for capacity in found.capacities:
        there = [
            (line, outcome) for line in found.policies
            if (outcome := line.at(capacity)) is not None
        ]  # fmt: skip
        if not there:
            continue
        rows = [
            [shown(space) or "(none)", count(amounts[0])]
            + [_reused(outcome.namespaces.get(space)) for _, outcome in there]
            for space, amounts in there[0][1].namespaces.items()
        ]
        head = ["namespace", "prompt tokens", *(line.name for line, _ in there)]
        caption = f"Tokens reused in the largest namespaces, with {tokens(capacity)} tokens"
        tables.append(details(f"With {tokens(capacity)} tokens", table(caption, head, rows)))
        tables += [
            _other_memory(capacity, outcome) for _, outcome in there if outcome.what_if_namespaces
        ]
    return section("namespaces", "Reuse by namespace", "<p>Namespaces share nothing.</p>", *tables)


def _other_memory(capacity: int, outcome: Outcome) -> str:
    """Return a table of what LRU would reuse with other capacities, by the sampled curve."""
    curves = outcome.what_if_namespaces
    times = [factor for factor, _ in next(iter(curves.values()))]
    rows = [
        [shown(space) or "(none)", *(share(rate) for _, rate in curve)]
        for space, curve in curves.items()
    ]
    caption = (
        f"Tokens that LRU would reuse with other capacities than {tokens(capacity)} tokens, sampled"
    )
    head = ["namespace", *(f"{factor:g}×" for factor in times)]
    return details(f"With more or less than {tokens(capacity)} tokens", table(caption, head, rows))


def _reused(amounts: Sequence[int] | None) -> str:
    return "–" if not amounts or not amounts[0] else share(amounts[1] / amounts[0])
